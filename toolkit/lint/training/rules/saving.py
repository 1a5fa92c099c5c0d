"""Rules about loading what was saved."""

from collections.abc import Iterator

from toolkit.lint.rulebook import TRAINING, Violation
from toolkit.lint.training.script import TrainingScript, constant


@TRAINING.rule(
    "untrusted-load",
    finds="a file that may execute code when it is loaded",
    reason="With weights_only=False, torch.load unpickles: a file of somebody else runs whatever"
    " it holds, as you.",
    fix="leave weights_only at True, and save state_dict()s, numbers and texts only",
)
def _unpickles(script: TrainingScript) -> Iterator[Violation[int]]:
    for call in script.torch_calls("load"):
        if call.name == "torch.load" and constant(call.argument("weights_only")) is False:
            yield Violation(call.node.lineno, "torch.load may execute what the file holds")


@TRAINING.rule(
    "load-onto-one-gpu",
    finds="a checkpoint that all ranks load onto the GPU that has saved it",
    reason="Tensors go back to the device that they came from: every rank of a node takes memory"
    " of GPU 0, which may not have so much.",
    fix='write torch.load(path, map_location="cpu"), or the rank\'s own device',
)
def _same_gpu(script: TrainingScript) -> Iterator[Violation[int]]:
    if not script.joins_ranks or script.is_wrapped:
        return
    for call in script.torch_calls("load"):
        if call.name != "torch.load" or call.is_open or script.rank_guard(call.node):
            continue
        if call.argument("map_location", 1) is None:
            yield Violation(call.node.lineno, "every rank loads onto the GPU that has saved it")
