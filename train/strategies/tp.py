"""Tensor parallel: ranks share each layer's matrices, by columns and then by rows.

Between the layers the sequence is cut instead (sequence parallel), so that norms and residuals are
not computed by all ranks alike. Which layer is cut how is the task's to say: `tensor_plan()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from train.config import Config
from train.errors import UsageError
from train.tasks.base import Task


def apply(model: nn.Module, task: Task, mesh: DeviceMesh, config: Config) -> None:
    """Cut a model along `mesh`, in place: its parameters become DTensors.

    Raises:
        UsageError: the task has no plan, or its heads or classes cannot be shared by so many.
    """
    plan = task.tensor_plan(model, ranks=mesh.size(), loss_parallel=config.loss_parallel)
    if not plan:
        raise UsageError(
            f"--tp {mesh.size()}: task {task.name!r} has no tensor-parallel plan; give it a method "
            "tensor_plan(), or use --strategy fsdp"
        )
    # Of a pipeline stage's other pieces there is nothing here.
    here = {name for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: plan[name] for name in plan if name in here})


def finish_gradients(model: nn.Module, ranks: int) -> None:
    """Lay every gradient out like its parameter.

    torch does not. Behind sequence parallelism a rank has the gradient of its part of the time, a
    DTensor that is `Partial`, and the gradient of an embedding cut by rows is whole on all ranks.
    DTensor operations know; whoever takes the local tensor, to clip by its norm for instance, is
    silently wrong. Here, after the last micro-batch, it costs one exchange per step.
    """
    if ranks == 1:
        return
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def losses_stay_apart(config: Config, tp: int) -> AbstractContextManager[None]:
    """Compute the loss from each rank's share of the classes, if that was asked for."""
    if config.loss_parallel and tp > 1:
        return loss_parallel()
    return nullcontext()
