"""Every sample once, whatever the ranks; and what a task may predict."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.data.order import Batch
from train.errors import UsageError
from train.inference.parts import MOST_PARTS, Partition
from train.inference.rows import lines, passes
from train.tasks.base import Classifier, Task


@given(
    samples=st.integers(0, 3000),
    batch=st.integers(1, 40),
    shards=st.integers(1, 9),
    random=st.randoms(use_true_random=False),
)
def test_each_sample_is_in_one_batch_and_all_ranks_make_as_many_passes(
    samples: int, batch: int, shards: int, random: Any
) -> None:
    partition = Partition(samples=samples, batch=batch)
    assert partition.parts <= MOST_PARTS
    missing = sorted(random.sample(range(partition.parts), random.randint(0, partition.parts)))
    plans = [list(passes(partition, missing, shard=n, shards=shards)) for n in range(shards)]
    assert len({len(plan) for plan in plans}) == 1
    counted = sorted((one for plan in plans for one in plan if one.counts), key=lambda p: p.batch)
    numbers = [number for one in counted for number in one.samples]
    wanted = [number for p in missing for number in partition.samples_of(partition.batches_of(p))]
    assert numbers == wanted
    assert list(dict.fromkeys(one.part for one in counted)) == missing
    # All ranks write their parts at the same time.
    assert len({tuple(one.closes for one in plan) for plan in plans}) == 1
    assert all(sum(one.closes for one in plan) == -(-len(missing) // shards) for plan in plans)
    # What is computed together does not depend on the ranks.
    assert all(one.samples.start == one.batch * batch for one in counted)


class Given(Task):
    """A task that predicts what it was given."""

    name = "mine"

    def __init__(self, value: object) -> None:
        self.value = value

    def predictions(self, outputs: Any, targets: Any) -> Any:
        return self.value

    model = train = test = loss = None  # type: ignore[assignment]


BATCH = Batch(inputs=torch.zeros(2, 3), targets=torch.tensor([4, 5]))


def written(task: Task, outputs: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(task, outputs, BATCH, range(7, 9))]


def test_a_task_predicts_its_outputs_unless_it_says_otherwise() -> None:
    class Plain(Given):
        predictions = Task.predictions

    outputs = {"sizes": torch.tensor([[0.1, 2.0], [float("nan"), 1e-9]]), "pair": (
        torch.tensor([True, False]), torch.tensor([0.5, 3.0], dtype=torch.bfloat16),
    )}  # fmt: skip
    assert written(Plain(None), outputs) == [
        {"index": 7, "prediction": {"sizes": [0.1, 2.0], "pair": [True, 0.5]}, "target": 4},
        {"index": 8, "prediction": {"sizes": [None, 1e-9], "pair": [False, 3.0]}, "target": 5},
    ]


def test_numbers_in_single_precision_are_as_short_as_they_can_be_and_the_same() -> None:
    numbers = torch.randn(2, 300) * torch.logspace(-30, 30, 300)
    read = written(Given({"x": numbers}), numbers)
    assert torch.tensor([row["x"] for row in read]).equal(numbers)
    assert all(float(f"{x:.9g}") == x for row in read for x in row["x"])


def test_a_classifier_predicts_the_class_and_its_probability() -> None:
    class Mine(Classifier):
        model = train = test = None  # type: ignore[assignment]

    outputs = torch.tensor([[0.0, 0.0, 40.0], [3.0, 1.0, 1.0]], dtype=torch.bfloat16)
    first, second = written(Mine(), outputs)
    assert first == {"index": 7, "prediction": 2, "probability": 1.0, "target": 4}
    assert second["prediction"] == 0
    assert second["probability"] == pytest.approx(0.7870, abs=1e-4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "predictions() gave Tensor, not values by name"),
        (
            {"index": torch.zeros(2)},
            "predictions() gave 'index', which every line already has",
        ),
        (
            {"x": torch.zeros(3)},
            "predictions() gave 'x' of shape [3] for 2 samples: the first dimension must be the "
            "sample (docs/how-to/own-task.md)",
        ),
        (
            {"x": {"y": torch.tensor(1.0)}},
            "predictions() gave 'x'['y'] of shape [] for 2 samples: ",
        ),
        ({"x": ["a"]}, "predictions() gave 'x' with 1 entries for 2 samples: give one for each"),
        ({"x": None}, "predictions() gave 'x' of type NoneType: give a tensor or a list with an "),
        ({"x": [object(), 2]}, "predictions() gave what JSON cannot hold: Object of type object "),
        (
            {"x": torch.zeros(2, dtype=torch.complex64)},
            "predictions() gave what JSON cannot hold: ",
        ),
    ],
)
def test_what_cannot_be_written_sample_by_sample_is_refused(value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        written(Given(value), torch.zeros(2))
    assert str(caught.value).startswith(f"task 'mine': {message}")
