"""The fork server of a node: imports torch once and forks the ranks (`start: warm`).

`python3 -u fork_server.py ADDRESS TORCHRUN_PID COMMAND...`, started by start.sh before torchrun.
The process that torchrun starts for a rank connects to ADDRESS (rank_proxy.py). The server forks
the rank, and the process remains as its proxy: it forwards signals to the rank and exits with the
rank's status. After the first start, the server also imports the installed packages that rank 0
has imported.

The server forks a rank only if the rank has the same Python, options and variables, and only after
a test process has computed with torch: threads from before a fork do not exist after it, and code
that waits for such a thread hangs. Otherwise the rank starts cold.
"""

from __future__ import annotations

import _thread
import ast
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import random
import runpy
import select
import signal
import site
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

from rank_proxy import PASSED_ON, PER_RANK, Request, interpreter, is_own, receive, send

# Slurm and a terminal signal every process of a job. The server ends with torchrun, after its
# ranks have saved. A rank receives what was sent to it once become() unblocks the signals.
signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in PASSED_ON])

HERE = os.path.dirname(os.path.abspath(__file__))

_spec = importlib.util.spec_from_file_location("rank_hook", os.path.join(HERE, "sitecustomize.py"))
assert _spec is not None and _spec.loader is not None
rank_hook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rank_hook)
for _name in ("rank_children", "rank_watch"):
    with contextlib.suppress(ImportError):  # not every job has them
        importlib.import_module(_name)

CANARY_S = 20.0
"""Time limit of the test process."""

LOOK_S = 0.5
"""Interval between two looks whether torchrun still runs."""

STABLE_S, STABLE_AFTER = 1.0, 5
"""Rank 0 reports its imports when as many looks in a row, this far apart, have found no new one."""

END = b"\0"
"""Last byte of a report: forked workers of the rank also keep the pipe open."""

YIELD_S = 0.02
"""Time that a rank leaves the GIL to its threads before it exits."""

FIRST = ("torch", "torch._dynamo", "torch.distributed.tensor")
"""Modules that almost every training script imports; optimizers and DDP import the last two."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/accel")
"""Device files: a process that has opened one must not fork."""

RANKED = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules whose function `rank_zero_only` keeps a variable's value from their import on."""

BLOCKS = "body", "orelse", "finalbody"
"""The statements within a statement of Python."""

PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1

STARTED_WITH = dict(os.environ)
"""The variables of this process before any import sets others."""

_libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """The fork server."""

    def __init__(self, server: socket.socket, torchrun: int, script: str) -> None:
        self.server, self._torchrun = server, torchrun
        """The listening socket, and the pid of torchrun."""
        self._folder = os.path.dirname(os.path.realpath(script))
        """Where Python looks for the script's modules first."""
        self.reason = ""
        """Why this server cannot fork ranks; empty if it can."""
        self._ranks: dict[int, socket.socket] = {}
        self._imported: dict[int, list[bytes]] = {}
        """Reported imports of a rank, by the read end of its pipe."""
        self._wake, wake = os.pipe()
        self._own = [self._wake, wake, server.fileno()]
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def load(self, names: Iterable[str]) -> None:
        """Import modules, skip those that fail, and test whether ranks can still be forked."""
        before = set(sys.modules)
        with silent():
            for name in names:
                if name not in sys.modules:
                    # A package may raise anything at import, even SystemExit.
                    with contextlib.suppress(BaseException):
                        importlib.import_module(name)
        new = set(sys.modules) - before
        if new and not self.reason:
            self.reason = hidden(new, self._folder) or used_device() or canary()
            gc.collect()
            gc.freeze()  # so that a rank's garbage collector leaves these pages shared

    def serve(self) -> Request:
        """Fork a rank per request; return only in a rank, with its request."""
        while is_there(self._torchrun):
            watched: list[Any] = [self.server, self._wake, *self._imported, *self._ranks.values()]
            for ready in select.select(watched, [], [], LOOK_S)[0]:
                if ready is self.server:
                    request = self._answer()
                    if request is not None:
                        return request
                elif ready == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif isinstance(ready, int):
                    self._read(ready)
                else:  # torchrun has killed the proxy
                    self._kill(ready)
            self._reap()
        os._exit(0)  # the kernel ends the ranks

    def _answer(self) -> Request | None:
        """Answer a request; return only in the new rank, with the request."""
        connection, _ = self.server.accept()
        connection.settimeout(10)
        request = None
        try:
            if is_own(connection):
                request = receive(connection)
                reason = self.reason or refusal(request)
                if not reason:
                    return self._fork(connection, request)
                send(connection, {"cold": reason})
        except (OSError, ValueError, KeyError) as error:
            with contextlib.suppress(OSError):
                send(connection, {"cold": f"{type(error).__name__}: {error}"})
        for fd in request.fds if request else ():
            os.close(fd)
        connection.close()
        return None

    def _fork(self, connection: socket.socket, request: Request) -> Request | None:
        told, tell = os.pipe()
        flush()
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in {*self._own, *self._imported, told, connection.fileno()}:
                os.close(fd)
            for other in self._ranks.values():
                os.close(other.detach())
            self.server.detach()
            connection.detach()
            die_with(own)
            request.tell = tell
            return request
        for fd in (*request.fds, tell):
            os.close(fd)
        self._ranks[pid] = connection
        self._imported[told] = []
        with contextlib.suppress(OSError):  # the proxy has ended, so the rank will end
            send(connection, {"pid": pid})
        return None

    def _read(self, told: int) -> None:
        """Read a rank's report of its imports; import the same when the report is complete."""
        part = os.read(told, 65536)
        self._imported[told].append(part)
        if part and not part.endswith(END):  # not its last byte, nor has the rank exited
            return
        report = b"".join(self._imported.pop(told))
        os.close(told)
        if report.endswith(END):
            self.load(report[: -len(END)].decode().split())

    def _kill(self, connection: socket.socket) -> None:
        for pid, other in self._ranks.items():
            if other is connection:
                for kill in (os.killpg, os.kill):  # it may not lead its group yet
                    with contextlib.suppress(OSError):
                        kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in [*self._ranks]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                connection = self._ranks.pop(pid)
                with contextlib.suppress(OSError):
                    send(connection, {"status": status})
                connection.close()


# ---- Whether ranks can be forked


def is_there(pid: int) -> bool:
    """Whether a process of this user is still running."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def refusal(request: Request) -> str:
    """Return why a forked rank would differ from a cold one; empty if it would not."""
    for what, own in interpreter().items():
        if (theirs := request.interpreter[what]) != own:
            return f"its {what} is {theirs}, and {own} in the fork server"
    differing = sorted(
        name
        for name in {*request.environ, *STARTED_WITH}
        if request.environ.get(name) != STARTED_WITH.get(name) and not PER_RANK.fullmatch(name)
    )
    if differing:
        return f"its variable {differing[0]} differs from that of torchrun"
    return ""


def used_device() -> str:
    """Return an error that names the device that this process has opened; empty if none."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened = os.readlink(f"/proc/self/fd/{fd}")
            if opened.startswith(DEVICES):
                return f"what it imports has opened {opened}"
    return ""


def canary() -> str:
    """Return why a forked process cannot compute; empty if it can."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch cannot be imported by the python3 that is first in PATH"
    flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with(os.getppid())
            torch.set_num_threads(2)
            matrix = torch.rand(256, 256, requires_grad=True)
            (matrix @ matrix).relu().sum().backward()
            torch.rand(100_000).sum().item()
            status = 0
        finally:
            os._exit(status)
    until_s = time.monotonic() + CANARY_S
    ended = status = 0
    while not ended and time.monotonic() < until_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0 if ended else 0.005)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"a forked process did not compute within {CANARY_S:.0f} s of what was imported"
    return "a forked process could not compute after what was imported" if status else ""


# ---- What is imported


def hidden(names: Iterable[str], folder: str) -> str:
    """Return why the script would import another module than this process has, from its folder."""
    for top in sorted({name.partition(".")[0] for name in names}):
        spec = importlib.machinery.PathFinder.find_spec(top, [folder])
        if spec is None or spec.loader is None:  # a folder of data is no package
            continue
        own = getattr(sys.modules.get(top), "__file__", None)
        if own is None or os.path.realpath(own) != os.path.realpath(spec.origin or ""):
            return f"its folder has a module {top}, and an installed one has the same name"
    return ""


def sets_variables(command: list[str]) -> str:
    """Return why packages must be imported by the script: it sets variables before."""
    sets, standard = False, getattr(sys, "stdlib_module_names", ())  # of Python 3.10
    for node in in_blocks(statements_of(command)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or one.name for one in node.names]
            others = {module.partition(".")[0] for module in modules}.difference(standard)
            if sets and not getattr(node, "level", 0) and others:
                return f"its script sets environment variables before it imports {min(others)}"
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            sets = sets or any(map(changes_environ, ast.walk(node)))
    return ""


def in_blocks(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those in blocks like `if` and `try`, but not those of functions."""
    for node in body:
        blocks = [node, *getattr(node, "handlers", [])]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            blocks = []
        parts = [getattr(one, part, []) for one in blocks for part in BLOCKS]
        if any(parts):
            for part in parts:
                yield from in_blocks(part)
        else:
            yield node


def changes_environ(node: ast.AST) -> bool:
    """Whether it changes `os.environ`: by an index, by `|=` or by a method like `update()`."""
    if isinstance(node, ast.AugAssign):
        return "environ" in (getattr(node.target, "attr", ""), getattr(node.target, "id", ""))
    if isinstance(node, ast.Subscript):
        changes = not isinstance(node.ctx, ast.Load)
    else:
        changes = isinstance(node, ast.Attribute) and node.attr in ("setdefault", "update", "pop")
    of = getattr(node, "value", None)
    return changes and "environ" in (getattr(of, "attr", ""), getattr(of, "id", ""))


def script_of(command: list[str]) -> str:
    """Return the training script; `-m` for a module."""
    return next((word for word in command[1:] if not word.startswith("--")), "")


def statements_of(command: list[str]) -> list[ast.stmt]:
    """Return the statements of a training script; none if it cannot be read."""
    script = script_of(command)
    if not script.endswith(".py"):
        return []
    try:
        with open(script, "rb") as file:
            return ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []


def imports_of(command: list[str]) -> Iterator[str]:
    """Yield the installed modules that a training script imports at top level."""
    for node in statements_of(command):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            with contextlib.suppress(Exception):
                spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
                if spec is not None and is_installed(spec):
                    yield name


def is_installed(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether a module belongs to Python or to an installed package, not to the user's sources."""
    origin = getattr(spec, "origin", None) or ""
    return origin in ("built-in", "frozen") or origin.startswith(installed_places())


@functools.lru_cache(maxsize=1)
def installed_places() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    places = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    return tuple(place + os.sep for place in places)


def tell_imports(fd: int, known: set[str]) -> None:
    """In a rank, report the installed modules once the rank imports no more."""
    count, quiet = len(sys.modules), 0
    while quiet < STABLE_AFTER:
        time.sleep(STABLE_S)
        quiet, count = (quiet + 1 if len(sys.modules) == count else 0), len(sys.modules)
    names = [
        name
        for name, module in [*sys.modules.items()]
        if name not in known and is_installed(getattr(module, "__spec__", None))
    ]
    content = "\n".join(names).encode() + END
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(fd, content) :]
        os.close(fd)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard output of imports; each rank prints its own."""
    flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        yield
    finally:
        flush()
        for fd, old in zip((1, 2), kept):
            os.dup2(old, fd)
            os.close(old)
        os.close(nowhere)


def flush() -> None:
    """Flush both streams, or each forked process would write their buffers again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# ---- In a rank


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent exits."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(request: Request) -> None:
    """Put this process into the state of a Python that is about to run a script."""
    os.setsid()
    for fd, own in enumerate(request.fds):
        os.dup2(own, fd)
    for own in request.fds:
        os.close(own)
    os.chdir(request.folder)
    os.umask(request.umask)
    _libc.prctl(PR_SET_NAME, b"python3", 0, 0, 0)
    for number in range(1, signal.NSIG):
        if signal.getsignal(number) is not None:  # otherwise the handler is not Python's
            ignored = number in request.ignored
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_at_import = {
        name: value for name, value in os.environ.items() if STARTED_WITH.get(name) != value
    }
    os.environ.clear()
    os.environ.update({**request.environ, **set_at_import})
    sys.path[:] = [each for each in request.path if os.path.abspath(each or os.curdir) != HERE]
    sys.argv[:] = request.arguments
    vars(sys).get("orig_argv", [])[1:] = ["-u", *request.arguments]  # of Python 3.10
    draw_anew()
    number_anew(request.environ)
    try:
        rank_hook.become_rank(request.ancestors)
        rank_hook.watch_rank()
    except Exception as error:  # the script must run all the same
        print(f"torch-deploy-toolkit: this rank is not prepared: {error}", file=sys.stderr)


def number_anew(environ: dict[str, str]) -> None:
    """Tell packages that have read the rank when the server imported them."""
    for name, variable in RANKED.items():
        function = getattr(sys.modules.get(name), "rank_zero_only", None)
        if function is not None and environ.get(variable, "").isdigit():
            function.rank = int(environ[variable])


def draw_anew() -> None:
    """Seed anew: all ranks have inherited the same states of the generators."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def run(request: Request) -> None:
    """Run the script or module, and exit, as Python does."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    script = request.arguments[0]
    safe_path = getattr(sys.flags, "safe_path", False)  # Python 3.11
    try:
        if script == "-m":
            sys.argv[:] = ["-m", *request.arguments[2:]]
            if not safe_path:
                sys.path.insert(0, os.getcwd())
            vars(main).update(__annotations__={}, __builtins__=sys.modules["builtins"])
            runpy._run_module_as_main(request.arguments[1])  # type: ignore[attr-defined]
            return
        path = os.path.join(os.getcwd(), script)
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        with open(path, "rb") as file:
            content = file.read()
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __cached__=None, __annotations__={})
        vars(main)["__builtins__"] = sys.modules["builtins"]
        exec(compile(content, path, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        # Next, the script's objects are destroyed while this thread holds the GIL. A gloo process
        # group then joins a thread that may need the GIL to release its last tensor: a deadlock
        # (torch 2.13). A cold rank has released the GIL in the imports of its last lines.
        time.sleep(YIELD_S)
        raise
    except BaseException as error:
        traceback = error.__traceback__
        own = run.__code__.co_filename
        while traceback is not None and traceback.tb_frame.f_code.co_filename == own:
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error, traceback)
        if isinstance(error, KeyboardInterrupt):
            flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


def main() -> None:
    """Serve until torchrun ends; in each rank, run the script."""
    address, torchrun, *command = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0" + address)
    server.listen(128)
    forks = Server(server, int(torchrun), script_of(command))
    forks.reason = sets_variables(command)
    if not forks.reason:
        forks.load([*FIRST, *imports_of(command)])
    request = forks.serve()
    del forks, server
    known = set(sys.modules)
    become(request)
    if request.environ["LOCAL_RANK"] == "0":
        # Not `threading`: this thread must stay out of the script's list of threads.
        _thread.start_new_thread(tell_imports, (request.tell, known))
    else:
        os.close(request.tell)
    run(request)


if __name__ == "__main__":
    main()
