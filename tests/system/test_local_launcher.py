"""Runs on this machine, for real: torchrun agents, signals, closed terminals."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Until
from tests.fakes import fake_slurm
from tests.support.processes import with_environment
from toolkit.local.launcher import LocalLauncher
from toolkit.runs.records import run_directory
from toolkit.runs.state import RunState

JOB = """
name: probe
script: {script}
resources: {{nnodes: 2, nproc_per_node: 1}}
stop: {{grace: 2m}}
env: {{PROBE: "{marker}"}}
"""

# Prints a line, waits to be stopped, and prints another.
WAITING = """
import os, signal, sys, time
def stop(*_):
    print(f"rank {rank} stops\\n", end="", flush=True)
    sys.exit(75)
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, stop)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} runs\\n", end="", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """A mark in the environment of every process of the run; none may be left at the end."""
    mark = f"probe-{tmp_path.name}-{os.getpid()}"
    yield mark
    left = with_environment(f"PROBE={mark}")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def job_file(tmp_path: Path, marker: str) -> Path:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    path = tmp_path / "probe.yaml"
    path.write_text(JOB.format(script=script, marker=marker))
    return path


def started(run_dir: Path, attempt: int = 0) -> bool:
    logs = "".join(path.read_text() for path in run_dir.glob(f"logs/attempt-{attempt}/node-*.log"))
    return logs.count("runs") == 2


def only_run(folder: Path) -> Path | None:
    return next(iter(folder.glob("runs/*")), None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_toolkit_run_stops_every_process(
    number: signal.Signals, job_file: Path, marker: str, tmp_path: Path, until: Until
) -> None:
    # Two torchruns once; each of them imports torch.
    ranks = "{nnodes: 2}" if number == signal.SIGINT else "{nproc_per_node: 2}"
    process = subprocess.Popen(
        [TOOLKIT, "run", job_file, "--set", f"resources={ranks}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until(lambda: (run := only_run(tmp_path)) and started(run), "both ranks run")
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else 1)
    assert b"CANCELLED" in output
    assert b"Traceback" not in output
    assert not with_environment(f"PROBE={marker}")
    run = only_run(tmp_path)
    assert run is not None
    logs = "".join(path.read_text() for path in run.glob("logs/attempt-0/node-*.log"))
    assert "rank 0 stops" in logs
    assert "rank 1 stops" in logs


@pytest.mark.slow
def test_a_closed_terminal_leaves_no_process_behind(
    job_file: Path, marker: str, tmp_path: Path, until: Until
) -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", TOOLKIT, "run", job_file],
        cwd=tmp_path,
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    until(lambda: (run := only_run(tmp_path)) and started(run), "both ranks run")
    os.close(terminal)
    process.wait(timeout=300)
    until(lambda: not with_environment(f"PROBE={marker}"), "every process has ended")


@pytest.mark.slow
def test_a_reader_who_leaves_ends_the_run_and_it_is_no_success(
    job_file: Path, marker: str, tmp_path: Path
) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text(
        "import time\nwhile True:\n    print('on', flush=True)\n    time.sleep(0.1)\n"
    )
    line = f"set -o pipefail; {TOOLKIT} run {job_file} --set script={chatty} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not with_environment(f"PROBE={marker}")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a small disk")
@pytest.mark.parametrize("free_pages", range(5))
def test_a_full_disk_is_told_in_a_line_and_leaves_no_process(
    free_pages: int, job_file: Path, marker: str, tmp_path: Path, until: Until
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    profile = tmp_path / "here.yaml"
    profile.write_text(f"kind: local\nruns_dir: {disk / 'runs'}\n")
    # A page for each file: job.yaml, run.sh, the lock, launch.json.
    size = (free_pages or 1) * os.sysconf("SC_PAGE_SIZE")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        if not free_pages:
            (disk / "fill").write_bytes(b"x" * size)
        done = subprocess.run(
            [TOOLKIT, "run", job_file, "--to", profile],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        until(lambda: not with_environment(f"PROBE={marker}"), "every process has ended")
        until(lambda: not with_environment(str(disk)), "the supervisor has ended")
    finally:
        # A process that is ending has no environment any more, and still open files.
        until(lambda: subprocess.run(["umount", disk], check=False).returncode == 0, "umount")
    assert done.returncode == 1
    assert "toolkit/cli/" not in done.stdout + done.stderr  # no traceback of ours
    assert "No space left on device" in done.stdout + done.stderr


def argv_of_run(tmp_path: Path, args: list[str]) -> list[str]:
    """Run a script with arguments in `tmp_path / "a run"`, and return what it is given."""
    program = "import json, sys; json.dump(sys.argv[1:], open('argv', 'w'))"
    (tmp_path / "show.py").write_text(program)
    job = toolkit.JobSpec(name="dollars", script=str(tmp_path / "show.py"), args=tuple(args))
    made = toolkit.plan(job, toolkit.LocalProfile(name="here"))
    (tmp_path / "run.sh").write_text(toolkit.render(made))
    done = subprocess.run(
        ["bash", tmp_path / "run.sh", "a run's $HOME"],
        env=os.environ | {"PATH": f"{TOOLKIT.parent}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    argv: list[str] = json.loads((tmp_path / "argv").read_text())
    return argv


def test_the_run_directory_and_the_attempt_are_replaced_in_arguments(tmp_path: Path) -> None:
    args = [
        *(
            "--out",
            "$TRAIN_RUN_DIR",
            "--ckpt=${TRAIN_RUN_DIR}/a 'b'",
            "$TRAIN_RUN_DIR/$TRAIN_ATTEMPT",
        ),
        *("$$TRAIN_RUN_DIR", "$TRAIN_RUN_DIRS", "$TRAIN_ATTEMPT_BEGAN", "x$TRAIN_ATTEMPT-y"),
    ]
    run = f"{tmp_path}/a run's $HOME"
    assert argv_of_run(tmp_path, args) == [
        *("--out", run, f"--ckpt={run}/a 'b'", f"{run}/0"),
        *("$$TRAIN_RUN_DIR", "$TRAIN_RUN_DIRS", "$TRAIN_ATTEMPT_BEGAN", "x0-y"),
    ]


def test_dollars_in_arguments_reach_the_program(tmp_path: Path) -> None:
    args = ["$$", "$$$", "a$$b", "$HOME", "$(x)", "${x}", "$$local_rank", "$${local_rank}", "$"]
    assert argv_of_run(tmp_path, args) == args


@pytest.mark.slow
def test_killing_toolkit_run_stops_the_run(
    job_file: Path, marker: str, tmp_path: Path, until: Until
) -> None:
    process = subprocess.Popen(
        [TOOLKIT, "run", job_file],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: (run := only_run(tmp_path)) and started(run), "both ranks run")
    process.kill()
    process.wait()
    until(lambda: not with_environment(f"PROBE={marker}"), "every process has ended")


def test_a_killed_supervisor_is_a_failure_and_no_cancellation(
    job_file: Path, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.chdir(tmp_path)
    run = toolkit.submit(toolkit.load(job_file), to="local")
    assert run.run_dir is not None
    until(lambda: started(run.run_dir), "both ranks run")
    os.kill(int((run.run_dir / "running.lock").read_text()), signal.SIGKILL)
    reason = "fatal: the supervisor of this run was killed; not started again"
    # Until the script has stopped its ranks, the run has not ended: their outcome says "preempted".
    ended = run.wait(300)
    assert (ended.state, ended.reason) == (toolkit.RunState.FAILED, reason)
    until(lambda: not with_environment(f"PROBE={marker}"), "every process has ended")


def test_a_killed_torchrun_is_a_failure_that_counts(
    job_file: Path, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """The other node's ranks are stopped with SIGTERM, which is no preemption of the run."""
    monkeypatch.chdir(tmp_path)
    run = toolkit.submit(toolkit.load(job_file, ["retries.requeue=1"]), to="local")
    assert run.run_dir is not None
    for attempt in range(2):
        until(lambda n=attempt: started(run.run_dir, n), "both ranks run")
        pids = with_environment(f"PROBE={marker}")
        # As a whole argument: the name of this test, in the ranks' arguments, holds the word, too.
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
        agents = [pid for pid in pids if b"torchrun" in map(os.path.basename, words[pid][:2])]
        assert len(agents) == 2
        os.kill(agents[0], signal.SIGKILL)
    assert run.wait(300).state is toolkit.RunState.FAILED
    killed = "retryable: torchrun was killed on this machine (exit status 137)"
    reasons = [path.read_text() for path in sorted(run.run_dir.glob("logs/attempt-*/reason"))]
    assert reasons == [f"{killed}; started again\n", f"{killed}; gave up after 1 requeues\n"]


# Node 0 ends by an error; node 1 is a torchrun that waits for its own threads when it is told.
HANGING_AT_ITS_END = r"""#!/bin/bash
case " $* " in
*is_host=1*) until [ -e {folder}/other ]; do sleep 0.05; done; exit 1 ;;
esac
trap 'echo TERM >>{folder}/signals; [ "$(grep -c . {folder}/signals)" -lt {needed} ] || exit 1' TERM
touch {folder}/other
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("needed", [2, pytest.param(99, marks=pytest.mark.slow)])
def test_a_torchrun_that_hangs_when_it_is_stopped_does_not_hold_the_run(
    needed: int, tmp_path: Path
) -> None:
    """Seen: SIGTERM while it stops its ranks since the rendezvous is lost; a second one ends it."""
    job = toolkit.JobSpec.model_validate(
        {
            "name": "hangs",
            "module": "train",
            "resources": {"nnodes": 2},
            "stop": {"grace": "1s"},
            "retries": {"in_job": 2},
        }
    )
    script = tmp_path / "run.sh"
    script.write_text(toolkit.render(toolkit.plan(job, toolkit.LocalProfile(name="here"))))
    torchrun = tmp_path / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(HANGING_AT_ITS_END.format(folder=tmp_path, needed=needed))
    torchrun.chmod(0o755)
    path = f"{torchrun.parent}:{TOOLKIT.parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    argv = ["bash", str(script), str(tmp_path / "run")]
    assert subprocess.run(argv, env=environ, timeout=300, check=False).returncode == 1
    assert (tmp_path / "signals").read_text() == "TERM\n" * min(needed, 3)
    reason = (tmp_path / "run/logs/attempt-0/reason").read_text()
    assert reason.startswith("retryable: exit status 1")


def test_a_run_whose_directory_is_removed_stops_and_says_so(
    job_file: Path, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.chdir(tmp_path)
    run = toolkit.submit(toolkit.load(job_file), to="local")
    assert run.run_dir is not None
    until(lambda: started(run.run_dir), "both ranks run")
    run.run_dir.rename(tmp_path / "elsewhere")  # at once, while the ranks write
    until(lambda: not with_environment(f"PROBE={marker}"), "every process has ended")
    assert not run.run_dir.exists()
    with pytest.raises(toolkit.RunLost, match=f"{run.run_dir} is gone"):
        run.wait(60)


def test_a_run_that_is_cancelled_right_after_it_was_submitted_is_cancelled(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor may not have begun to listen for signals."""
    monkeypatch.chdir(tmp_path)
    run = toolkit.submit(toolkit.load(job_file), to="local")
    run.cancel()
    status = run.wait(300)
    assert status.state is toolkit.RunState.CANCELLED
    assert "left no outcome" not in status.reason


@pytest.mark.slow
def test_a_rank_that_detaches_itself_does_not_outlive_the_run(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "daemon.sh"
    script.write_text("#!/bin/sh\nsetsid sleep 1000 </dev/null >/dev/null 2>&1 &\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    job = toolkit.JobSpec(name="probe", command=(str(script),), env={"PROBE": marker})
    run = toolkit.submit(job, to="local")
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED
    assert not with_environment(f"PROBE={marker}")


@pytest.mark.slow
def test_a_submitted_run_outlives_the_shell_that_submitted_it(
    job_file: Path, tmp_path: Path, until: Until
) -> None:
    done = subprocess.run(
        [TOOLKIT, "submit", job_file, "--to", "local"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    run = toolkit.open_run(done.stdout.strip())
    assert run.run_dir is not None
    folder = run.run_dir
    until(lambda: started(folder), "both ranks run")
    assert run.status().state is toolkit.RunState.RUNNING
    with pytest.raises(toolkit.LauncherError, match="has not ended; `toolkit wait` for it, or "):
        toolkit.resubmit(run)
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED


@pytest.mark.slow
def test_the_time_limit_stops_a_run(job_file: Path, tmp_path: Path) -> None:
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    job = toolkit.load(job_file, ["time_limit=10s", "stop.grace=5s"])
    run = toolkit.submit(job, to=profile)
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert status.reason == "walltime: out of time; not started again (retries.requeue is 0)"


FAILING = """
import json, os, sys
attempt, folder = int(os.environ["TRAIN_ATTEMPT"]), os.environ["TRAIN_RUN_DIR"]
outcome = {"version": 1, "attempt": attempt, "step": attempt + 1, "status": "done"}
if attempt < 2:
    outcome |= {"status": "retryable", "rank": 0, "reason": f"lost link {attempt}"}
if int(os.environ["RANK"]) == 0:
    with open(f"{folder}/outcome.json", "w") as file:
        json.dump(outcome, file)
sys.exit(attempt < 2)
"""


@pytest.mark.parametrize(
    ("requeue", "state", "reasons"),
    [
        (
            2,
            toolkit.RunState.SUCCEEDED,
            [
                "retryable: rank 0: lost link 0; started again",
                "retryable: rank 0: lost link 1; started again",
                "done: all steps made",
            ],
        ),
        pytest.param(
            1,
            toolkit.RunState.FAILED,
            [
                "retryable: rank 0: lost link 0; started again",
                "retryable: rank 0: lost link 1; gave up after 1 requeues",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            0,
            toolkit.RunState.FAILED,
            ["retryable: rank 0: lost link 0; not started again (retries.requeue is 0)"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_requeue_means_what_it_means_on_a_cluster(
    requeue: int, state: toolkit.RunState, reasons: list[str], tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    spec = toolkit.JobSpec.model_validate(
        {
            "name": "probe",
            "script": str(tmp_path / "failing.py"),
            "retries": {"requeue": requeue},
        }
    )
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    run = toolkit.submit(spec, to=profile)
    assert run.wait(300).state is state
    assert run.run_dir is not None
    written = sorted(run.run_dir.glob("logs/attempt-*/reason"))
    assert [path.read_text().rstrip("\n") for path in written] == reasons


def test_nothing_starts_that_could_not_be_remembered(
    job_file: Path, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(toolkit.LauncherError, match="set XDG_STATE_HOME to another folder"):
        toolkit.submit(toolkit.load(job_file), to="local")
    assert not (tmp_path / "runs").exists()
    assert not with_environment(f"PROBE={marker}")


def test_a_secret_that_is_not_set_is_asked_for_before_anything_starts(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROBE_TOKEN", raising=False)
    with pytest.raises(toolkit.LauncherError) as refused:
        toolkit.submit(toolkit.load(job_file, ["secrets=[PROBE_TOKEN]"]), to="local")
    assert str(refused.value) == "secrets are not set here: PROBE_TOKEN; export them first"
    assert not (tmp_path / "runs").exists()


def test_what_the_script_refuses_is_the_reason(tmp_path: Path) -> None:
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    mount = {"source": "/nope", "target": "/nope"}
    job = toolkit.JobSpec.model_validate({"name": "m", "module": "train", "mounts": [mount]})
    run = toolkit.submit(job, to=profile)
    assert run.wait(300).reason == "fatal: the folder of a mount is missing: /nope"
    assert list(run.logs()) == ["m: the folder of a mount is missing: /nope"]
    with pytest.raises(toolkit.LauncherError) as refused:
        toolkit.resubmit(run)
    command = f"bash {run.run_dir}/run.sh {run.run_dir} continue"
    assert str(refused.value) == f"{run.uri} is continued by hand: {command}"


def test_an_active_run_cannot_be_continued_by_hand_and_one_that_is_continued_is_active(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(TOOLKIT.parent), prepend=os.pathsep)
    run = toolkit.submit(toolkit.load(job_file), to="local")
    assert run.run_dir is not None
    until(lambda: started(run.run_dir), "it runs")
    argv = ["bash", str(run.run_dir / "run.sh"), str(run.run_dir), "continue"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"probe: {run.run_dir} is active\n")
    assert not (run.run_dir / "logs/attempt-1").exists()
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        until(lambda: started(run.run_dir, 1), "it goes on")
        assert run.status().state is toolkit.RunState.RUNNING
        run.cancel()
        process.wait(300)
    assert run.status().state is toolkit.RunState.CANCELLED


def test_a_block_of_a_template_runs_after_the_attempt(tmp_path: Path) -> None:
    template = tmp_path / "t/local/run.sh.j2"
    template.parent.mkdir(parents=True)
    template.write_text(
        '{% extends "toolkit/local/run.sh.j2" %}{% block after %}\n'
        'echo "$_status" >"$_run_dir/after"\n{% endblock %}'
    )
    folders = {"runs_dir": str(tmp_path / "runs"), "templates_dir": str(tmp_path / "t")}
    profile = toolkit.LocalProfile(name="here", **folders)
    run = toolkit.submit(toolkit.JobSpec(name="a", command=["false"]), to=profile)
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert run.run_dir is not None
    assert (run.run_dir / "after").read_text() == "1\n"


@pytest.mark.slow
def test_a_stopped_run_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    job = toolkit.load(ROOT / "jobs/digits.yaml", ["args.3=1", "resources.nnodes=1"])
    run = toolkit.submit(job, to=profile)
    assert run.wait(180).state is toolkit.RunState.SUCCEEDED
    assert run.run_dir is not None
    argv = ["bash", str(run.run_dir / "run.sh"), str(run.run_dir)]
    environ = {**os.environ, "PATH": f"{TOOLKIT.parent}:{os.environ['PATH']}"}
    again = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "already holds a run; to go on with it: bash FILE" in again.stderr
    with pytest.raises(toolkit.LauncherError, match="has succeeded; there is nothing to do again"):
        toolkit.resubmit(run)
    subprocess.run([*argv, "continue"], cwd=ROOT, env=environ, check=True)
    assert "already done" in (run.run_dir / "logs/attempt-1/node-0.log").read_text()


def test_chosen_gpus_are_shared_out(tmp_path: Path) -> None:
    """Where the user may use some GPUs only, the nodes get those."""
    job = toolkit.JobSpec.model_validate(
        {
            "name": "g",
            "module": "train",
            "resources": {"nnodes": 2, "gpus_per_node": 2, "nproc_per_node": 2},
        }
    )
    script = toolkit.render(toolkit.plan(job, toolkit.LocalProfile(name="here")))
    environ = fake_slurm.install(tmp_path, nodes=2) | {"CUDA_VISIBLE_DEVICES": "4,7,GPU-5,2"}
    (tmp_path / "script.sh").write_text(script)
    argv = ["bash", str(tmp_path / "script.sh"), str(tmp_path / "run")]
    subprocess.run(argv, env=environ, check=True)
    seen = [json.loads(path.read_text()) for path in (tmp_path / "dumps").iterdir()]
    devices = sorted(s["env"]["CUDA_VISIBLE_DEVICES"] for s in seen)
    assert devices == ["4,7", "GPU-5,2"]


@pytest.mark.slow
def test_one_failing_node_ends_the_other(tmp_path: Path, marker: str) -> None:
    script = tmp_path / "half.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1000)\n"
    )
    job = toolkit.JobSpec(
        name="probe",
        script=str(script),
        env={"PROBE": marker},
        resources={"nnodes": 2},
        stop={"grace": "2s"},
    )
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    run = toolkit.submit(job, to=profile)
    status = run.wait(300)
    assert status.state is toolkit.RunState.FAILED
    assert status.reason.startswith("failed: rank 1 on node-1: exit status 3; ")


def test_gpus_that_are_not_there_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    job = toolkit.JobSpec(
        name="probe",
        module="train",
        resources={"nnodes": 2, "gpus_per_node": 4},
    )
    with pytest.raises(toolkit.LauncherError) as refused:
        LocalLauncher(profile, gpus=lambda: 6).submit(toolkit.plan(job, profile))
    assert str(refused.value) == (
        "8 GPUs are needed (2 x 4), and this machine has 6; "
        "--set resources.gpus_per_node=0 trains on its CPUs"
    )
    assert not (tmp_path / "runs").exists()


def test_nodes_share_out_the_gpus_without_overlap() -> None:
    job = toolkit.JobSpec(
        name="probe",
        module="train",
        resources={"nnodes": 3, "nproc_per_node": 2, "gpus_per_node": 2},
    )
    made = toolkit.plan(job, toolkit.LocalProfile(name="here"))
    assert made.visible_devices == ((0, 1), (2, 3), (4, 5))


def test_make_run_trains_digits_above_95_percent(tmp_path: Path) -> None:
    done = subprocess.run(
        [TOOLKIT, "run", ROOT / "jobs/digits.yaml", "--to", _profile(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    outcome = run_directory.outcome(run_dir)
    assert outcome is not None
    assert outcome["status"] == "done"
    assert outcome["metrics"]["test_accuracy"] > 0.95
    assert str(run_dir) in done.stderr


def _profile(folder: Path) -> Path:
    path = folder / "here.yaml"
    path.write_text(f"kind: local\nruns_dir: {folder / 'runs'}\n")
    return path


def test_a_run_inside_a_rank_gets_nothing_of_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = {
        "LOCAL_RANK": "3",
        "PET_NNODES": "4",
        "TORCHELASTIC_RUN_ID": "outer",
        "TRAIN_JOINS": "yes",
        "WANDB_RUN_ID": "outer",
    }
    for name, value in {**outer, "CUDA_VISIBLE_DEVICES": "", "OWN": "kept"}.items():
        monkeypatch.setenv(name, value)
    command = ["bash", "-c", 'env -0 >"$TRAIN_RUN_DIR/seen"']
    job = toolkit.JobSpec.model_validate({"name": "inner", "command": command})
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    run = LocalLauncher(profile).submit(toolkit.plan(job, profile))
    assert run.wait(120).state is RunState.SUCCEEDED, "\n".join(run.logs())
    assert run.run_dir is not None
    seen = dict(line.split("=", 1) for line in (run.run_dir / "seen").read_text().split("\0")[:-1])
    assert {name for name, value in outer.items() if seen.get(name) == value} == set()
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"], seen["OWN"]) == ("0", "", "kept")
