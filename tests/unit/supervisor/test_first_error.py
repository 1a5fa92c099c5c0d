"""First errors of drawn attempts are those that the scripts of version 0.2 found, by awk."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from toolkit.supervisor.evidence.first_error import (
    Attempt,
    Failure,
    alike,
    from_line,
    in_words,
    last_failure,
    repeated_failure,
)
from toolkit.supervisor.evidence.torchrun_report import read_reports

RECORDED = (ROOT / "tests/data/supervisor/first_errors.txt").read_text().splitlines()
"""Of each attempt: the last failure, and the repeated one, all ranks ended or not."""

BEGAN_NS = 10**18

MESSAGES = (
    "ValueError: bad shape",
    "RuntimeError: no kernel at 0x7f01, port 4001: 3 vs 4",
    "RuntimeError: Connection reset by peer",
    "RuntimeError: [enforce fail at alloc.cpp:75] failed to send 12 bytes",
    "KeyError",
    "KeyErrors: none",
    "OSError: [Errno 5] Input/output error: '/data/a1/part-0017.bin'",
    "torch.distributed.DistBackendError: NCCL error in x.cpp:12, remote process exited",
    "TimeoutError: after 10.5 seconds on node1.cluster of rank 3, pid=812; 12ms5",
    "Exception: id deadbeef01 at 2026-11-28 10:11:12,345 from 10.0.0.7:2950",
    "stopped by SIGTERM",
    'ValueError: a "quoted\\ttab" and back\\\\slash',
    "the same as rank 1",
    "StallError: collective mismatch: timed out",
    "RuntimeError: attempt-3/node-0 of node12 and xnode1 said it, /tmp/ab12_c/file",
    "RuntimeError: 1764331872 1764331872.25 12.7.1.2",
)
STDERR = (
    "Traceback (most recent call last):\n  File x\n{}\n",
    "[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: {}\n",
    "Exception ignored in: <x>\nTraceback (most recent call last):\n  File\n{}\n",
    "terminate called\n  what():  {}\n",
    "Fatal Python error: Aborted\n\nThread 0x1\n",
    "Traceback (most recent call last):\n  x\n{}\nmore\nlines\nof it\nFatal Python error: so\n",
    "Traceback (most recent call last):\n  File x\n{}\n" + "it went on\n" * 60,
    "nothing of interest\n",
    "",
)


def draw(dice: random.Random, run_dir: Path) -> Attempt:
    """Write the files of an attempt, and return where they are."""
    logs = run_dir / "logs/attempt-1"
    logs.mkdir(parents=True)
    hosts = ["node1", "node2"]
    (logs / "nodes").write_text("".join(f"{host}\n" for host in hosts))
    changed = list(range(-40, 400))
    dice.shuffle(changed)

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        at = BEGAN_NS + changed.pop() * 10**9
        os.utime(path, ns=(at, at))

    message = dice.choice(MESSAGES)
    for node in range(dice.choice([1, 2])):
        for run in range(dice.choice([1, 1, 2])):
            for start in range(dice.choice([1, 2, 3])):
                for rank in range(dice.choice([1, 2])):
                    folder = logs / f"node-{node}/7-{run}_ab/attempt_{start}/{rank}"
                    if dice.random() < 0.5:
                        message = dice.choice(MESSAGES)
                    if dice.random() < 0.4:
                        told = {"message": {"message": message, "extraInfo": {}}}
                        plain = {"message": message, "timestamp": "1"}
                        write(folder / "error.json", json.dumps(dice.choice([told, plain])))
                    if dice.random() < 0.8:
                        write(folder / "stderr.log", dice.choice(STDERR).format(message))
    reports = []
    for _ in range(dice.choice([0, 1, 2])):
        reports += [
            *dice.choice([[], ["Root Cause (first observed failure):"]]),
            f"  time      : 2026-11-28_10:00:0{dice.randrange(3)}",
            f"  host      : {dice.choice(['node1', 'node2'])}",
            "  rank      : 0 (local_rank: 0)",
            f"  exitcode  : {dice.choice([1, -9, -15, 93, -6])} (pid: 5)",
            "  error_file: <N/A>",
        ]
    of = {"attempt": dice.choice([0, 1, 1]), "restart": dice.choice([0, 1, 2])}
    if dice.random() < 0.5:
        status = dice.choice(["running", "fatal", "retryable", "preempted"])
        record = {"version": 1, "status": status, **of, "step": dice.choice([7, 8])}
        write(run_dir / "outcome.json", json.dumps(record, indent=2) + "\n")
    for name, event in (("events.jsonl", "error"), ("metrics.jsonl", "x")):
        rows: list[dict[str, Any]] = [
            {"event": event, "attempt": dice.choice([0, 1]), "restart": restart, "step": 5 + k}
            for k, restart in enumerate(dice.choices([0, 1, 2], k=dice.choice([0, 3])))
        ]
        if rows:
            write(run_dir / name, "".join(f"{json.dumps(row)}\n" for row in rows))
    for step in range(dice.choice([0, 0, 2])):
        write(run_dir / f"checkpoints/step-{step}/done", "")
        os.utime(run_dir / f"checkpoints/step-{step}", ns=(BEGAN_NS + step * 10**9,) * 2)
    since = dice.choice([None, BEGAN_NS])
    if since:
        write(logs / "began", "")
        os.utime(logs / "began", ns=(BEGAN_NS, BEGAN_NS))
    return Attempt(
        run_dir=str(run_dir),
        number=1,
        nodes=hosts,
        reports=read_reports(reports),
        newer_than_ns=since,
    )


def test_a_host_whose_name_begins_anothers_is_masked_whole(tmp_path: Path) -> None:
    """In awk the order was left to chance."""
    attempt = Attempt(str(tmp_path), 0, nodes=["node1", "node1.cluster"])
    folder = tmp_path / "node-0/1_a/attempt_0/0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text('{"message": "OSError: on node1.cluster and node1"}')
    assert last_failure(attempt, str(tmp_path)) == Failure("error", "-", "OSError: on * and *")


def line(failure: Failure | None) -> str:
    return failure.line() if failure else ""


def test_first_errors_are_those_that_were_recorded(tmp_path: Path) -> None:
    seen = set()
    for number in range(len(RECORDED) // 3):
        attempt = draw(random.Random(number), tmp_path / f"run-{number}")
        logs = f"{attempt.run_dir}/logs/attempt-1"
        one = f"{logs}/node-0/7-0_ab"
        whole = attempt._replace(newer_than_ns=None)
        found = [
            line(last_failure(attempt, logs)),
            *(line(repeated_failure(whole, one, all_ended=ended)) for ended in (True, False)),
        ]
        assert found == RECORDED[3 * number : 3 * number + 3], f"run-{number}"
        seen |= {answer.partition("\t")[0] for answer in found}
    assert seen == {"", "error", "fault", "bare", "unsure"}


FAULT = Failure("fault", "7", "ValueError: a /x/1 and 7")


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (FAULT, FAULT._replace(step="9"), True),  # at any step
        (FAULT, FAULT._replace(message="ValueError: b"), False),
        (FAULT._replace(kind="error"), FAULT, False),
        (FAULT._replace(kind="error"), Failure("error", "7", "ValueError: a /y/2 and 8"), True),
        (FAULT._replace(kind="error"), Failure("error", "8", "ValueError: a /y/2 and 8"), False),
        (FAULT._replace(kind="error", step="-"), Failure("error", "-", FAULT.message), True),
        (FAULT._replace(kind="error", step="-"), Failure("error", "-", "ValueError: c"), False),
        (Failure("bare", "7", "signal 9"), Failure("bare", "7", "signal 9"), True),
        (Failure("unsure", "-", "signal 9"), Failure("unsure", "-", "signal 9"), False),
    ],
)
def test_which_failures_are_the_same(before: Failure, now: Failure, same: bool) -> None:
    assert alike(from_line(before.line()), now, in_a_row=True) == same


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("7", "the same failure twice at step 7: signal 9"),
        ("7+", "the same failure twice at step 7 or later: signal 9"),
        ("after step-1", "the same failure twice with no checkpoint after step-1: signal 9"),
        ("-", "the same failure twice: signal 9"),
    ],
)
def test_the_words_for_a_failure_that_came_twice(step: str, words: str) -> None:
    assert in_words(Failure("bare", step, "signal 9")) == words
