"""The first process of a pod reports to Kubernetes how torchrun has ended."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, Until
from tests.support.ports import free_port
from tests.support.processes import with_environment
from tests.support.rendered import KINDS, container_of, manifest, pod_command, workload
from tests.support.strict_server import arrives
from toolkit.supervisor.pod import PodStart

DONE, FINAL, AGAIN = 0, 42, 138

CARRIED = {"runs_claim": "runs", "supervisor": "carried"}

OF_EACH = ("PyTorchJob", "TrainJob")
"""The kinds whose entrypoints differ in what follows from an end; see the test of the others."""

TORCHRUN = r"""#!/bin/sh
say() { echo "{\"version\": 1, \"status\": \"$1\"}" >"$TRAIN_RUN_DIR/outcome.json"; }
wait_for_stop() { touch "$TRAIN_RUN_DIR/ready"; while :; do sleep 0.02; done; }
sleep 0.02  # file systems date by the tick of a clock
eval "$1"
"""


def pod_manifest(
    kind: str, *, requeue: int = 9, in_job: int = 0, nnodes: int = 1, more: Any = None
) -> str:
    """Return a manifest; `more` are keys of the job."""
    retries = {"requeue": requeue, "in_job": in_job}
    job = {"retries": retries, "resources": {"nnodes": nnodes}, **(more or {})}
    return manifest(job, CARRIED, kind)


class Pod:
    """A pod of a run, whose container can be started again and again."""

    def __init__(
        self,
        folder: Path,
        kind: str = "Job",
        *,
        name: str = "t-0",
        requeue: int = 9,
        in_job: int = 0,
        nnodes: int = 1,
        more: Any = None,
    ) -> None:
        self.folder, self.runs = folder, folder / "runs" / "it's a run"
        text = pod_manifest(kind, requeue=requeue, in_job=in_job, nnodes=nnodes, more=more)
        self.command = pod_command(text, folder)
        self.programs = folder / "bin"
        self.programs.mkdir(exist_ok=True)
        self.program("torchrun", TORCHRUN)
        self.environ = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOSTNAME": name,
            "TRAIN_RUN_DIR": str(self.runs),
        }

    def be_quick(self) -> None:
        """Let the supervisor's clock run fast from now on."""
        flags = self.command[self.command.index("sh", 1) + 1 :]
        self.command = [sys.executable, "-m", "tests.support.quick_pod", "pod", *flags]
        self.environ["PYTHONPATH"] = str(ROOT)

    def options(self, *words: str) -> None:
        """Give the supervisor more options."""
        self.command[-1:-1] = words

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def start(self, *argv: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *argv],
            env=self.environ | environ,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **environ: str) -> int:
        """Run the container to its end; `code` is what torchrun does."""
        with self.start("torchrun", code, **environ) as process:
            return process.wait(300)

    @property
    def failures(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.runs.glob("logs/**/failed"))


@pytest.mark.parametrize(
    ("code", "status", "failures"),
    [
        ("exit 0", DONE, 0),
        ("say running; exit 0", DONE, 0),
        ("say done; exit 1", DONE, 0),
        ("say fatal; exit 0", FINAL, 0),
        ("say preempted; exit 0", AGAIN, 0),
        ("say fatal; exit 1", FINAL, 0),
        ("say retryable; exit 1", AGAIN, 1),
        ("say running; exit 1", AGAIN, 1),
        ("say preempted; exit 1", AGAIN, 0),
        ("exit 1", AGAIN, 1),
        ("kill -KILL $$", AGAIN, 1),
        ("exit 126", FINAL, 0),
        ("exit 127", FINAL, 0),
    ],
)
def test_how_torchrun_ends_is_what_kubernetes_is_told(
    code: str, status: int, failures: int, tmp_path: Path
) -> None:
    pod = Pod(tmp_path)
    assert (pod.run(code), pod.failures) == (status, failures)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_name_the_run_directory_and_the_attempt(tmp_path: Path, kind: str) -> None:
    args = ["--out=$TRAIN_RUN_DIR/x y", "${TRAIN_ATTEMPT}$TRAIN_ATTEMPT", "$TRAIN_RUN_DIRS", "$(x)"]
    job = {"args": args, "resources": {"nnodes": 1}}
    container = container_of(workload(manifest(job, {"runs_claim": "runs"}, kind)))
    environ, argv = arrives(container)
    run_dir = environ["TRAIN_RUN_DIR"].decode()
    pod = Pod(tmp_path, kind)
    pod.command = pod_command(manifest(job, CARRIED, kind), tmp_path)[:4]
    pod.program("torchrun", '#!/bin/sh\nprintf "%s\\n" "$@" >"$TRAIN_RUN_DIR/argv"\n')
    with pod.start(*map(os.fsdecode, argv), TRAIN_ATTEMPT="3") as process:
        assert process.wait(300) == DONE
    *_, out, attempts, other, text = (pod.runs / "argv").read_text().splitlines()
    assert (out, attempts) == (f"--out={run_dir}/x y", "33")
    assert (other, text) == ("$TRAIN_RUN_DIRS", "$(x)")


def test_a_program_that_is_not_there_is_not_started_again(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.program("unreadable", "")
    (pod.programs / "unreadable").chmod(0o644)
    for program in ("no-such-program", str(pod.programs / "unreadable")):
        with pod.start(program) as process:
            assert process.wait() == FINAL


def test_an_outcome_of_an_earlier_start_counts_for_nothing(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "PyTorchJob")
    for word in ("done", "fatal", "preempted"):
        assert pod.run(f"say {word}; exit 1") in (DONE, FINAL, AGAIN)
        before = pod.failures
        assert (pod.run("exit 1"), pod.failures) == (AGAIN, before + 1)


def test_what_an_outcome_quotes_is_not_what_it_says(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    text = json.dumps({"status": "retryable", "reason": 'it said "status": "fatal" and "done"'})
    pod.runs.mkdir(parents=True)
    (tmp_path / "quoting.json").write_text(text)
    code = f'cp {tmp_path}/quoting.json "$TRAIN_RUN_DIR/outcome.json"; exit 1'
    assert pod.run(code) == AGAIN


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("at_the_signal", "status"),
    [
        ("exit 0", AGAIN),  # exit status 0 of one pod would end the others
        ("exit 1", AGAIN),
        ("say preempted; exit 1", AGAIN),
        ("say done; exit 0", DONE),
        ("say fatal; exit 1", FINAL),
    ],
)
def test_a_stopped_run_is_to_be_started_again_unless_it_has_ended(
    at_the_signal: str, status: int, stop: signal.Signals, tmp_path: Path, until: Until
) -> None:
    pod = Pod(tmp_path)
    with pod.start("torchrun", f"trap '{at_the_signal}' TERM; wait_for_stop") as process:
        until(lambda: (pod.runs / "ready").exists(), "torchrun runs")
        process.send_signal(stop)
        assert (process.wait(), pod.failures) == (status, 0)


def test_each_signal_reaches_torchrun_and_its_status_is_waited_for(
    tmp_path: Path, until: Until
) -> None:
    pod = Pod(tmp_path)
    count = tmp_path / "signals"
    code = f"trap 'echo x >>{count}' TERM; wait_for_stop"
    with pod.start("torchrun", code) as process:
        until(lambda: (pod.runs / "ready").exists(), "torchrun runs")
        for number in (1, 2, 3):
            process.send_signal(signal.SIGTERM)
            until(lambda n=number: count.exists() and len(count.read_text()) == 2 * n, "it came")
        assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        argv = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
        (pid,) = (pid for pid, words in argv.items() if words[1].endswith(b"/torchrun"))
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait() == AGAIN
        assert process.stderr and "torchrun ended with 137" in process.stderr.read()


def test_a_signal_before_torchrun_has_begun_is_not_lost(tmp_path: Path, until: Until) -> None:
    """It waits for a first pod that does not answer yet."""
    pod = Pod(tmp_path, nnodes=2)
    option = f"--rdzv-endpoint=localhost:{free_port()}"
    with pod.start("torchrun", "exec sleep 1000", option, JOB_COMPLETION_INDEX="1") as process:
        until(lambda: [*pod.runs.glob("logs/*/*/began")], "it has begun")
        process.terminate()
        assert (process.wait(300), pod.failures) == (AGAIN, 0)


def test_failures_are_counted_and_those_beyond_requeue_are_final(tmp_path: Path) -> None:
    pod = Pod(tmp_path, requeue=2)
    other = Pod(tmp_path, name="t-1", requeue=2)
    assert [pod.run("exit 1") for _ in range(2)] == [AGAIN, AGAIN]
    assert pod.run("say preempted; exit 1") == AGAIN
    assert other.run("exit 1") == AGAIN
    assert pod.run("exit 1") == FINAL
    assert Pod(tmp_path, name="t-2", requeue=0).run("exit 1") == FINAL


@pytest.mark.parametrize("more", [{}, {"in_job": 3}, {"nnodes": 2}])
def test_jobs_jobsets_and_trainjobs_end_by_the_same_rules(more: dict[str, int]) -> None:
    def options(kind: str) -> list[str]:
        args: list[str] = container_of(workload(pod_manifest(kind, **more)))["args"]
        return [word for word in args[: args.index("--")] if not word.startswith("--env=")]

    assert options("Job") == options("JobSet") == options("TrainJob")
    assert options("Job") != options("PyTorchJob")


@pytest.mark.parametrize("kind", OF_EACH)
def test_who_submits_a_run_again_begins_to_count_anew(kind: str, tmp_path: Path) -> None:
    pod = Pod(tmp_path, kind, requeue=1)
    for submission in ("a", "b"):
        assert [pod.run("exit 1", TRAIN_START=submission) for _ in range(2)] == [AGAIN, FINAL]
    attempts = sorted(folder.name for folder in pod.runs.glob("logs/attempt-*"))
    assert attempts == ["attempt-0", "attempt-1"]


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_pod_that_has_failed_for_good_ends_all_others_and_their_replacements(
    kind: str, tmp_path: Path, until: Until
) -> None:
    """Kubernetes replaces it like a pod whose node is lost; a PyTorchJob deletes the others."""
    pod, other = (Pod(tmp_path, kind, name=f"t-{n}", requeue=1, nnodes=2) for n in (0, 1))
    other.be_quick()
    first = {"TRAIN_START": "a", "JOB_COMPLETION_INDEX": "0"}
    waits = 'trap "exit 1" TERM; touch "$TRAIN_RUN_DIR/ready"; while :; do /bin/sleep 0.02; done'
    with other.start("torchrun", waits, **first) as process:
        until((pod.runs / "ready").exists, "the other runs")
        code = f"{raises('ValueError: NaN')}; say fatal; exit 1"
        with pod.start("torchrun", code, **first) as failing:
            assert failing.wait(300) == FINAL
            assert failing.stderr is not None
            verdict = failing.stderr.read().splitlines()[-1]
        if kind == "PyTorchJob":
            assert (other.runs / "logs/attempt-0/t-1/ended").exists(), "it was waited for"
        assert process.wait(300) == FINAL, "though its torchrun was only told to stop"
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == verdict
    if kind == "PyTorchJob":  # the operator starts no other; this is the object applied again
        assert pod.run("exit 0", **first) == DONE
        return
    for one in (pod, other, Pod(tmp_path, kind, name="t-2")):
        with one.start("torchrun", 'touch "$TRAIN_RUN_DIR/ran"', **first) as again:
            assert again.wait(300) == FINAL
            assert again.stderr is not None
            assert again.stderr.read() == f"{verdict}\n"
    assert not (pod.runs / "ran").exists()
    assert pod.run("exit 0", TRAIN_START="b") == DONE, "submitted again, it starts"


def test_a_pod_that_is_stopping_is_not_stopped_again_when_another_ends_for_good(
    tmp_path: Path, until: Until
) -> None:
    """torchrun abandons ranks that write a checkpoint if a second signal arrives early."""
    pod = Pod(tmp_path, "TrainJob")
    pod.be_quick()
    count, looks = tmp_path / "signals", pod.runs / "looks"
    with pod.start("torchrun", f"trap 'echo x >>{count}' TERM; wait_for_stop") as process:
        until((pod.runs / "ready").exists, "torchrun runs")
        process.terminate()
        until(count.exists, "it is being stopped")
        (pod.runs / "logs/attempt-0/ended_for_good").write_text("another pod's reason\n")
        seen = len(looks.read_text())
        until(lambda: len(looks.read_text()) > seen + 3, "it looks at the others")
        assert count.read_text() == "x\n"
        for pid in with_environment(f"TRAIN_RUN_DIR={pod.runs}\0"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_pod_of_a_lost_node_stops_without_a_checkpoint_when_another_has_its_place(
    kind: str, tmp_path: Path, until: Until
) -> None:
    """What it would save is older than what its replacement has saved."""
    old, new = Pod(tmp_path, kind), Pod(tmp_path, kind)
    saves = """trap 'touch "$TRAIN_RUN_DIR/saved"; exit 1' TERM; wait_for_stop"""
    for kubelet_is_back in (True, False):
        if not kubelet_is_back:
            old.be_quick()
        with old.start("torchrun", saves) as process:
            until((old.runs / "ready").exists, "it runs")
            assert new.run("exit 0") == DONE
            if kubelet_is_back:
                process.terminate()
            assert process.wait(300) == AGAIN
            for pid in with_environment(f"TRAIN_RUN_DIR={old.runs}\0"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # as the end of a container does
        (old.runs / "ready").unlink()
        assert not (old.runs / "saved").exists()


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_pod_that_is_replaced_while_it_saves_keeps_its_checkpoint(
    kind: str, tmp_path: Path, until: Until
) -> None:
    """Kubernetes replaces a pod 10 s after its deletion; `stop.grace` is longer."""
    old, new = Pod(tmp_path, kind), Pod(tmp_path, kind)
    saves = (
        """trap 'while [ ! -e "$TRAIN_RUN_DIR/goes" ]; do sleep 0.02; done; """
        """touch "$TRAIN_RUN_DIR/saved"; exit 1' TERM; wait_for_stop"""
    )
    with old.start("torchrun", saves) as process:
        until((old.runs / "ready").exists, "it runs")
        process.terminate()
        marks = partial(old.runs.glob, "logs/*/*/stopping")
        until(lambda: any(mark.read_text() for mark in marks()), "it is being stopped")
        with new.start("torchrun", '[ -e "$TRAIN_RUN_DIR/saved" ]') as replacement:
            assert replacement.stderr is not None
            assert "waits for the pod" in replacement.stderr.readline()
            (old.runs / "goes").touch()
            assert process.wait(300) == AGAIN
            assert replacement.wait(300) == DONE
    assert old.failures == 0, "a stop is no failure"


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_pod_that_is_stopped_while_it_waits_lets_the_other_one_save(
    kind: str, tmp_path: Path, until: Until
) -> None:
    old, new = Pod(tmp_path, kind), Pod(tmp_path, kind)
    saves = """trap 'touch "$TRAIN_RUN_DIR/told"; wait_for_stop' TERM; wait_for_stop"""
    with old.start("torchrun", saves) as process:
        until((old.runs / "ready").exists, "it runs")
        process.terminate()
        until((old.runs / "told").exists, "torchrun saves")
        with new.start("torchrun", "exit 0") as replacement:
            assert replacement.stderr is not None
            assert "waits for the pod" in replacement.stderr.readline()
            replacement.terminate()
            assert replacement.wait(300) == AGAIN
        assert process.poll() is None
        process.kill()
    for pid in with_environment(f"TRAIN_RUN_DIR={old.runs}\0"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # It was killed at the end of its grace, a while ago.
    for path in old.runs.glob("logs/*/*/stopping"):
        os.utime(path, (1, 1))
    assert new.run("exit 0") == DONE


@pytest.mark.parametrize("kind", OF_EACH)
def test_starts_without_progress_are_limited(kind: str, tmp_path: Path) -> None:
    pod = Pod(tmp_path, kind, more={"retries": {"requeue": 9, "no_progress": 2}})
    steps = (4, 6, 6, 6)
    ends = [
        pod.run(f"{lost(step)}; {raises(f'error {word}', number=number)}; exit 1")
        for number, (step, word) in enumerate(zip(steps, "abcd", strict=True))
    ]
    assert ends == [AGAIN, AGAIN, AGAIN, FINAL]


def idle(local_rank: int, status: int = 93) -> str:
    """Return a torchrun with a worker that ends so (torch 2.13, multiprocessing/api.py)."""
    said = f"failed (exitcode: {status}) local_rank: {local_rank} (pid: 7) of binary: python"
    return f'echo "E1122 07:34:07.896000 9 torch/x/api.py:1002] {said}" >>"$TORCH_LOGS_OUT"'


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_worker_that_ends_with_93_is_not_started_again(kind: str, tmp_path: Path) -> None:
    """As on Slurm, until the run is submitted again; nor are pods that have lost it."""
    pod, other = Pod(tmp_path, kind), Pod(tmp_path, kind, name="t-1")
    assert (pod.run(f"{idle(1)}; exit 1", TRAIN_START="a"), pod.failures) == (FINAL, 0)
    assert other.run("exit 1", TRAIN_START="a") == FINAL
    assert other.run("exit 0", TRAIN_START="a") == FINAL, "torchrun is not started"
    assert [one.run("exit 0", TRAIN_START="c") for one in (pod, other)] == [DONE, DONE]


def test_a_93_after_which_torchrun_went_on_is_none(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    assert pod.run(f"{idle(0)}; {idle(0, 1)}; exit 1") == AGAIN
    assert pod.run(f"{idle(0)}; exit 0") == DONE


def test_torchrun_says_how_its_workers_have_ended_where_it_is_looked_for(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    (pod.programs / "torchrun").unlink()
    (tmp_path / "idle.py").write_text("raise SystemExit(93)")
    bins = f"{pod.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with pod.start("torchrun", str(tmp_path / "idle.py"), PATH=bins) as process:
        assert process.wait() == FINAL
    (log,) = pod.runs.glob("logs/attempt-0/t-0/torchrun.log")
    assert "(exitcode: 93)" in log.read_text()


def test_every_submission_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    pods = [Pod(tmp_path, "JobSet", name=f"t-node-0-{n}", nnodes=2) for n in (0, 1)]
    seen = []
    for start in ("uid-a", "uid-b", "uid-c"):
        told = tmp_path / start
        code = f'echo "$TRAIN_ATTEMPT $PET_LOG_DIR" >>{told}; exit 0'
        running = [pod.start("torchrun", code, TRAIN_START=start) for pod in pods]
        for process in running:
            with process:
                assert process.wait() == 0
        first, second = sorted(told.read_text().splitlines())
        assert first[0] == second[0] and first.endswith(f"logs/attempt-{first[0]}/t-node-0-0")
        seen.append(int(first[0]))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("kind", OF_EACH)
def test_without_labels_every_pod_is_of_attempt_0(kind: str, tmp_path: Path) -> None:
    """What the downward API makes of a label that is not there is an empty text."""
    pod = Pod(tmp_path, kind)
    code = '[ "$TRAIN_ATTEMPT" = 0 ] && [ "$PET_LOG_DIR" = "$TRAIN_RUN_DIR/logs/attempt-0/t-0" ]'
    for _ in range(2):
        assert pod.run(code, TRAIN_ATTEMPT="", TRAIN_START="") == DONE


def test_pods_meet_at_the_first_one(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for index, host in (("0", "1"), ("3", "0")):
        code = f'[ "$PET_RDZV_CONF" = "is_host={host},join_timeout=600,read_timeout=30" ]'
        assert pod.run(code, JOB_COMPLETION_INDEX=index) == DONE


def test_the_first_pod_is_waited_for_before_torchrun_starts(tmp_path: Path, until: Until) -> None:
    pod = Pod(tmp_path, nnodes=2)
    pod.be_quick()
    looks, option = pod.runs / "looks", f"--rdzv-endpoint=localhost:{(port := free_port())}"
    start = partial(pod.start, "torchrun", 'touch "$TRAIN_RUN_DIR/ran"', option)
    with start(JOB_COMPLETION_INDEX="1") as process:
        until(lambda: looks.exists() and len(looks.read_text()) > 3, "it has tried some times")
        assert not (pod.runs / "ran").exists()
        with socket.create_server(("localhost", port)):
            assert process.wait() == DONE
    assert (pod.runs / "ran").exists()


HANGS = r"""
mkdir -p "$PET_LOG_DIR/run/attempt_0"
looks() { wc -l <"$TRAIN_RUN_DIR/looks" || echo 0; }
before=$(looks)
until [ "$(looks)" -gt $((before + 3)) ]; do /bin/sleep 0.05; done
echo "E1125 api.py] failed (exitcode: 1) local_rank: 0 (pid: 1)" >>"$TORCH_LOGS_OUT"
exec python3 -c "import time; time.sleep(3600)"
"""
UNNOTICED = (
    HANGS.splitlines()[1]
    + """
exec python3 -c "import os, time; os.fork() or os._exit(1); time.sleep(3600)"
"""
)
"""A torchrun whose rank has failed and which waits for ever for a store that is gone."""


@pytest.mark.parametrize(("hangs", "host_answers"), [(HANGS, True), (UNNOTICED, False)])
def test_a_torchrun_that_hangs_without_ranks_is_ended(
    hangs: str, host_answers: bool, tmp_path: Path, until: Until
) -> None:
    """The node of the first pod is lost; the pod that replaces the first one may be there."""
    pod = Pod(tmp_path, nnodes=2)
    pod.be_quick()
    with socket.create_server(("localhost", 0)) as server:
        option = f"--rdzv-endpoint=localhost:{server.getsockname()[1]}"
        with pod.start("torchrun", hangs, option, JOB_COMPLETION_INDEX="1") as process:
            until(lambda: [*pod.runs.glob("logs/*/*/run")], "torchrun runs")
            if not host_answers:
                server.close()
            assert process.wait(300) == AGAIN
            assert process.stderr is not None
            assert "the first pod, where the nodes meet, was lost" in process.stderr.read()


@pytest.mark.parametrize(
    "code",
    [
        "",  # no rank has begun yet
        'mkdir -p "$PET_LOG_DIR/run/attempt_0"; ',  # its ranks have ended well, those of others not
    ],
)
def test_a_torchrun_that_waits_for_other_nodes_is_left_alone(code: str, tmp_path: Path) -> None:
    pod = Pod(tmp_path, nnodes=2)
    pod.be_quick()
    waits = """exec python3 -c "import os, time
while os.stat(os.environ['TRAIN_RUN_DIR'] + '/looks').st_size < 22: time.sleep(0.01)" """
    with socket.create_server(("localhost", 0)) as server:
        option = f"--rdzv-endpoint=localhost:{server.getsockname()[1]}"
        with pod.start("torchrun", code + waits, option, JOB_COMPLETION_INDEX="1") as process:
            assert process.wait(300) == DONE


def test_a_pod_that_comes_back_when_the_others_are_done_is_done(tmp_path: Path) -> None:
    first, late = Pod(tmp_path, nnodes=2), Pod(tmp_path, name="t-1", nnodes=2)
    start = {"TRAIN_START": "uid-1"}
    assert late.run("say running; exit 1", **start) == AGAIN
    assert first.run("say done; exit 0", **start) == DONE
    assert late.run('touch "$TRAIN_RUN_DIR/ran"; exit 1', **start) == DONE
    assert not (first.runs / "ran").exists()
    again = {"TRAIN_START": "uid-2"}  # submitted again, for example with more steps
    assert late.run('touch "$TRAIN_RUN_DIR/ran"', **again) == DONE
    assert (first.runs / "ran").exists()


def test_the_only_pod_is_not_run_again_once_it_is_done(tmp_path: Path) -> None:
    """It may be preempted before the operator has seen that it is done; without an outcome, too."""
    pod = Pod(tmp_path)
    runs = 'echo >>"$TRAIN_RUN_DIR/ran"'
    for start, times in (("uid-1", 1), ("uid-1", 1), ("uid-2", 2)):
        assert pod.run(runs, TRAIN_START=start) == DONE
        assert len((pod.runs / "ran").read_text()) == times


def test_where_nothing_can_be_written_nothing_is_tried_again(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.be_quick()
    pod.runs.parent.mkdir()
    pod.runs.write_text("not a folder")
    assert pod.run("exit 0") == FINAL


@pytest.mark.parametrize("place", ["", "logs/attempt-0"])
def test_storage_that_is_away_for_a_moment_is_waited_for(
    place: str, tmp_path: Path, until: Until
) -> None:
    pod = Pod(tmp_path)
    (blocked := pod.runs / place).parent.mkdir(parents=True)
    blocked.write_text("not a folder")
    with pod.start("torchrun", "exit 0") as process:
        until(lambda: b"supervisor" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "it runs")
        blocked.unlink()
        assert process.wait(300) == DONE


@pytest.mark.parametrize("file", ["memory.events", "memory/memory.oom_control"])
def test_a_rank_that_the_kernel_killed_for_memory_is_told(file: str, tmp_path: Path) -> None:
    """On nodes with cgroups of version 2 and 1."""
    pod, counters = Pod(tmp_path), tmp_path / "cgroup" / file
    pod.options("--cgroups", str(tmp_path / "cgroup"))
    counters.parent.mkdir(parents=True)
    for killed, status in ((0, AGAIN), (1, FINAL)):
        counters.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}\n")
        with pod.start("torchrun", "exit 1") as process:
            assert process.wait(300) == status
            assert process.stderr is not None
            assert ("out of memory" in process.stderr.read()) is bool(killed)


def test_a_rank_out_of_memory_that_torchrun_starts_again_ends_the_run_at_once(
    tmp_path: Path,
) -> None:
    """Even if the ranks of the new start say that they were stopped, which they are for this."""
    pod, counters = Pod(tmp_path, in_job=1), tmp_path / "cgroup/memory.events"
    pod.options("--cgroups", str(tmp_path / "cgroup"))
    counters.parent.mkdir(parents=True)
    starts_again = (
        'trap "say preempted; exit 1" TERM; mkdir -p "$PET_LOG_DIR/id/attempt_0"; '
        f'echo oom_kill 1 >"{counters}"; mkdir "$PET_LOG_DIR/id/attempt_1"; wait_for_stop'
    )
    with pod.start("torchrun", starts_again) as process:
        assert process.wait(300) == FINAL
        assert process.stderr is not None
        assert "fatal: out of memory" in process.stderr.read()


@pytest.mark.parametrize("failed", [True, False])
def test_a_pod_out_of_memory_is_told_though_it_was_stopped(
    failed: bool, tmp_path: Path, until: Until
) -> None:
    pod, counters = Pod(tmp_path, "JobSet"), tmp_path / "cgroup/memory.events"
    pod.options("--cgroups", str(tmp_path / "cgroup"))
    counters.parent.mkdir(parents=True)
    counters.write_text(
        "oom_kill 1\n"
    )  # perhaps of a helper process that the script can do without
    line = "E1125 17:00:00 7 x.py:9] failed (exitcode: -9) local_rank: 0 (pid: 7)"
    logged = f'echo "{line}" >"$TORCH_LOGS_OUT"; ' if failed else ""
    code = f"trap 'exit 1' TERM; {logged}wait_for_stop"
    with pod.start("torchrun", code, TRAIN_START="a") as process:
        until((pod.runs / "ready").exists, "torchrun runs")
        process.terminate()
        assert process.wait(300) == (FINAL if failed else AGAIN)
    counters.write_text("oom_kill 0\n")  # those of a container are its own
    ended = pod.run("exit 0", TRAIN_START="a")
    assert ended == (FINAL if failed else DONE), "nothing is tried again that ran out of memory"


def test_the_words_of_a_stopped_pod_fit_a_run_that_was_cancelled(
    tmp_path: Path, until: Until
) -> None:
    """A pod cannot tell a cancelled run from a preempted one."""
    pod = Pod(tmp_path)
    with pod.start("torchrun", "trap 'exit 1' TERM; wait_for_stop") as process:
        until((pod.runs / "ready").exists, "torchrun runs")
        process.terminate()
        assert process.wait(300) == AGAIN
        assert process.stderr is not None
        assert process.stderr.read() == (
            "torchrun ended with 1; preempted: stopped from outside; "
            "goes on from its checkpoint if it is started again: 138\n"
        )


KILLED = "kill -KILL $PPID; exit 1"
"""What the kernel does for memory, where it kills a container whole: the first process, too."""


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_container_that_is_killed_whole_has_failed(kind: str, tmp_path: Path) -> None:
    pod = Pod(tmp_path, kind, requeue=2)

    def start(code: str, submission: str = "a") -> int:
        return pod.run(code, TRAIN_START=submission)

    assert start(KILLED) == -signal.SIGKILL
    assert start("say preempted; exit 1") == AGAIN
    assert [start(KILLED) for _ in range(2)] == [-signal.SIGKILL] * 2
    assert start("exit 0") == FINAL, "the third was one too many"
    assert start("exit 0", "b") == DONE, "submitted again, it counts anew"


def raises(words: str, *, number: int = 0, start: int = 0) -> str:
    """Return the `number`th torchrun of a pod, with a rank that has left such an error file."""
    said = json.dumps({"message": {"message": words, "extraInfo": {"timestamp": "1"}}})
    folder = f'"$PET_LOG_DIR/id_{number}/attempt_{start}/0"'
    return f"mkdir -p {folder}; echo '{said}' >{folder}/error.json"


def lost(step: int, attempt: int | str = "$TRAIN_ATTEMPT") -> str:
    """Return a train/ that has lost a rank after so many steps."""
    said = f'{{\\"status\\": \\"retryable\\", \\"attempt\\": {attempt}, \\"step\\": {step}}}'
    return f'echo "{said}" >"$TRAIN_RUN_DIR/outcome.json"'


@pytest.mark.parametrize("kind", OF_EACH)
def test_pods_that_fail_twice_alike_are_not_started_again(kind: str, tmp_path: Path) -> None:
    pod, other = Pod(tmp_path, kind), Pod(tmp_path, kind, name="t-1")

    words = ("no kernel at 0x7f01, pid 41", "another one", "no kernel at 0x7fc2, pid 52")
    for number, said in enumerate((*words, words[0])):
        expected = FINAL if number == 3 else AGAIN
        assert pod.run(f"{raises(said, number=number)}; exit 1", TRAIN_START="a") == expected
        echo = raises("Connection closed by peer [10.0.0.1]:4711", number=number)
        if number < 3:
            assert other.run(f"{echo}; exit 1", TRAIN_START="a") == AGAIN
    (ended,) = pod.runs.glob("logs/attempt-0/t-0/ended")
    assert ended.read_text() == (
        "torchrun ended with 1; fatal: the same failure twice: no kernel at 0x*, pid *; "
        "another start would end like these two; not started again: 42\n"
    )


def test_a_pod_that_loses_a_rank_twice_at_one_step_is_not_started_again(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    echo = raises("Connection closed by peer")
    ends = [pod.run(f"{lost(step)}; {echo}; exit 1") for step in (4, 5)]
    assert [*ends, pod.run("say preempted; exit 1")] == [AGAIN] * 3
    assert pod.run(f"{lost(5)}; {echo}; exit 1") == FINAL


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_failure_that_comes_again_at_its_step_counts_with_another_one_in_between(
    kind: str, tmp_path: Path
) -> None:
    pod = Pod(tmp_path, kind)

    def start(number: int, words: str, step: int) -> int:
        return pod.run(f"{lost(step)}; {raises(words, number=number)}; exit 1", TRAIN_START="a")

    assert start(0, "RuntimeError: no kernel", 12) == AGAIN
    assert start(1, "RuntimeError: no memory", 13) == AGAIN
    assert start(2, "RuntimeError: no memory", 14) == AGAIN
    assert start(3, "RuntimeError: no kernel", 12) == FINAL


def test_a_pod_that_is_killed_without_a_word_is_started_again(tmp_path: Path) -> None:
    """Also where an earlier start has left words, and a step, that are not of this one."""
    pod = Pod(tmp_path)
    assert pod.run(f"{lost(4)}; {raises('Broken pipe')}; exit 1") == AGAIN
    assert [pod.run("exit 1") for _ in range(3)] == [AGAIN] * 3


def test_a_torchrun_that_would_start_for_ever_what_fails_alike_is_ended(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "PyTorchJob", in_job=9)
    pod.be_quick()
    starts = "; ".join(raises("no kernel", start=number) for number in (0, 1))
    code = f"trap 'say preempted; exit 1' TERM; {starts}; wait_for_stop"
    assert (pod.run(code), pod.failures) == (FINAL, 0)
    again = f"{raises('no kernel', number=1)}; {raises('another', number=1, start=1)}; exit 1"
    assert pod.run(again) == AGAIN, "what an earlier start has left is not of this one"


def test_a_torchrun_that_has_lost_the_signal_to_end_is_told_again(tmp_path: Path) -> None:
    """As one does where the signal comes while it writes to its log."""
    pod = Pod(tmp_path, in_job=9)
    pod.be_quick()
    starts = "; ".join(raises("no kernel", start=number) for number in (0, 1))
    second = "trap 'say preempted; exit 1' TERM"
    code = f'trap "{second}" TERM; {starts}; wait_for_stop'
    assert (pod.run(code), pod.failures) == (FINAL, 0)


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_pod_that_has_only_lost_another_one_tells_the_cause(kind: str, tmp_path: Path) -> None:
    """Its status may be the only one that is seen: it is final, so that the others are deleted."""
    pod = Pod(tmp_path, kind, in_job=1)
    code = ""
    for number in (0, 1):
        cause = raises("RuntimeError: no kernel", start=number)
        echo = raises("Connection closed by peer", start=number)
        code += f"{cause.replace('$PET_LOG_DIR', '$PET_LOG_DIR/../t-1')}; {echo}; "
    assert pod.run(f"{code}{lost(5)}; exit 1") == FINAL
    (ended,) = pod.runs.glob("logs/attempt-0/t-0/ended")
    assert "fatal: the same failure twice at step 5: RuntimeError: no kernel; " in ended.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_is_sh_and_holds_nothing_that_kubernetes_expands(
    kind: str, tmp_path: Path
) -> None:
    notify = {"webhook": "$HOOK", "command": "cat"}
    secrets = {"HOOK": {"secret": "hooks", "key": "url"}}
    text = pod_manifest(kind, in_job=3, more={"notify": notify, "secrets": secrets})
    shell, option, script, _ = container_of(workload(text))["command"]
    assert (shell, option) == ("sh", "-ec")
    assert not re.search(r"\$(?:[$(]|[^\x00-\x7f])", script)
    path = tmp_path / "command.sh"
    path.write_text(script)
    if not os.environ.get("CI") and shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    shellcheck = ["shellcheck", "--shell=sh", "--severity=style"]
    for argv in (["sh", "-n"], shellcheck):
        done = subprocess.run([*argv, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_supervisor_that_was_not_submitted_is_not_started(tmp_path: Path) -> None:
    """Whoever may create ConfigMaps can be faster than the run, and its pods would execute it."""
    pod = Pod(tmp_path)
    with zipfile.ZipFile(tmp_path / "supervisor.pyz", "w") as archive:
        archive.writestr("__main__.py", f"open({str(tmp_path / 'executed')!r}, 'w')")
    assert pod.run("exit 0") == FINAL
    assert not (tmp_path / "executed").exists()
    (tmp_path / "supervisor.pyz").unlink()
    assert pod.run("exit 0") == FINAL, "nor is one that is not there"


FAILS = """
import sys
from toolkit.supervisor import __main__, pod
pod.PodStart._conclude = lambda self: 1 / 0
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("kind", OF_EACH)
def test_a_mistake_of_the_supervisor_is_tried_again_once(kind: str, tmp_path: Path) -> None:
    """It may lie in what was there that time."""
    pod = Pod(tmp_path, kind, nnodes=2)
    flags = pod.command[pod.command.index("sh", 1) + 1 :]
    pod.command = [sys.executable, "-c", FAILS, "pod", *flags]
    pod.environ["PYTHONPATH"] = str(ROOT)
    for expected in (AGAIN, FINAL):
        with pod.start("torchrun", "exit 0") as process:
            assert process.wait(300) == expected
            assert process.stderr is not None
            assert "ZeroDivisionError" in process.stderr.read()
    assert pod.failures == 2
    (ended,) = pod.runs.glob("logs/attempt-0/ended_for_good")
    assert ended.read_text() == "the supervisor failed: ZeroDivisionError: division by zero\n"


def test_a_replaced_pod_that_fails_by_itself_does_not_end_its_replacement(
    tmp_path: Path, until: Until
) -> None:
    """A node that was frozen comes back: its ranks have lost the others at once."""
    old, new = (Pod(tmp_path, requeue=1) for _ in range(2))
    start = {"TRAIN_START": "a"}
    wait = 'touch "$TRAIN_RUN_DIR/{}"; until [ -e "$TRAIN_RUN_DIR/{}" ]; do sleep 0.02; done'
    with old.start("torchrun", f"{wait.format('ready', 'back')}; exit 1", **start) as process:
        until((old.runs / "ready").exists, "it runs")
        with new.start("torchrun", wait.format("new", "goes"), **start) as replacement:
            until((new.runs / "new").exists, "its replacement runs")
            (old.runs / "back").touch()
            assert process.wait(300) == AGAIN
            (old.runs / "goes").touch()
            assert replacement.wait(300) == DONE
    assert not [*old.runs.glob("logs/*/ended_for_good")]


def test_pods_with_their_nodes_host_name_are_counted_by_their_index(tmp_path: Path) -> None:
    ends = []
    for node in ("gpu1", "gpu2", "gpu3"):
        pod = Pod(tmp_path, "PyTorchJob", name=node, requeue=1)
        pod.options("--host-network")
        ends.append(pod.run("exit 1", TRAIN_START="t", JOB_COMPLETION_INDEX="0"))
    assert ends == [AGAIN, FINAL, FINAL]


def test_a_failure_of_an_earlier_start_is_not_one_of_this_start(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    assert pod.run(f"say running; {idle(3, 2)}; exit 1") == AGAIN
    assert pod.run("exit 1") == AGAIN, "its torchrun had no rank that ended with 2"
    (ended,) = pod.runs.glob("logs/*/t-0/ended")
    assert ended.read_text() == "torchrun ended with 1; failed: exit status 1; started again: 138\n"


def test_a_moment_without_storage_gives_no_number_of_an_earlier_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs/attempt-0").mkdir(parents=True)
    (tmp_path / "logs/start-0").symlink_to("earlier")
    link, failures = os.symlink, [OSError(errno.EIO, "Input/output error")]

    def symlink(source: str, target: str) -> None:
        if failures:
            raise failures.pop()
        link(source, target)

    monkeypatch.setattr(os, "symlink", symlink)
    start: Any = object.__new__(PodStart)
    start.run_dir, start.name, start.submission = str(tmp_path), "0", "this"
    start.signals = SimpleNamespace(wait=lambda seconds: None)
    start._open_attempt()
    assert start.number == 1
