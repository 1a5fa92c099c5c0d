"""Check that a model supports a backward pass in two parts: a stage's inputs, then its weights.

Zero-bubble schedules and DualPipeV split a stage's backward pass in this way. A hook on an
activation would run in both parts, and a reentrant checkpoint in neither. Behind a layer's backward
hook, torch does not find the second part. The second part goes from one use of a parameter to
another, and cannot take this path again for the parameters in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward
from torch.overrides import TorchFunctionMode

from ...data.order import Batch
from ...errors import UsageError
from ...model.trees import Tree, mapped, tensors_of
from ..base import Parts

CHECKPOINT = "CheckpointFunctionBackward"
"""The node of a reentrant activation checkpoint in a graph."""


def check(parts: Parts, batch: Batch, stages: Sequence[Sequence[str]], *, flags: str) -> None:
    """Make sure that a model supports both parts; `stages` are the pieces of each stage.

    Raises:
        UsageError: on all ranks; names the layer or parameter.
    """
    problem = ""
    if parts.group.rank_info.rank == 0 and len(batch):
        for look in (_bound_to_one_pass, partial(_used_in_turn, stages=stages)):
            # Models that cannot run on the device `meta` are not checked.
            with suppress(Exception):
                problem = problem or look(parts.sketch(torch.device("meta")), batch.inputs)
    if problem := parts.group.broadcast(problem):
        raise UsageError(
            f"{flags}: the model of task {parts.task.name!r} {problem}, but the backward pass of "
            "this schedule goes through a stage in two parts; use another --pp-schedule, such as "
            "1F1B"
        )


def _bound_to_one_pass(model: nn.Module, inputs: Tree) -> str:
    """Describe the first layer with a hook on a gradient, or with a reentrant checkpoint."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"has a backward hook on layer {name!r}"
    seen: set[Any] = set()
    calls = _HookCalls(model)

    def look(name: str, module: nn.Module, arguments: object, outputs: Tree) -> None:
        if not calls.problem and _finds(CHECKPOINT, tensors_of(outputs), seen):
            calls.problem = f"checkpoints its activations in layer {name!r} with use_reentrant=True"

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name))
    given = mapped(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs)
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"), calls:
        model.train()(given)
    return calls.problem


def _used_in_turn(model: nn.Module, inputs: Tree, stages: Sequence[Sequence[str]]) -> str:
    """Describe the first parameter that a stage uses before and after others."""
    names = {_node_of(parameter): name for name, parameter in model.named_parameters()}
    given = mapped(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs)
    for number, held in enumerate(stages):
        stage = nn.Sequential(*map(model.get_submodule, held)).train()
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            outputs = stage(given)
        # The first stage needs no input gradients, and makes one pass.
        if number > 0 and (node := _passed_twice(given, outputs, stage)):
            return f"uses parameter {names[node]!r} before and after others of a stage"
        given = mapped(lambda t: t.detach().requires_grad_(), outputs)
    return ""


def _passed_twice(inputs: Tree, outputs: Tree, stage: nn.Module) -> Any:
    """Return a parameter's node if its gradient and those of others share a path in the graph.

    Follows the traversal of torch's schedules: by groups of parameters, from the nodes where their
    paths meet the path of the inputs' gradient.
    """
    ends = [tensor.grad_fn for tensor in tensors_of(outputs) if tensor.grad_fn is not None]
    reverse = _backward.construct_reverse_graph(ends)
    roots = [_node_of(tensor) for tensor in tensors_of(inputs)]
    of_inputs, _ = _backward.reverse_closure(roots, set(), reverse)
    trained = [_node_of(parameter) for parameter in stage.parameters() if parameter.requires_grad]
    groups = _backward.get_param_groups(roots, trained, reverse)
    ways = []
    for group in groups:
        above, _ = _backward.reverse_closure(list(group["params"]), set(), reverse)
        ways.append((above & _behind(group["intermediates"])) - group["params"])
    for group, way in zip(groups, ways, strict=True):
        if any(way & other for other in ways if other is not way):
            for node in group["params"]:
                if len(_backward.reverse_closure([node], of_inputs, reverse)[1]) > 1:
                    return node
    return None


def _node_of(tensor: Tensor) -> Any:
    return _backward._get_grad_fn_or_grad_acc(tensor)


def _behind(nodes: Iterable[Any]) -> set[Any]:
    """Collect nodes of a graph, and all nodes that the backward pass reaches from them."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _finds(wanted: str, outputs: Sequence[Tensor], seen: set[Any]) -> bool:
    """Whether the graph of some tensors has a node of that name outside `seen`; extends `seen`."""
    nodes = _behind(tensor.grad_fn for tensor in outputs) - seen
    seen |= nodes
    return any(node.name() == wanted for node in nodes)


class _HookCalls(TorchFunctionMode):
    """Records the first layer that registers a hook on an activation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.problem = ""
        self._running: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *_: object) -> None:
        # The hook must return None: another value would replace the layer's output.
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad) and not args[0].is_leaf:
            layer = self._running[-1] if self._running else ""
            self.problem = self.problem or f"registers a hook on an activation in layer {layer!r}"
        return func(*args, **(kwargs or {}))
