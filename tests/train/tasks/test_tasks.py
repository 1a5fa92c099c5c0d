"""The built-in tasks: the data that they read, their refusals, and that they can be learnt."""

from __future__ import annotations

import gzip
import lzma
import math
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toolkit
from tests.conftest import ROOT
from tests.train.support.datasets import FASHION_MNIST, SHUTTLE, there
from train import tasks
from train.data.loader import Feed, source_of
from train.data.order import Batch, SampleOrder, permutation
from train.errors import UsageError
from train.layers import CausalAttention, Positions
from train.model.evaluation import parts_of
from train.runtime.rank import RankInfo
from train.tasks.base import Classifier, Task
from train.tasks.fashion_mnist import FashionMnist
from train.tasks.shuttle import Shuttle


def composed(task: Task, samples: int = 5) -> None:
    """The pieces, one after the other, are the forward pass."""
    model = task.model().eval()
    inputs = source_of(task.train()).take(torch.arange(samples)).inputs
    hidden = inputs
    for name in task.pieces(model):
        hidden = model.get_submodule(name)(hidden)
    assert hidden.equal(model(inputs))


@pytest.mark.parametrize("name", ["digits", "chars"])
def test_pieces_make_up_the_model(name: str) -> None:
    composed(tasks.load(name))


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    task = tasks.load("digits")
    images, labels = load_digits(return_X_y=True)
    known = Batch(
        inputs=torch.from_numpy(images).float() / 16, targets=torch.from_numpy(labels).long()
    )
    shuffled = known.take(permutation(len(known), seed=0, epoch=0))
    for part, source in (
        (shuffled.part(0, 360), source_of(task.test())),
        (shuffled.part(360, len(shuffled)), source_of(task.train())),
    ):
        found = source.take(torch.arange(len(part)))
        assert found.inputs.equal(part.inputs) and found.targets.equal(part.targets)


def test_without_scikit_learn_the_digits_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        tasks.load("digits")


def test_every_task_says_how_far_it_has_come() -> None:
    task = tasks.load("digits")
    outputs = torch.eye(10)[[3, 4, 5, 6]]
    score = task.score(outputs, torch.tensor([3, 4, 0, 6]))
    assert task.metrics(score, 4) == {"accuracy": 0.75}


# --- fashion-mnist


@pytest.fixture(scope="module")
def fashion() -> FashionMnist:
    return FashionMnist(there(FASHION_MNIST))


def test_fashion_mnist_is_whole_and_stays_in_bytes(fashion: FashionMnist) -> None:
    train, test = fashion.train(), fashion.test()
    assert train.inputs.shape == (60_000, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert torch.bincount(train.targets).tolist() == [6000] * 10
    assert torch.bincount(test.targets).tolist() == [1000] * 10
    assert fashion.identity() == {"train_samples": 60_000, "parameters": 29_178}
    composed(fashion)


def test_fashion_mnist_is_learnt(fashion: FashionMnist) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, part = fashion.model(), fashion.train().part(0, 6400)
    feed = Feed(part, SampleOrder(size=6400, seed=0), global_batch=32, shard=0, shards=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for step in range(150):
        batch = feed.batch(step * 32)
        optimizer.zero_grad()
        torch.autograd.backward(fashion.loss(model(batch.inputs), batch.targets) / 32)
        optimizer.step()
    model.eval()
    test = fashion.test().part(0, 2000)
    with torch.no_grad():
        score = fashion.score(model(test.inputs), test.targets)
    assert fashion.metrics(score.double(), 2000)["accuracy"] > 0.75


def test_missing_pictures_name_the_package_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as missing:
        FashionMnist(tmp_path)
    assert str(missing.value) == (
        f"task 'fashion-mnist' needs {tmp_path}/train-images-idx3-ubyte.gz: install the Debian "
        "package dataset-fashion-mnist (apt-get install dataset-fashion-mnist), or set "
        "FASHION_MNIST_DIR to a folder that has its files"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x08\x01\0\0\0\x09"),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0"),
        gzip.compress(bytes(1000))[:-9],
    ],
    ids=["other", "empty", "short", "floats", "cut"],
)
def test_damaged_pictures_are_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{file}: "):
        FashionMnist(tmp_path)


# --- shuttle


@pytest.fixture(scope="module")
def shuttle() -> Shuttle:
    return Shuttle(there(SHUTTLE))


def test_shuttle_is_split_by_class_and_standardised_by_its_training_part(shuttle: Shuttle) -> None:
    train, test = shuttle.train(), shuttle.test()
    assert torch.bincount(train.targets).tolist() == [31910, 35, 120, 6232, 2287, 7, 9]
    assert torch.bincount(test.targets).tolist() == [13676, 15, 51, 2671, 980, 3, 4]
    assert train.inputs.shape == (40_600, 9)
    assert train.inputs.mean(dim=0).abs().max() < 1e-4
    assert (train.inputs.std(dim=0) - 1).abs().max() < 1e-4
    assert (test.inputs.std(dim=0) - 1).abs().max() > 1e-4
    composed(shuttle)


def test_shuttle_is_measured_by_class(shuttle: Shuttle) -> None:
    """Always guessing the most frequent class looks good in one figure only."""
    targets = shuttle.test().targets
    outputs = torch.zeros(len(targets), 7)
    outputs[:, 0] = 1.0
    halves = [
        shuttle.score(outputs[half], targets[half])
        for half in (slice(None, 9000), slice(9000, None))
    ]
    metrics = shuttle.metrics((halves[0] + halves[1]).double(), len(targets))
    assert metrics["accuracy"] == pytest.approx(13676 / 17400)
    assert metrics["balanced_accuracy"] == pytest.approx(1 / 7)
    assert metrics["rarest_class_recall"] == 0.0


def test_a_missing_shuttle_names_the_package_and_a_way_without_r(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as missing:
        Shuttle(tmp_path / "none.rda")
    message = str(missing.value)
    assert message.startswith(f"task 'shuttle' needs {tmp_path}/none.rda of the Debian package")
    assert "apt-get install r-cran-mlbench" in message
    assert "dpkg -x" in message
    assert "SHUTTLE_RDA" in message


def test_without_rdata_the_shuttle_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rdata", None)
    (tmp_path / "Shuttle.rda").touch()
    with pytest.raises(UsageError, match="pip install rdata"):
        Shuttle(tmp_path / "Shuttle.rda")


def test_damaged_shuttles_are_named(tmp_path: Path) -> None:
    content = lzma.decompress(there(SHUTTLE).read_bytes())
    path = tmp_path / "Shuttle.rda"
    compressed = lzma.compress(content[:200_000], preset=0)
    for damage in (b"", b"no xz", compressed, compressed[:-20]):
        path.write_bytes(damage)
        with pytest.raises(UsageError, match=f"task 'shuttle' cannot use {path}: "):
            Shuttle(path)


def word(text: str) -> bytes:
    return struct.pack(">ii", 9, len(text)) + text.encode()


def strings(*texts: str) -> bytes:
    return struct.pack(">ii", 16, len(texts)) + b"".join(map(word, texts))


HEAD = b"RDX2\nX\n" + struct.pack(">iii", 2, 3 << 16, 2 << 16)
SYMBOL, PAIR, END = (struct.pack(">i", flags) for flags in (1, 1 << 10 | 2, 254))


def test_another_data_frame_is_refused(tmp_path: Path) -> None:
    """Written by hand: a list of one column, whose attribute's name comes twice."""
    column = struct.pack(">iiii", 1 << 9 | 13, 2, 1, 2)
    levels = PAIR + SYMBOL + word("names") + strings("low", "high") + END
    # `names` was the second symbol, after the frame's own.
    names = PAIR + struct.pack(">i", 2 << 8 | 255) + strings("heat") + END
    frame = struct.pack(">ii", 1 << 9 | 19, 1) + column + levels + names
    path = tmp_path / "x.rda"
    for name, problem in (("x", "KeyError"), ("Shuttle", "")):
        path.write_bytes(lzma.compress(HEAD + PAIR + SYMBOL + word(name) + frame + END))
        with pytest.raises(UsageError, match=f"^task 'shuttle' cannot use {path}: {problem}"):
            Shuttle(path)


@pytest.mark.parametrize(
    "content",
    [
        b"RDA3\nX\n",
        HEAD,
        HEAD + END,
        HEAD + struct.pack(">ii", 14, -5),
        HEAD + struct.pack(">i", 24),
        HEAD + struct.pack(">i", 9 << 8 | 255),
        HEAD + struct.pack(">i", 2),
        HEAD + struct.pack(">ii", 19, 1) * 2000,
    ],
)
def test_what_is_no_data_frame_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.rda"
    path.write_bytes(lzma.compress(content))
    with pytest.raises(UsageError, match=f"^task 'shuttle' cannot use {path}: "):
        Shuttle(path)


# --- evaluation, layers, jobs


@pytest.mark.parametrize("batch", [1, 2, 256])
@pytest.mark.parametrize("size", [1, 7, 256, 257, 1000])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_every_rank_makes_as_many_evaluations_and_each_sample_counts_once(
    batch: int, size: int, shards: int
) -> None:
    test = Batch(inputs=torch.arange(size), targets=torch.arange(size))
    by_rank = [
        list(parts_of(test, batch=batch, shard=shard, shards=shards)) for shard in range(shards)
    ]
    assert len({len(parts) for parts in by_rank}) == 1
    assert len(by_rank[0]) == math.ceil(math.ceil(size / shards) / batch)
    # No model is given an empty batch, which many cannot take.
    assert all(0 < len(part) <= batch for parts in by_rank for part, _ in parts)
    seen = torch.cat([part.inputs for parts in by_rank for part, counts in parts if counts])
    assert seen.equal(torch.arange(size))


class LaterHalf:
    """Attention of the second half of a sequence to all of it, as a rank with that half does it."""

    def __init__(self, earlier_key: Tensor, earlier_value: Tensor) -> None:
        self.key, self.value = earlier_key, earlier_value

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys = torch.cat([self.key, key], dim=2)
        time, start = query.shape[2], self.key.shape[2]
        seen = torch.ones(time, start + time, dtype=torch.bool).tril(start)
        return nn.functional.scaled_dot_product_attention(
            query, keys, torch.cat([self.value, value], dim=2), attn_mask=seen
        )


def test_attention_and_positions_can_be_told_that_they_see_a_part() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64)
    attention, positions = CausalAttention(), Positions(8, 16)
    whole, places = attention(query, key, value), positions(8)
    attention.context = LaterHalf(key[:, :, :4], value[:, :, :4])
    positions.offset = 4
    later = attention(query[:, :, 4:], key[:, :, 4:], value[:, :, 4:])
    assert (later - whole[:, :, 4:]).abs().max() < 1e-12
    assert positions(4).equal(places[4:])


@pytest.mark.parametrize("job", sorted(path.name for path in (ROOT / "jobs").glob("*.yaml")))
@pytest.mark.parametrize("profile", ["slurm/profiles/slurm.yaml", "k8s/profiles/k8s.yaml"])
def test_every_job_can_be_rendered_and_its_arguments_are_understood(job: str, profile: str) -> None:
    from train.cli import flags

    site = toolkit.load_profile(str(ROOT / profile))
    # A sweep is one job array of Slurm; elsewhere its points are jobs of their own.
    alone = [] if isinstance(site, toolkit.SlurmProfile) else ["sweep=null"]
    spec = toolkit.load(ROOT / "jobs" / job, alone)
    assert spec.name in toolkit.render(toolkit.plan(spec, site))
    shape = spec.resources
    rank_info = RankInfo(
        rank=0,
        world_size=shape.max_nodes * shape.nproc_per_node,
        local_rank=0,
        local_world_size=shape.nproc_per_node,
        launched=True,
        addressed=True,
    )
    config = flags.parse(list(spec.args), {flags.RUN_DIR: "run"}, rank_info).config
    assert config.task == {"sweep": "digits"}.get(spec.name, spec.name)


# --- identity of a task of your own


class Tiny(Classifier):
    """As little as a task can be."""

    def __init__(self, width: int = 3, make: Callable[[], nn.Module] | None = None) -> None:
        self.make = make or (lambda: nn.Linear(4, width))

    def model(self) -> nn.Module:
        return self.make()

    def train(self) -> Batch:
        return Batch(inputs=torch.zeros(5, 4), targets=torch.zeros(5, dtype=torch.int64))

    test = train


def test_another_size_of_data_or_model_is_another_run() -> None:
    assert Tiny().identity() == {"train_samples": 5, "parameters": 15}
    assert Tiny(width=4).identity() != Tiny().identity()


def test_asking_for_the_identity_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    Tiny().identity()
    assert torch.get_rng_state().equal(before)


def test_a_model_that_no_meta_device_can_make_has_an_identity_too() -> None:
    def picky() -> nn.Module:
        layer = nn.Linear(4, 3)
        assert layer.weight.sum().item() != 0.0
        return layer

    assert Tiny(make=picky).identity()["parameters"] == 15


def test_the_program_finds_the_data_by_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(there(SHUTTLE), tmp_path / "copy.rda")
    monkeypatch.setenv("SHUTTLE_RDA", str(tmp_path / "copy.rda"))
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    assert len(source_of(tasks.load("shuttle").test())) == 17_400
    with pytest.raises(UsageError, match=str(tmp_path)):
        tasks.load("fashion-mnist")
