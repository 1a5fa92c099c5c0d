"""Slurm's text is read as its own JSON means it, in every recorded version."""

import pytest

from tests.fakes.slurm_answers import FOLDER, Recording
from toolkit.runs.state import RunState
from toolkit.slurm.commands import ask_accounting, ask_jobs

RECORDED = sorted(FOLDER.glob("*.json"))
STATES = {
    "done": RunState.SUCCEEDED,
    "failed": RunState.FAILED,
    "array": RunState.FAILED,
    "timed out": RunState.PREEMPTED,
    "running": RunState.RUNNING,
    "cancelled": RunState.CANCELLED,
    "cancelled before it began": RunState.CANCELLED,
    "begins later": RunState.PENDING,
    "depends": RunState.PENDING,
    "held": RunState.PENDING,
    "waits for nodes": RunState.PENDING,
    "waits behind it": RunState.PENDING,
}


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def slurm(request: pytest.FixtureRequest) -> Recording:
    return Recording(request.param)


def test_the_oldest_and_the_newest_slurm_are_among_them() -> None:
    assert [path.stem for path in RECORDED] == ["22.05", "24.11", "26.05"]


def test_squeue_is_read_as_its_json_says(slurm: Recording) -> None:
    rows = ask_jobs(slurm.command, list(slurm.jobs.values()))
    told = {said.job_id: said for said in slurm.queue}
    assert {row.job_id for row in rows} == told.keys()
    for row in rows:
        said = told[row.job_id]
        assert row.word in said.words, row
        assert (row.reason, row.start) == (said.reason, said.start), row


def test_sacct_is_read_as_its_json_says(slurm: Recording) -> None:
    rows = ask_accounting(slurm.command, list(slurm.jobs.values()))
    assert rows
    told = {said.job_id: said for said in slurm.accounting}
    assert {row.job_id for row in rows} == told.keys()
    for row in rows:
        said = told[row.job_id]
        assert row.word in said.words, row
        status, signal = said.status
        assert (f"exit status {status}" in row.reason) == (status != 0), row
        assert (f"signal {signal}" in row.reason) == (signal != 0), row


def test_both_say_what_happened(slurm: Recording) -> None:
    names = {job_id: name for name, job_id in slurm.jobs.items()}
    queue = ask_jobs(slurm.command, list(slurm.jobs.values()))
    accounting = ask_accounting(slurm.command, list(slurm.jobs.values())) or []
    for rows in (queue, accounting):
        assert {row.whole for row in rows} == set(names)
        assert [
            (row.job_id, row.state) for row in rows if row.state != STATES[names[row.whole]]
        ] == []
