"""A rank's child processes during a stop: they outlive its signal, and take those of the rank."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Until
from tests.support.watchdog import start_rank, write_site

STARTS = """
import multiprocessing, os, signal, subprocess, sys, time

CHILD = '''
import sys
for line in sys.stdin:
    print("child has", line, end="", flush=True)
open(sys.argv[1] + "/flushed", "w").close()
'''

def serve(end, folder):
    while text := end.recv():
        end.send("child has " + text)
    open(folder + "/flushed", "w").close()

def start(how, folder):
    if how == "program":
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, folder], stdin=pipe, stdout=pipe, text=True
        )
        def ask(text):
            print(text, file=child.stdin, flush=True)
            return child.stdout.readline().strip()
        def end():
            child.stdin.close()
            return child.wait()
        return ask, end
    context = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, folder))
    child.start()
    theirs.close()
    def ask(text):
        ours.send(text)
        return ours.recv()
    def end():
        ours.send("")
        child.join()
        return child.exitcode
    return ask, end
"""

ASKS = (
    STARTS
    + """
if __name__ == "__main__":
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(number))
    ask, end = start(*sys.argv[1:])
    print(ask("begun"), flush=True)
    while not told:
        time.sleep(0.01)
    print(ask("more"), flush=True)
    print("child has ended with", end(), flush=True)
"""
)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a script as a rank; at the end, what is left of it is killed."""
    site = write_site(tmp_path)
    with contextlib.ExitStack() as stack:

        def start(text: str, *argv: str, **more: str) -> "subprocess.Popen[str]":
            process = stack.enter_context(start_rank(site, text, *argv, **more))
            stack.callback(_kill_group, process.pid)
            return process

        yield start


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def lines(process: "subprocess.Popen[str]", count: int = 1) -> list[str]:
    """Return the next lines that a process prints."""
    assert process.stdout
    return [process.stdout.readline().rstrip() for _ in range(count)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver", "program"])
def test_a_child_works_on_until_its_rank_has_done_with_it(
    how: str,
    number: int,
    script: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    until: Until,
) -> None:
    rank = script(ASKS, how, str(tmp_path))
    assert lines(rank) == ["child has begun"]
    os.killpg(rank.pid, number)  # as torchrun does
    os.killpg(rank.pid, number)  # a second time, as at `scancel`
    said, errors = rank.communicate(timeout=60)
    assert said.startswith("child has more\n"), (rank.returncode, errors)
    assert "child has ended with" in said, errors
    until((tmp_path / "flushed").exists, "the child has flushed")


FORKS = (
    ASKS.replace('if __name__ == "__main__":', "def run():")
    + """
if __name__ == "__main__":
    rank = os.fork()
    if rank == 0:
        os.setsid()
        run()
        sys.exit(0)
    sys.stdin.readline()
    os.killpg(rank, signal.SIGTERM)
    os.wait()
"""
)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_rank_that_torchrun_forks_has_its_children_protected(
    how: str, script: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """So do calls of functions start, whose ranks find torch imported."""
    torchrun = script(FORKS, how, str(tmp_path), LOCAL_RANK="")
    assert lines(torchrun) == ["child has begun"]
    said, errors = torchrun.communicate("\n", timeout=60)
    assert said.startswith("child has more\n"), (torchrun.returncode, errors)


LEAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "w").close(), os._exit(0)))
    print("ready", flush=True)
    time.sleep(1000)
time.sleep(1000)
"""


def test_a_signal_that_was_kept_is_taken_when_the_rank_has_ended(
    script: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, until: Until
) -> None:
    rank = script(LEAVES, str(tmp_path / "told"))
    assert lines(rank) == ["ready"]
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.wait(60) == 3
    until((tmp_path / "told").exists, "the child has been told")


TERMINATES = """
import multiprocessing, os, signal, sys, time

def sleep(end, handles):
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    end.send(os.getpid())
    time.sleep(1000)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    child = context.Process(target=sleep, args=(theirs, sys.argv[2] == "handles"))
    child.start()
    ours.recv()
    time.sleep(0.1)
    child.terminate()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize(("kind", "status"), [("default", "-15"), ("handles", "7")])
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_rank_can_terminate_its_child(
    how: str, kind: str, status: str, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    assert script(TERMINATES, how, kind).communicate(timeout=60) == (f"{status}\n", "")


ENDS = """
import os, signal, subprocess, sys, time
how = sys.argv[1]
if os.fork() == 0:
    if how == "program":
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        sys.exit(-program.wait())
    if how == "spawned":
        program = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        os.kill(program, signal.SIGTERM)
        sys.exit(-os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    if how == "raise":
        signal.raise_signal(signal.SIGTERM)
        os._exit(3)
    if how == "execute":
        os.execvp("sh", ["sh", "-c", "kill $$; exit 3"])
print(abs(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.mark.parametrize("how", ["program", "spawned", "kill", "raise", "execute"])
def test_a_child_and_its_programs_end_by_their_own_signals(
    how: str, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    assert script(ENDS, how).communicate(timeout=60) == ("15\n", "")


LOADER = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == int(sys.argv[2]):
            open("hangs", "w").close()
            time.sleep(1000)
        return torch.tensor(index)

if __name__ == "__main__":
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    context = sys.argv[1]
    loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=context)
    seen = []
    for batch in loader:
        if not seen:
            print("begun", flush=True)
            while not told:
                time.sleep(0.01)
        seen += batch.tolist()
    print(len(set(seen)), flush=True)
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_loader_gives_all_batches_after_the_signal(
    how: str, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    rank = script(LOADER, how, "-1")
    assert lines(rank) == ["begun"], rank.communicate()
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.communicate(timeout=120)[0] == "40\n"
    assert rank.returncode == 0


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_loaders_worker_that_hangs_ends_after_its_rank_was_killed(
    how: str, script: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, until: Until
) -> None:
    rank = script(LOADER, how, "20")
    assert lines(rank) == ["begun"], rank.communicate()
    os.kill(rank.pid, signal.SIGTERM)
    until((tmp_path / "hangs").exists, "a worker hangs")
    rank.kill()
    rank.wait()
    until(lambda: not _group_exists(rank.pid), "all processes have ended")


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


SUBMITS = "import signal; print('ready', flush=True); signal.sigwait([signal.SIGUSR2])"


def test_a_job_that_a_rank_has_submitted_is_no_child_of_it(
    script: Callable[..., "subprocess.Popen[str]"],
) -> None:
    """Such a job may have inherited the variable; its programs and ranks are of another tree."""
    program = script(SUBMITS, TRAIN_RANK_PIDS="4194303 4194302", LOCAL_RANK="")
    assert lines(program) == ["ready"]
    program.terminate()
    assert program.wait(60) == -signal.SIGTERM
    rank = script(ASKS, "fork", ".", TRAIN_RANK_PIDS="4194303 4194302")
    assert lines(rank) == ["child has begun"]
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.communicate(timeout=60)[0].startswith("child has more")


PROGRAM = """
import os, signal, subprocess
program = subprocess.Popen(["sleep", "60"], preexec_fn=os.setsid)
os.killpg(program.pid, signal.SIGTERM)
print("program has ended with", program.wait(30), flush=True)
"""


@pytest.mark.parametrize("place", ["rank", "child"])
def test_a_program_started_by_way_of_a_function_of_python_takes_signals(
    place: str, script: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Before the program, Python runs the hooks of a fork: it would inherit blocked signals."""
    child = f"import os\nif os.fork():\n    os.wait()\nelse:\n    exec({PROGRAM!r})"
    text = PROGRAM if place == "rank" else child
    said, errors = script(text, "-").communicate(timeout=60)
    assert said == "program has ended with -15\n", errors


SHARES = ASKS.replace(
    "def serve(end, folder):",
    """def serve(end, folder):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=1)
    memory.close()
    memory.unlink()""",
)


def test_a_child_that_shares_memory_outlives_a_stop(
    script: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """multiprocessing starts its tracker in the child, and then unblocks signals."""
    rank = script(SHARES, "fork", str(tmp_path))
    assert lines(rank) == ["child has begun"]
    os.killpg(rank.pid, signal.SIGTERM)
    said, errors = rank.communicate(timeout=60)
    assert said.startswith("child has more\n"), errors
