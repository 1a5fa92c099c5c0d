"""Ranks that are forked where torch has been imported are as those that Python starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S
from toolkit.supervisor.evidence.memory import ranks_below
from toolkit.supervisor.watchdog_files import write_watchdog

COLD = "starts cold"


class Site:
    """What start.sh and torchrun do: a parent, and processes that are started for ranks."""

    def __init__(self, folder: Path, imports: str = "", **variables: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        start = write_watchdog(
            str(folder / "watchdog"), watches=True, reads_steps=False, children=True, warm=True
        )
        self.programs = Path(start).parent / "site"
        self.address = str(uuid.uuid4())
        own = {"PYTHONPATH": str(self.programs), "PYTHONUNBUFFERED": "1"}
        self.environ = {**os.environ, **own, **variables}
        for name in ("TRAIN_WATCHDOG", "TRAIN_RANK_PIDS"):
            self.environ.pop(name, None)
        # In the place of torchrun, whose end is the parent's.
        self.torchrun = subprocess.Popen(["sleep", "1d"])
        (folder / "imports.py").write_text(imports)
        self.log = (folder / "parent.log").open("ab")
        program = [sys.executable, "-u", str(self.programs / "fork_server.py")]
        command = ["torchrun", "--nnodes=1", str(folder / "imports.py")]
        self.parent = subprocess.Popen(
            [*program, self.address, str(self.torchrun.pid), *command],
            env={**self.environ, "TRAIN_IS_FORK_SERVER": "1"},
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
        )

    def close(self) -> None:
        self.torchrun.kill()
        self.torchrun.wait()
        assert self.parent.wait(PATIENCE_S) == 0, (self.folder / "parent.log").read_text()
        self.log.close()

    def rank(
        self, script: str, *arguments: str, warm: bool = True, **given: Any
    ) -> subprocess.Popen[str]:
        """Start a rank as torchrun does."""
        path = self.folder / f"{uuid.uuid4().hex[:8]}.py"
        path.write_text(script)
        return self.start([path.name, *arguments], warm=warm, **given)

    def start(
        self, argv: list[str], *, warm: bool = True, rank: int = 0, **variables: str
    ) -> subprocess.Popen[str]:
        own = {
            "TORCHELASTIC_RUN_ID": "none",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        environ = {**self.environ, **own, **variables}
        if warm:
            environ["TRAIN_FORK_SERVER"] = self.address
        return subprocess.Popen(
            [sys.executable, "-u", *argv],
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, script: str, *arguments: str, **given: Any) -> tuple[int, str, str]:
        """Return the exit status of a rank, and what it has printed."""
        process = self.rank(script, *arguments, **given)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.closing(Site(tmp_path_factory.mktemp("warm"))) as found:
        yield found


def until(condition: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


FACTS = """
import json, logging, multiprocessing, os, pickle, signal, sys, threading, torch

class Mine:
    pass

umask = os.umask(0); os.umask(umask)
names = "TRAIN_RANK_PIDS", "TORCHINDUCTOR_CACHE_DIR"  # pids; and what an import of torch sets
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__,
    "package": __package__,
    "globals": sorted(name for name in globals()),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "mine": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
    "path": sys.path,
    "environ": {k: v for k, v in os.environ.items() if k not in names},
    "protected": "TRAIN_RANK_PIDS" in os.environ,
    "folder": os.getcwd(),
    "umask": umask,
    "leads its group": os.getpgrp() == os.getsid(0),
    "handlers": [repr(signal.getsignal(n)).partition(" at ")[0] for n in range(1, signal.NSIG)],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": len(threading.enumerate()),
    "process": multiprocessing.current_process().name,
    "logging": len(logging.getLogger().handlers),
    "flags": str(sys.flags),
    "stdin": sys.stdin.read(),
    "beside": any(path.endswith("/warm0") for path in sys.path),
    "hook": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "executable": sys.executable,
    "children": multiprocessing.active_children(),
}, sort_keys=True))
"""


def test_a_forked_rank_finds_what_one_finds_that_python_has_started(site: Site) -> None:
    (site.folder / "facts.py").write_text(FACTS)
    for argv in (["facts.py", "--lr", "0.1"], ["-m", "facts", "-x"]):
        found = []
        for warm in (True, False):
            out, err = site.start(argv, warm=warm).communicate(timeout=PATIENCE_S)
            assert COLD not in err
            found.append(json.loads(out))
        assert found[0] == found[1]


def test_ranks_draw_different_random_numbers(site: Site) -> None:
    script = (
        "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1))"
    )
    drawn = [site.end(script, rank=rank)[1].split() for rank in (0, 1, 0)]
    assert all(len({*column}) == 3 for column in zip(*drawn, strict=True))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("os._exit(5)", 5),
        ("raise ValueError('no')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit; atexit.register(print, 'at exit')", 0),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()", 0),
        ("def f(:", 1),
    ],
)
def test_a_forked_rank_ends_as_any_other(site: Site, ending: str, status: int) -> None:
    script = f"import os, signal, sys, threading, time\nprint('begun')\n{ending}\n"
    path = site.folder / "ends.py"
    path.write_text(script)
    found = []
    for warm in (True, False):
        process = site.start(["ends.py"], warm=warm)
        found.append((*process.communicate(timeout=PATIENCE_S), process.returncode))
    assert found[0] == found[1]
    assert found[0][2] == status


LOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return torch.full((3,), n)

if __name__ == "__main__":
    torch.set_num_threads(2)
    model = torch.nn.Linear(3, 1)
    for batch in DataLoader(Data(), 2, num_workers=2, multiprocessing_context=sys.argv[1]):
        model(batch.float()).sum().backward()
    print(sum(batch.sum().item() for batch in DataLoader(Data(), 2, num_workers=2)))
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_loader_has_its_workers(site: Site, how: str) -> None:
    assert site.end(LOADER, how) == (0, "84\n", "")


def test_a_signal_of_torchrun_reaches_the_rank_and_not_its_loader(site: Site) -> None:
    script = """
import multiprocessing, os, signal, sys, time

def work(tell):
    tell.send(0)
    time.sleep(1.5)
    tell.send("whole")

def stop(*_):
    print(ours.recv(), flush=True)
    sys.exit(7)

ours, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(theirs,)).start()
ours.recv()
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.1)  # Python misses a signal just before a sleep begins
"""
    process = site.rank(script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    site.parent.send_signal(signal.SIGTERM)  # Slurm sends it to every process of a step
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE_S)[0] == "whole\n"
    assert process.returncode == 7


PROXY = """
import os, signal, socket, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
import rank_proxy

rank = subprocess.Popen(["sleep", "1d"], start_new_session=True)
ours, theirs = socket.socketpair()

def waits():
    with open(f"/proc/self/task/{os.getpid()}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"

def stop():
    while signal.getsignal(signal.SIGCONT) is signal.SIG_DFL or not all(
        waits() for _ in range(20) if not time.sleep(0.01)
    ):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    print(rank.wait(), flush=True)
    rank_proxy.send(theirs, {"status": 7 << 8})

threading.Thread(target=stop, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
rank_proxy.be_proxy(rank.pid, ours)
"""


def test_a_signal_that_does_not_interrupt_the_proxys_wait_reaches_the_rank(site: Site) -> None:
    # As if it arrives just before the wait begins: another thread gets it from the kernel.
    argv = [sys.executable, "-c", PROXY, str(site.programs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.returncode) == ("-15\n", 7), done.stderr


def pid_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


WAIT = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1e4)\n"


def test_a_rank_ends_with_what_torchrun_has_started(site: Site) -> None:
    process = site.rank(WAIT)
    rank = pid_of(process)
    assert rank != process.pid
    until(lambda: [each.pid for each in ranks_below([os.getpid()])] == [rank])
    process.kill()
    process.communicate()
    until(lambda: not is_there(rank))


def test_ranks_end_with_torchrun_and_with_the_parent(tmp_path: Path) -> None:
    for kill in ("torchrun", "parent"):
        site = Site(tmp_path / kill)
        process = site.rank(WAIT)
        rank = pid_of(process)
        getattr(site, kill).kill()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        until(lambda rank=rank: not is_there(rank))
        site.torchrun.kill()
        site.torchrun.wait()
        site.parent.wait(PATIENCE_S)
        # The next one starts by itself.
        assert site.end("print('begun')")[:2] == (0, "begun\n")
        site.log.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"OMP_NUM_THREADS": "3"}, "its variable OMP_NUM_THREADS differs"),
        ({"MINE": "1"}, "its variable MINE differs"),
    ],
)
def test_a_rank_that_would_differ_starts_by_itself(
    site: Site, given: dict[str, str], reason: str
) -> None:
    status, out, err = site.end("import os\nprint(os.getppid())", **given)
    assert (status, out) == (0, f"{os.getpid()}\n")
    assert err.count(COLD) == 1
    assert reason in err


LAUNCH = """
import os, subprocess, sys
own = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
rank = subprocess.run([sys.executable, "-u", "rank.py"], env={**os.environ, **own})
sys.exit(rank.returncode)
"""


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C.UTF-8"}, {"LANG": "C"}], ids=str)
def test_a_rank_is_forked_in_any_locale(locale: dict[str, str], tmp_path: Path) -> None:
    start = write_watchdog(
        str(tmp_path / "watchdog"), watches=False, reads_steps=False, children=True, warm=True
    )
    (tmp_path / "torchrun.py").write_text(LAUNCH)
    (tmp_path / "rank.py").write_text(
        "import os\nprint(open(f'/proc/{os.getppid()}/cmdline').read())"
    )
    kept = ("HOME", "TMPDIR", "LD_LIBRARY_PATH")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", start, "never", sys.executable, "torchrun.py", "--nproc-per-node=1", "rank.py"],
        env={**environ, **locale},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0
    assert COLD not in done.stderr
    assert "fork_server" in done.stdout


IMPOSTOR = """
import os, socket, sys
os.setuid(65534)
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + sys.argv[1])
server.listen()
print("listens", flush=True)
connection, _ = server.accept()
print(repr(connection.recv(1000)), flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who becomes another user")
def test_another_user_at_the_address_is_told_nothing(site: Site) -> None:
    address = str(uuid.uuid4())
    argv = [sys.executable, "-c", IMPOSTOR, address]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listens\n"
        own, site.address = site.address, address
        try:
            status, out, err = site.end("print('begun')", SECRET="hidden")
        finally:
            site.address = own
        assert (status, out) == (0, "begun\n")
        assert "the fork server belongs to another user" in err
        assert impostor.communicate()[0] == "b''\n"


@pytest.fixture
def device(worker_id: str) -> Iterator[str]:
    """A file where NVIDIA's driver has its devices."""
    if os.getuid() != 0:
        pytest.skip("needs root, who may write into /dev")
    path = Path(f"/dev/nvidia-{worker_id}-{os.getpid()}")
    path.touch()
    yield str(path)
    path.unlink()


@pytest.mark.parametrize("argv", [["-c", "print(1)"], ["-O", "one.py"], ["."]])
def test_what_is_no_plain_script_starts_by_itself(site: Site, argv: list[str]) -> None:
    for name in ("one.py", "__main__.py"):
        (site.folder / name).write_text("print(1)")
    out, err = site.start(argv).communicate(timeout=PATIENCE_S)
    assert out == "1\n"
    assert COLD in err


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ("import torch; torch.Tensor.relu = None", "could not compute"),
        ("import torch, os; torch.Tensor.relu = lambda _: os._exit(3)", "could not compute"),
        ("kept = open('DEVICE')", "has opened /dev/nvidia"),
    ],
)
def test_a_parent_that_an_import_has_spoilt_forks_no_rank(
    tmp_path: Path, device: str, spoilt: str, reason: str
) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (installed := tmp_path / "lib" / version / "site-packages").mkdir(parents=True)
    (installed / "spoilt.py").write_text(spoilt.replace("DEVICE", device))
    folder = tmp_path / "site"
    path = f"{folder / 'watchdog/site'}:{installed}"
    with contextlib.closing(
        Site(folder, "import spoilt", PYTHONUSERBASE=str(tmp_path), PYTHONPATH=path)
    ) as site:
        status, out, err = site.end("print('begun')")
    assert (status, out) == (0, "begun\n")
    assert reason in err


def test_the_next_start_has_what_a_rank_has_imported(site: Site) -> None:
    script = """
import os, sys, time
print("wave" in sys.modules, flush=True)
import wave
if len(sys.argv) > 1:
    os.fork()  # as a worker of a DataLoader, which has the rank's files open
    time.sleep(1e4)
"""
    first = site.rank(script, "stay")
    assert first.stdout is not None
    assert first.stdout.readline() == "False\n"

    def knows() -> bool:
        time.sleep(2)  # each look is a rank that imports torch
        return site.end(script)[1] == "True\n"

    until(knows)
    first.kill()
    first.communicate()


def installed_in(folder: Path, **modules: str) -> dict[str, str]:
    """Install modules for the user; return the variables with which Python finds them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (place := folder / "lib" / version / "site-packages").mkdir(parents=True)
    for name, text in modules.items():
        path = place / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ours = folder / "site/watchdog/site"
    return {"PYTHONUSERBASE": str(folder), "PYTHONPATH": f"{ours}:{place}"}


def test_a_module_beside_the_script_comes_before_an_installed_one(tmp_path: Path) -> None:
    """Also where an installed package imports it."""
    variables = installed_in(
        tmp_path, datasets="WHOSE = 'installed'", other="import datasets\nWHOSE = datasets.WHOSE"
    )
    script = "import other\nprint(other.WHOSE)"
    (folder := tmp_path / "site").mkdir()
    (folder / "datasets.py").write_text("WHOSE = 'of the script'")
    with contextlib.closing(Site(folder, script, **variables)) as site:
        status, out, err = site.end(script)
    assert (status, out) == (0, "of the script\n")
    assert "its folder has a module datasets" in err


def test_a_rank_has_its_number_in_packages_that_keep_it(tmp_path: Path) -> None:
    keeps = "import os\ndef rank_zero_only(): pass\n"
    keeps += "rank_zero_only.rank = int(os.environ.get('RANK', 0))"
    name = "lightning_utilities.core.rank_zero"
    script = f"from {name} import rank_zero_only\nprint(rank_zero_only.rank)"
    packages = {"lightning_utilities.__init__": "", "lightning_utilities.core.__init__": ""}
    variables = installed_in(tmp_path, **packages, **{name: keeps})
    with contextlib.closing(Site(tmp_path / "site", script, **variables)) as site:
        for rank in (0, 1):
            assert site.end(script, rank=rank) == (0, f"{rank}\n", "")


@pytest.mark.parametrize(
    "sets",
    [
        "os.environ['MINE'] = '1'\nimport reads",
        "os.environ |= {'MINE': '1'}\nimport sys, reads",
        "if __name__ == '__main__':\n    os.environ['MINE'] = '1'\n    import reads",
        "try:\n    os.environ.update(MINE='1')\nfinally:\n    import reads",
    ],
)
def test_a_script_that_sets_variables_before_it_imports_starts_cold(
    sets: str, tmp_path: Path
) -> None:
    variables = installed_in(tmp_path, reads="import os\nMINE = os.environ.get('MINE')")
    script = f"import os\n{sets}\nprint(reads.MINE)"
    with contextlib.closing(Site(tmp_path / "site", script, **variables)) as site:
        status, out, err = site.end(script)
    assert (status, out) == (0, "1\n")
    assert "its script sets environment variables before it imports reads" in err
