"""One node of a Slurm step: the real program, with a script in the place of torchrun."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Until
from toolkit.supervisor import node as node_module
from toolkit.supervisor.node import Node, Options, is_reachable
from toolkit.supervisor.own_folder import LONGEST_TMPDIR, OwnFolder, remove_left_folders
from toolkit.supervisor.process import Signals

ENVIRON = {
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "7",
    "SLURM_JOB_ID": "42",
    "SLURMD_NODENAME": "n2",
}
RECORD = """
import json, os, sys
files = {}
for folder in filter(None, os.environ.get("PYTHONPATH", "").split(":")):
    files[folder] = sorted(os.listdir(folder)) + sorted(os.listdir(os.path.dirname(folder)))
json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "files": files}, open("record", "w"))
"""


class Place:
    """The folder of an attempt, and a torchrun."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.logs = folder, folder / "logs/attempt-0"
        self.logs.mkdir(parents=True)
        self.environ = {**os.environ, **ENVIRON, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        (folder / "bin").mkdir()

    def program(self, name: str, text: str) -> None:
        path = self.run_dir / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def argv(self, text: str, *options: str, words: tuple[str, ...] = ()) -> list[str]:
        """Return the command line of a node whose torchrun is a script of sh."""
        self.program("torchrun", f"#!/bin/sh\ncd {self.run_dir}\n{text}\n")
        own = [sys.executable, "-Ium", "toolkit.supervisor", "node", str(self.logs)]
        return [*own, *options, "--", "torchrun", *words]

    def start(self, text: str, *options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.argv(text, *options),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, text: str, *options: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
        """Run a node; return its exit status and what it has printed."""
        done = subprocess.run(
            self.argv(text, *options, words=words),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def here(self, text: str, **options: Any) -> Node:
        """Return a node in this process."""
        words = self.argv(text)
        made = Options(logs=str(self.logs), command=words[words.index("--") + 1 :], **options)
        signals = Signals([signal.SIGCHLD])
        return Node(made, signals, self.environ)

    def files(self) -> dict[str, str]:
        """Return what the node has written, but for the clock that shows its life."""
        return {
            path.name: path.read_text()
            for path in self.logs.iterdir()
            if path.is_file() and not path.name.startswith("alive-")
        }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a node of this process look often, and puts back what it has done to signals."""
    monkeypatch.setattr(node_module, "LOOK_S", 0.02)
    monkeypatch.setattr(node_module, "PAUSE_S", 0.02)
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


# ---- The files, and the answer to srun


@pytest.mark.parametrize("status", [0, 3])
def test_a_node_leaves_behind_how_torchrun_has_ended(place: Place, status: int) -> None:
    began = int(time.time())
    assert place.run(f"exit {status}") == (status, "")
    failed = place.files().pop("failed-1", "")
    assert place.files() == {
        "began-1": "7\n",
        "ended-1": f"{status}\n",
        **({"failed-1": failed} if status else {}),
    }
    assert re.fullmatch(r"\d{10}\.\d{9}\tn2\t3\n" if status else "", failed)
    assert int((place.logs / "alive-1").read_text()) >= began


def test_a_torchrun_that_is_killed_is_told_as_a_shell_does(place: Place) -> None:
    assert place.run("kill -KILL $$")[0] == 137
    assert place.files()["failed-1"].endswith("\tn2\t137\n")


@pytest.mark.parametrize(("mode", "status"), [(None, 127), (0o644, 126)])
def test_a_torchrun_that_cannot_be_started_is_named(
    place: Place, mode: int | None, status: int
) -> None:
    argv = place.argv("")
    path = place.run_dir / "bin/torchrun"
    path.unlink() if mode is None else path.chmod(mode)
    place.environ["PATH"] = str(path.parent)
    done = subprocess.run(argv, env=place.environ, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.startswith("n2: torchrun: ")
    assert place.files()["ended-1"] == f"{status}\n"


def test_a_run_directory_that_is_removed_does_not_change_how_torchrun_has_ended(
    place: Place,
) -> None:
    status, printed = place.run(f"rm -r {place.logs}; exit 5")
    assert status == 5
    assert "n2: [Errno 2] No such file or directory" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ((), {"PET_RDZV_CONF": "is_host=0,join_timeout=600"}),
        (
            ("--static", "--join-timeout=9"),
            {"PET_RDZV_CONF": "timeout=9", "PET_NODE_RANK": "1"},
        ),
        (
            ("--elastic", "--joins"),
            {"PET_RDZV_CONF": "is_host=0,join_timeout=600", "key": "joined-by-42"},
        ),
    ],
)
def test_torchrun_is_told_what_differs_from_node_to_node(
    place: Place, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    (place.run_dir / "record.py").write_text(RECORD)
    more = [
        "--env=WORD=it's $HOME, a=b",
        "--env=EMPTY=",
        "--env=PATH=" + ":".join((f"{place.run_dir}/bin", "/usr/bin", "/bin")),
    ]
    status, printed = place.run(
        f'exec {sys.executable} record.py "$@"', *options, *more, words=("--x=1", "", "a b")
    )
    assert (status, printed) == (0, "")
    seen = json.loads((place.run_dir / "record").read_text())
    assert seen["argv"] == ["--x=1", "", "a b"]
    key = variables.pop("key", "1")
    expected = {
        "PET_LOCAL_ADDR": "n2",
        "PET_LOG_DIR": f"{place.logs}/node-{key}",
        "WORD": "it's $HOME, a=b",
        "EMPTY": "",
        **variables,
    }
    assert {name: seen["env"].get(name) for name in expected} == expected
    assert ("PET_NODE_RANK" in seen["env"]) is ("PET_NODE_RANK" in variables)
    assert (place.logs / f"began-{key}").exists()


def test_the_first_node_is_the_host_of_the_rendezvous(place: Place) -> None:
    place.environ["SLURM_NODEID"] = "0"
    assert place.run("echo $PET_RDZV_CONF") == (0, "is_host=1,join_timeout=600\n")


# ---- A stop


def test_a_stop_that_came_before_a_node_could_hear_it_is_heard(place: Place) -> None:
    """srun drops a signal that comes before its tasks have started; the mark in the file stays."""
    (place.logs / "stopping").write_text("cancelled\n")
    assert place.run("touch trained") == (0, "")  # to srun no failed node
    assert not (place.run_dir / "trained").exists()
    assert place.files()["stopped-1"] == place.files()["ended-1"] == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_torchrun_that_is_stopped_is_no_failed_node(
    place: Place, until: Until, number: signal.Signals
) -> None:
    """srun would kill the other nodes in their checkpoint."""
    # A node that is slow to notice that torchrun runs sends SIGTERM once more.
    task = place.start("trap '' TERM; touch began; until [ -e end ]; do sleep 0.05; done; exit 1")
    until((place.run_dir / "began").exists, "torchrun runs")
    task.send_signal(number)
    task.send_signal(number)
    assert task.poll() is None, "torchrun still writes its checkpoint"
    (place.run_dir / "end").touch()
    assert task.communicate()[0] == ""
    assert task.returncode == 0
    files = place.files()
    assert (files["ended-1"], files["stopped-1"]) == ("1\n", "1\n")
    assert "failed-1" not in files


class SignalLater(Signals):
    """A signal that comes while torchrun is being started."""

    def take(self) -> Iterator[int]:
        if Path(self.after).exists():
            yield signal.SIGTERM

    after = ""


def test_a_signal_that_comes_while_torchrun_is_being_started_reaches_it(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = place.here("sleep 60")
    started, popen = place.run_dir / "started", subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.touch()
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    node.signals = SignalLater([signal.SIGCHLD])
    monkeypatch.setattr(node.signals, "after", str(started))
    assert node.run() == 0
    assert place.files()["stopped-1"] in ("143\n", "1\n")


# ---- Signs of life


def test_a_node_opens_little_and_lists_nothing_where_all_nodes_write(
    place: Place, quick: None
) -> None:
    """In a minute at most eight files of the shared file system, and no folder."""
    node = place.here("")
    seen: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(
            str(place.run_dir)
        ):
            seen.append(event)

    sys.addaudithook(note)
    with subprocess.Popen(["sleep", "60"]) as torchrun:
        for now_s in range(0, 600, 3):
            node.look(torchrun, float(now_s))
        torchrun.kill()
    assert set(seen) == {"open"}
    assert len(seen) <= 80


@pytest.mark.parametrize(("nodes", "seconds"), [("2", 9.0), ("1000", 60.0), ("many", 9.0)])
def test_many_nodes_show_their_lives_less_often(
    place: Place, quick: None, nodes: str, seconds: float
) -> None:
    place.environ["SLURM_STEP_NUM_NODES"] = nodes
    node = place.here("")
    with subprocess.Popen(["sleep", "60"]) as torchrun:
        node.look(torchrun, 100.0)
        for now_s, shown in ((100.0 + seconds - 1, False), (100.0 + seconds, True)):
            (place.logs / "alive-1").unlink(missing_ok=True)
            node.look(torchrun, now_s)
            assert (place.logs / "alive-1").exists() is shown
        torchrun.kill()


# ---- Memory

RUNS_OUT = """
trap 'kill $!; exit 1' TERM
RANK=0 TORCHELASTIC_RESTART_COUNT=0 sleep 60 &
until [ -e killed ]; do sleep 0.02; done
kill $!
wait $!
RANK=0 TORCHELASTIC_RESTART_COUNT=1 sleep 60 &
wait $!
"""


def test_ranks_that_ran_out_of_memory_are_not_started_again(
    place: Place, quick: None, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = place.run_dir / "killed"
    monkeypatch.setattr(node_module, "oom_kills", lambda: int(killed.exists()))
    node = place.here(RUNS_OUT)

    def kill_when_seen() -> None:
        until(lambda: node._peak, "a rank was seen")
        killed.touch()

    seen = threading.Thread(target=kill_when_seen)
    seen.start()
    assert node.run() == 1
    seen.join()
    assert re.fullmatch(r"n2 \(rank 0 had used \d+ MiB\)\n", place.files()["oom-1"])
    assert "failed-1" in place.files()


def test_a_rank_that_is_killed_in_the_last_start_is_told(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = place.run_dir / "killed"
    monkeypatch.setattr(node_module, "oom_kills", lambda: int(killed.exists()))
    assert place.here("touch killed; exit 1").run() == 1
    assert place.files()["oom-1"] == "n2\n"


def test_a_look_that_fails_does_not_end_torchrun(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(pids: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(node_module, "ranks_below", fails)
    assert place.here("sleep 0.2; exit 4").run() == 4
    assert "RuntimeError: boom" in capsys.readouterr().err


# ---- Elastic

DIES_ONCE = """
echo start >>starts
[ -e died ] && exit 0
touch died
TORCHELASTIC_RUN_ID=x sleep 60 &
until grep -qsz TORCHELASTIC /proc/$!/environ; do sleep 0.01; done
echo $! >worker
kill -KILL $$
"""


def test_a_torchrun_that_dies_alone_starts_again_and_its_workers_do_not_outlive_it(
    place: Place, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = place.here(DIES_ONCE, elastic=True, restarts=2)
        endpoint = f"--rdzv-endpoint=127.0.0.1:{server.getsockname()[1]}"
        node.options = node.options._replace(command=[*node.options.command, endpoint])
        assert node.run() == 0
    assert capsys.readouterr().out == (
        "torchrun ended on n2 with exit status 137 while others go on; it starts again\n"
    )
    assert (place.run_dir / "starts").read_text() == "start\n" * 2
    assert "succeeded-1" in place.files()
    state = Path(f"/proc/{(place.run_dir / 'worker').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_NODEID": "0"}, {"restarts": 0}, {"elastic": False}, {"endpoint": "127.0.0.1:1"}],
    ids=["the host", "no restarts left", "a fixed number of nodes", "nobody is left"],
)
def test_a_torchrun_that_dies_does_not_start_again(
    place: Place, quick: None, changed: dict[str, Any]
) -> None:
    place.environ["SLURM_NODEID"] = changed.pop("SLURM_NODEID", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = changed.pop("endpoint", f"127.0.0.1:{server.getsockname()[1]}")
        node = place.here(DIES_ONCE, **{"elastic": True, "restarts": 2, **changed})
        words = [*node.options.command, f"--rdzv-endpoint={endpoint}"]
        node.options = node.options._replace(command=words)
        assert node.run() == 137
    os.kill(int((place.run_dir / "worker").read_text()), signal.SIGKILL)
    assert (place.run_dir / "starts").read_text() == "start\n"


@pytest.mark.parametrize("words", [[], ["--rdzv-endpoint="], ["--rdzv-endpoint=h:x"]])
def test_an_endpoint_that_is_none_is_not_reached(words: list[str]) -> None:
    assert not is_reachable(["torchrun", *words])


# ---- What ranks start with

SITE = ("site", "sitecustomize.py", "quick_imports.py", "start.sh")


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["--protect-children"], {*SITE, "rank_children.py"}),
        (
            ["--env=TRAIN_LOG_PATTERN=x", "--stall=learned"],
            {
                *(*SITE, "rank_watch.py"),
                *("watchdog.py", "stragglers.py", "log_steps.py"),
            },
        ),
    ],
)
def test_the_programs_of_the_watchdog_are_on_the_node_itself_and_go_with_it(
    place: Place, options: list[str], files: set[str]
) -> None:
    """No file server has to be there for a rank to start again."""
    (place.run_dir / "record.py").write_text(RECORD)
    place.environ.pop("PYTHONPATH", None)
    run = (f"--env=TRAIN_RUN_DIR={place.run_dir}", "--env=TRAIN_ATTEMPT=0")
    assert place.run(f"exec {sys.executable} record.py", *options, *run) == (0, "")
    ((folder, found),) = json.loads((place.run_dir / "record").read_text())["files"].items()
    assert {name for name in found if name != "__pycache__"} == files
    assert re.fullmatch(r"/tmp/supervisor\.\w+/watchdog/site", folder)
    assert not Path(folder).exists()


def test_a_run_goes_on_where_the_programs_cannot_be_written(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = place.here("exit 0", protect_children=True)
    monkeypatch.setattr(node, "_folder", OwnFolder("/proc/none"))
    assert node.run() == 0
    assert "n2: the run goes on without a watchdog: " in capsys.readouterr().err


def test_what_a_killed_process_has_left_is_removed_and_nothing_that_is_in_use(
    tmp_path: Path,
) -> None:
    place = str(tmp_path)
    mine = OwnFolder(place)
    mine.path("x")
    left = f"from toolkit.supervisor.own_folder import OwnFolder as O; o = O({place!r}); "
    left += "open(o.path('x'), 'w'); import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", left], check=False, cwd=ROOT)
    (tmp_path / "supervisor.other").mkdir()  # as one is before it has its lock
    assert len(list(tmp_path.iterdir())) == 3
    remove_left_folders(place)
    assert {str(path) for path in tmp_path.iterdir()} == {mine.made, f"{place}/supervisor.other"}
    mine.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.other"]


IN_TMPDIR = """
import os, socket, sys
folder = os.environ["TMPDIR"]
os.mkdir(folder + "/torch-shm-dir-abcdef")
socket.socket(socket.AF_UNIX).bind(folder + "/torch-shm-dir-abcdef/manager.sock")
open("seen", "w").write(folder)
"""


@pytest.mark.parametrize("length", [LONGEST_TMPDIR, LONGEST_TMPDIR + 1, 200])
def test_sockets_can_be_made_in_a_tmpdir_of_any_length(place: Place, length: int) -> None:
    (place.run_dir / "bind.py").write_text(IN_TMPDIR)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        site = Path(folder, "x" * (length - len(folder) - 1))
        site.mkdir()
        place.environ["TMPDIR"] = str(site)
        status, said = place.run(f"exec {sys.executable} bind.py")
        assert (status, [path.name for path in site.iterdir()]) == (0, ["torch-shm-dir-abcdef"])
    seen = (place.run_dir / "seen").read_text()
    if length == LONGEST_TMPDIR:
        assert (seen, said) == (str(site), "")
    else:
        assert re.fullmatch(r"/tmp/supervisor\.\w+/tmp", seen)
        text = (
            f"TMPDIR has {length} characters, too many for sockets in it: ranks see it as {seen}\n"
        )
        assert said == text
        assert not os.path.lexists(seen)


def test_a_tmpdir_that_a_job_sets_is_shortened_too(place: Place, tmp_path: Path) -> None:
    site = tmp_path / ("x" * 100)
    site.mkdir()
    (place.run_dir / "bind.py").write_text(IN_TMPDIR)
    assert place.run(f"exec {sys.executable} bind.py", f"--env=TMPDIR={site}")[0] == 0
    assert [path.name for path in site.iterdir()] == ["torch-shm-dir-abcdef"]


# ---- Containers

RUNTIME = """#!/bin/sh
case "$*" in
"image exists"*) exit 1 ;;
run* | exec*)
  printf '%s\\n' "$@" >words
  [ ! -e status ] || exit $(cat status)
  while [ "$1" != image ]; do shift; done
  shift
  exec "$@"
esac
"""


@pytest.fixture
def runtime(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Has stand-ins of podman and apptainer, which run the command on the node itself."""
    for name in ("podman", "apptainer"):
        place.program(name, RUNTIME)
    monkeypatch.chdir(place.run_dir)
    return place


@pytest.mark.parametrize(("name", "status"), [("podman", 125), ("apptainer", 255)])
def test_a_container_that_does_not_start_may_start_on_another_node(
    runtime: Place, name: str, status: int
) -> None:
    (runtime.run_dir / "status").write_text(str(status))
    assert runtime.run("exit 0", f"--runtime={name}", "--image=image")[0] == status
    assert runtime.files()["cannot-1"] == (f"retryable n2: {name} could not start the container\n")


@pytest.mark.parametrize("name", ["podman", "apptainer"])
def test_torchrun_runs_in_a_container(runtime: Place, name: str) -> None:
    (runtime.run_dir / "record.py").write_text(RECORD)
    status, printed = runtime.run(
        f'exec {sys.executable} record.py "$@"',
        *(f"--runtime={name}", "--image=image", "--env=WORD=a b", "--protect-children"),
        words=("--x",),
    )
    assert (status, printed) == (0, "")
    words = (runtime.run_dir / "words").read_text().splitlines()
    own = words[words.index("image") + 1 :]
    if name == "podman":
        assert own[0] == "sh" and own[1].endswith("/inside.sh")
        own = own[2:]
    assert own[:3] == ["env", "WORD=a b", "sh"]
    assert own[4:] == ["never", "torchrun", "--x"]
    folder = own[3].removesuffix("/watchdog/start.sh")
    mount = {"podman": "--volume", "apptainer": "--bind"}[name]
    mounts = [words[at + 1] for at, word in enumerate(words) if word == mount]
    assert mounts == [f"{runtime.run_dir}:{runtime.run_dir}", f"{folder}:{folder}"]
    assert "cannot-1" not in runtime.files()


def test_an_image_that_is_nowhere_ends_the_job(runtime: Place) -> None:
    status, _ = runtime.run("exit 0", "--runtime=podman", "--image=localhost/none:1")
    assert status == 125
    assert runtime.files()["cannot-1"] == (
        "fatal n2: podman has no image localhost/none:1 here, and nowhere to pull it from\n"
    )
    assert runtime.files()["ended-1"] == "125\n"


def test_a_container_ends_when_its_node_role_is_killed(runtime: Place, until: Until) -> None:
    """Even by SIGKILL, and though the container ignores every other signal."""
    runtime.program("podman", RUNTIME.replace('  exec "$@"', "  cat >/dev/null; touch ended"))
    task = runtime.start("", "--runtime=podman", "--image=image")
    until((runtime.run_dir / "words").exists, "the container runs")
    task.kill()
    until((runtime.run_dir / "ended").exists, "its stdin has ended")
    task.communicate()


def test_a_supervisor_that_fails_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Node, "_until_the_end", fails)
    before = {number: signal.getsignal(number) for number in (*node_module.STOPS, signal.SIGCHLD)}
    try:
        for name, value in ENVIRON.items():
            monkeypatch.setenv(name, value)
        assert node_module.main(Options(str(place.logs), ["torchrun"])) == 1
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert place.files()["cannot-1"] == "retryable n2: the supervisor failed: RuntimeError: boom\n"
