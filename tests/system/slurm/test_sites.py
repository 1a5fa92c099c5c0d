"""Asking real Slurm: with and without accounting, of two versions, by the command line."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, SANDBOX, TOOLKIT, Cluster, Until
from tests.support.asked_slurm import JOBS
from tests.support.slurm_site import Site, failure, output
from tests.system.slurm.test_chains import Shell, started
from tests.unit.slurm.test_submission import submit_a_chain_to_one_that_answers_too_late
from toolkit.slurm import SlurmLauncher
from toolkit.slurm.run import SlurmRun

pytestmark = pytest.mark.slurm

OTHERS = {"trixie": "24.11", "forky": "2[6-9]"}
"""Newer Slurms by the suites of Debian that have them; forky's was 26.05 when this was written."""

Answer = subprocess.CompletedProcess[str]


@pytest.fixture
def shell(site: Site) -> Shell:
    return Shell(site)


def own_cluster(*options: str) -> Iterator[Cluster]:
    """Start a cluster beside that of the session."""
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    argv = [str(SANDBOX), "up", "--kill-wait", "5", "--gpus", "0", "--dir", str(folder), *options]
    try:
        subprocess.run(argv, check=True)
        yield Cluster(folder)
    finally:
        subprocess.run([SANDBOX, "down", "--dir", str(folder)], check=True)
        shutil.rmtree(folder)


def counting(site: Site, asked: list[str]) -> SlurmLauncher:
    """Return a launcher that notes which programs it calls."""

    def command(argv: Sequence[str]) -> Answer:
        asked.append(argv[0])
        return site._command(argv)

    return SlurmLauncher(site.profile, command=command)


def by_toolkit(cluster: Cluster, *argv: str) -> Answer:
    """Run the toolkit as a user on the login node does."""
    return subprocess.run(
        [TOOLKIT, *argv], env=cluster.environ, capture_output=True, text=True, check=False
    )


@pytest.fixture
def same_user(cluster: Cluster, own_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the login node's programs see what this test has submitted."""
    monkeypatch.setitem(cluster.environ, "XDG_STATE_HOME", os.environ["XDG_STATE_HOME"])


@pytest.mark.slow
@pytest.mark.usefixtures("same_user")
def test_runs_are_listed_cancelled_and_waited_for_together(
    cluster: Cluster, shell: Shell, until: Until
) -> None:
    runs = [shell.submit("true"), shell.submit("exit 3"), shell.submit("true")]
    held = shell.submit("true", sbatch={"begin": "now+2days"})
    asked: list[str] = []
    launcher = counting(shell.site, asked)
    opened = [launcher.open(run.record) for run in (*runs, held)]
    until(lambda: all(run.run_dir and list(run.run_dir.glob("logs/*-0")) for run in runs), "begun")
    asked.clear()
    found = toolkit.statuses(opened)
    assert [status.state.upper() for status in found] == ["RUNNING"] * 3 + ["PENDING"]
    assert found[3].reason.startswith(
        "BeginTime: its begin time has not been reached; expected to start"
    )
    assert asked == ["squeue"]

    listed = by_toolkit(cluster, "list", "--state", "RUNNING", "--json")
    assert [row["uri"] for row in json.loads(listed.stdout)] == [run.uri for run in runs]
    names = [runs[2].name, held.uri]
    assert by_toolkit(cluster, "cancel", *names).returncode == 0
    # Right after it: no answer from before is shown.
    states = [row["state"] for row in json.loads(by_toolkit(cluster, "list", "--json").stdout)]
    assert states[3] == "CANCELLED"
    shell.go.touch()
    done = by_toolkit(cluster, "wait", *(run.uri for run in (*runs, held)), "--json")
    assert done.returncode == 1, done.stderr
    states = [row["state"] for row in json.loads(done.stdout)]
    assert states == ["SUCCEEDED", "FAILED", "CANCELLED", "CANCELLED"], done.stderr
    assert by_toolkit(cluster, "wait", runs[0].uri, runs[0].name).returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("same_user")
def test_a_run_that_a_person_continues_is_seen_and_cancelled(
    cluster: Cluster, shell: Shell, until: Until
) -> None:
    shell.go.touch()
    run = shell.submit("exit 2")
    assert run.wait(300).state is toolkit.RunState.FAILED
    shell.go.unlink()
    script = f"{run.run_dir}/probe.sbatch"
    log = f"--output={run.run_dir}/logs/by-hand.log"
    cluster.slurm("sbatch", log, script, str(run.run_dir), "continue")
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "it is seen")
    until(lambda: started(run) == 2, "it has begun")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)


@pytest.mark.usefixtures("same_user")
def test_a_run_of_another_cluster_is_told_by_its_cluster(cluster: Cluster, shell: Shell) -> None:
    run = shell.submit("true")
    state = Path(os.environ["XDG_STATE_HOME"], "torch-deploy-toolkit/runs.jsonl")
    state.write_text(state.read_text().replace("slurm://sandbox/", "slurm://elsewhere/"))
    uri = run.uri.replace("sandbox", "elsewhere")
    # The job is there, and the run directory in its command proves that it is this run's.
    assert json.loads(by_toolkit(cluster, "status", uri, "--json").stdout)["state"] != "UNKNOWN"
    cluster.slurm("scancel", run.job_id)
    # Another job, whose run directory cannot be seen from here.
    state.write_text(state.read_text().replace(run.job_id, "7").replace(run.name, "gone-1"))
    shown = json.loads(by_toolkit(cluster, "status", "slurm://elsewhere/7", "--json").stdout)
    assert shown["state"] == "UNKNOWN"
    assert (
        "it is of cluster 'elsewhere', and the Slurm that answers here is 'sandbox'"
        in (shown["reason"])
    )


def forgetful(site: Site, *, without: str = "squeue") -> SlurmLauncher:
    """Return a launcher whose controller has forgotten all jobs, as it does within minutes."""

    def command(argv: Sequence[str]) -> Answer:
        if argv[0] == without:
            return subprocess.CompletedProcess(list(argv), 0, JOBS, "")
        return site._command(argv)

    return SlurmLauncher(site.profile, command=command)


def lose(run: SlurmRun) -> None:
    """Take away what the run has left behind."""
    assert run.run_dir is not None
    for path in [*run.run_dir.glob("logs/attempt-*"), *run.run_dir.glob("outcome.json")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_without_accounting_a_lost_run_is_told_as_lost(shell: Shell) -> None:
    shell.go.touch()
    run = shell.submit("exit 2")
    run.wait(300)
    lose(run)
    status = forgetful(shell.site).open(run.record).status()
    assert (status.state, status.lost) == (toolkit.RunState.UNKNOWN, True)


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """A cluster with accounting."""
    yield from own_cluster("--nodes", "1", "--accounting")


@pytest.mark.slow
def test_the_accounting_tells_what_nobody_else_knows(
    accounted: Cluster, tmp_path: Path, until: Until
) -> None:
    site = Site(accounted, tmp_path)
    shell = Shell(site)
    shell.go.touch()
    good, bad = shell.submit("true"), shell.submit("exit 2")
    sweep = shell.submit('exit "$I"', sweep={"grid": {"env.I": [0, 2]}})
    never = shell.submit("true", sbatch={"begin": "now+1hour"})
    accounted.slurm("scancel", never.job_id)
    runs = [good, bad, sweep, never]
    for run in runs:
        run.wait(300)
        for part in run.points or (run,):
            assert isinstance(part, SlurmRun)
            lose(part)
    launcher = forgetful(site)
    opened = [launcher.open(run.record) for run in runs]

    def states() -> list[str]:
        return [status.state.upper() for status in toolkit.statuses(opened)]

    # The accounting hears of an end some time after the controller.
    until(lambda: states() == ["SUCCEEDED", "FAILED", "FAILED", "CANCELLED"], f"told: {states()}")
    assert "the accounting says FAILED, exit status 1" in opened[1].status().reason
    assert [status.state.upper() for status in opened[2].statuses()] == ["SUCCEEDED", "FAILED"]
    accounted("stop", "slurmdbd")
    try:
        fresh = forgetful(site).open(bad.record).status()
    finally:
        accounted("start", "slurmdbd")
    assert (fresh.state, fresh.lost) == (toolkit.RunState.UNKNOWN, False)
    assert "the accounting does not answer" in fresh.reason


@pytest.mark.slow
def test_who_waits_for_its_turn_is_told_its_place(
    accounted: Cluster, tmp_path: Path, until: Until
) -> None:
    site = Site(accounted, tmp_path)
    shell = Shell(site)
    first, second, third = (shell.submit("true", sbatch={"exclusive": True}) for _ in range(3))
    until(lambda: started(first) == 1, "the first has the only node")
    later = shell.submit("true", sbatch={"begin": "now+1hour"})

    def reasons() -> list[str]:
        # Others than the launcher that has asked before: places are asked for once a minute.
        launcher = SlurmLauncher(site.profile, command=site._command)
        opened = [launcher.open(run.record) for run in (second, third, later)]
        return [status.reason for status in toolkit.statuses(opened)]

    def told() -> bool:
        found = reasons()
        places = ["queue position 1 of 2 in partition ", "queue position 2 of 2 in partition "]
        return all(place in reason for place, reason in zip(places, found, strict=False))

    until(told, "places", seen=reasons)
    assert "place" not in reasons()[2]
    for run in (first, second, third, later):
        run.cancel()
        run.wait(300)


@pytest.fixture(scope="module", params=OTHERS)
def newer(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of a newer Slurm than this machine's."""
    folder = ROOT / f".cache/slurm-{request.param}"
    if not folder.is_dir():
        reason = f"no other Slurm: {SANDBOX} fetch {request.param} {folder}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    for cluster in own_cluster("--nodes", "2", "--slurm", str(folder)):
        version = cluster.slurm("squeue", "--version")
        assert re.match(f"slurm-wlm {OTHERS[request.param]}", version), version
        yield cluster


@pytest.mark.slow
def test_a_newer_slurm_is_asked_and_answers_alike(
    newer: Cluster, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(newer.environ, "XDG_STATE_HOME", os.environ["XDG_STATE_HOME"])
    site = Site(newer, tmp_path)
    shell = Shell(site)
    once = 'mkdir "$TRAIN_RUN_DIR/once" 2>/dev/null && exit 1; true'
    first = shell.submit(once, retries={"requeue": 1}, resources={"nnodes": 2})
    until(lambda: first.status().state is toolkit.RunState.RUNNING, "the first runs")
    second = shell.submit("true", first.uri, resources={"nnodes": 2})
    third = shell.submit("true", sbatch={"begin": "now+1hour"})
    sweep = shell.submit('exit "$I"', sweep={"grid": {"env.I": [0, 2]}, "max_running": 1})
    listed = json.loads(by_toolkit(newer, "list", "--json").stdout)
    assert [row["state"] for row in listed[:3]] == ["RUNNING", "PENDING", "PENDING"]
    assert listed[1]["reason"] == f"Dependency: afterok:{first.job_id}"
    assert listed[2]["reason"].startswith(
        "BeginTime: its begin time has not been reached; expected to"
    )
    third.cancel()
    assert third.wait(300).state is toolkit.RunState.CANCELLED
    shell.go.touch()
    assert first.wait(300).state is toolkit.RunState.SUCCEEDED, failure(first)
    assert "started again on the same nodes" in output(first)
    assert second.wait(300).state is toolkit.RunState.SUCCEEDED, failure(second)
    assert sweep.wait(300).state is toolkit.RunState.FAILED
    assert [status.state.upper() for status in sweep.statuses()] == ["SUCCEEDED", "FAILED"]

    shell.go.unlink()
    script = f"{second.run_dir}/probe.sbatch"
    by_hand = f"--output={second.run_dir}/logs/by-hand.log"
    newer.slurm("sbatch", by_hand, script, str(second.run_dir), "continue")
    until(lambda: second.status().state is toolkit.RunState.RUNNING, "the hand-made job is seen")
    until(lambda: started(second) == 2, "it has begun")
    second.cancel()
    assert second.wait(300).state is toolkit.RunState.CANCELLED, failure(second)


def test_a_newer_slurm_that_answers_too_late_has_the_job_once(
    newer: Cluster, tmp_path: Path
) -> None:
    submit_a_chain_to_one_that_answers_too_late(newer, Site(newer, tmp_path))
    newer.slurm("scancel", "--me")
