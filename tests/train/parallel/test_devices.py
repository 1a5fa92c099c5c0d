"""One process, several devices: by hand, and with nn.DataParallel."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import _random

from tests.train.support.ladder import like_the_models
from tests.train.support.making import trainer_for
from train.cli.compatibility import problems
from train.cli.config import Config
from train.data.loader import resident
from train.data.order import Batch
from train.errors import UsageError
from train.model.batchnorm import SynchronisedBatchNorm
from train.parallel.base import Parts, WholeModel
from train.parallel.layout import Layout
from train.parallel.one_process import Manual, Single, Threaded
from train.proof.draws import double_precision
from train.runtime.devices import agree_on_device, device_and_backend, gpu_of, set_tf32
from train.runtime.process_group import RankGroup, arrange, open_group
from train.runtime.rank import RankInfo
from train.tasks.base import Classifier
from train.tasks.chars import Chars
from train.tasks.digits import Digits

Making = Callable[[Parts], WholeModel]
HERE = torch.device("cpu")
STEPS = 3


def parts_of(task: Classifier, **config: Any) -> Parts:
    return Parts(
        task=task,
        config=Config(**config),
        layout=Layout(),
        group=RankGroup(rank_info=RankInfo(), device=HERE),
    )


def train(strategy: WholeModel) -> dict[str, Tensor]:
    """Make some steps, and give everything that came of them."""
    batch = strategy.task.train()
    assert isinstance(batch, Batch)
    optimizer = torch.optim.AdamW([p for _, p in strategy.named_parameters()], lr=1e-3)
    found = {f"start {name}": tensor.clone() for name, tensor in strategy.model_state().items()}
    for step in range(STEPS):
        sums = strategy.accumulate(batch.part(8 * step, 8 * step + 8).split_into(3))
        found[f"loss {step}"] = sums.loss
        strategy.scale_gradients(1 / sums.count)
        for name, parameter in strategy.named_parameters():
            assert parameter.grad is not None
            found[f"grad {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    tally = strategy.evaluate(batch.part(0, 13))
    found |= {"test loss": tally.loss, "test score": tally.score}
    return found | strategy.model_state()


@pytest.mark.parametrize("task", [Digits, Chars])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [(Manual, "cpu,cpu"), (Manual, "cpu, cpu ,cpu"), (Manual, None), (Threaded, None)],
)
def test_training_on_a_list_of_devices_equals_one_device(
    task: type[Classifier], strategy: Making, devices: str | None
) -> None:
    parts = parts_of(task(), strategy="manual", devices=devices)
    several, one = train(strategy(parts)), train(Single(parts))
    # The same operations in the same order: the same bits.
    assert several.keys() == one.keys()
    assert all(torch.equal(several[name], one[name]) for name in one)


def test_pieces_fetch_their_inputs_to_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # `meta` computes shapes without numbers: a second kind of device that every machine has.
    elsewhere = torch.device("meta")
    monkeypatch.setattr("train.parallel.one_process.devices", lambda listed: [HERE, elsewhere])
    strategy = Manual(parts_of(Digits(), devices="pretended"))
    kinds = [parameter.device.type for _, parameter in strategy.named_parameters()]
    assert kinds == ["cpu", "cpu", "meta", "meta", "meta", "meta"]
    batch = Digits().train().part(0, 4)
    # So did the targets, or the loss could not be computed.
    assert strategy.evaluate(batch).loss.device == elsewhere


def test_manual_says_which_device_holds_what() -> None:
    strategy = Manual(parts_of(Digits(), devices="cpu,cpu"))
    assert strategy.describe() == ("cpu: 8,320 parameters (0); cpu: 17,802 parameters (1, 2, 3, 4)")


@pytest.mark.parametrize(
    ("strategy", "devices", "says"),
    [
        (Manual, "cpu,gpu", "--devices cpu,gpu: unknown device 'gpu'; use 'cpu', or 'cuda:0'"),
        (Manual, "cpu,", "--devices cpu,: unknown device ''"),
        (Manual, "cpu:1", "unknown device 'cpu:1'"),
        (Manual, "cuda:99", "--devices cuda:99: there is no 'cuda:99': this process sees "),
        (Threaded, "cuda:99,cuda:99", "there is no 'cuda:99'"),
        (
            Manual,
            "cpu,cpu,cpu,cpu",
            "--devices cpu,cpu,cpu,cpu: the model is to be cut in 4 parts, but only 3 of its "
            "pieces ('0', '1', '2', '3', '4') have parameters; ask for at most 3",
        ),
        (Threaded, "cpu,cpu", "--devices cpu,cpu: nn.DataParallel knows GPUs only"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(strategy: Making, devices: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        strategy(parts_of(Digits(), devices=devices))


def test_dataparallel_tells_what_the_first_device_carries() -> None:
    strategy = Threaded(parts_of(Digits(), optimizer="adamw"))
    weights = sum(p.numel() * 4 for p in strategy.model.parameters()) / 2**20
    strategy.accumulate([Digits().train().part(0, 64)])
    if torch.cuda.is_available():
        assert "peak memory: cuda:0" in strategy.report()
        return
    assert "just runs the model" in strategy.describe()
    assert f"keeps {4 * weights:,.2f} MiB" in strategy.report()
    assert f"borrows {2 * weights:,.2f} MiB" in strategy.report()
    assert "gathers the outputs of all, 0.00 MiB" in strategy.report()
    plain = Threaded(parts_of(Digits(), optimizer="sgd"))
    assert f"keeps {2 * weights:,.2f} MiB" in plain.report()


def test_wrong_form_mean_of_the_devices_means_weighs_samples_differently() -> None:
    """Outputs must be gathered, not losses: shares differ in size."""
    model = nn.Linear(64, 10)
    batch = Digits().train().part(0, 5)
    loss = nn.functional.cross_entropy
    shares = batch.split_into(2)
    assert [len(share) for share in shares] == [2, 3]
    of_means = torch.stack([loss(model(s.inputs), s.targets) for s in shares]).mean()
    of_outputs = torch.cat([model(s.inputs) for s in shares])
    whole = loss(model(batch.inputs), batch.targets)
    torch.testing.assert_close(loss(of_outputs, batch.targets), whole)
    assert abs(of_means - whole) > 1e-4


def test_dataparallel_brings_batches_to_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which need not be the one that this process calls `cuda`.
    elsewhere = torch.device("meta")
    monkeypatch.setattr("train.parallel.one_process.devices", lambda listed: [elsewhere])
    strategy = Threaded(parts_of(Digits(), devices="pretended"))
    batch = Digits().train().part(0, 4)
    assert strategy.evaluate(batch).loss.device == elsewhere
    assert strategy.accumulate([batch]).loss.device == elsewhere


def test_dataparallel_on_the_cpu_needs_none_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy = Threaded(parts_of(Digits(), devices="cpu"))
    assert strategy.accumulate([Digits().train().part(0, 4)]).loss.device == HERE


def sees(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def on_node(local_rank: int, ranks: int) -> RankInfo:
    return RankInfo(
        rank=local_rank,
        world_size=ranks,
        local_rank=local_rank,
        local_world_size=ranks,
        launched=True,
    )


@pytest.mark.parametrize("rank_info", [on_node(0, 8), RankInfo(rank=5, world_size=8, local_rank=5)])
def test_a_node_with_fewer_gpus_than_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank_info: RankInfo
) -> None:
    sees(monkeypatch, 4)
    # Through the command line's configuration, before ranks meet.
    with (
        pytest.raises(UsageError, match=r"has 4 GPUs for [68] ranks: start 4 ranks there, or tra"),
        open_group(rank_info, Config(strategy="ddp", backend="gloo")),
    ):
        pass
    assert device_and_backend(rank_info, "gloo", "cpu") == (HERE, "gloo")


def test_a_gpu_that_was_asked_for_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, 0)
    assert device_and_backend(on_node(1, 2), "gloo") == (HERE, "gloo")
    with pytest.raises(UsageError, match=r"--device cuda needs a GPU for each rank, but on "):
        device_and_backend(on_node(1, 2), "gloo", "cuda")


def test_a_device_beside_a_list_of_devices_is_refused() -> None:
    (problem,) = problems(Config(strategy="manual", device="cuda"), RankInfo())
    assert problem.startswith("--device cuda is one for each rank, but --strategy manual has ")


def agreed(gpus: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of each rank; rank r sees only GPU r."""
    sees(monkeypatch, 1)
    monkeypatch.setattr("train.runtime.devices.gpu_of", lambda device: f"GPU-{device.index}")
    store = HashStore()

    def rank(number: int) -> str:
        rank_info = on_node(number, len(gpus))
        assert device_and_backend(rank_info, "gloo")[0] == torch.device("cuda", 0)
        try:
            agree_on_device(store, rank_info, torch.device("cuda", gpus[number]))
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as threads:
        return list(threads.map(rank, range(len(gpus))))


def test_ranks_that_are_each_shown_their_own_gpu_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed([3, 2, 1, 0], monkeypatch) == [""] * 4


def test_ranks_that_would_share_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = agreed([0, 1, 0, 2], monkeypatch)
    assert len(set(said)) == 1
    assert said[0].startswith("some ranks would share one GPU; start one rank per GPU, have the ")
    assert said[0].splitlines()[1:] == [f"  ranks 0, 2 on {socket.gethostname()}"]


def test_parts_of_one_gpu_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert gpu_of(torch.device("cuda", 1)) == "MIG-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3")
    )
    assert gpu_of(torch.device("cuda", 0)) == "1-2-3"
    assert gpu_of(HERE) == ""


def test_single_precision_is_rounded_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn

    def now() -> tuple[bool, bool]:
        return matrices.allow_tf32, convolutions.allow_tf32

    before = now()
    try:
        for wanted, expected in (("auto", before), ("on", (True, True)), ("off", (False, False))):
            set_tf32(wanted, gpu)
            assert now() == expected
        with pytest.raises(UsageError, match="--tf32 on is for GPUs"):
            set_tf32("on", HERE)
        assert Config(reduce="exact").identity()["tf32"] == "auto"
    finally:
        matrices.allow_tf32, convolutions.allow_tf32 = before


def test_tensors_of_several_ranks_draw_without_asking_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own tracker would broadcast a seed, which some ranks never receive."""
    made = []
    monkeypatch.setattr(
        _random,
        "OffsetBasedRNGTracker",
        lambda mesh, run_state_sync=True: made.append(run_state_sync),
    )
    monkeypatch.setattr(_random, "_rng_tracker", None)
    monkeypatch.setattr(
        "train.runtime.process_group.init_device_mesh",
        lambda *given, mesh_dim_names: "mesh of GPUs",
    )
    arrange(RankGroup(rank_info=RankInfo(), device=torch.device("cuda", 0)), {}, timeout_s=1)
    assert made == [False]


def test_data_larger_than_a_gpu_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(inputs=torch.zeros(2**20), targets=torch.zeros(2**20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**22, 2**33))
    with pytest.raises(UsageError, match=r"task 'wide': .* have 0\.0 GiB\. Each GPU gets"):
        resident(batch, torch.device("cuda", 0), task="wide")
    assert resident(batch, HERE, task="wide") is not None


class Normed(Digits):
    """With running statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


class Chance(Normed):
    """Puts numbers in places that may be the same, so that the order decides."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(outputs, targets)
        places = torch.zeros(2, dtype=torch.int64, device=loss.device)
        return loss + loss.new_zeros(1).put_(places, loss.detach().expand(2)).sum() * 0


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As `--reduce exact` has it on GPUs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_what_has_no_exact_form_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = trainer_for(0, 1, tmp_path, task=f"{__file__}:Chance", reduce="exact")
    with pytest.raises(UsageError, match=r"--reduce exact: .*: put_ does not have a determin"):
        trainer.resume()


@pytest.mark.usefixtures("deterministic")
def test_to_look_for_it_changes_nothing(tmp_path: Path) -> None:
    trainer = trainer_for(0, 1, tmp_path, task=f"{__file__}:Normed", reduce="exact")
    before = {name: t.clone() for name, t in trainer.strategy.model_state().items()}
    trainer.resume()
    after = trainer.strategy.model_state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for _, p in trainer.strategy.named_parameters())


@pytest.mark.parametrize("made_on", [None, HERE, torch.device("meta")])
def test_wherever_a_model_is_made_it_gets_the_layers_of_the_device_that_it_runs_on(
    made_on: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is made on the host, and what `--meta-init` makes is nowhere yet."""
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)
    parts = parts_of(Normed(), sync_batch_norm=True)
    on_gpu = dataclasses.replace(
        parts, group=RankGroup(rank_info=RankInfo(), device=torch.device("cuda", 0))
    )
    assert isinstance(on_gpu.model(made_on).get_submodule("0"), nn.SyncBatchNorm)
    assert isinstance(parts.model(made_on).get_submodule("0"), SynchronisedBatchNorm)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        (Manual, "cpu,cuda:0"),
        (Manual, "cuda:0"),
        (Threaded, "cuda:0"),
        (Threaded, "cpu"),
        pytest.param(Manual, "cuda:0,cuda:1", marks=pytest.mark.gpu(2)),
        pytest.param(Threaded, "cuda:0,cuda:1", marks=pytest.mark.gpu(2)),
        pytest.param(Threaded, "cuda:1", marks=pytest.mark.gpu(2)),
    ],
)
def test_gpus_equal_one_device(strategy: Making, devices: str) -> None:
    """In double precision: AdamW makes whole steps of the signs of mere rounding."""
    with double_precision():
        parts = parts_of(like_the_models(Digits()), devices=devices)
        there = dataclasses.replace(
            parts, group=RankGroup(rank_info=RankInfo(), device=torch.device("cuda", 0))
        )
        several, one = train(strategy(there)), train(Single(parts))
    for name in one:
        torch.testing.assert_close(several[name].cpu(), one[name], atol=1e-9, rtol=1e-9)
