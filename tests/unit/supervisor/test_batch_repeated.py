"""A failure that comes again on Slurm: whether an attempt has ended as one before."""

import json
from pathlib import Path

import pytest

from tests.support.ending_batch import Job
from toolkit.supervisor.evidence.first_error import Failure

AGAIN = ["requeue 7"]


END = "; another start would end like these two; not queued again"


KILLED = """
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_01:30:12
  host      : {}
  rank      : 1 (local_rank: 0)
  exitcode  : {} (pid: 337)
  error_file: <N/A>
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, limit=9)


def raised(job: Job, words: str, *, start: int = 0, node: int = 0, rank: int = 0) -> None:
    """Leave the error file of a rank in the folder of the attempt, as `@record` does."""
    folder = job.folder(job.attempt) / f"node-{node}/7-0_x/attempt_{start}/{rank}"
    folder.mkdir(parents=True)
    said = {"message": {"message": words, "extraInfo": {"timestamp": "1"}}}
    (folder / "error.json").write_text(json.dumps(said))


def printed(job: Job, text: str, *, rank: int = 0) -> None:
    """Leave what a rank has printed to stderr."""
    folder = job.folder(job.attempt) / f"node-0/7-0_x/attempt_0/{rank}"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(text)


def ends(job: Job, *, step: int | None = None, report: str = "", status: str = "retryable") -> str:
    """End an attempt; return its reason."""
    (job.folder(job.attempt) / "nodes").write_text("n1\nn2\n")
    if step is not None:
        job.told(status=status, attempt=job.attempt, restart=0, step=step, rank=0, reason="so")
    assert job.conclude(1, printed=report) in (1, 93)
    return job.reason


def next_attempt(job: Job) -> None:
    job.attempt += 1
    job.asked.clear()


def test_the_same_error_twice_at_one_step_is_fatal_and_says_so(job: Job) -> None:
    raised(job, "RuntimeError: no kernel for 3 vs 4\nmore of it")
    assert ends(job, step=12).endswith("; queued again")
    next_attempt(job)
    raised(job, "RuntimeError: no kernel for 3 vs 4\nmore that differs")
    assert ends(job, step=12) == (
        f"fatal: the same failure twice at step 12: RuntimeError: no kernel for 3 vs 4{END}"
    )
    assert job.asked == []


@pytest.mark.parametrize(
    ("first", "second"),
    [(("one", 12), ("one", 13)), (("one", 12), ("other", 12)), (("one", None), ("other", None))],
)
def test_another_step_or_another_error_is_tried_again(
    job: Job, first: tuple[str, int | None], second: tuple[str, int | None]
) -> None:
    for words, step in (first, second):
        raised(job, f"RuntimeError: {words}")
        assert ends(job, step=step).endswith("; queued again")
        next_attempt(job)


def test_a_fault_of_the_code_costs_two_starts_whatever_comes_in_between(job: Job) -> None:
    """At any step, since a bad sample comes at another step after another restart."""
    raised(job, "IndexError: list index out of range")
    assert ends(job, step=12).endswith("; queued again")
    next_attempt(job)
    raised(job, "RuntimeError: the file server is away")
    assert ends(job, step=13).endswith("; queued again")
    next_attempt(job)
    raised(job, "IndexError: list index out of range")
    assert ends(job, step=14) == (
        "fatal: the same failure twice at step 14: IndexError: list index out of range" + END
    )


def test_numbers_and_paths_are_no_difference_at_the_same_step(job: Job) -> None:
    words = "RuntimeError: {} of /data/part-{} has {} rows"
    raised(job, words.format("a", 1, 17))
    assert ends(job, step=12).endswith("; queued again")
    next_attempt(job)
    raised(job, words.format("a", 2, 19))
    assert ends(job, step=13).endswith("; queued again")
    next_attempt(job)
    raised(job, words.format("b", 2, 19))
    assert ends(job, step=13).endswith("; queued again")
    next_attempt(job)
    raised(job, words.format("a", 3, 20))
    assert ends(job, step=13).startswith("fatal: the same failure twice at step 13: RuntimeError")


def test_a_script_that_records_nothing_is_known_by_its_traceback(job: Job) -> None:
    trace = "Traceback (most recent call last):\n  File x\n    y\nValueError: bad at 0x{}\n"
    for address in ("7f01", "7ffe"):
        printed(job, "rank 1 warns\n", rank=1)
        printed(job, "starting\n" + trace.format(address) + "bye\n")
        reason = ends(job, report=KILLED.format("n1", 1))
        next_attempt(job)
    assert reason == f"fatal: the same failure twice: ValueError: bad at 0x*{END}"


def test_a_traceback_after_which_a_rank_went_on_is_not_its_end(job: Job) -> None:
    for _ in range(2):
        printed(job, "Traceback (most recent call last):\n  x\nValueError: caught\n" + "on\n" * 60)
        assert "; queued again" in ends(job, report=KILLED.format("n1", -9))
        next_attempt(job)


def test_progress_of_a_script_with_metrics_alone_is_seen(job: Job) -> None:
    reasons = []
    for step in (5, 6, 6):
        line = {"attempt": job.attempt, "restart": 0, "step": step}
        with (job.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        raised(job, "RuntimeError: bad")
        reasons.append(ends(job))
        next_attempt(job)
    assert [reason.partition(":")[0] for reason in reasons] == ["retryable", "retryable", "fatal"]
    assert reasons[2].startswith("fatal: the same failure twice at step 6 or later: RuntimeError: ")


def test_progress_of_a_script_with_checkpoints_alone_is_seen(job: Job) -> None:
    words = []
    for name in ("a.pt", "b.pt", "b.pt"):
        (job.run_dir / "checkpoints").mkdir(exist_ok=True)
        (job.run_dir / "checkpoints" / name).touch()
        raised(job, "RuntimeError: bad")
        words.append(ends(job))
        next_attempt(job)
    assert [reason.partition(":")[0] for reason in words] == ["retryable", "retryable", "fatal"]
    assert words[2].startswith("fatal: the same failure twice with no checkpoint after b.pt: ")


@pytest.mark.parametrize(
    ("step", "status", "word"),
    [(None, "", "retryable"), (5, "running", "retryable"), (5, "retryable", "fatal")],
    ids=["no step", "a step or later", "the step"],
)
def test_a_rank_that_is_killed_twice_is_the_same_failure_only_at_a_known_step(
    job: Job, step: int | None, status: str, word: str
) -> None:
    for host in ("n1", "n2"):
        raised(job, "another rank went away [Connection closed by peer]")
        reason = ends(job, step=step, status=status, report=KILLED.format(host, -9))
        next_attempt(job)
    assert reason.partition(":")[0] == word
    assert word == "retryable" or reason == (
        f"fatal: the same failure twice at step 5: signal 9{END}"
    )


def test_ranks_that_only_lose_each_other_twice_at_a_known_step_are_fatal(job: Job) -> None:
    """As where a collective that one rank does not make times out."""
    for words in ("Timed out waiting 30000ms", "Connection reset by peer"):
        raised(job, words)
        reason = ends(job, step=5)
        next_attempt(job)
    assert reason == (f"fatal: the same failure twice at step 5: ranks have lost another one{END}")


@pytest.mark.parametrize("word", ["preempted", "walltime", "node_failure", "lost"])
@pytest.mark.parametrize("step", [12, None])
def test_what_was_stopped_between_two_failures_is_none_of_them(
    job: Job, word: str, step: int | None
) -> None:
    """But where no step is known it may have been progress."""
    raised(job, "RuntimeError: bad")
    ends(job, step=step)
    next_attempt(job)
    job.had(1, word)
    next_attempt(job)
    raised(job, "RuntimeError: bad")
    assert ends(job, step=step).partition(":")[0] == ("fatal" if step else "retryable")


def test_failures_of_an_earlier_job_in_the_directory_do_not_count(job: Job) -> None:
    raised(job, "RuntimeError: bad")
    ends(job, step=12)
    next_attempt(job)
    raised(job, "RuntimeError: bad")
    job.told(status="retryable", attempt=1, step=12, rank=0, reason="so")
    job.since = 1
    assert job.conclude(1) == 1
    assert job.asked == AGAIN


def test_two_starts_in_one_job_that_fail_alike_are_enough(job: Job) -> None:
    for start in (0, 1):
        raised(job, "RuntimeError: bad", start=start)
    raised(job, "Connection closed by peer", start=0, node=1)
    events = [{"attempt": 0, "restart": start, "event": "error", "step": 12} for start in (0, 1)]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (job.run_dir / "events.jsonl").write_text(text)
    assert ends(job) == f"fatal: the same failure twice at step 12: RuntimeError: bad{END}"


def fails_in_two_starts(job: Job, words: str, *, node: int) -> None:
    for start in (0, 1):
        raised(job, words, start=start, node=node)
    events = [{"attempt": 0, "restart": start, "event": "error", "step": 12} for start in (0, 1)]
    (job.run_dir / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))


LOST = "another rank went away [Connection closed by peer]"


def test_the_node_with_the_cause_is_named_and_not_the_first_that_has_lost_it(job: Job) -> None:
    fails_in_two_starts(job, LOST, node=0)
    fails_in_two_starts(job, "RuntimeError: bad", node=1)
    assert ends(job) == f"fatal: the same failure twice at step 12: RuntimeError: bad{END}"


def test_nodes_that_only_lose_another_one_are_stopped_later_than_the_cause_can_take(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system, the files of the node with the cause may be seen a minute later."""
    now_s = 100.0
    monkeypatch.setattr("toolkit.supervisor.evidence.repeated.time.monotonic", lambda: now_s)
    fails_in_two_starts(job, LOST, node=0)
    with job.batch() as batch:
        found = []
        for now_s in (100.0, 159.0, 160.0):  # noqa: B007  # read by the clock
            found.append(batch.repetitions.in_job(all_ended=False))
        assert found == [None, None, Failure("bare", "12", "ranks have lost another one")]
        now_s = 100.0
        fails_in_two_starts(job, "RuntimeError: bad", node=1)
        at_once = batch.repetitions.in_job(all_ended=False)
        assert at_once == Failure("error", "12", "RuntimeError: bad")


def test_what_was_stopped_for_its_repetition_is_fatal_whatever_it_says_then(job: Job) -> None:
    (job.folder(0) / "repeated").write_text("error\t12\tRuntimeError: bad\n")
    reason = ends(job, step=12, status="preempted")
    assert reason == f"fatal: the same failure twice at step 12: RuntimeError: bad{END}"


def fails_on(job: Job, host: str, words: str) -> str:
    """Let an attempt fail at one step, on a node first; return its reason."""
    raised(job, words)
    reason = ends(job, step=12, report=KILLED.format(host, 1))
    next_attempt(job)
    return reason


CUDA = "RuntimeError: CUDA error: unspecified launch failure"
DRIVER = "RuntimeError: The NVIDIA driver on your system is too old"
NCCL = "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.28"


@pytest.mark.parametrize("words", [CUDA, DRIVER, NCCL])
def test_a_device_that_fails_twice_is_tried_without_its_node_once(words: str, job: Job) -> None:
    fails_on(job, "n2", words)
    job.asked.clear()
    assert fails_on(job, "n2", words) == (
        f"retryable: the same failure twice at step 12: {words}; queued again; "
        "without n2, where two attempts have failed first"
    )
    assert fails_on(job, "n3", words).startswith("fatal: the same failure twice at step 12: ")


@pytest.mark.parametrize(
    ("words", "hosts", "up"),
    [
        (CUDA, ("n1", "n2"), "n1:idle n2:mix n3:idle n4:alloc"),
        (CUDA, ("n2", "n2"), "n1:idle n2:mix n3:down"),
        ("IndexError: 7", ("n2", "n2"), "n1:idle n2:mix n3:idle n4:alloc"),
    ],
    ids=["on two nodes", "no other node", "the script's own"],
)
def test_what_no_other_node_would_mend_is_fatal(
    job: Job, words: str, hosts: tuple[str, str], up: str
) -> None:
    job.cluster.up = up
    reasons = [fails_on(job, host, words) for host in hosts]
    assert reasons[1] == f"fatal: the same failure twice at step 12: {words}{END}"


MISMATCH = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length "
    "<= op.nbytes. 1000 vs 12. Is there a distributed collective mismatch in your code?"
)


def test_ranks_in_different_collectives_are_the_codes_fault_and_no_nodes(job: Job) -> None:
    """Gloo ends one of them by an exception of C++; the other one has lost its peer."""
    for _ in range(2):
        abort = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  "
        printed(job, f"{abort}{MISMATCH}\n", rank=1)
        lost = "gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
        printed(job, f"Traceback (most recent call last):\n  x\nRuntimeError: [{lost}\n")
        reason = ends(job, report=KILLED.format("n1", -6))
        assert not (job.folder(job.attempt) / "failing_node").exists()
        next_attempt(job)
    assert reason == f"fatal: the same failure twice: {MISMATCH}{END}"


@pytest.mark.parametrize(
    ("found", "blamed"),
    [
        ("collective mismatch: number 7 of process group 0 is barrier on rank 1 on n1", False),
        ("no rank differs from the others; they stand at /x/train.py:41 in <module>", False),
        ("rank 1 on n1 has not joined barrier 7 of process group 0", True),
    ],
)
def test_a_rank_that_was_ended_for_a_stall_blames_its_node_only_if_it_differs(
    job: Job, found: str, blamed: bool
) -> None:
    for silent_s in (600, 601):
        raised(job, f"StallError: no step for {silent_s} s: {found}", rank=1)
        reason = ends(job, report=KILLED.format("n1", -9))
        assert (job.folder(job.attempt) / "failing_node").exists() is blamed
        next_attempt(job)
    assert reason.startswith("fatal: the same failure twice: StallError: no step for * s: ")


def test_the_status_that_torchrun_observed_first_is_compared(job: Job) -> None:
    """Rank 0 has answered torchrun's SIGTERM with a status of its own, in the same second."""
    other = KILLED.format("n1", 3).replace("Root Cause (first observed failure)", "Failures")
    ends(job, step=5, report=other + KILLED.format("n1", 7))
    assert (job.folder(0) / "first_error").read_text() == "bare\t5\texit status 7\n"


# ---- When words are the same


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ('at 0x7f01aB of "it"', 'at 0x* of "it"'),
        ("pid 7, process 8: Thread-9", "pid *, process *: Thread-*"),
        ("[10.0.0.1]:4711 and localhost:29500", "[*]:* and localhost:*"),
        ("at 2026-11-22 10:11:12,55", "at * *"),
        ("after 1800012ms of 30.5 s; 5 samples, 20 vs 16", "after * s of * s; 5 samples, 20 vs 16"),
        ("/tmp/tmpab_1x/f of logs/attempt-3/node-1/7-0_zz/x", "/tmp/tmp*/f of logs/attempt-*"),
        ("host n1, n2.site, n12", "host *, *.site, n12"),
        ("cuda:3 of rank 2", "cuda:* of rank *"),
        ("id 0a1b2c3d4e5f, words deadbeef 12345678", "id *, words deadbeef 12345678"),
        ("C:\\n is no line", "C:\\n is no line"),
        ("step 7 of 9", "step 7 of 9"),
    ],
)
def test_what_differs_from_start_to_start_is_not_the_failure(
    job: Job, words: str, kept: str
) -> None:
    raised(job, words)
    ends(job)
    first_error = (job.folder(0) / "first_error").read_text()
    assert first_error == f"error\t-\t{kept}\n"
