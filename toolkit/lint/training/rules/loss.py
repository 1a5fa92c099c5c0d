"""Rules about the inputs of a loss."""

import ast
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.rules.data_parallel import WRAPPERS
from toolkit.lint.training.script import TrainingScript

_SAME_MODEL = ("to", "cuda", "cpu", "float", "double", "train", "eval")
"""Methods of a module that return the same module."""


@TRAINING.rule(
    "nll-of-raw-outputs",
    finds="nll_loss of a linear layer's outputs",
    reason="nll_loss expects logarithms of probabilities. Raw outputs have no upper bound: the "
    "loss falls below zero without end, and the model learns no probabilities.",
    fix="write cross_entropy, which is log_softmax and nll_loss in one",
)
def _raw_outputs(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls("nll_loss"):
        outputs = call.argument("input", 0)
        values = script.values_of(outputs.id) if isinstance(outputs, ast.Name) else [outputs]
        function = script.function_of(call.node)
        given = {one.arg for one in function.args.args} if function else set()
        if values and all(
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id not in given
            and _ends_in_linear(script, value.func, frozenset())
            for value in values
        ):
            yield Violation(call.node.lineno, "nll_loss is given what a linear layer returns")


def _ends_in_linear(script: TrainingScript, model: ast.expr, seen: frozenset[str]) -> bool:
    """Whether a model returns the outputs of a linear layer, as far as the script shows."""
    if isinstance(model, ast.Name):
        if model.id in seen:
            return True  # model = DistributedDataParallel(model)
        values = script.values_of(model.id)
        known = seen | {model.id}
        return bool(values) and all(_ends_in_linear(script, value, known) for value in values)
    if not isinstance(model, ast.Call):
        return False
    name = script.full_name(model.func)
    if name == "torch.nn.Linear":
        return True
    if isinstance(model.func, ast.Attribute) and model.func.attr in _SAME_MODEL:
        return _ends_in_linear(script, model.func.value, seen)
    inner = model.args[-1:] if name == "torch.nn.Sequential" else model.args[:1]
    wraps = name == "torch.nn.Sequential" or (
        name.startswith("torch.") and name.rpartition(".")[2] in WRAPPERS
    )
    return wraps and bool(inner) and _ends_in_linear(script, inner[0], seen)
