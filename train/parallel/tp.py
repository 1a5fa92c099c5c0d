"""Tensor parallel: ranks share each layer's matrices, by columns and then by rows.

The task's `tensor_plan()` defines how each layer is cut. Between these layers it may cut the
sequence instead (sequence parallel), so that ranks do not repeat each other's work on norms and
residuals.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    loss_parallel,
    parallelize_module,
)

from ..cli.config import Config
from ..errors import UsageError
from ..tasks.base import Task
from . import consistency
from .base import Parts, local


def apply(model: nn.Module, task: Task, mesh: DeviceMesh, config: Config) -> None:
    """Cut a model along `mesh`, in place: its parameters become DTensors.

    Afterwards this restores two properties that torch loses: a parameter shared by two modules
    becomes two parameters, and a frozen parameter of a module with style SequenceParallel becomes
    trainable.

    Raises:
        UsageError: the task has no plan, a size does not divide by the number of ranks, modules cut
            a shared parameter in different ways, or a layer is parametrized.
    """
    plan = task.tensor_plan(model, ranks=mesh.size(), loss_parallel=config.loss_parallel)
    if not plan:
        raise UsageError(
            f"--tp {mesh.size()}: task {task.name!r} has no tensor-parallel plan; give it a method "
            "tensor_plan(), or use --strategy fsdp"
        )
    # A pipeline stage holds only some of the pieces.
    here = {name for name, _ in model.named_modules()}
    plan = {name: plan[name] for name in plan if name in here}
    names = {id(module): name for name, module in model.named_modules()}
    ties = consistency.ties_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    for name in plan:
        if parametrized := getattr(model.get_submodule(name), "parametrizations", None):
            raise UsageError(
                f"--tp {mesh.size()}: tensor_plan() of task {task.name!r} cuts layer {name!r}, but "
                f"a parametrization (weight_norm, orthogonal, ...) computes its "
                f"{next(iter(parametrized))} as a whole: leave {name!r} out of the plan, or use "
                "--strategy fsdp"
            )
    parallelize_module(model, mesh, plan)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for places in ties:
        copies = [module.get_parameter(name) for module, name in places]
        cuts = [_cut(copy) for copy in copies]
        if len(set(cuts)) > 1:
            uses = "; ".join(
                f"{names[id(module)]}.{name} {cut}"
                for (module, name), cut in zip(places, cuts, strict=True)
            )
            raise UsageError(
                f"--tp {mesh.size()}: modules share one parameter, but tensor_plan() cuts it "
                f"differently for each ({uses}): give these modules styles that cut it alike (an "
                "embedding RowwiseParallel, a head ColwiseParallel), or use --strategy fsdp"
            )
        consistency.tie(places, copies[0])
    _check_even(model, plan, ranks=mesh.size())


def _cut(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return "is not cut"
    dims = [str(p.dim) for p in parameter.placements if isinstance(p, Shard)]
    return f"is cut along dimension {' and '.join(dims)}" if dims else "is whole on each rank"


def _check_even(model: nn.Module, plan: Mapping[str, ParallelStyle], *, ranks: int) -> None:
    """Refuse a linear layer with rows or columns that do not divide evenly among ranks.

    Between two such layers, torch passes each rank's part on as a plain tensor, and assumes parts
    of equal size when it joins them again.
    """
    for prefix, module in model.named_modules():
        style = plan.get(prefix)
        if not isinstance(module, nn.Linear):
            continue
        if isinstance(style, ColwiseParallel) and not style.use_local_output:
            continue  # its output is a DTensor
        for name, parameter in module.named_parameters(recurse=False):
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            for dim in [p.dim for p in placements if isinstance(p, Shard)]:
                size = parameter.shape[dim]
                if size % ranks:
                    raise UsageError(
                        f"--tp {ranks} cannot share parameter {prefix}.{name} "
                        f"{list(parameter.shape)} evenly along dimension {dim}: {size} = "
                        f"{size // ranks} x {ranks} + {size % ranks}; choose a size that {ranks} "
                        f"divides, leave {prefix} out of tensor_plan(), or use another --tp"
                    )


def finish_gradients(model: nn.Module, ranks: int) -> None:
    """Give every gradient the layout of its parameter.

    torch does not. After sequence parallelism, a rank has the gradient from its part of the
    sequence, a `Partial` DTensor. The gradient of an embedding cut by rows is whole on all ranks.
    DTensor operations handle both, but use of the local tensor, for example to clip by its norm, is
    silently wrong. After the last micro-batch, a new layout costs one exchange per step.
    """
    if ranks == 1:
        return
    for parameter in model.parameters():
        gradient = parameter.grad
        if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
            continue
        placements = parameter.placements
        if gradient.placements == tuple(placements):
            continue
        # An offloaded gradient is in host memory, from which NCCL cannot send.
        home, way = local(gradient).device, gradient.device_mesh.device_type
        moved = gradient if home.type == way else cast("DTensor", gradient.to(way))
        moved = moved.redistribute(placements=placements)
        parameter.grad = moved if home.type == way else moved.to(home)


MIXED = "got mixed torch.Tensor and DTensor"
"""torch's message about an operation on a DTensor and a plain tensor."""


def check_uncut_gradients(
    modules: Sequence[nn.Module], mesh: DeviceMesh, *, task: str, halves: bool
) -> None:
    """Make sure that the ranks of `mesh` have the same gradients for all uncut parameters.

    A parameter outside the task's plan is whole on each rank. If ranks apply the parameter to
    different heads or parts of the sequence, each rank has only a part of its gradient, and nothing
    sums the parts. With `halves`, gradients have half precision, which rounds by half a percent.

    Raises:
        UsageError: on all ranks; names a parameter.
    """
    ranks, gradients = mesh.size(), {}
    for module in modules if ranks > 1 else ():
        for name, parameter in module.named_parameters():
            # Parameters in the plan already have correct gradients.
            dims = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
            if parameter.grad is not None and "tp" not in (dims or ()):
                gradients[name] = local(parameter.grad)
    if not gradients:
        return
    sums = [(g.double().norm(), g.double().sum()) for g in gradients.values()]
    mine = torch.tensor([[float(a), float(b)] for a, b in sums], dtype=torch.float64)
    mine = mine.to(mesh.device_type)
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
    far = (most - least).amax(dim=1) > (0.1 if halves else 1e-3) * most[:, 0]
    wrong = [name for name, is_far in zip(gradients, far.tolist(), strict=True) if is_far]
    if wrong:
        raise UsageError(
            f"--tp {ranks}: tensor_plan() of task {task!r} leaves out {wrong[0]!r}, which works on "
            "what the plan cuts, so that each rank has a part of its gradient only; give its "
            "module a style, such as train.tasks.styles.Replicated, or use --strategy fsdp"
        )


@contextmanager
def losses_stay_apart(parts: Parts) -> Iterator[None]:
    """Compute the loss from each rank's share of the classes, if requested.

    Raises:
        UsageError: the model or the loss combines split and whole tensors.
    """
    ranks = parts.layout.tp
    apart = parts.config.loss_parallel and ranks > 1
    try:
        with loss_parallel() if apart else nullcontext():
            yield
    except RuntimeError as error:
        # In a pipeline, torch wraps this error in another one.
        reason = next((str(e) for e in (error, error.__cause__) if MIXED in str(e)), "")
        if ranks == 1 or not reason:
            raise
        flags = f"--tp {ranks}{' --loss-parallel' if apart else ''}"
        raise UsageError(
            f"{flags}: the model or the loss of task {parts.task.name!r} puts what tensor_plan() "
            f"cuts together with what it does not ({reason.partition(',')[0]}): have the plan give "
            "plain tensors (use_local_output=True)"
            + (", or leave out --loss-parallel" if apart else ", or use --strategy fsdp")
        ) from error
