"""Training or evaluation mode of each layer, as set by the task.

`model()` may put a layer in `eval()`, such as a batch normalisation with fixed statistics, and a
module's own `train()` may do so. `train(True)` after an evaluation would undo the former, and
without `train(True)` the latter never takes effect. So modes are settled when the model is made,
saved before an evaluation, and restored after it: a run trains the same before and after an
evaluation, and after a resume.
"""

from collections.abc import Sequence

from torch import nn


def settle(model: nn.Module) -> list[str]:
    """Set the modes of a new model for training; name the layers that stay in evaluation mode.

    Layers that `model()` has put in `eval()` stay in it. If the whole model is in `eval()`, as
    libraries return loaded models, it trains. Of nested layers, the outermost is named.
    """
    evaluating = [m for m in model.modules() if not m.training] if model.training else []
    model.train(True)
    for module in evaluating:
        module.training = False
    names: list[str] = []
    for name, module in model.named_modules():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names


class Modes:
    """The modes of all layers of modules that `settle()` has set."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._note()

    def evaluate(self) -> None:
        """Put all layers in evaluation mode."""
        if any(root.training for root in self._roots):
            self._note()
            for root in self._roots:
                root.eval()

    def train(self) -> None:
        """Restore the modes that layers had before the last evaluation."""
        if not all(root.training for root in self._roots):
            for module, training in self._training:
                module.training = training

    def _note(self) -> None:
        self._training = [(m, m.training) for root in self._roots for m in root.modules()]
