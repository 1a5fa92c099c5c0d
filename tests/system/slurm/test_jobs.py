"""Jobs on a real Slurm cluster: trained, cancelled, requeued, robbed of a node."""

import dataclasses
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster, Until
from tests.support.slurm_site import Site, events, failure, nodes_of, output
from toolkit.slurm import SlurmLauncher

pytestmark = pytest.mark.slurm


def test_make_submit_slurm_trains_digits_on_two_nodes_and_follows(
    cluster: Cluster, tmp_path: Path
) -> None:
    profile = tmp_path / "here.yaml"
    profile.write_text(f"kind: slurm\nruns_dir: {tmp_path / 'runs'}\nvenv: .venv\n")
    done = subprocess.run(
        ["make", "submit-slurm", f"PROFILE={profile}"],
        cwd=ROOT,
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\bslurm://sandbox/\d+\b", done.stdout)
    assert "test_accuracy" in done.stdout
    assert "SUCCEEDED" in done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome["status"] == "done"
    assert outcome["metrics"]["test_accuracy"] > 0.95
    recorded = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    (start,) = (event for event in recorded if event["event"] == "start")
    assert start["world_size"] == 2
    assert (run_dir / "logs/attempt-0/exit_status").read_text() == "0\n"


@pytest.mark.slow
def test_a_rendered_script_needs_no_toolkit(
    cluster: Cluster, site: Site, tmp_path: Path, until: Until
) -> None:
    job = toolkit.load(ROOT / "jobs/digits.yaml", ["args.3=1"])
    script = toolkit.render(toolkit.plan(job, site.profile))
    # `python -m train` finds the package in the job's folder, which is not the project's here.
    (tmp_path / "train").symlink_to(ROOT / "train")
    done = subprocess.run(
        ["sbatch", "--parsable", f"--chdir={tmp_path}"],
        input=script,
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    job_id = done.stdout.strip()
    run_dir = site.runs / f"digits-{job_id}"

    def ended() -> bool:
        return "JobState=COMPLETED" in cluster.slurm("scontrol", "show", "job", job_id)

    until(ended, "the job has completed")
    assert json.loads((run_dir / "outcome.json").read_text())["status"] == "done"
    assert "attempt 0 on node" in (tmp_path / f"digits-{job_id}.out").read_text()


@pytest.mark.slow
def test_a_second_submit_makes_a_second_run(site: Site) -> None:
    first, second = site.submit("args.3=1"), site.submit("args.3=1")
    assert first.uri != second.uri
    assert first.run_dir != second.run_dir
    for run in (first, second):
        assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)


@pytest.mark.slow
def test_scancel_stops_the_run_with_a_checkpoint(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    run.cancel()
    status = run.wait(300)
    assert status.state is toolkit.RunState.CANCELLED, failure(run)
    (stopped,) = events(run, "stopped")
    assert events(run, "checkpoint")[-1]["step"] == stopped["step"]
    assert "Traceback" not in output(run)
    until(lambda: not _processes(cluster), "no process of the job is left on any node")


SLOW_RANK_0 = """
import os, pathlib, signal, sys, time
def stop(*_):
    if os.environ["RANK"] == "0":
        time.sleep(12)  # longer than KillWait
        pathlib.Path(os.environ["TRAIN_RUN_DIR"], "checkpoint").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(os.environ["TRAIN_RUN_DIR"], "rank-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""


def test_cancel_leaves_rank_0_the_whole_grace_though_the_others_are_done(
    site: Site, tmp_path: Path, until: Until
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_RANK_0)
    job = toolkit.JobSpec.model_validate(
        {
            "name": "slow",
            "script": str(script),
            "resources": {"nnodes": 2},
            "stop": {"grace": "60s"},
        }
    )
    run = site.launcher.submit(toolkit.plan(job, site.profile))
    folder = run.run_dir
    assert folder is not None
    until(lambda: (folder / "rank-0").exists() and (folder / "rank-1").exists(), "both run")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    assert (folder / "checkpoint").exists(), failure(run)


@pytest.mark.slow
def test_a_cancelled_run_goes_on_when_it_is_told_to(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    assert run.run_dir is not None
    cluster.slurm(
        *("sbatch", f"--output={site.runs}/again.log"),
        *(str(run.run_dir / "digits.sbatch"), str(run.run_dir), "continue"),
    )
    until(lambda: events(run, "resume"), "it goes on")
    (resumed,) = events(run, "resume")
    assert (resumed["attempt"], resumed["step"]) == (1, events(run, "stopped")[0]["step"])
    assert "digits: attempt 1 on node" in output(run)  # though its job prints elsewhere
    assert next(run.logs(attempt=1)).startswith("digits: attempt 1 on node")


@pytest.mark.slow
def test_a_job_id_that_is_another_jobs_is_never_cancelled(site: Site, until: Until) -> None:
    """Clusters count alike, and count again: the id alone does not make a job ours."""
    other = site.submit_long()
    until(lambda: events(other, "checkpoint"), "the other job runs")
    assert other.run_dir is not None
    elsewhere = other.run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    ours = site.launcher.open(dataclasses.replace(other.record, run_dir=elsewhere))
    assert ours.status().lost
    ours.cancel()
    assert other.status().state is toolkit.RunState.RUNNING


@pytest.mark.slow
def test_a_finished_run_is_known_though_the_controller_is_away(site: Site) -> None:
    run = site.submit("args.3=1")
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)

    def away(argv: object) -> "subprocess.CompletedProcess[str]":
        text = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        return subprocess.CompletedProcess([str(argv)], 1, "", text)

    again = SlurmLauncher(site.profile, command=away).open(run.record)
    assert again.status().state is toolkit.RunState.SUCCEEDED
    assert list(again.logs(follow=True)) == list(run.logs())


def test_what_sbatch_refuses_is_told_in_its_words_and_leaves_nothing(site: Site) -> None:
    with pytest.raises(toolkit.LauncherError) as refused:
        site.submit("resources.memory=900TiB")
    assert str(refused.value).startswith("sbatch refused: sbatch: error: Memory specification")
    assert not list(site.runs.iterdir())


@pytest.mark.slow
def test_a_cancelled_run_is_known_to_another_process_after_slurm_forgot_it(
    site: Site, until: Until
) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    run.cancel()
    run.wait(300)

    def forgetful(argv: object) -> "subprocess.CompletedProcess[str]":
        text = "slurm_load_jobs error: Invalid job id specified"
        return subprocess.CompletedProcess([str(argv)], 1, "", text)

    again = SlurmLauncher(site.profile, command=forgetful).open(run.record)
    assert again.status().state is toolkit.RunState.CANCELLED


def test_requeue_resumes_at_the_same_step(cluster: Cluster, site: Site, until: Until) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    cluster.slurm("scontrol", "requeue", run.job_id)
    until(lambda: events(run, "resume"), "the second attempt has resumed")
    (resumed,) = events(run, "resume")
    assert resumed["attempt"] == 1
    if stopped := events(run, "stopped"):
        assert resumed["step"] == stopped[0]["step"]
        assert resumed["samples_seen"] == stopped[0]["samples_seen"]
    else:  # KillWait was over before: nothing is lost that was saved
        saved = [e["step"] for e in events(run, "checkpoint") if e["attempt"] == 0]
        assert int(str(resumed["step"])) >= int(str(saved[-1]))
    assert run.status().state is toolkit.RunState.RUNNING
    goodput = run.goodput()
    assert goodput.starts == 2
    seconds = goodput.seconds
    # Slurm lets a job that was queued again wait until its credentials have expired.
    assert min(seconds[name] for name in ("start", "imports", "setup")) > 0
    first, second = run.scheduled()
    # In whole seconds, as Slurm has them.
    assert run.record.created - 1 <= first.queued <= first.eligible <= first.started
    assert first.started <= second.queued <= second.eligible <= second.started
    assert seconds["productive"] > 0
    assert sum(seconds.values()) == pytest.approx(goodput.elapsed_s)


@pytest.mark.slow
def test_walltime_stops_with_a_checkpoint_and_queues_again(
    cluster: Cluster, site: Site, until: Until
) -> None:
    # The warning comes stop.grace + 30 s before the end, so at the next look of Slurm (30 s).
    run = site.submit_long("stop.grace=3m", "time_limit=10m", "retries.requeue=1")
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    cluster.end_in(200, run.job_id)
    until(lambda: events(run, "resume"), "the second attempt has resumed")
    assert events(run, "resume")[0]["step"] == events(run, "stopped")[0]["step"]
    assert run.run_dir is not None
    ended, logs = "walltime: out of time; queued again", run.run_dir / "logs/attempt-0"
    assert (logs / "reason").read_text() == f"{ended}\n"
    # The requeue may have its script killed, after KillWait (5 s), before it can print this.
    if (logs / "exit_status").exists():
        assert f"digits: attempt 0 ended: {ended}" in output(run)


@pytest.mark.slow
def test_a_powered_off_node_gets_the_job_requeued_and_finished(
    cluster: Cluster, site: Site, until: Until
) -> None:
    steps = '["--task", "digits", "--steps", "6000", "--checkpoint-every", "50"]'
    run = site.submit(f"args={steps}")
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    lost = nodes_of(cluster, run)[-1]
    cluster("power-off", lost)
    try:
        until(lambda: events(run, "resume"), "the job runs elsewhere")
        assert lost not in nodes_of(cluster, run)
        status = run.wait(300)
    finally:
        cluster("power-on", lost)
    assert status.state is toolkit.RunState.SUCCEEDED, failure(run)
    assert events(run, "done")[0]["step"] == 6000
    assert events(run, "done")[0]["attempt"] == 1


@pytest.mark.slow
def test_a_killed_rank_is_restarted_inside_the_job(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    node = nodes_of(cluster, run)[-1]
    (worker,) = [  # a worker, not its torchrun
        process
        for process in json.loads(cluster("ps", node, "--json"))
        if "-m train" in process["command"] and "torchrun" not in process["command"]
    ]
    os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: events(run, "resume"), "the workers have resumed")
    assert events(run, "resume")[0]["attempt"] == 0
    assert events(run, "resume")[0]["restart"] == 1


def test_a_missing_head_node_fails_loudly(site: Site, tmp_path: Path) -> None:
    """Without the name of the first node every node would train alone; nothing must start."""
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (broken / "scontrol").chmod(0o755)
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={broken}:{ROOT}/.venv/bin:$PATH\n")
    profile = site.profile.model_copy(update={"venv": str(tmp_path / "venv")})
    job = toolkit.load(ROOT / "jobs/digits.yaml")
    run = site.launcher.submit(toolkit.plan(job, profile))
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert re.search(r"digits: scontrol names no node for 'node\[\d-\d\]'", output(run))
    assert not events(run, "start")


@pytest.mark.slow
def test_the_same_run_directory_twice_is_refused(
    cluster: Cluster, site: Site, until: Until
) -> None:
    run = site.submit("args.3=1")
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert run.run_dir is not None
    before = sorted(path for path in run.run_dir.rglob("*") if path.is_file())
    log = site.runs / "again.log"
    again = cluster.slurm(
        "sbatch",
        "--parsable",
        "--wait-all-nodes=0",
        f"--output={log}",
        str(run.run_dir / "digits.sbatch"),
        str(run.run_dir),
    ).strip()

    def state() -> str:
        return cluster.slurm("squeue", "-h", "-t", "all", "-j", again, "-o", "%T").strip()

    until(lambda: state() == "FAILED", "the second job has failed")
    assert f"{run.run_dir} already holds a run; to go on with it: sbatch FILE" in log.read_text()
    assert sorted(path for path in run.run_dir.rglob("*") if path.is_file()) == before


@pytest.mark.slow
def test_fake_gpus_are_given_to_each_node(cluster: Cluster, site: Site) -> None:
    job = toolkit.JobSpec(
        name="gpus",
        command=("bash", "-c", "echo devices $CUDA_VISIBLE_DEVICES"),
        resources={"nnodes": 2, "gpus_per_node": 2},
    )
    profile = site.profile.model_copy(update={"gpu_type": "h100"})
    run = site.launcher.submit(toolkit.plan(job, profile))
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert len(re.findall(r"devices \d,\d", output(run))) == 2


def test_without_a_controller_the_message_names_the_way_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    environ = {**cluster.environ, "SANDBOX_DIR": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    environ.pop("SLURM_CONF", None)
    done = subprocess.run(
        [TOOLKIT, "submit", ROOT / "jobs/digits.yaml", "--to", "slurm"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "make sandbox-up" in done.stderr
    assert "Traceback" not in done.stderr


def _processes(cluster: Cluster) -> str:
    return "".join(line for line in cluster("ps").splitlines() if "train" in line)


@contextmanager
def no_way(cluster: Cluster, start: str, end: str) -> Iterator[None]:
    """Keep a node from reaching another one; the controller still reaches both."""
    pid = json.loads(cluster("status", "--json"))["pids"][start]
    there = ["nsenter", f"--target={pid}", "--net", "--mount"]
    found = subprocess.run([*there, "getent", "hosts", end], capture_output=True, check=True)
    route = ["unreachable", found.stdout.decode().split()[0]]
    subprocess.run([*there, "ip", "route", "add", *route], check=True)
    try:
        yield
    finally:
        subprocess.run([*there, "ip", "route", "del", *route], check=True)


@pytest.mark.slow
def test_what_srun_cannot_start_on_a_node_is_tried_again_in_the_same_job(
    cluster: Cluster, site: Site, tmp_path: Path, until: Until
) -> None:
    go, way = tmp_path / "go", tmp_path / "way"
    prolog = (
        "srun --ntasks=1 true",
        # The script's pause between two tries lasts until there is a way again.
        f"sleep() {{ until [ -e {way} ]; do command sleep 0.1; done; }}",
        f"while [ ! -e {go} ]; do command sleep 0.1; done",
    )
    profile = site.profile.model_copy(update={"prolog": prolog})
    job = toolkit.load(ROOT / "jobs/digits.yaml", ["args.3=1", "retries.requeue=0"])
    run = SlurmLauncher(profile, command=site._command).submit(toolkit.plan(job, profile))
    until(lambda: run.status().state is toolkit.RunState.RUNNING, "the job has its nodes")
    first, last = nodes_of(cluster, run)
    with no_way(cluster, first, last):
        go.touch()
        until(
            lambda: f"srun has not reached {last}" in output(run),
            "srun has failed",
            seen=lambda: failure(run),
        )
    way.touch()
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert run.run_dir is not None
    assert not (run.run_dir / "logs/attempt-1").exists()
