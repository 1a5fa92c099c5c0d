"""What people read of an end: the cause, not an exit status, and the same sentence everywhere.

Each cause is produced for real where a process can: by ranks, a torchrun of a few lines, and the
supervisor's roles.
"""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import short_torchrun
from tests.support.ending_batch import Job, handlers_kept
from tests.support.told_run import run_at
from toolkit.cli import output
from toolkit.cli.summary import rows_of, summary_lines, summary_of
from toolkit.kubernetes.pods import last_words
from toolkit.runs.records import run_directory
from toolkit.runs.views import report
from toolkit.supervisor import local, pod
from toolkit.supervisor.evidence.cause import LOOPBACK
from toolkit.supervisor.notify import Receivers
from toolkit.supervisor.policy import Limits
from toolkit.supervisor.supervised import Policy

KILL = "import os, signal; "
ONE = "import os\nif os.environ['RANK'] == '1': "
"""What only rank 1 does; rank 0 ends well."""

REFUSES = "import argparse; argparse.ArgumentParser(prog='train.py').parse_args(['--epoch', '3'])"
RECORDS = """\
import json, os
if os.environ["RANK"] == "1":
    message = {"message": "ValueError: sample 7", "extraInfo": {"timestamp": "1700000000"}}
    json.dump({"message": message}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
    raise SystemExit(1)
"""
LOSES_A_PEER = """\
import os, signal, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    open("ready", "w").close()
    signal.pause()
while not os.path.exists("ready"):
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer [10.0.0.2]:41234")
"""
PORT = """\
import socket
taken = socket.create_server(("127.0.0.1", 0))
socket.socket().bind(taken.getsockname())
"""
DEVICE = ONE + "raise RuntimeError('CUDA error: invalid device ordinal')"
STEP = (  # by both ranks, of which one is killed when the other one fails
    'import json, os; draft = f"run/outcome.{os.getpid()}"; json.dump({"version": 1, "status": '
    '"%s", "attempt": 0, "step": 57, "rank": %s, "reason": "%s"}, open(draft, "w")); '
    'os.replace(draft, "run/outcome.json"); '
)


class Place:
    """A folder with a run directory, and the run that people ask for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.job: Job | None = None

    @property
    def reason(self) -> str:
        return (self.run_dir / "logs/attempt-0/reason").read_text().rstrip("\n")

    def sentences(self, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
        """Yield the sentence as each view shows it."""
        run = run_at(self.run_dir)
        run.told = run_directory.ended_status(self.run_dir)
        yield "list", str(rows_of([run])[0]["reason"])
        (line,) = [line for line in summary_lines(summary_of(run)) if line.startswith("reason:")]
        yield "status", line.removeprefix("reason:").strip()
        capsys.readouterr()
        output.print_end(run, run.told)
        last = capsys.readouterr().err.strip().split("\n")[-1]
        yield "logs", last.removeprefix("digits: FAILED (").partition("); run directory")[0]
        (attempt,) = report._attempts(run)
        yield "report", str(attempt["reason"])
        content = json.loads((self.run_dir / "logs/attempt-0/notified-end.json").read_text())
        yield "notification", str(content["text"]).partition(" ended: ")[2]


POLICY = Policy("digits", 0, Limits(0), 60, receivers=Receivers(("end",), command="cat >noted"))


def here(folder: Path, script: str, *, ranks: int = 2, devices: str = "", nodes: int = 1) -> Place:
    """Run a script on this machine by the role `local`."""
    (folder / "train.py").write_text(script)
    options = local.Options(
        run_dir="run",
        mode="",
        command=["torchrun", f"--nproc-per-node={ranks}", "train.py"],
        devices=[devices] * nodes,
        ports=(61000, 4000),
        static=False,
        policy=POLICY,
    )
    with handlers_kept():
        assert local.main(options) != 0
    return Place(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", short_torchrun.installed(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


LOCAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "an exception": (
        ONE + "raise ValueError('bad batch')", {},
        "failed: rank 1 on node-0: ValueError: bad batch",
    ),
    "an error file": (RECORDS, {}, "failed: rank 1 on node-0: ValueError: sample 7"),
    "killed": (
        KILL + ONE + "os.kill(os.getpid(), signal.SIGKILL)", {},
        "failed: rank 1 on node-0: killed by SIGKILL",
    ),
    "a segmentation fault": (
        KILL + ONE + "os.kill(os.getpid(), signal.SIGSEGV)", {},
        "failed: rank 1 on node-0: killed by SIGSEGV",
    ),
    "an exit status": (
        "import sys\n" + ONE + "sys.exit('no data in /data')", {},
        "failed: rank 1 on node-0: exit status 1: no data in /data",
    ),
    "a lost peer": (LOSES_A_PEER, {}, "failed: rank 1 on node-0: killed by SIGKILL"),
    "a peer of this machine": (
        ONE + "raise RuntimeError('Gloo connectFullMesh failed with [pair.cc:144] no error, "
        "remote=[127.0.0.1]:41234')", {"nodes": 2},
        "failed: rank 1 on node-[01] has lost another rank, which left no word: RuntimeError: "
        "Gloo connectFullMesh failed with [pair.cc:144] no error, remote=[127.0.0.1]:41234",
    ),
    "a syntax error": (
        "def f(:\n    pass\n", {},
        "fatal: rank [01] on node-0: SyntaxError: invalid syntax; no node can start it",
    ),
    "a missing module": (
        "import torchvison", {},
        "fatal: rank [01] on node-0: ModuleNotFoundError: No module named 'torchvison'; "
        "no node can start it",
    ),
    "a module that is missing later": (
        "import os; os.makedirs('run/checkpoints/attempt-0/step-00000050', exist_ok=True)\n"
        + STEP % ("running", "None", "") + "import torchvison", {},
        "failed: rank [01] on node-0: ModuleNotFoundError: No module named 'torchvison', "
        "at step 57 or later, 7 steps after the newest checkpoint",
    ),
    "a module that was there before": (
        "import os; os.makedirs('run/checkpoints/first', exist_ok=True)\nimport torchvison", {},
        "failed: rank [01] on node-0: ModuleNotFoundError: No module named 'torchvison'",
    ),
    "an argument": (
        REFUSES, {},
        "fatal: rank [01] on node-0: exit status 2: train.py: error: unrecognized arguments: "
        "--epoch 3: another start would end like this one",
    ),
    "too few GPUs": (
        DEVICE, {"devices": "0", "ranks": 2},
        "fatal: rank [01] on node-0: RuntimeError: CUDA error: invalid device ordinal; "
        "2 ranks per node, and 1 GPUs",
    ),
    "a GPU that is away": (
        DEVICE, {"devices": "0,1"},
        "failed: rank [01] on node-0: RuntimeError: CUDA error: invalid device ordinal",
    ),
    "memory of a GPU": (
        ONE + "raise MemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')", {},
        "failed: rank 1 on node-0: MemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    "a read-only file system": (
        ONE + f"raise OSError({errno.EROFS}, os.strerror({errno.EROFS}), '/ro/x')", {},
        "failed: rank 1 on node-0: OSError: [Errno 30] Read-only file system: '/ro/x'",
    ),
    "a quota": (
        ONE + f"raise OSError({errno.EDQUOT}, os.strerror({errno.EDQUOT}))", {},
        "failed: rank 1 on node-0: OSError: [Errno 122] Disk quota exceeded",
    ),
    "the outcome says why": (
        STEP % ("fatal", "1", "loss is nan") + "raise SystemExit(1)", {},
        "fatal: rank 1: loss is nan",
    ),
    "the outcome says what may go away": (
        STEP % ("retryable", "0", "lost rank 1") + "raise SystemExit(1)", {},
        "failed: rank 0: lost rank 1",
    ),
    "the outcome only reports a loss": (
        STEP % ("retryable", "0", "another rank went away at step 57 of 300") + KILL
        + "os.kill(os.getpid(), signal.SIGKILL)", {},
        "failed: rank [01] on node-0: killed by SIGKILL",
    ),
    "killed at a step": (
        STEP % ("running", "None", "") + KILL + "os.kill(os.getpid(), signal.SIGKILL)", {},
        "failed: rank [01] on node-0: killed by SIGKILL, at step 57 or later",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_the_cause_is_the_reason_on_this_machine(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, how, cause = LOCAL[name]
    place = here(folder, script, **how)
    sentence = _first(place, capsys)
    assert re.fullmatch(_pattern(cause) + "; not started again.*", sentence)
    assert {text for _, text in place.sentences(capsys)} == {sentence}
    assert not re.search("retryable|without a word", sentence)


def _first(place: Place, capsys: pytest.CaptureFixture[str]) -> str:
    return next(place.sentences(capsys))[1]


def _pattern(cause: str) -> str:
    return re.escape(cause).replace(r"\[01\]", "[01]")


OWN: dict[str, tuple[str, str]] = {
    "a port that is taken": (PORT, "failed: torchrun: OSError: [Errno 98] Address already in use"),
    "an option of torchrun": (
        "import argparse; argparse.ArgumentParser(prog='torchrun').parse_args(['--nnode'])",
        "fatal: torchrun: torchrun: error: unrecognized arguments: --nnode: "
        "another start would end like this one",
    ),
    "torchrun is killed": (
        KILL + "os.kill(os.getpid(), signal.SIGKILL)",
        "failed: torchrun was killed on this machine (exit status 137)",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_torchruns_own_end_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, cause = OWN[name]
    (folder / "bin/torchrun").write_text(f"#!{sys.executable} -S\n{program}\n")
    place = here(folder, "")
    assert {text.partition("; not started")[0] for _, text in place.sentences(capsys)} == {cause}


def test_a_torchrun_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    place = here(folder, "")
    cause = "fatal: torchrun is not in PATH; activate the environment that has torch"
    assert {text for _, text in place.sentences(capsys)} == {cause}


# ---- Slurm

UNKNOWN = "failed: exit status 1"
RANK = """\
  time      : 2026-11-21_23:47:20
  host      : n2
  rank      : 1 (local_rank: 0)
  exitcode  : {} (pid: 7)
  error_file: <N/A>
"""
KILLED, RAISED = RANK.format(-9), RANK.format(1)


def real(*words: str) -> str:
    """Return what a program prints on its stderr."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stderr


PYXIS = "slurmstepd: error: pyxis: "
SLURM: dict[str, tuple[dict[str, Any], str]] = {
    "srun is refused": (
        {"printed": "srun: error: Unable to create step for job 7: Invalid Trackable RESource"},
        "failed: srun could not start torchrun: Unable to create step for job 7: Invalid "
        "Trackable RESource (exit status 1)",
    ),
    "a credential has expired": (
        {"printed": "srun: error: Task launch for StepId=7.0 failed on node n2: "
                    "Job credential expired", "status": 167},
        "failed: srun could not start on n2: Job credential expired; Slurm's cred_expire must pass "
        "after a requeue (exit status 167)",
    ),
    "a prolog": (
        {"printed": "slurmstepd-n2: error: TaskProlog failed status=1"},
        "failed: TaskProlog failed status=1 on n2 (exit status 1)",
    ),
    "an image that no registry has": (
        {"printed": PYXIS + "[ERROR] URL https://registry.example/v2/x/manifests/9 returned "
                    "error code: 404\nsrun: error: spank_pyxis.so: task_init() failed"},
        "fatal: srun could not start torchrun: URL https://registry.example/v2/x/manifests/9 "
        "returned error code: 404 (exit status 1)",
    ),
    "a registry that is away": (
        {"printed": PYXIS + "[ERROR] Could not process JSON input\nsrun: error: failed"},
        "failed: srun could not start torchrun: Could not process JSON input (exit status 1)",
    ),
    "apptainer on one node": (
        {"printed": "FATAL:   could not open image /x.sif: no such file or directory",
         "cannot": {1: "retryable n2: apptainer could not start the container"}},
        "failed: n2: apptainer could not start the container: could not open image /x.sif: no such "
        "file or directory",
    ),
    "podman": (
        {"printed": "Error: initializing source docker://x/y: manifest unknown",
         "cannot": {1: "retryable n2: podman could not start the container"}},
        "fatal: n2: podman could not start the container: initializing source docker://x/y: "
        "manifest unknown",
    ),
    "no torchrun on one node": (
        {"cannot": {1: "missing n2: torchrun: No such file or directory"}, "status": 127},
        "failed: n2: torchrun: No such file or directory",
    ),
    "no torchrun on any node": (
        {"cannot": {n: f"missing n{n + 1}: torchrun: No such file or directory" for n in (0, 1)},
         "status": 127},
        "fatal: n1: torchrun: No such file or directory",
    ),
    "the shell": (
        {"printed": real("bash", "-c", "no-such-program"), "began": True, "status": 1},
        "failed: no-such-program: command not found",
    ),
    "a rank is killed": (
        {"printed": KILLED, "began": True},
        "failed: rank 1 on n2: killed by SIGKILL",
    ),
    "out of memory": (
        {"printed": KILLED, "began": True, "oom": {1: "n2 (rank 1 had used 9 MiB)"}},
        "fatal: out of memory: the kernel killed a process on n2 (rank 1 had used 9 MiB)",
    ),
    "torchrun is killed": (
        {"began": True, "failed": {1: "5.0\tn2\t137"}, "status": 137},
        "failed: torchrun was killed on n2 (exit status 137)",
    ),
    "a module is missing on one node": (
        {"stderr": {1: "ModuleNotFoundError: No module named 'x'"}, "began": True,
         "printed": RAISED},
        "failed: rank 1 on n2: ModuleNotFoundError: No module named 'x'",
    ),
    "a module is missing on each node": (
        {"stderr": dict.fromkeys((0, 1), "ModuleNotFoundError: No module named 'x'"), "began": True,
         "printed": RAISED},
        "fatal: local rank 0 on n1: ModuleNotFoundError: No module named 'x'; no node can start it",
    ),
    "a name leads to 127.0.1.1": (
        {"stderr": {1: "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error, "
                       "remote=[127.0.1.1]:41234"}, "began": True, "printed": RAISED},
        "fatal: rank 1 on n2: RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no "
        f"error, remote=[127.0.1.1]:41234; {LOOPBACK}",
    ),
    "a store of the first node is gone": (
        {"printed": "[W1121 TCPStore.cpp:138] [c10d] recvValue failed on SocketImpl(fd=8, "
                    "addr=[127.0.0.1]:49770, remote=[127.0.1.1]:61000): Connection reset by peer\n"
                    + KILLED, "began": True},
        "failed: rank 1 on n2: killed by SIGKILL",
    ),
    "nothing": ({"began": True}, UNKNOWN),
}  # fmt: skip


def on_slurm(folder: Path, given: dict[str, Any]) -> Place:
    """End an attempt on two nodes that has left marks, folders of ranks and lines in its log."""
    (folder / "run").mkdir()
    receivers = Receivers(("end",), command="cat >noted")
    job = Job(folder / "run", limit=0, in_job=0, receivers=receivers)
    logs = job.folder(0)
    for node in (0, 1) if given.get("began") else ():
        (logs / f"began-{node}").write_text("3\n")
    for kind in ("cannot", "oom", "failed"):
        for node, text in given.get(kind, {}).items():
            (logs / f"{kind}-{node}").write_text(text + "\n")
    for node, error in given.get("stderr", {}).items():
        rank = logs / f"node-{node}/none_a/attempt_0/0"
        rank.mkdir(parents=True)
        (rank / "stderr.log").write_text(f"Traceback (most recent call last):\n  x\n{error}\n")
    (logs / "nodes").write_text("n1\nn2\n")
    (logs / "exit_status").write_text("1\n")
    job.conclude(given.get("status", 1), printed=given.get("printed", ""))
    return Place(folder)


@pytest.mark.parametrize("name", SLURM)
def test_the_cause_is_the_reason_on_slurm(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given, cause = SLURM[name]
    place = on_slurm(tmp_path, given)
    sentence = _first(place, capsys)
    assert re.fullmatch(re.escape(cause) + "; not queued again.*", sentence)
    assert {text for _, text in place.sentences(capsys)} == {sentence}
    assert not re.search("retryable|without a word", sentence)


# ---- Pods

PODS: dict[str, tuple[str, str]] = {
    "an exception": (
        ONE + "raise ValueError('bad batch')", "failed: rank 1 on t-0: ValueError: bad batch",
    ),
    "killed": (
        KILL + ONE + "os.kill(os.getpid(), signal.SIGKILL)",
        "failed: rank 1 on t-0: killed by SIGKILL",
    ),
    "a missing module": (
        "import torchvison",
        "fatal: rank [01] on t-0: ModuleNotFoundError: No module named 'torchvison'; "
        "no node can start it",
    ),
    "an argument": (
        REFUSES,
        "fatal: rank [01] on t-0: exit status 2: train.py: error: unrecognized arguments: "
        "--epoch 3: another start would end like this one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PODS)
def test_the_cause_is_the_reason_in_pods(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that the kubelet keeps, the pod's file and the notification."""
    script, cause = PODS[name]
    (folder / "train.py").write_text(script)
    for variable, value in {"HOSTNAME": "t-0", "TRAIN_RUN_DIR": str(folder / "run")}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("TORCH_LOGS_OUT", raising=False)
    command = ["torchrun", "--nproc-per-node=2", "train.py"]
    options = pod.Options(command, POLICY._replace(limits=Limits(0)), cgroups=str(folder))
    with handlers_kept():
        status = pod.main(options)
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert re.fullmatch(f"torchrun ended with 1; {_pattern(cause)}; not started again.*", last)
    assert last.endswith(f": {status}")
    words = last_words(last)
    assert (words.word, words.verdict) == (cause.partition(":")[0], last)
    logs = folder / "run/logs/attempt-0"
    assert (logs / "t-0/ended").read_text() == last + "\n"
    text = json.loads((logs / "notified-end.json").read_text())["text"]
    assert text.endswith(" ended: " + last.partition("; ")[2].rpartition(": ")[0])
