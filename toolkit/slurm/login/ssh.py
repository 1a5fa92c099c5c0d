"""An OpenSSH connection to a host, shared by all commands of all processes.

The module runs the program `ssh` instead of a library such as paramiko: the user's `~/.ssh/config`,
agent, jump hosts, second factors and shared connections (ControlMaster) work as in a terminal.
"""

import functools
import os
import re
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.job.environment import of_slurm_command_in_bash, without_outer_job
from toolkit.slurm import commands
from toolkit.text.answers import first_line, plain

_OPTIONS = (
    "BatchMode=yes",  # no password prompt: the toolkit may run unattended
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ClearAllForwardings=yes",  # forwardings in the user's configuration are for other sessions
    "RemoteCommand=none",
    "RequestTTY=no",
    "LogLevel=ERROR",
)
_PERSIST_S = 60
"""How long the connection stays open for the next command of any process, in seconds."""

_SOCKET_MAX = 104 - 1 - 40 - 17
"""Maximum length of the socket's folder: macOS allows 104 characters, including %C and ssh's
suffix."""

_BEGIN, _END = "torch-deploy-toolkit: begin", "torch-deploy-toolkit: end"

_WRAPPER = """\
main() {{
trap '' HUP PIPE
{body}
}}
echo '{begin}'; echo '{begin}' >&2
(main) </dev/null
status=$?
printf '\\n{end} %s\\n' "$status"; echo '{end}' >&2
"""
"""A function, so that bash reads all of it before it runs any of it. In the function, a lost
connection kills nothing. The marks show the end of its output, and separate it from the output of
login shells before and after it."""

_MISSING = "torch-deploy-toolkit: not in PATH"


class Lost(LauncherError):
    """The connection was cut or could not be made: the effect on the remote side is unknown."""


class Hung(Lost):
    """The host was reached, but its answer did not end within the time limit."""


class SshConnection:
    """A connection to a login node, by its name in ssh.

    Each call raises `SchedulerMissing` if its program is not installed here, and `Lost` if the host
    cannot be reached, the connection was lost on the way, or the answer does not end (`Hung`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost = float("-inf")
        """Time of the last failed connection, in seconds since 1970."""

    @functools.cached_property
    def ssh(self) -> tuple[str, ...]:
        """The client and its options.

        A shared connection in the user's own configuration is kept: it may have required a
        second factor.
        """
        options = list(_OPTIONS)
        own = self._run(["ssh", "-G", self.name], limit_s=commands.ANSWER_S)
        if not re.search(r"^controlpath (?!none$)", own.stdout, re.MULTILINE):
            folder = _socket_folder(os.environ)
            if folder is None:
                options += ["ControlMaster=no", "ControlPath=none"]
            else:
                options += ["ControlMaster=auto", f"ControlPersist={_PERSIST_S}"]
                options += [f"ControlPath={folder}/%C"]
        return ("ssh", *(word for option in options for word in ("-o", option)))

    def bash(
        self, body: str, *, limit_s: float | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run lines of bash in a login shell, for at most ten minutes by default.

        The lines are sent by stdin, so that no argument list shows them.
        """
        script = _WRAPPER.format(body=body, begin=_BEGIN, end=_END)
        stdin = script.encode("utf-8", "surrogateescape")
        limit_s = commands.ACTION_S if limit_s is None else limit_s
        done = self._run([*self.ssh, self.name, "exec bash -l -s"], stdin, limit_s=limit_s)
        output = plain(done.stdout).partition(f"{_BEGIN}\n")[2]
        output, _, rest = output.rpartition(f"\n{_END} ")
        status, is_whole, _ = rest.partition("\n")
        if not is_whole or not re.fullmatch(r"\d{1,3}", status):
            raise Lost(self._why_lost(done.stderr))
        message = plain(done.stderr).partition(f"{_BEGIN}\n")[2].rpartition(f"{_END}\n")[0]
        return subprocess.CompletedProcess([], int(status), output, message)

    def command(self, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run one command; the method is a `commands.Command`.

        Raises:
            SchedulerMissing: the command does not exist on the host.
        """
        asks = commands.only_asks(argv)
        missing = f"{{ echo '{_MISSING}' >&2; exit 127; }}"
        lines = [
            f"command -v {shlex.quote(argv[0])} >/dev/null || {missing}",
            of_slurm_command_in_bash(asks=asks),
            shlex.join(argv),
        ]
        done = self.bash("\n".join(lines), limit_s=commands.ANSWER_S if asks else None)
        if done.returncode == 127 and _MISSING in done.stderr:
            raise SchedulerMissing(
                f"no Slurm on {self.name}: {argv[0]} is not in the PATH of a login shell there; "
                f"try `ssh {self.name} bash -lc {argv[0]}`"
            )
        return subprocess.CompletedProcess(argv, done.returncode, done.stdout, done.stderr)

    def rsync(
        self, *words: str, names: bytes = b"", show: Callable[[bytes], object] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run rsync over the same connection; `names` are for `--files-from=-`.

        `show` is called with its progress as rsync prints it, in parts.

        Raises:
            LauncherError: rsync is missing on the host, or its shell prints text into the stream.
        """
        waits = f"--timeout={commands.ANSWER_S:.0f}"  # for a host that stops sending
        tells = () if show is None else ("--info=progress2",)
        argv = ["rsync", "--protect-args", waits, f"--rsh={shlex.join(self.ssh)}", *tells, *words]
        done = self._run(argv, names, limit_s=commands.TRANSFER_S, show=show)
        if done.returncode == 127 or "rsync: command not found" in done.stderr:
            raise LauncherError(f"rsync is not installed on {self.name}; ask who runs it")
        if "is your shell clean?" in done.stderr:
            raise LauncherError(self._printing_shell())
        if done.returncode in (10, 12, 30, 35, 255):  # sockets, the protocol's stream, time-outs
            raise Lost(self._why_lost(done.stderr))
        return done

    def _printing_shell(self) -> str:
        """Return the text that the host's shell prints before every command, and the fix."""
        done = self._run([*self.ssh, self.name, "true"], limit_s=commands.ANSWER_S)
        shown = first_line(done.stdout)[:80]
        return (
            f"{self.name} prints text in shells that are not interactive"
            + f" ({shown!r})" * bool(shown)
            + f", which breaks rsync; `ssh {self.name} true` must print nothing. Begin ~/.bashrc "
            "there with `[[ $- == *i* ]] || return`, or ~/.cshrc with `if (! $?prompt) exit`"
        )

    def _run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        limit_s: float,
        show: Callable[[bytes], object] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        if shutil.which(argv[0]) is None:
            raise SchedulerMissing(f"{argv[0]} is not in PATH here; a profile with `via` needs it")
        try:
            return commands.run_limited(
                argv, stdin=stdin, environ=without_outer_job(), limit_s=limit_s, show=show
            )
        except commands.TooLong as error:
            raise Hung(self._why_lost(str(error))) from None

    def _why_lost(self, message: str) -> str:
        """Record that the host was not reached, and return the reason."""
        self.lost = time.time()
        lines = [line for line in message.strip().splitlines() if line not in (_BEGIN, _END)]
        # ssh's own message comes last; rsync adds two lines about itself.
        own = [line for line in lines if not line.startswith("rsync")] or lines
        why = own[-1].strip() if own else "the connection was closed"
        return (
            f"{self.name} is not reached by ssh: {why.removeprefix('ssh: ')}; "
            f"`ssh {self.name} true` must work without a question"
        )


connection_to = functools.cache(SshConnection)
"""Returns the connection to a host, one object per name and process."""


def _socket_folder(environ: Mapping[str, str]) -> Path | None:
    """Return a private folder for the connection's socket; None if none can be created."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = Path(f"/tmp/tdt-ssh-{os.getuid()}")  # TMPDIR may be too long a path
    folder = Path(runtime, "tdt-ssh") if runtime and Path(runtime).is_dir() else own
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
    fits = len(os.fsencode(folder)) < _SOCKET_MAX and not re.search(r"[%\s'\"]", str(folder))
    return folder if private and not info.st_mode & 0o077 and fits else None
