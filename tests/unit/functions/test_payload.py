"""The files of a call: only its owner decides what is unpickled."""

import json
import os
import pickle
from pathlib import Path

import pytest

import toolkit
from tests.support.asked_slurm import Slurm, User
from toolkit.functions.job import FunctionJob
from toolkit.functions.payload import FOLDER, SubmittedCall
from toolkit.functions.worker import RankFiles, WorkerId
from toolkit.slurm.submission import SlurmJob, write_jobs


@pytest.fixture
def call(tmp_path: Path) -> SubmittedCall:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    (folder / "call.json").write_text(json.dumps({"ranks": 1, "restarts": 0}))
    (folder / "call.pkl").write_bytes(pickle.dumps((print, (1,), {"end": ""})))
    for path in (tmp_path, folder, folder / "call.pkl"):
        path.chmod(0o700)
    return SubmittedCall(tmp_path)


def test_a_call_is_read_again(call: SubmittedCall) -> None:
    assert call.parts() == (print, (1,), {"end": ""})


@pytest.mark.parametrize("name", ["", FOLDER, f"{FOLDER}/call.pkl"])
def test_a_call_that_others_may_write_is_not_unpickled(call: SubmittedCall, name: str) -> None:
    (call.run_dir / name).chmod(0o772)
    with pytest.raises(toolkit.LauncherError, match="can be written by others"):
        call.parts()


def test_a_call_that_was_resubmitted_has_not_ended(tmp_path: Path) -> None:
    """Until its next attempt begins, outcome.json is about the one before."""
    slurm = Slurm()
    user = User(tmp_path, slurm)
    run = user.run("r", 77)
    assert run.run_dir
    for folder in ("function", "logs/attempt-0"):
        (run.run_dir / folder).mkdir()
    (run.run_dir / "function/call.json").write_text(json.dumps({"ranks": 1, "restarts": 0}))
    outcome = run.run_dir / "outcome.json"
    outcome.write_text(json.dumps({"version": 1, "status": "fatal", "attempt": 0}))
    os.utime(run.run_dir / "jobs.jsonl", (1, 1))
    slurm.rows = user.line("r", 77, "FAILED")
    job = FunctionJob[object](run)
    assert (job.state, job.done()) == ("FAILED", True)
    write_jobs(run.run_dir, [SlurmJob(job_id="78", mode="continue")])
    os.utime(outcome, (2, 2))
    slurm.rows += user.line("r", 78, "PENDING", " continue", reason="Priority")
    assert (job.state, job.done()) == ("PENDING", False)


def test_a_rank_that_torchrun_restarts_removes_what_it_wrote_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    given = {**dict.fromkeys(numbers, "1"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**given, "TRAIN_RUN_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    worker = WorkerId()
    RankFiles(worker).result("of the first start")
    other = worker.attempt_dir / "rank-0.pkl"
    other.touch()
    assert (worker.attempt_dir / "rank-1.pkl").exists()
    RankFiles(worker)
    assert list(worker.attempt_dir.iterdir()) == [other]
