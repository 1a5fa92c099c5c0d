"""Nodes of a batch job: which has failed first, and which are excluded."""

from pathlib import Path

import pytest

from tests.support.ending_batch import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def fail_on_n2(job: Job) -> str:
    """Let a second attempt fail first on n2; return its reason."""
    job.attempt = 1
    job.had(0, "retryable", step=10, failing="n2")
    (job.folder(1) / "nodes").write_text("n1\nn2\n")
    (job.folder(1) / "failed-0").write_text("100.9\tn1\n")
    (job.folder(1) / "failed-1").write_text("100.5\tn2\n")
    job.told(status="retryable", attempt=1, step=20, rank=1, reason="x")
    assert job.conclude(1) == 1
    return job.reason.removeprefix("retryable: rank 1: x; queued again")


@pytest.mark.parametrize(("excluded", "all_of_them"), [("(null)", "n2"), ("n4", "n4,n2")])
def test_a_node_that_failed_first_twice_is_excluded(
    job: Job, excluded: str, all_of_them: str
) -> None:
    job.cluster.excluded = excluded
    assert fail_on_n2(job) == "; without n2, where two attempts have failed first"
    assert job.asked == ["requeue 7", f"update jobid=7 excnodelist={all_of_them}"]


def test_what_a_site_prints_around_slurms_answers_is_no_node(job: Job) -> None:
    job.cluster.excluded = "n4"
    job.cluster.noise = "Welcome to site 7!\n12345\nn9 idle\n\x1b[1mloading cuda/12\x1b[0m\r"
    assert fail_on_n2(job) == "; without n2, where two attempts have failed first"
    assert job.asked == ["requeue 7", "update jobid=7 excnodelist=n4,n2"]


@pytest.mark.parametrize("up", ["n1:mix n2:mix", "n1:mix n2:mix n3:idle* n4:drain"])
def test_a_node_that_the_job_needs_is_not_excluded(job: Job, up: str) -> None:
    job.cluster.up = up
    assert fail_on_n2(job) == (
        "; not without n2, where two attempts have failed first: too few nodes would be left"
    )
    assert job.asked == ["requeue 7"]


def test_a_node_that_is_excluded_already_is_not_told_again(job: Job) -> None:
    job.cluster.excluded = "n2,n4"
    assert fail_on_n2(job) == ""
    assert job.asked == ["requeue 7"]


FAILURE = """
[0]:
  time      : 2026-11-21_01:30:{}
  host      : {}
  rank      : 1 (local_rank: 0)
  exitcode  : {} (pid: 337)
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [(("22", "n1.site", 1), ("12", "n2.site", 1)), (("12", "n1", 1), ("12", "n2", -9))],
)
def test_torchruns_reports_say_who_failed_first(
    job: Job, first: tuple[str, str, int], second: tuple[str, str, int]
) -> None:
    (job.folder(0) / "nodes").write_text("n1\nn2\n")
    (job.folder(0) / "failed-0").write_text("100.9\tn1\n")
    job.told(status="retryable", attempt=0, step=20, rank=1, reason="x")
    assert job.conclude(1, printed=FAILURE.format(*first) + FAILURE.format(*second)) == 1
    assert (job.folder(0) / "failing_node").read_text() == "n2\n"


@pytest.mark.parametrize(
    ("nodes", "host", "failing"),
    [
        (("n1.site", "n2.site"), "n2.site", "n2.site\n"),
        (("n1.site", "n2.site"), "n2", "n2.site\n"),
        (("n1", "n2"), "n2.other.org", "n2\n"),
        (("n2.east", "n2.west"), "n2", None),
        (("n2.east", "n2.west"), "n2.west", "n2.west\n"),
        (("n1", "n22"), "n2", None),
        (("n1", "n2"), "n\\\\2", None),
    ],
)
def test_a_node_is_the_same_with_and_without_its_domain(
    job: Job, nodes: tuple[str, str], host: str, failing: str | None
) -> None:
    (job.folder(0) / "nodes").write_text("\n".join(nodes) + "\n")
    job.told(status="retryable", attempt=0, step=20, rank=1, reason="x")
    assert job.conclude(1, printed=FAILURE.format("12", host, -9)) == 1
    path = job.folder(0) / "failing_node"
    assert (path.read_text() if path.exists() else None) == failing


@pytest.mark.parametrize("noise", ["", "Welcome to site 7!"])
def test_a_node_that_slurm_calls_down_is_the_failing_one(job: Job, noise: str) -> None:
    job.cluster.down, job.cluster.restarts, job.cluster.noise = "n2", 1, noise
    (job.folder(0) / "failed-0").write_text("100.5\tn1\n")
    assert job.conclude(1, stopping="terminated") == 1
    assert job.reason == "node_failure: down: n2; queued again"
    assert (job.folder(0) / "failing_node").read_text() == "n2\n"


@pytest.mark.parametrize(
    ("down", "reason", "failing"),
    [
        ("n2", "lost: the batch script was killed; down: n2", "n2"),
        ("", "lost: the batch script was killed", "n1"),
    ],
)
def test_the_next_attempt_says_what_became_of_a_lost_one(
    job: Job, down: str, reason: str, failing: str
) -> None:
    job.attempt = 1
    job.cluster.down = down
    (job.folder(0) / "nodes").write_text("n1\nn2\n")
    job.told(status="running", attempt=0, step=50, rank=None, reason="x")
    assert job.complete_previous() == 0
    before = job.folder(0)
    assert (before / "reason").read_text() == f"{reason}\n"
    assert (before / "failing_node").read_text() == f"{failing}\n"
    assert (before / "step").read_text() == "50\n"


@pytest.mark.parametrize(
    ("failures", "step", "status", "reason"),
    [
        (2, 10, 0, ""),
        (3, 10, 1, "gave_up: gave up after 2 requeues"),
        (3, 0, 93, "no_progress: no step beyond 0 in 3 attempts (retries.no_progress)"),
    ],
)
def test_a_job_that_slurm_queued_again_beyond_its_limits_ends_at_its_start(
    job: Job, failures: int, step: int, status: int, reason: str
) -> None:
    job.attempt = failures
    for attempt in range(failures):
        job.had(attempt, "node_failure", step=step * (attempt + 1))
    assert job.complete_previous() == status
    assert not reason or job.reason == reason


LAUNCH_FAILED = """
srun: error: Task launch for StepId=7.{} failed on node {}: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: n1: task 0: Killed
"""


@pytest.mark.parametrize("status", [233, 236, 167])
@pytest.mark.parametrize("began", [("began-0",), ()], ids=["n1 began", "n1 ended before"])
def test_a_node_that_srun_could_not_start_on_is_named(
    job: Job, status: int, began: tuple[str, ...]
) -> None:
    """And no other one: srun ends the tasks of the others, perhaps before they have started."""
    (job.folder(0) / "nodes").write_text("n1\nn2\n")
    for name in began:
        (job.folder(0) / name).touch()
    job.conclude(status, printed=LAUNCH_FAILED.format(0, "n2") + LAUNCH_FAILED.format(1, "n2"))
    assert job.reason.startswith(f"retryable: srun could not start on n2 (exit status {status}); ")
    assert (job.folder(0) / "failing_node").read_text() == "n2\n"


def test_where_srun_names_no_node_it_is_one_whose_task_has_not_begun(job: Job) -> None:
    (job.folder(0) / "nodes").write_text("n1\nn2\n")
    (job.folder(0) / "began-0").touch()
    # As an earlier try has named n1, which has started since.
    job.conclude(233, printed=LAUNCH_FAILED.format(0, "n1"))
    assert job.reason.startswith("retryable: srun could not start on n2 (exit status 233); ")
    assert (job.folder(0) / "failing_node").read_text() == "n2\n"
