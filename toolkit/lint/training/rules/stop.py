"""Rules about the signal that stops training."""

import ast
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import TrainingScript, constant


@TRAINING.rule(
    "stop-kills-workers",
    finds="DataLoader workers killed by the signal on which the script saves",
    reason="torchrun sends SIGTERM to every process of a rank, and so do some Slurm sites. The "
    "signal kills the DataLoader workers, and torch raises an error in the rank, which may end "
    "before it has saved. The toolkit's supervisor prevents that (`stop.protect_children`).",
    fix="give the loader a worker_init_fn that calls signal.signal(signal.SIGTERM, signal.SIG_IGN)",
)
def _workers_die(script: TrainingScript) -> Iterator[Violation[int]]:
    handlers = (call for call in script.calls if call.name == "signal.signal")
    if not any(_handles_sigterm(call.node) for call in handlers):
        return
    for loader in script.torch_calls("DataLoader"):
        workers = loader.argument("num_workers", 5)
        if workers is None or constant(workers) == 0 or loader.is_open:
            continue
        if loader.argument("worker_init_fn", 10) is None:
            yield Violation(loader.node.lineno, "SIGTERM ends the workers before the script saves")


def _handles_sigterm(call: ast.Call) -> bool:
    number, handler = [*map(ast.unparse, call.args[:2]), "", ""][:2]
    return number.endswith("SIGTERM") and not handler.endswith(("SIG_IGN", "SIG_DFL"))
