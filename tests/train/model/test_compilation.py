"""`--compile` compiles in every combination, or is refused."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn

from tests.train.support.ladder import whole
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.data.order import Batch
from train.errors import UsageError
from train.model import compilation
from train.tasks.base import Classifier

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from tests.train.conftest import Running, Start

STEPS = 3
CLASSES = 16


class Normed(Classifier):
    """Layers of torch as pieces; one of them has running statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 14), nn.Linear(14, 16)
        )

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 8, generator=generator)
        return Batch(inputs=inputs, targets=(inputs.argmax(1) + 1))

    test = train

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"3": ColwiseParallel(), "4": RowwiseParallel()}


class Deep(Normed):
    """More pieces of one class than torch compiles for one piece of code."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(size, size + 1) for size in range(8, 20)))


class Lookup(Classifier):
    """A lookup as a piece, cut by rows."""

    local = True

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(CLASSES, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, CLASSES)
        )

    def train(self) -> Batch:
        inputs = torch.arange(64 * 4).view(64, 4) % CLASSES
        return Batch(inputs=inputs, targets=(inputs * 3) % CLASSES)

    test = train

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "1": ColwiseParallel(use_local_output=self.local),
            "3": RowwiseParallel(),
        }


class Handed(Lookup):
    """Whose second piece hands a DTensor on."""

    local = False


class Hidden(Normed):
    """A model that torch.compile is configured to skip."""

    def model(self) -> nn.Module:
        return Unseen(super().model())


class Unseen(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs


def task(kind: type[Classifier]) -> str:
    return f"{__file__}:{kind.__name__}"


def trained(rank: int, ranks: int, folder: Path, **chosen: Any) -> tuple[dict[str, Tensor], int]:
    """Weights and running statistics after some steps, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    # The compiler reads attributes that warn when they are read.
    warnings.simplefilter("ignore")
    # The same as inductor up to its C++, for which no test need wait.
    compilation.BACKEND = "aot_eager"
    torch._dynamo.reset()
    counters.clear()
    trainer = trainer_for(rank, ranks, folder, **{"optimizer": "sgd", "lr": 0.1, **chosen})
    trainer.resume()
    for _ in range(STEPS):
        trainer.train_step()
    trainer.measure()
    state = {name: whole(tensor) for name, tensor in trainer.strategy.model_state().items()}
    return state, counters["stats"]["unique_graphs"]


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": 2},
    "pp": {"strategy": "pp", "micro_batch": 4},
}
LOOKED_UP = {name: LAYOUTS[name] for name in ("fsdp", "tp")}


def compiled(
    rank: int, folder: Path, kind: str, layouts: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, int]]:
    """By layout, how far from a run that is not compiled, and the number of graphs."""
    found = {}
    for name, layout in layouts.items():
        ranks = 1 if name == "single" else 2
        plain, graphs = trained(rank, ranks, folder, task=kind, **layout)
        assert graphs == 0
        for again in (False, True):
            state, graphs = trained(
                rank,
                ranks,
                folder,
                task=kind,
                compile=True,
                activation_checkpointing=again,
                **layout,
            )
            found[f"{name}, again" if again else name] = largest(plain, state), graphs
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts", "pieces"), [(Normed, LAYOUTS, 4), (Lookup, LOOKED_UP, 3)]
)
def test_what_is_compiled_trains_the_same_and_is_compiled(
    tmp_path: Path,
    kind: type[Classifier],
    layouts: dict[str, dict[str, Any]],
    pieces: int,
) -> None:
    """Running statistics move once, too, where activations are computed again."""
    by_rank = on_ranks(2, compiled, tmp_path, task(kind), layouts)
    for found in by_rank:
        assert {name: far for name, (far, _) in found.items() if far > 1e-6} == {}
    for name in found:
        # For training alone. Of one model in one piece there is one; a stage has some pieces.
        least = 1 if name in ("single", "ddp") else pieces
        graphs = [found[name][1] for found in by_rank]
        assert (sum(graphs) if name.startswith("pp") else min(graphs)) >= least, (name, graphs)


@pytest.mark.slow
def test_each_of_many_pieces_is_compiled(tmp_path: Path) -> None:
    _, graphs = trained(
        0, 1, tmp_path, task=task(Deep), compile=True, activation_checkpointing=True
    )
    assert graphs >= 12


def test_a_model_of_which_nothing_is_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has compiled nothing of the model of task"):
        trained(0, 1, tmp_path, task=task(Hidden), compile=True)


def refusal(rank: int, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        trained(rank, 2, folder, task=task(Handed), tp=2, compile=True)
    return str(caught.value)


def test_a_piece_that_is_handed_a_dtensor_is_not_compiled(tmp_path: Path) -> None:
    for said in on_ranks(2, refusal, tmp_path):
        assert said.startswith("--compile: piece '2' receives a DTensor, and torch.comp")


def test_copies_of_a_compiled_model_on_several_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = [torch.device("cuda", number) for number in range(2)]
    monkeypatch.setattr("train.parallel.one_process.devices", lambda listed: gpus)
    for flag in ("compile", "activation_checkpointing"):
        with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} cannot be combined with"):
            trainer_for(0, 1, tmp_path, strategy="dataparallel", **{flag: True})


ELF = bytearray(Path(sys.executable).resolve().read_bytes())


def planted(cache: Path) -> dict[str, Path]:
    """A cache with libraries whole and cut off, and folders of compilers that have been killed."""
    paths = {
        "whole": cache / "ab/cwhole.main.so",
        "short": cache / "ab/cshort.main.so",
        "empty": cache / "cd/cempty.main.o",
        "zeros": cache / "cd/czeros.main.so",
        "held": cache / "cd/cheld.main.so",
        "begun": cache / "ef/cbegun.main.so",
        "header": cache / "precompiled_headers/cheader.h.gch",
        "source": cache / "ab/cshort.main.cpp",
    }
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ELF)
    paths["short"].write_bytes(ELF[: len(ELF) // 2])
    paths["held"].write_bytes(ELF[: len(ELF) // 2])
    paths["empty"].write_bytes(b"")
    paths["zeros"].write_bytes(bytes(len(ELF)))
    (cache / "ef/cbegun.main_CxxBuild").mkdir()
    (cache / "precompiled_headers/cheader.h_CxxBuild").mkdir()
    for folder in (cache / "locks", cache / "precompiled_headers/locks"):
        folder.mkdir()
    return paths


def test_only_what_no_compiler_is_at_is_removed_from_its_cache(tmp_path: Path) -> None:
    paths = planted(tmp_path)
    with FileLock(tmp_path / "locks/cheld.lock"):
        removed = compilation.remove_unfinished(tmp_path)
    gone = {"short", "empty", "zeros", "begun", "header"}
    assert sorted(removed) == sorted(paths[name] for name in gone)
    assert {name for name, path in paths.items() if not path.exists()} == gone
    assert not list(tmp_path.glob("*/*_CxxBuild"))
    # Now its holder is gone.
    assert compilation.remove_unfinished(tmp_path) == [paths["held"]]
    assert compilation.remove_unfinished(tmp_path / "none") == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
def test_a_run_killed_while_compiling_starts_again(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    cache = tmp_path / "cache"

    def started(steps: int) -> Running:
        return start.single(
            "--task=digits",
            f"--steps={steps}",
            "--checkpoint-every=0",
            "--global-batch=16",
            "--compile",
            run_dir=tmp_path / "run",
            # Libraries are put in the one, and headers in a folder of the other.
            TORCHINDUCTOR_CACHE_DIR=str(cache),
            TMPDIR=str(temporary),
        )

    def kernels() -> list[Path]:
        """The libraries of the model; others only probe the processor."""
        sources = cache.glob("*/*.main.cpp")
        made = [p.with_suffix(".so") for p in sources if "chk_kernel" not in p.read_text()]
        return [path for path in made if path.exists()]

    killed = started(10**9)
    killed.wait_until(lambda: bool(kernels()))
    # With its compilers, as a node or a container is killed.
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.wait()
    for path in kernels():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert started(2).finish().losses().keys() == {1, 2}
    assert not list(cache.glob("*/*_CxxBuild"))
