"""Which layers train and which only evaluate, as the task has set them.

`model()` may put a layer in `eval()`, such as a batch normalisation whose statistics are to stay,
and a module's own `train()` may do so. `train(True)` after an evaluation would end the former, and
without it the latter never begins. So modes are settled when the model is made, noted before an
evaluation, and put back after it: a run trains the same before and after, and after a resume.
"""

from collections.abc import Sequence

from torch import nn


def settle(model: nn.Module) -> list[str]:
    """Put a new model in the modes it shall train in; name the layers that only evaluate.

    Those that `model()` has put in `eval()` do, unless it is the model as a whole, as libraries
    return loaded models. Of nested ones, the outermost is named.
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
    """The modes of all layers of some modules that have been settled."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._note()

    def evaluate(self) -> None:
        """Have all layers evaluate."""
        if any(root.training for root in self._roots):
            self._note()
            for root in self._roots:
                root.eval()

    def train(self) -> None:
        """Have all layers train that did before the last evaluation."""
        if not all(root.training for root in self._roots):
            for module, training in self._training:
                module.training = training

    def _note(self) -> None:
        self._training = [(m, m.training) for root in self._roots for m in root.modules()]
