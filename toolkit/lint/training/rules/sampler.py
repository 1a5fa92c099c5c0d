"""Rules about the samples of each rank."""

import ast
import re
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import Called, TrainingScript, constant

_ALONE = (
    *("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler"),
    "BatchSampler",
)
"""torch samplers that do not divide the samples between ranks."""

_NOT_TRAINING = re.compile(r"(?:^|_)(?:val|valid|validation|test|eval|evaluation|dev)(?:_|$)", re.I)


@TRAINING.rule(
    "sampler-not-distributed",
    finds="a loader that gives every rank the same samples, or lets each rank draw samples "
    "independently",
    reason="DistributedDataParallel does not divide the data. Without a sampler that knows the "
    "ranks, every rank goes through the whole data set in each epoch: N ranks do the work N times.",
    fix="give it sampler=DistributedSampler(dataset), and leave shuffle=True to the sampler",
)
def _not_distributed(script: TrainingScript) -> Iterator[Violation[int]]:
    if not script.joins_ranks or script.is_wrapped:
        return
    for loader in script.torch_calls("DataLoader"):
        if _NOT_TRAINING.search(_name_of(script, loader)) or loader.is_open:
            continue
        batches, sampler = loader.argument("batch_sampler"), loader.argument("sampler", 3)
        if script.rank_guards(loader.node) or _is_divided(script, loader.argument("dataset", 0)):
            continue
        if batches is None and (sampler is None or isinstance(sampler, ast.Constant)):
            yield Violation(loader.node.lineno, "this loader has no sampler that knows the ranks")
        elif sampler is not None and script.comes_from(sampler, *_ALONE):
            yield Violation(
                loader.node.lineno,
                f"the sampler of this loader knows no ranks ({ast.unparse(sampler)[:40]})",
                fix="draw by rank: a DistributedSampler, or your own sampler that takes each "
                "Nth index of one drawing, with the same seed on all ranks",
            )


@TRAINING.rule(
    "set-epoch-missing",
    finds="a DistributedSampler without set_epoch",
    reason="The sampler shuffles by seed and epoch. Without set_epoch every epoch has the same "
    "order on every rank, and the same samples stay on the same rank.",
    fix="call sampler.set_epoch(epoch) at the beginning of each epoch",
)
def _no_epoch(script: TrainingScript) -> Iterator[Violation[int]]:
    if script.is_wrapped or script.methods("set_epoch"):
        return
    for call in script.torch_calls("DistributedSampler"):
        if _NOT_TRAINING.search(_name_of(script, call)) or call.is_open:
            continue
        shuffle = call.argument("shuffle", 3)
        if shuffle is not None and constant(shuffle) is False:
            continue
        yield Violation(call.node.lineno, "nobody calls set_epoch of this DistributedSampler")


@TRAINING.rule(
    "sampler-before-group",
    finds="a DistributedSampler created before the process group",
    reason="The sampler asks the default process group for the number of ranks: without a group "
    "it raises an error.",
    fix="call init_process_group first, or give num_replicas and rank",
)
def _before_group(script: TrainingScript) -> Iterator[Violation[int]]:
    groups = script.torch_calls("init_process_group")
    for call in script.torch_calls("DistributedSampler"):
        if call.argument("num_replicas", 1) is not None or call.is_open:
            continue
        function = script.function_of(call.node)
        same = [g for g in groups if script.function_of(g.node) is function]
        if same and all(call.node.lineno < g.node.lineno for g in same):
            yield Violation(call.node.lineno, "the process group does not exist yet at this line")


def _name_of(script: TrainingScript, call: Called) -> str:
    """Return the name to which a call's result is assigned; empty without a name."""
    for parent in script.parents(call.node):
        if isinstance(parent, ast.Assign):
            return ast.unparse(parent.targets[0])
        if isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            return ast.unparse(parent.target)
        if isinstance(parent, ast.keyword):
            return parent.arg or ""
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return parent.name
        if isinstance(parent, ast.stmt) and not isinstance(parent, ast.Return):
            return ""
    return ""


def _is_divided(script: TrainingScript, dataset: ast.expr | None) -> bool:
    """Whether a data set may divide itself: it is iterable or receives the rank."""
    values = script.values_of(dataset.id) if isinstance(dataset, ast.Name) else [dataset]
    for value in values:
        if not isinstance(value, ast.Call):
            continue
        if re.search(r"rank|world_size|num_replicas|shard", ast.unparse(value), re.I):
            return True
        text = script.classes.get(script.full_name(value.func), "")
        if re.search(r"IterableDataset|get_rank|RANK", text):
            return True
    return False
