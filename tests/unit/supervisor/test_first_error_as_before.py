"""The supervisor reads first errors as the scripts' awk does, until that is gone."""

import json
import os
import random
import subprocess
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

AWK = (ROOT / "templates/common/first_error.sh").read_text()
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
        run_dir=str(run_dir), number=1, nodes=hosts, reports=reports, newer_than_ns=since
    )


def awk(folder: Path, attempts: list[Attempt]) -> list[str]:
    """Return what the scripts' functions print of each attempt, by line: last, then all."""
    text = [AWK, "HOSTNAME=elsewhere; export HOSTNAME; _attempt=1"]
    for attempt in attempts:
        logs = f"{attempt.run_dir}/logs/attempt-1"
        mark = f"{logs}/began" if attempt.newer_than_ns else ""
        report = "\n".join(attempt.reports)
        text.append(
            f"_run_dir={attempt.run_dir}; cat >report <<'END'\n{report}\nEND\n"
            f'_all_ended=yes; first_error {logs} last {mark} <report >>out; echo ";" >>out\n'
            f"for _all_ended in yes ''; do "
            f"first_error {logs}/node-0/7-0_ab all </dev/null >>out; echo ';' >>out; done"
        )
    done = subprocess.run(
        ["bash", "-s"], input="\n".join(text), cwd=folder, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = (folder / "out").read_text(encoding="latin-1")
    return [answer.rstrip("\n") for answer in printed.split(";\n")][:-1]


def test_a_host_whose_name_begins_anothers_is_masked_whole(tmp_path: Path) -> None:
    """In awk the order was left to chance."""
    attempt = Attempt(str(tmp_path), 0, nodes=["node1", "node1.cluster"])
    folder = tmp_path / "node-0/1_a/attempt_0/0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text('{"message": "OSError: on node1.cluster and node1"}')
    assert last_failure(attempt, str(tmp_path)) == Failure("error", "-", "OSError: on * and *")


def line(failure: Failure | None) -> str:
    return failure.line() if failure else ""


@pytest.mark.parametrize("count", [25, pytest.param(1_000, marks=pytest.mark.slow)])
def test_it_finds_what_awk_finds(tmp_path: Path, count: int) -> None:
    attempts = []
    for number in range(count):
        run_dir = tmp_path / f"run-{number}"
        attempts.append(draw(random.Random(number), run_dir))
    answers = awk(tmp_path, attempts)
    seen: dict[str, int] = {}
    for number, attempt in enumerate(attempts):
        logs = f"{attempt.run_dir}/logs/attempt-1"
        one = f"{logs}/node-0/7-0_ab"
        whole = attempt._replace(newer_than_ns=None)
        found = [
            line(last_failure(attempt, logs)),
            *(line(repeated_failure(whole, one, all_ended=ended)) for ended in (True, False)),
        ]
        assert found == answers[3 * number : 3 * number + 3], f"run-{number}"
        for answer in found:
            seen[answer.partition("\t")[0]] = seen.get(answer.partition("\t")[0], 0) + 1
    assert set(seen) == {"", "error", "fault", "bare", "unsure"}


@pytest.mark.parametrize("count", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_two_failures_are_alike_as_before_and_are_told_in_the_same_words(
    tmp_path: Path, count: int
) -> None:
    dice, pairs = random.Random(3), []
    steps = ("7", "7+", "after step-1", "-", "8")
    kinds = ("error", "fault", "bare", "unsure")
    words = ("ValueError: a /x/1 and 7", "ValueError: a /y/2 and 8", "signal 9")
    for _ in range(count):
        now = Failure(dice.choice(kinds), dice.choice(steps), dice.choice(words))
        changed = {"step": dice.choice(steps), "message": dice.choice(words)}
        before = now._replace(**{k: v for k, v in changed.items() if dice.random() < 0.5})
        pairs.append((before, now))
    text = [AWK]
    for before, now in pairs:
        text.append(f"if same_failure '{before.line()}' '{now.line()}'; then echo same; fi")
        text.append(f"in_words '{now.line()}'; echo ';'")
    done = subprocess.run(["bash", "-s"], input="\n".join(text), text=True, capture_output=True)
    answers = done.stdout.split(";\n")
    for (before, now), answer in zip(pairs, answers, strict=False):
        same = "same\n" if alike(from_line(before.line()), now, in_a_row=True) else ""
        assert answer == f"{same}{in_words(now)}\n", (before, now)
