"""Causes are distinguished from echoes, and each is reported once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from torch import AcceleratorError, OutOfMemoryError, nn
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from train.__main__ import end_early
from train.errors import (
    CheckpointError,
    NonFiniteLoss,
    PeerError,
    PortError,
    ReplicaError,
    UsageError,
    is_collateral,
)
from train.failure.diagnose import explain, is_ours_alone
from train.failure.record import ERROR_FILE, fail, lost, tell, tell_echo, unwritable
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.rank import RankInfo


@pytest.mark.parametrize(
    "error",
    [
        PeerError("rank 0: disk full"),
        DistNetworkError("refused"),
        DistStoreError("timed out"),
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
        ),
        DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error\n"
            "ncclRemoteError: A call failed possibly due to a network error"
        ),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"),
    ],
)
def test_the_end_of_another_rank_is_an_echo(error: Exception) -> None:
    assert is_collateral(error)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no run directory"),
        NonFiniteLoss("step 3"),
        CheckpointError("cannot write: Broken pipe"),
        ValueError("connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(28, "No space left on device"),
        DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN)\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
        ),
    ],
)
def test_what_happened_here_is_a_cause(error: Exception) -> None:
    assert not is_collateral(error)


ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AcceleratorError(ECC, 214), "retryable"),
        (RuntimeError("CUDA error: unspecified launch failure"), "retryable"),
        (DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error"), "retryable"),
        (RuntimeError("The NVIDIA driver on your system is too old"), "retryable"),
        (OSError(5, "Input/output error", "/data/shard-3"), "retryable"),
        (OSError(116, "Stale file handle", "{run}/metrics.jsonl"), "retryable"),
        (CheckpointError("step 10: Input/output error"), "retryable"),
        (PortError("localhost:45891 is taken"), "retryable"),
        (ReplicaError("weight differs"), "retryable"),
        (RuntimeError("CUDA error: device-side assert triggered"), "fatal"),
        (RuntimeError("CUDA error: CUBLAS_STATUS: out of memory"), "fatal"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling x"), "fatal"),
        (RuntimeError("CUDA error: no kernel image is available"), "fatal"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "fatal"),
        (UsageError("data/shard-3: Input/output error"), "fatal"),
        (CheckpointError("step 10: No space left on device"), "fatal"),
        (ValueError("shapes differ"), "fatal"),
    ],
)
def test_only_what_another_start_may_cure_can_be_retried(
    error: Exception, status: str, tmp_path: Path
) -> None:
    if isinstance(error, OSError):
        error.filename = error.filename.format(run=tmp_path)
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, launched=True)
    directory = RunDirectory(tmp_path, rank)
    fail(error, directory, None, TrainingProgress(steps=20))
    outcome = directory.read_outcome()
    assert outcome is not None and outcome.status == status


class Machine:
    """The ranks of a machine, as torchrun starts them, one after the other in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.folder, self.monkeypatch, self.ranks = folder, monkeypatch, ranks
        self.first = 0

    def rank(self, local_rank: int) -> RankInfo:
        file = self.error_file(local_rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.monkeypatch.setenv(ERROR_FILE, str(file))
        return RankInfo(
            rank=self.first + local_rank,
            world_size=8,
            local_rank=local_rank,
            local_world_size=self.ranks,
            launched=True,
        )

    def error_file(self, local_rank: int) -> Path:
        return self.folder / "attempt_0" / str(local_rank) / "error.json"

    def report(self) -> str:
        """What torchrun ends with, from the text of the root cause on."""
        failures = {
            rank: ProcessFailure(rank, 1000 + rank, 1, str(self.error_file(rank)))
            for rank in range(self.ranks)
        }
        return str(ChildFailedError("train", failures))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch, 3)


def test_what_all_ranks_find_is_said_once_and_is_the_root_cause(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first to find it need not be rank 0.
    for rank in (1, 0, 2):
        tell(machine.rank(rank), "no such flag\n--epoch")
    assert capsys.readouterr().err == "train: no such flag\n--epoch\n"
    others, _, root = machine.report().partition("Root Cause")
    assert "rank      : 1 (" in root
    assert "traceback : no such flag\n  --epoch\n" in root
    assert others.count("traceback : the same as rank 1\n") == 2
    # When torchrun's folder was changed last tells when the ranks have begun.
    assert {path.name for path in machine.error_file(0).parents[1].iterdir()} == {"0", "1", "2"}


def test_what_ranks_find_apart_is_said_by_each(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(machine.rank(0), "no file a.py")
    tell(machine.rank(1), "no file b.py")
    tell(machine.rank(2), "shapes differ", trace="Traceback of rank 2\n", summary="ValueError: x")
    assert capsys.readouterr().err == (
        "train: no file a.py\ntrain: no file b.py\n"
        "Traceback of rank 2\ntrain: rank 2: shapes differ\n"
    )
    assert "traceback : ValueError: x\n" in machine.report()


def test_another_machine_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    machine.first = 3
    tell(machine.rank(0), "no file a.py")
    assert capsys.readouterr().err == "train: on node-7: no file a.py\n"


def test_echoes_are_said_once_and_are_never_the_root_cause(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_echo(machine.rank(0), "another rank went away [closed by peer :1]")
    tell_echo(machine.rank(1), "another rank went away [closed by peer :2]")
    assert capsys.readouterr().err == (
        "train: rank 0: another rank went away [closed by peer :1]\n"
    )
    # Rank 2 was killed, and has left nothing: torchrun dates it by when it has looked.
    _, _, root = machine.report().partition("Root Cause")
    assert "rank      : 2 (" in root


def test_a_rank_that_torchrun_ends_because_of_another_is_no_root_cause(machine: Machine) -> None:
    machine.rank(0)
    end_early(None, "SIGTERM")
    tell(machine.rank(1), "no such flag")
    others, _, root = machine.report().partition("Root Cause")
    assert "traceback : stopped by SIGTERM\n" in others
    assert "traceback : no such flag\n" in root


def test_without_torchrun_rank_0_says_what_all_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    rank_info = RankInfo(world_size=2, launched=True)
    for rank in (0, 1):
        tell(replace(rank_info, rank=rank), "no such flag")
    tell(replace(rank_info, rank=1), "shapes differ", trace="Traceback\n")
    assert capsys.readouterr().err == (
        "train: no such flag\nTraceback\ntrain: rank 1: shapes differ\n"
    )


def test_a_folder_that_may_be_anybodys_silences_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    for _ in range(2):
        tell(RankInfo(), "no such flag")
    assert capsys.readouterr().err == "train: no such flag\n" * 2


def test_a_lost_rank_is_told_from_where_this_one_was() -> None:
    raw = RuntimeError("[tcp/pair.cc:553] Connection closed by peer\n [127.0.0.1]:5")
    assert lost(raw, TrainingProgress(steps=9, step=3)) == (
        "another rank went away while this one was at step 4 of 9 (its own output says why, or its "
        "node's); start again to continue from the newest checkpoint "
        "[[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5]"
    )
    assert lost(raw, None).startswith("another rank went away before the first step (")
    # That one speaks for itself.
    peer = PeerError("rank 0: disk full")
    assert lost(peer, None) == "ends because of others: rank 0: disk full"


def test_only_a_file_of_the_run_directory_is_the_run_directorys_fault(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", str(tmp_path / "run/metrics.jsonl"))
    assert unwritable(full, tmp_path / "run").startswith(
        f"cannot use {tmp_path / 'run/metrics.jsonl'}: No space left on device; "
    )
    elsewhere = OSError(28, "No space left on device", str(tmp_path / "other"))
    assert unwritable(elsewhere, tmp_path / "run") == ""
    assert unwritable(OSError("no file"), tmp_path / "run") == ""


class Odd(nn.Module):
    """A model that cannot be looked at."""

    def forward(self) -> None:
        raise ValueError("of mine")

    def named_modules(self, *arguments: object, **named: object) -> NoReturn:
        raise RuntimeError("not now")


def test_what_cannot_be_explained_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="of mine") as caught:
        Odd()()
    assert explain(caught.value, None, None) == "the run failed"
    assert not is_ours_alone(caught.value)
