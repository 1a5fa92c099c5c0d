"""Rules about saving and loading checkpoints."""

import ast
import re
from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import Called, TrainingScript, about_rank, constant


@TRAINING.rule(
    "save-on-every-rank",
    finds="a file that all ranks write at once",
    reason="Ranks write into the same file at the same time: it may be torn, and a resume fails "
    "or reads a mixture.",
    fix="write it under if rank == 0:, to another name first, then os.replace() it",
)
def _all_write(script: TrainingScript) -> Iterator[Violation[int]]:
    if not script.joins_ranks or script.is_wrapped:
        return
    for call in script.torch_calls("save"):
        place = call.argument("f", 1)
        if (
            call.name != "torch.save"
            or script.rank_guards(call.node)
            or _returns_early(script, call)
        ):
            continue
        if place is not None and re.search(r"rank|shard|pid", ast.unparse(place), re.I):
            continue
        if (function := script.function_of(call.node)) and _called_under_guard(
            script, function.name
        ):
            continue
        yield Violation(call.node.lineno, "every rank writes this file")


def _returns_early(script: TrainingScript, call: Called) -> bool:
    """Whether other ranks leave the function before the call: `if rank != 0: return`."""
    function = script.function_of(call.node)
    return function is not None and any(
        isinstance(node, ast.If)
        and about_rank(node.test)
        and node.lineno < call.node.lineno
        and any(isinstance(one, ast.Return | ast.Continue) for one in node.body)
        for node in ast.walk(function)
    )


def _called_under_guard(script: TrainingScript, name: str) -> bool:
    """Whether only some ranks call a function of the script, at every call."""
    calls = [c for c in script.calls if c.last == name and not c.name.startswith("torch.")]
    return bool(calls) and all(script.rank_guards(c.node) for c in calls)


@TRAINING.rule(
    "untrusted-load",
    finds="a file that may execute code during loading",
    reason="With weights_only=False, torch.load unpickles: a file from somebody else can run any "
    "code with your rights.",
    fix="leave weights_only at True (write it before torch 2.6), and save state_dict()s, "
    "numbers and texts only",
)
def _unpickles(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls("load"):
        if call.name == "torch.load" and constant(call.argument("weights_only")) is False:
            yield Violation(call.node.lineno, "torch.load may execute what the file holds")


@TRAINING.rule(
    "load-onto-one-gpu",
    finds="a checkpoint that all ranks load onto the GPU that saved it",
    reason="Tensors return to the device that saved them: every rank of a node uses memory of the "
    "same GPU, which may run out.",
    fix='write torch.load(path, map_location="cpu"), or the rank\'s own device',
)
def _same_gpu(script: TrainingScript) -> Iterator[Violation[int]]:
    if not script.joins_ranks or script.is_wrapped:
        return
    for call in script.torch_calls("load"):
        if call.name != "torch.load" or call.is_open or script.rank_guards(call.node):
            continue
        if call.argument("map_location", 1) is None:
            yield Violation(call.node.lineno, "every rank loads onto the GPU that has saved it")
