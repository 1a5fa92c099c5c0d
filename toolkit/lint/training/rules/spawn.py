"""Rules about the arguments of processes that torch.multiprocessing starts."""

import ast
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import Called, TrainingScript

_OPTIMIZERS = (
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "RMSprop", "NAdam", "RAdam"),
    *("LBFGS", "ASGD", "Rprop", "Adafactor", "Muon"),
)


def _handed_over(script: TrainingScript) -> Iterator[tuple[Called, ast.expr]]:
    """Yield each argument that the script passes to a new process, with the call."""
    for call in script.calls:
        if call.last in ("spawn", "start_processes", "Process") and "multiprocessing" in call.name:
            args = call.argument("args", 1)
        else:
            continue
        values = script.values_of(args.id) if isinstance(args, ast.Name) else [args]
        for value in values:
            if isinstance(value, ast.Tuple | ast.List):
                for one in value.elts:
                    yield call, one


@TRAINING.rule(
    "spawned-loader",
    finds="a DataLoader passed to child processes",
    reason="Each process gets a copy of the data set and of the sampler, which knows nothing of "
    "the rank: the ranks do not divide the samples.",
    fix="make data set, sampler and loader in the process, after init_process_group",
)
def _loader(script: TrainingScript) -> Iterator[Violation[int]]:
    for call, value in _handed_over(script):
        if script.comes_from(value, "DataLoader"):
            what = f"{ast.unparse(value)[:40]} is copied into each process"
            yield Violation(call.node.lineno, what)


@TRAINING.rule(
    "spawned-optimizer",
    finds="an optimizer passed to child processes",
    reason="If you pass it with the model, its parameters stay in memory that all processes share "
    "on a CPU: each step is made once per rank. If the process creates the model, the optimizer "
    "does not know it: step() changes parameters that nothing uses.",
    fix="make model and optimizer in the process, the optimizer from the wrapped model's "
    "parameters",
)
def _optimizer(script: TrainingScript) -> Iterator[Violation[int]]:
    for call, value in _handed_over(script):
        if script.comes_from(value, *_OPTIMIZERS):
            what = f"{ast.unparse(value)[:40]} is copied into each process"
            yield Violation(call.node.lineno, what)


@TRAINING.rule(
    "spawn-of-nothing",
    finds="one process per GPU, without a check for zero GPUs",
    reason="On a machine without GPUs the number is 0: nothing is started, nothing is trained, "
    "and the script ends with status 0.",
    fix="end with an error if it is 0, or train on the CPU: max(1, torch.cuda.device_count())",
)
def _nothing(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.calls:
        if call.last not in ("spawn", "start_processes") or "multiprocessing" not in call.name:
            continue
        count = call.argument("nprocs", 2)
        if count is None or not script.comes_from(count, "device_count", module="torch.cuda"):
            continue
        if not _is_looked_at(script, count):
            yield Violation(call.node.lineno, "starts no process where there is no GPU")


def _is_looked_at(script: TrainingScript, count: ast.expr) -> bool:
    """Whether a condition or an assertion tests the number of GPUs, or for a GPU."""
    text = ast.unparse(count)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.If | ast.Assert | ast.IfExp | ast.While):
            asked = ast.unparse(node.test)
            if text in asked or "device_count" in asked or "is_available" in asked:
                return True
    return False
