"""Jobs that wait for others, and runs of several jobs: none stuck, none in another's way."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, Cluster, Until
from tests.support.asked_slurm import CONFIG
from tests.support.ending_batch import Job
from tests.support.slurm_site import Site, failure, output
from tests.system.chaos.frame import TASK, Trial
from toolkit.job.spec import Dependency, parse_dependency
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.run import SlurmRun

LOOP = 'trap "exit 75" TERM; while [ ! -e "$GO" ]; do sleep 0.1; done; exec bash -c "$THEN"'


class Shell:
    """Submits runs that wait for a file, which tells them how to end."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.go = site.runs.parent / "go"

    def plan(self, then: str, **more: Any) -> toolkit.SlurmPlan:
        job = toolkit.JobSpec.model_validate(
            {
                "name": "probe",
                "command": ["bash", "-c", LOOP],
                "env": {"GO": str(self.go), "THEN": then},
                **more,
            }
        )
        return toolkit.plan(job, self.site.profile)

    def submit(self, then: str, *after: str, chain: int = 1, **more: Any) -> SlurmRun:
        wanted = [parse_dependency(text) for text in after]
        return self.site.launcher.submit(self.plan(then, **more), after=wanted, chain=chain)

    def forgotten(self, run: SlurmRun) -> SlurmRun:
        """Return the run as it is seen when Slurm has forgotten its jobs."""

        def command(argv: Any) -> "subprocess.CompletedProcess[str]":
            if argv[0] not in ("squeue", "scontrol") or argv[1:3] == ["show", "config"]:
                return self.site._command(argv)
            text = "slurm_load_jobs error: Invalid job id specified"
            return subprocess.CompletedProcess(argv, 1, "", text)

        return SlurmLauncher(self.site.profile, command=command).open(run.record)


@pytest.fixture
def shell(site: Site) -> Shell:
    return Shell(site)


def started(run: toolkit.Run) -> int:
    return len(list(run.run_dir.glob("logs/attempt-*"))) if run.run_dir else 0


# ---- Dependencies


@pytest.mark.parametrize(
    ("written", "wish", "run"),
    [
        ("x-1", "ok", "x-1"),
        ({"any": "slurm://c/1"}, "any", "slurm://c/1"),
        ({"fail": "/runs/x"}, "fail", "/runs/x"),
    ],
)
def test_what_a_job_waits_for_is_written_in_three_ways(written: Any, wish: str, run: str) -> None:
    job = toolkit.JobSpec.model_validate({"name": "a", "module": "m", "after": [written]})
    assert [(d.wish, d.run) for d in job.after] == [(wish, run)]
    assert toolkit.JobSpec.model_validate(job.as_written()) == job


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("[{ok: a, any: b}]", "give one of ok, any and fail; found ok and any"),
        ("[{}]", "give one of ok, any and fail; found none"),
        ("[{end: a}]", "unknown key 'end' under 'after[0]'"),
        ("[1]", "after[0]: must be a mapping of keys to values, not 1"),
        ("['']", "ok: the run has no name"),
        ("a", "after: must be a list, not 'a'"),
    ],
)
def test_other_ways_are_refused_with_their_line(after: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nmodule: m\nafter: {after}\n")
    with pytest.raises(toolkit.SpecError) as refused:
        toolkit.load(path)
    assert str(refused.value).startswith(f"{path}:3: ")
    assert message in str(refused.value)


def test_other_places_refuse_to_wait_and_say_what_to_do() -> None:
    here = toolkit.LocalProfile(name="here")
    job = toolkit.JobSpec(name="a", module="m", after=(Dependency(ok="x"),))
    with pytest.raises(toolkit.PlanError, match="toolkit wait RUN &&"):
        toolkit.plan(job, here)
    plain = toolkit.JobSpec(name="a", module="m")
    for more in ({"after": ["x"]}, {"chain": 2}):
        with pytest.raises(toolkit.PlanError, match="toolkit wait RUN &&"):
            toolkit.submit(plain, to=here, **more)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_starts_when_what_it_waits_for_has_ended_as_wished(shell: Shell) -> None:
    bad, good = shell.submit("exit 3"), shell.submit("true")
    wanted = [f"{good.uri}:ok", f"{bad.name}:fail", f"{bad.run_dir}:any"]
    starts = shell.submit("true", *wanted)
    never = [shell.submit("true", bad.uri), shell.submit("true", f"{good.uri}:fail")]
    assert starts.status().reason == (
        f"Dependency: afterok:{good.job_id},afternotok:{bad.job_id},afterany:{bad.job_id}"
    )
    shell.go.touch()
    assert starts.wait(300).state is toolkit.RunState.SUCCEEDED, failure(starts)
    for run in never:
        status = run.wait(300)
        assert status.state is toolkit.RunState.CANCELLED
        assert status.reason.startswith("dependency never satisfied: after")
        assert shell.forgotten(run).status().state is toolkit.RunState.CANCELLED
        assert "its dependency (after" in shell.forgotten(run).status().reason
        assert not started(run)


@pytest.mark.slow
@pytest.mark.slurm
def test_what_has_ended_is_judged_by_its_run_directory(shell: Shell) -> None:
    """Slurm would start a job that depends on a forgotten job, however that job ended."""
    shell.go.touch()
    bad, good = shell.submit("exit 3"), shell.submit("true")
    bad.wait(300), good.wait(300)
    known = set(shell.site.runs.iterdir())
    with pytest.raises(toolkit.LauncherError, match="it had to succeed, but it is FAILED"):
        shell.submit("true", bad.uri)
    with pytest.raises(toolkit.LauncherError, match="it had to fail, but it is SUCCEEDED"):
        shell.submit("true", f"{good.uri}:fail")
    with pytest.raises(toolkit.LauncherError, match="no run 'slurm://sandbox/1'"):
        shell.submit("true", "slurm://sandbox/1")
    assert set(shell.site.runs.iterdir()) == known
    run = shell.submit("true", good.uri, f"{bad.uri}:fail", f"{bad.uri}:any")
    assert run.jobs[0].after == ""
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_waits_for_all_points_of_a_sweep(shell: Shell) -> None:
    sweep = shell.submit('exit "$I"', sweep={"grid": {"env.I": [0, 1]}})
    ok, fails = shell.submit("true", sweep.uri), shell.submit("true", f"{sweep.name}:fail")
    one, other = shell.submit("true", f"{sweep.uri}_0"), shell.submit("true", f"{sweep.uri}_1")
    shell.go.touch()
    ended = [run.wait(300).state.upper() for run in (ok, fails, one, other)]
    assert ended == ["CANCELLED", "SUCCEEDED", "SUCCEEDED", "CANCELLED"]
    with pytest.raises(toolkit.LauncherError, match=f"after {sweep.uri}_1: it had to succeed"):
        shell.submit("true", sweep.uri)


# ---- Chains


@pytest.mark.parametrize(("since", "status"), [(0, 93), (3, 0)])
def test_a_chain_without_progress_ends_whoever_made_the_attempts(
    since: int, status: int, tmp_path: Path
) -> None:
    """As after four jobs that ran out of time at one step, each the first attempt of its job."""
    job = Job(tmp_path, attempt=4, since=since, limit=0, mode="chain")
    for attempt in range(4):
        job.had(attempt, "walltime", step=57)
    assert job.complete_previous() == status


@pytest.mark.slow
@pytest.mark.slurm
def test_a_chain_goes_on_over_a_real_time_limit_and_ends_done(
    cluster: Cluster, site: Site, until: Until, tmp_path: Path
) -> None:
    (tmp_path / "pace").write_text("0.2")
    job = toolkit.JobSpec.model_validate(
        {
            "name": "counted",
            "module": "train",
            "args": [
                "--task",
                f"{TASK}:Counted",
                "--no-verify",
                "--steps",
                "1000",
                "--checkpoint-every",
                "10",
            ],
            "resources": {"nnodes": 2, "cpus_per_node": 1, "memory": "2GiB"},
            "env": {"OMP_NUM_THREADS": "1", "COUNTED": str(tmp_path)},
            "stop": {"grace": "3m"},
            "time_limit": "10m",
            "retries": {"requeue": 0},
        }
    )
    trial = Trial(
        run=site.launcher.submit(toolkit.plan(job, site.profile), chain=6), folder=tmp_path
    )
    run = trial.run
    until(trial.saved, "a first checkpoint")
    assert run.status().state is toolkit.RunState.RUNNING
    # The warning comes stop.grace + 30 s before the end, at Slurm's next look (every 30 s).
    cluster.end_in(200, run.job_id)
    until(lambda: trial.events("stopped"), "its time is over")
    status = trial.wait()
    assert status.state is toolkit.RunState.SUCCEEDED, failure(run)
    (stopped,), (resumed,) = trial.events("stopped"), trial.events("resume")
    assert (resumed["attempt"], resumed["step"]) == (1, stopped["step"])
    ids = [job.job_id for job in run.jobs]
    until(lambda: not cluster.slurm("squeue", "-h", "-j", ",".join(ids)), "no job is left")
    assert started(run) == 2
    assert "attempt 1 was the last (done: all steps made)" in output(run)
    assert run.status() == status


@pytest.mark.parametrize(
    ("jobs", "decision"),
    [
        ("", "not queued again (retries.requeue is 0)"),
        ('{"job_id": "7", "mode": "", "after": ""}', "not queued again (retries.requeue is 0)"),
        (
            '{"job_id": "7", "mode": "", "after": ""}\n{"job_id": "8", "mode": "chain"}',
            "the next job of the chain goes on",
        ),
        (
            '{"job_id": "6", "mode": "", "after": ""}\n{"job_id": "7", "mode": "chain"}',
            "not queued again (retries.requeue is 0)",
        ),
    ],
    ids=["by hand", "no chain", "not the last", "the last"],
)
def test_a_job_of_a_chain_says_what_follows(tmp_path: Path, jobs: str, decision: str) -> None:
    job = Job(tmp_path, limit=0)
    (job.run_dir / "jobs.jsonl").write_text(f"{jobs}\n")
    assert job.conclude(1, stopping="walltime") == 1
    assert job.reason == f"walltime: out of time; {decision}"


@pytest.mark.slow
@pytest.mark.slurm
def test_a_preemption_does_not_end_a_chain(cluster: Cluster, shell: Shell, until: Until) -> None:
    shell.site.profile = shell.site.profile.model_copy(update={"partition": "low"})
    run = shell.submit("true", chain=2)
    assert run.run_dir is not None
    until((run.run_dir / "logs/attempt-0/began-0").exists, "it runs")
    cluster.slurm(
        *("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 1"),
    )
    until(lambda: started(run) == 2, "the next job goes on")
    shell.go.touch()
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    # KillWait (5 s) may end the script before it can add what it has decided.
    assert (
        (run.run_dir / "logs/attempt-0/reason")
        .read_text()
        .startswith("preempted: Slurm has taken the nodes; ")
    )


@pytest.mark.slow
@pytest.mark.slurm
def test_a_fatal_failure_ends_a_chain_and_what_waits_for_it(shell: Shell, until: Until) -> None:
    run = shell.submit("exit 2", chain=3)
    waits, rues = shell.submit("true", run.uri), shell.submit("true", f"{run.uri}:fail")
    shell.go.touch()
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert waits.wait(300).state is toolkit.RunState.CANCELLED
    assert rues.wait(300).state is toolkit.RunState.SUCCEEDED
    assert started(run) == 1
    ended = "attempt 0 was the last (fatal: "
    until(lambda: output(run).count(ended) == 2, "both other jobs have said so")

    # It continues after the user has mended the cause and resubmitted it, and only then.
    shell.go.unlink()
    again = shell.site.launcher.resubmit(run, chain=2)
    until(lambda: started(run) == 2, "it goes on")
    assert again.uri == run.uri
    with pytest.raises(toolkit.LauncherError, match="RUNNING and has not ended"):
        shell.site.launcher.resubmit(run)
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    assert started(run) == 2


@pytest.mark.slurm
def test_cancel_ends_all_jobs_of_a_chain(cluster: Cluster, shell: Shell, until: Until) -> None:
    run = shell.submit("true", chain=4, retries={"requeue": 2})
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "it runs")
    until(lambda: started(run) == 1, "it has begun")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    ids = ",".join(job.job_id for job in run.jobs)
    until(lambda: not cluster.slurm("squeue", "-h", "-j", ids), "no job is left")
    assert started(run) == 1


@pytest.mark.slow
@pytest.mark.slurm
def test_a_requeue_within_a_chain_keeps_the_next_job_waiting(
    cluster: Cluster, shell: Shell, until: Until
) -> None:
    once = 'mkdir "$TRAIN_RUN_DIR/once" 2>/dev/null && exit 1; sleep 3'
    run = shell.submit(once, chain=2, retries={"requeue": 1})
    shell.go.touch()
    first, second = (job.job_id for job in run.jobs)

    def living() -> list[str]:
        shown = cluster.slurm("squeue", "-h", "-j", f"{first},{second}", "-o", "%i %T")
        return sorted(shown.splitlines())

    until(lambda: started(run) == 2, "the first job has started again")
    assert living() == [f"{first} RUNNING", f"{second} PENDING"]
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    until(lambda: not living(), "no job is left")
    assert started(run) == 2
    assert output(run).count("this job of the chain has nothing to do") == 1


def test_a_chain_that_a_site_refuses_halfway_leaves_nothing(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def command(argv: Any) -> "subprocess.CompletedProcess[str]":
        asked.append([argv[0], *argv[-1:]])
        if argv[0] == "scontrol":
            return subprocess.CompletedProcess(argv, 0, CONFIG.format("c"), "")
        sent = sum(word[0] == "sbatch" for word in asked)
        limit = "sbatch: error: AssocMaxSubmitJobLimit"
        said = f"Submitted batch job {sent}\n"
        return subprocess.CompletedProcess(argv, sent // 3, said, limit * (sent == 3))

    profile = toolkit.SlurmProfile(name="s", runs_dir=str(tmp_path))
    job = toolkit.JobSpec(name="probe", module="train")
    with pytest.raises(toolkit.LauncherError, match=r"sbatch refused: .*AssocMaxSubmitJobLimit"):
        SlurmLauncher(profile, command=command).submit(toolkit.plan(job, profile), chain=5)
    assert [word for word, _ in asked] == ["scontrol", "sbatch", "sbatch", "sbatch", "scancel"]
    assert [last for _, last in asked[2:]] == ["chain", "chain", "2"]
    assert not list(tmp_path.iterdir())
    assert not list(toolkit.list_runs())


@pytest.mark.slurm
def test_a_chain_of_a_sweep_is_refused(site: Site) -> None:
    job = toolkit.load(ROOT / "jobs/sweep.yaml")
    with pytest.raises(toolkit.LauncherError, match="--chain is for a single run"):
        site.launcher.submit(toolkit.plan(job, site.profile), chain=2)
