"""Rules about wrapping a model for data parallelism."""

import ast
import re
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import TrainingScript

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm1d", "LazyBatchNorm2d")


@TRAINING.rule(
    "ddp-not-assigned",
    finds="a wrapped model that is discarded",
    reason="DistributedDataParallel exchanges gradients only after a forward pass of the returned "
    "module. The original model still trains, separately on each rank, and no error is raised.",
    fix="assign it and call the result: model = DistributedDataParallel(model)",
)
def _not_assigned(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls(*WRAPPERS):
        if isinstance(next(script.parents(call.node), None), ast.Expr):
            yield Violation(call.node.lineno, f"the result of {call.last}(…) is not used")


@TRAINING.rule(
    "optimizer-before-sharding",
    finds="an optimizer created before fully_shard of the same model",
    reason="fully_shard replaces the parameters with shards. The optimizer holds the old "
    "parameters: its steps do not change the model, and no error is raised.",
    fix="make the optimizer after fully_shard",
)
def _before_sharding(script: TrainingScript) -> Iterator[Violation[int]]:
    optimizers = [c for c in script.calls if re.fullmatch(r"torch\.optim\.[A-Z]\w+", c.name)]
    for sharded in script.torch_calls("fully_shard"):
        model, function = sharded.argument("module", 0), script.function_of(sharded.node)
        here = [o for o in optimizers if script.function_of(o.node) is function]
        if not isinstance(model, ast.Name) or any(
            o.node.lineno > sharded.node.lineno for o in here
        ):
            continue
        conditions = set(script.conditions_of(sharded.node))
        for one in here:
            if _parameters_of(one.argument("params", 0)) == model.id and conditions.issuperset(
                script.conditions_of(one.node)
            ):
                yield Violation(one.node.lineno, f"fully_shard({model.id}) comes after this line")


def _parameters_of(given: ast.expr | None) -> str:
    """Return the name of the model that passes its `parameters()` to an optimizer."""
    if (
        isinstance(given, ast.Call)
        and isinstance(given.func, ast.Attribute)
        and given.func.attr == "parameters"
        and isinstance(given.func.value, ast.Name)
    ):
        return given.func.value.id
    return ""


@TRAINING.rule(
    "batchnorm-not-converted",
    finds="BatchNorm in a model under DistributedDataParallel that each rank computes alone",
    reason="DistributedDataParallel converts nothing: each rank normalises by its own share of "
    "the batch, and by default only rank 0's running statistics survive. With few samples per "
    "rank the model becomes another one.",
    fix="write model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before "
    "DistributedDataParallel, or # toolkit: allow batchnorm-not-converted if shares of "
    "the batch are large",
)
def _not_converted(script: TrainingScript) -> Iterator[Violation[int]]:
    converts = any(call.last == "convert_sync_batchnorm" for call in script.calls)
    if not converts and script.torch_calls("DistributedDataParallel"):
        for call in script.torch_calls(*_BATCH_NORMS)[:1]:
            yield Violation(call.node.lineno, f"{call.last} is not converted to SyncBatchNorm")


@TRAINING.rule(
    "data-parallel",
    finds="nn.DataParallel",
    reason="DataParallel is one process with a thread per GPU: Python's lock lets one thread at a "
    "time run Python code, the model is copied in each step, and the first GPU gathers all "
    "outputs.",
    fix="start a process per GPU with torchrun and wrap the model in DistributedDataParallel",
)
def _one_process(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls("DataParallel"):
        yield Violation(call.node.lineno, "nn.DataParallel uses one process for all GPUs")
