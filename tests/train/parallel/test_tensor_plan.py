"""A model cut by its task's plan computes what the whole one computes, gradients included."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    loss_parallel,
    parallelize_module,
)

from tests.train.support.ranks import on_ranks
from train import tasks
from train.data.loader import source_of
from train.errors import UsageError
from train.parallel import tp
from train.tasks.base import Task, classes_can_be_sharded
from train.tasks.chars import Chars

# In double precision, so that nothing but a wrong computation makes a difference.
EQUAL = 1e-10
SAMPLES = 6
CASES = [(name, ranks, by_class) for name in ("chars", "digits") for ranks in (2, 4)
         for by_class in (False, True)]  # fmt: skip

Found = dict[tuple[str, int, bool], dict[str, float]]


def largest(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def off(parameter: DTensor, expected: Tensor) -> float:
    """Compare gradients as the owner of a local tensor sees them: laid out like the parameter."""
    assert isinstance(parameter.grad, DTensor)
    gradient = parameter.grad.to_local()
    if gradient.shape != parameter.to_local().shape:
        return math.inf
    # Not the gradient's own full_tensor(), which would make good what the local tensors lack.
    shards = DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return largest(shards.full_tensor(), expected)


def differences(
    task: Task, ranks: int, plan: Mapping[str, ParallelStyle], *, finish: bool = True
) -> dict[str, float]:
    """Run a split model beside the whole one, and return their differences by quantity."""
    torch.manual_seed(0)
    model = task.model().double()
    reference = copy.deepcopy(model)
    batch = source_of(task.train()).take(torch.arange(SAMPLES))
    inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
    expected = reference(inputs)
    expected_loss = task.loss(expected, batch.targets)
    torch.autograd.backward(expected_loss)

    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("copies", "tp"))["tp"]
    parallelize_module(model, mesh, dict(plan))
    outputs = model(inputs)
    with loss_parallel() if isinstance(outputs, DTensor) else nullcontext():
        loss = task.loss(outputs, batch.targets)
        torch.autograd.backward(loss)
    if finish:
        tp.finish_gradients(model, ranks)
    found = {
        "outputs": largest(whole(outputs), expected),
        "loss": largest(whole(loss), expected_loss),
        "score": largest(
            task.score(whole(outputs), batch.targets), task.score(expected, batch.targets)
        ),
        "by class": float(isinstance(outputs, DTensor)),
    }
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert isinstance(mine, DTensor), name
        assert theirs.grad is not None
        found[f"gradient of {name}"] = off(mine, theirs.grad)
    return found


def all_cases(rank: int) -> Found:
    found: Found = {}
    for name, ranks, by_class in CASES:
        task = tasks.load(name)
        plan = task.tensor_plan(task.model(), ranks=ranks, loss_parallel=by_class)
        found[name, ranks, by_class] = differences(task, ranks, plan)
    plan = Chars().tensor_plan(Chars().model(), ranks=4)
    found["unfinished", 4, False] = differences(Chars(), 4, plan, finish=False)
    return found


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return on_ranks(4, all_cases)


@pytest.mark.parametrize(("name", "ranks", "by_class"), CASES)
def test_a_cut_model_equals_the_whole_one(
    found: list[Found],
    name: str,
    ranks: int,
    by_class: bool,
) -> None:
    for on_rank in found:
        case = dict(on_rank[name, ranks, by_class])
        assert case.pop("by class") == by_class
        assert max(case.values()) <= EQUAL, case


def test_unfinished_local_gradients_are_not_those_of_the_parameters(
    found: list[Found],
) -> None:
    """The wrong form, and why `tp.finish_gradients()` exists."""
    case = found[0]["unfinished", 4, False]
    wrong = {name for name, difference in case.items() if difference > EQUAL}
    norms = ["blocks.0.attention_norm", "blocks.0.feed_norm", "blocks.1.attention_norm",
             "blocks.1.feed_norm", "head.norm"]  # fmt: skip
    assert wrong == {"gradient of embed.symbols.weight"} | {
        f"gradient of {norm}.{part}" for norm in norms for part in ("weight", "bias")
    }


@pytest.mark.parametrize(("name", "ranks"), [("chars", 3), ("chars", 8), ("digits", 3)])
def test_sizes_that_cannot_be_shared_are_refused_with_the_arithmetic(name: str, ranks: int) -> None:
    task = tasks.load(name)
    with pytest.raises(UsageError) as refused:
        task.tensor_plan(task.model(), ranks=ranks)
    assert (
        str(refused.value)
        == {
            ("chars", 3): "--tp 3 does not divide the 4 attention heads: 4 = 1 x 3 + 1; "
            "use --tp 2 or 4",
            ("chars", 8): "--tp 8 does not divide the 4 attention heads: 4 = 0 x 8 + 4; "
            "use --tp 2 or 4",
            ("digits", 3): "--tp 3 does not divide the 128 hidden units: 128 = 42 x 3 + 2; "
            "use --tp 2, 4, 8, 16, 32, 64 or 128",
        }[name, ranks]
    )


def test_a_task_without_a_plan_says_what_to_do() -> None:
    class Plain(Chars):
        tensor_plan = Task.tensor_plan

    with pytest.raises(UsageError, match=r"'chars' does not say .* give it a tensor_plan"):
        Plain().tensor_plan(nn.Identity())


def test_loss_parallel_needs_a_class_on_every_rank() -> None:
    assert [ranks for ranks in range(1, 12) if classes_can_be_sharded(10, ranks)] == [
        1, 2, 3, 4, 5, 10,
    ]  # fmt: skip
    # Eight ranks: five have two classes each, three would have none.
    plan = tasks.load("digits").tensor_plan(nn.Identity(), ranks=8, loss_parallel=True)
    assert plan["4"].use_local_output is True  # type: ignore[attr-defined]
