"""Inputs, targets and outputs of more than one tensor train as one process trains them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from tests.train.conftest import Start
from tests.train.support.ladder import Recording, merged
from tests.train.support.making import refusal, trainer_for
from tests.train.support.nested import KINDS, Nested
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.dryrun import examine
from train.errors import UsageError
from train.parallel.base import Tally, tally

FILE = Path(__file__).parents[1] / "support/nested.py"
# In double precision: sums over ranks are made in another order.
MOST = 1e-12
COMMON = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 5.0}
# By name: task and options. All of them train as one process does.
ON_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("Nested", {"strategy": "ddp", "micro_batch": 2}),
    "fsdp": ("Nested", {"strategy": "fsdp", "micro_batch": 2}),
    "fsdp, recomputed": ("Nested", {"strategy": "fsdp", "activation_checkpointing": True}),
    "hsdp": ("Nested", {"strategy": "hsdp", "dp_replicate": 2}),
    "tp": ("Nested", {"strategy": "tp"}),
    "pp 1F1B": ("Nested", {"strategy": "pp", "micro_batch": 2}),
    "pp ZBVZeroBubble": (
        "Nested",
        {"strategy": "pp", "micro_batch": 2, "pp_schedule": "ZBVZeroBubble"},
    ),
    "local-sgd": ("Nested", {"strategy": "local-sgd", "local_steps": 1, "clip_norm": None}),
    "exact": ("Nested", {"reduce": "exact", "micro_batch": 1}),
    "from a Dataset": ("FromDataset", {"strategy": "ddp"}),
    "cp": ("Sentences", {"strategy": "cp"}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "micro-batches": ("Nested", {"micro_batch": 3}),
    "recomputed": ("Nested", {"activation_checkpointing": True}),
    "manual": ("Nested", {"strategy": "manual", "devices": "cpu,cpu"}),
    "dataparallel": ("Nested", {"strategy": "dataparallel"}),
    "local": ("Nested", {"clip_norm": None}),
    "Nested": ("Nested", {}),
    "FromDataset": ("FromDataset", {}),
    "Sentences": ("Sentences", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "between stages": (
        "TwoBetween",
        {"strategy": "pp", "micro_batch": 2},
        "--pp 2: stage 0 of task 'two-between', which ends with '0', gives a tuple; from "
        r"stage to stage goes one tensor, and the last gives tensors only: cut elsewhere by "
        r"pieces\(\), have that module give what it may, or leave out --pp",
    ),
    "no tensor": (
        "WithText",
        {"strategy": "pp", "micro_batch": 2},
        r"--pp 2: stage 1 of task 'with-text', which ends with '1', gives a str as "
        r"output\['text'\]; from stage to stage goes one tensor, and the last gives tensors "
        r"only: .*, or leave out --pp",
    ),
    "no sequence": (
        "WithLengths",
        {"strategy": "cp"},
        r"--cp 2 cuts dimension 1 of inputs and targets, the sequence, but those of task "
        r"'with-lengths' are inputs\['symbols'\] \[8, 8\], inputs\['weights'\] "
        r"\[8, 8, 2\], inputs\['length'\] \[8\] and targets\['next'\] \[8, 8\], "
        r"targets\['weight'\] \[8, 8\]; leave out --cp",
    ),
}

Trained = tuple[dict[str, Tensor], list[float], dict[str, float]]


def trained(rank: int, ranks: int, folder: Path, task: str, **chosen: Any) -> Trained:
    """Weights and losses after some steps, and the metrics of an evaluation."""
    config = {"task": f"{FILE}:{task}", **COMMON, **chosen}
    trainer = trainer_for(rank, ranks, folder, **config)
    trainer.resume()
    record = Recording(trainer)
    return merged(trainer.group, record.final), record.losses, trainer.measure()


def sharded_tally() -> Tally:
    """Measure outputs that are divided among the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    value, scores = torch.arange(4.0), torch.eye(4, KINDS)
    outputs = {"value": value, "kinds": (distribute_tensor(scores, mesh, [Shard(1)]),)}
    with loss_parallel():
        return tally(Nested(), outputs, (value, {"kind": torch.tensor([0, 1, 2, 2])}))


def all_on_two(rank: int, folder: Path) -> tuple[dict[str, Trained], dict[str, str], Tally]:
    torch.set_default_dtype(torch.float64)
    found = {
        name: trained(rank, 2, folder / name, task, **chosen)
        for name, (task, chosen) in ON_TWO.items()
    }
    refused = {
        name: refusal(rank, 2, folder / name, task=f"{FILE}:{task}", **chosen)
        for name, (task, chosen, _) in REFUSED.items()
    }
    return found, refused, sharded_tally()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(2, all_on_two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    torch.set_default_dtype(torch.float64)
    folder = tmp_path_factory.mktemp("one")
    yield {n: trained(0, 1, folder / n, task, **chosen) for n, (task, chosen) in ALONE.items()}
    torch.set_default_dtype(torch.float32)


def assert_same(got: Trained, expected: Trained) -> None:
    weights, losses, measured = expected
    assert got[0].keys() == weights.keys()
    assert max((got[0][name] - weights[name]).abs().max().item() for name in weights) < MOST
    assert got[1] == pytest.approx(losses, rel=MOST)
    assert got[2] == pytest.approx(measured, rel=MOST)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_train_on_trees_what_one_process_does(
    ranks: list[Any], alone: dict[str, Trained], name: str
) -> None:
    expected = alone["local" if name == "local-sgd" else ON_TWO[name][0]]
    for found, *_ in ranks:
        assert_same(found[name], expected)


def test_nested_outputs_that_ranks_share_are_measured_whole(ranks: list[Any]) -> None:
    expected = functional.cross_entropy(
        torch.eye(4, KINDS).double(), torch.tensor([0, 1, 2, 2]), reduction="sum"
    )
    for _, _, measured in ranks:
        assert measured.score.tolist() == [3]
        assert measured.loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("name", ["micro-batches", "recomputed", "manual", "dataparallel"])
def test_one_process_trains_on_trees_the_same_in_every_way(
    alone: dict[str, Trained], name: str
) -> None:
    assert_same(alone[name], alone["Nested"])


def test_a_tree_in_memory_and_a_dataset_of_trees_are_the_same(alone: dict[str, Trained]) -> None:
    assert_same(alone["FromDataset"], alone["Nested"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_on_all_ranks_before_the_first_step(
    ranks: list[Any], name: str
) -> None:
    message = REFUSED[name][-1]
    for _, refused, _ in ranks:
        assert re.fullmatch(message, refused[name]), refused[name]


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"strategy": "fsdp", "dp_shard": 2, "micro_batch": 2},
        {"strategy": "pp", "pp": 2, "micro_batch": 2},
        {"strategy": "pp", "pp": 2, "micro_batch": 2, "pp_schedule": "ZBVZeroBubble"},
    ],
    ids=["single", "fsdp", "pp", "pp of four stages"],
)
def test_a_dry_run_counts_a_step_on_trees(chosen: dict[str, Any]) -> None:
    findings = examine(Config(task=f"{FILE}:Nested", global_batch=8, **chosen))
    assert all(rank.flops > 0 for rank in findings.ranks)


def test_a_dry_run_refuses_what_a_run_would() -> None:
    with pytest.raises(UsageError, match="stage 0 of task 'two-between', which ends with '0', giv"):
        examine(Config(task=f"{FILE}:TwoBetween", pp=2, global_batch=8, micro_batch=2))


@pytest.mark.slow
def test_a_run_on_a_dataset_of_dicts_evaluates_and_exports(start: Start, tmp_path: Path) -> None:
    flags = (f"--task={FILE}:FromDataset", "--epochs=2", "--global-batch=8", "--optimizer=sgd")
    alone = start.single(
        *flags, "--workers=1", f"--export={tmp_path / 'one.st'}", run_dir=tmp_path / "one"
    ).finish()
    server = start.ranks(
        2,
        *flags,
        "--strategy=ps",
        "--ps-mode=sync",
        f"--export={tmp_path / 'ps.st'}",
        run_dir=tmp_path / "ps",
    ).finish()
    metrics = alone.outcome()["metrics"]
    assert metrics.keys() == {"loss", "test_loss", "test_right"}
    assert server.outcome()["metrics"] == pytest.approx(metrics, rel=MOST)
    one, other = (load_file(tmp_path / name) for name in ("one.st", "ps.st"))
    assert one.keys() == other.keys() == Nested().model().state_dict().keys()
    assert max((one[name] - other[name]).abs().max().item() for name in one) < MOST
