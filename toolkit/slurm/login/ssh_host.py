"""A login node reached by ssh: it receives code and jobs, and returns logs.

The code is the project's git working tree: committed or not, but without ignored files. A run
directory on the login node additionally contains:

    code/         the project at the time of submission
    submitted/    sbatch's answers, for a later connection if the first is cut
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.job.environment import of_slurm_command_in_bash
from toolkit.profile import SlurmProfile
from toolkit.rendering import path_quote
from toolkit.runs.evidence.stacks import NO_WATCHDOG, Exchange
from toolkit.runs.long_operation import Report, operation
from toolkit.runs.records import run_directory
from toolkit.runs.records.git_commands import is_own_tree, rev_parse, run_git
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.records.state_dir import state_folder
from toolkit.runs.run import Run
from toolkit.slurm.login.host import DOUBTFUL, LoginNode, RunFolder
from toolkit.slurm.login.mirror import Mirrors
from toolkit.slurm.login.ssh import Hung, Lost, SshConnection, connection_to
from toolkit.slurm.snapshot import snapshot_file
from toolkit.text.answers import error_line, first_line, values
from toolkit.text.quantities import format_size, rounded_size

_CODE_BYTES = 2**30
"""Default limit of a project's size in bytes."""

_NAMED = 5
"""Number of files to name for a project that is too large."""

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Delay before each retry after a cut connection, in seconds; a minute in all."""

_SENT = re.compile(rb"\r *([\d.,]+) +(\d+)%")
"""rsync's progress: bytes, grouped by the locale, and the percentage."""

_LISTED = re.compile(r"(?:[HSMRCKU?] |.*\n[HSMRCKU?] )(.*)", re.DOTALL)
"""A file listed by `git ls-files -t`, after possible output of a git wrapper."""

_MAKE = """\
set -e
mkdir -p {base}
{venv}
mkdir -p {runs}
cd {runs}
mkdir {name}
mkdir -p {name}/logs {name}/submitted {name}/code/{below}
echo "==runs|$(pwd)|=="
echo "==latest|$(readlink {latest})|=="
"""

_LOCKED = """\
cd {folder} || exit
exec 9>>submitted/lock
flock 9 2>/dev/null || :  # until an interrupted connection has also ended; not all file systems can
"""

_SUBMIT = """\
[ ! -e {key} ] || exec cat {key}
{doubt}
: >{key}.begun || exit
{environment}
{secrets}
{sbatch} >{key}.answer 2>{key}.said
status=$?
[ $status -ne 0 ] || mv {key}.answer {key}
cat {key} 2>/dev/null
cat {key}.said >&2
exit $status
"""
"""sbatch prints to files first: a lost connection loses no output."""


class SshLoginNode(LoginNode):
    """A login node reached by ssh."""

    remote = True

    def __init__(self, profile: SlurmProfile) -> None:
        """Prepare to reach the host; this process shares one connection and one set of mirrors."""
        self._ssh = connection_to(profile.host)
        self._mirrors = _mirrors_of(self._ssh, state_folder() / "mirrors" / profile.host)
        self._tree: WorkingTree | None = None
        self._before = ""
        file = snapshot_file(host=profile.host)
        super().__init__(profile, self._ssh.command, file=file)

    @property
    def cwd(self) -> str:
        """Empty: the home folder on the host contains no files of a job."""
        return ""

    # ---- A new run

    def make(self, name: str) -> RunFolder:
        """Create the run directory on the host, and its mirror here."""
        start = Path.cwd()
        tree = self._tree = working_tree(start)
        tree.require_small(self._profile.code_limit_bytes)
        below = start.resolve().relative_to(tree.root.resolve())
        done = self._ssh.bash(
            _MAKE.format(
                base=self._remote(""),
                venv=self._venv_check(),
                runs=path_quote(self._profile.below(self._profile.runs_dir)),
                name=shlex.quote(name),
                below=shlex.quote(str(below)),
                latest=self._remote(f"/latest/{tree.root.name}"),
            )
        )
        if done.returncode != 0:
            raise LauncherError(f"{self._ssh.name}: {done.stderr.strip() or done.stdout.strip()}")
        runs, latest = ("".join(values(done.stdout, name)) for name in ("runs", "latest"))
        if not runs.startswith("/") or not f"{runs}{latest}".isprintable():
            raise LauncherError(f"{self._ssh.name}: {runs[:200]!r} is not a folder for runs")
        there = f"{runs}/{name}"
        here = run_directory.make(self._mirrors.folder, name)
        self._before = latest
        return RunFolder(here=here, there=there, start=str(Path(there, "code", below)))

    def _venv_check(self) -> str:
        venv = self._profile.venv
        if venv is None or venv.startswith("/"):
            return ":"
        path = self._profile.below(venv)
        why = (
            f"virtual environment {path} does not exist; create it once: ssh {self._ssh.name} "
            f"'python3 -m venv {path} && {path}/bin/pip install torch'"
        )
        there = f"[ -f {path_quote(path)}/bin/activate ]"
        return f"{there} || {{ echo {shlex.quote(why)} >&2; exit 1; }}"

    def _remote(self, path: str) -> str:
        return path_quote(self._profile.remote_dir.rstrip("/") + path)

    def bring(self, folder: RunFolder) -> None:
        """Copy the code and the files of the mirror to the host."""
        assert self._tree is not None
        tree = self._tree
        there = f"{self._ssh.name}:{folder.there}/"
        names = b"".join(os.fsencode(name) + b"\0" for name in tree.names)
        # Compare files by content: two edits within a second may have the same time and size.
        # Unchanged files are hard links, so they must not be written to.
        same = ("--checksum", "--chmod=Du+rwx,F-w", "--from0", "--files-from=-")
        before = [f"--link-dest={self._before}"] if self._before else []
        what = f"copying the project to {self._ssh.name} ({len(tree.names)} files)"
        with operation(what) as report:
            ends = (f"{tree.root}/", f"{there}code/")
            self._sync("-lpt", *same, *before, *ends, names=names, report=report)
        self._sync("-rlt", f"{folder.here}/", there)
        # The link points to the code of the project's newest run.
        code, latest = shlex.quote(f"{folder.there}/code"), self._remote("/latest")
        link = self._remote(f"/latest/{tree.root.name}")
        self._ssh.bash(f"mkdir -p {latest}\nln -sfn {code} {link}")

    def _sync(self, *words: str, names: bytes = b"", report: Report | None = None) -> None:
        def show(part: bytes) -> None:
            if report and (sent := _SENT.findall(part)):
                size, share = sent[-1]
                text = rounded_size(int(re.sub(rb"\D", b"", size)))
                report(int(share), 100, text)

        done = self._ssh.rsync(*words, names=names, show=show if report else None)
        if done.returncode != 0:
            raise LauncherError(f"rsync to {self._ssh.name}: {error_line(done.stderr)}")

    def discard(self, folder: RunFolder, *, used: bool) -> None:
        """Remove the run directory on the host and its mirror."""
        shutil.rmtree(folder.here, ignore_errors=True)
        self._ssh.bash(f"rm -rf {shlex.quote(folder.there)}")

    # ---- Submission

    def sbatch(
        self,
        argv: Sequence[str],
        *,
        folder: RunFolder,
        key: str,
        again: bool,
        secrets: Mapping[str, str],
    ) -> "subprocess.CompletedProcess[str]":
        """Submit a job, or return the recorded answer if it was submitted before.

        bash reads secrets from its stdin: they appear on no command line and in none of our files.
        """
        file = f"submitted/{key}"
        script = _LOCKED + _SUBMIT
        return self._ssh.bash(
            script.format(
                folder=shlex.quote(folder.there),
                key=file,
                environment=of_slurm_command_in_bash(asks=False),
                doubt=":" if again else f"[ ! -e {file}.begun ] || exit {DOUBTFUL}",
                secrets="\n".join(f"export {n}={shlex.quote(v)}" for n, v in secrets.items()),
                sbatch=shlex.join(argv),
            )
        )

    def answers(self, folder: RunFolder, keys: Sequence[str]) -> dict[str, str]:
        """Return sbatch's recorded answers, after waiting for an earlier cut connection."""
        own = "grep -aoE 'Submitted batch job [0-9]+' submitted/{key} | tail -n 1"
        lines = [f"[ ! -e submitted/{key} ] || echo {key} $({own.format(key=key)})" for key in keys]
        script = _LOCKED.format(folder=shlex.quote(folder.there)) + "\n".join(lines)
        pairs = (line.partition(" ") for line in self._ssh.bash(script).stdout.splitlines())
        return {key: answer for key, _, answer in pairs}

    def keep(self, folder: RunFolder, *, jobs: Sequence[str], record: RunRecord | None) -> None:
        """Write the lines of the jobs, and the record of a new run, to the run directory."""
        commands = [
            f"grep -qsxF {shlex.quote(line)} jobs.jsonl || echo {shlex.quote(line)} >>jobs.jsonl"
            for line in jobs
        ]
        if record is not None:
            # The toolkit on the login node opens the run by this record.
            options = {k: v for k, v in record.profile.items() if k not in ("via", "remote_dir")}
            run_dir = Path(folder.there)
            profile = options | {"runs_dir": str(run_dir.parent)}
            there = replace(record, profile=profile, run_dir=run_dir, remote_dir=None)
            launch = json.dumps(there.as_json())
            commands.append(f"printf %s {shlex.quote(launch)} >launch.json")
        script = _LOCKED.format(folder=shlex.quote(folder.there)) + " &&\n".join(commands)
        for pause_s in (*_PAUSES_S, None):
            try:
                done = self._ssh.bash(script)
                break
            except Lost as error:
                if isinstance(error, Hung) or pause_s is None:
                    raise
                time.sleep(pause_s)
        if done.returncode != 0:
            place = f"{self._ssh.name}:{folder.there}"
            raise LauncherError(
                f"the jobs are submitted, but {place} cannot be written: {error_line(done.stderr)}"
            )

    # ---- An earlier run

    def watch(self, run: Run) -> None:
        """Register that a process has this run open."""
        self._mirrors.watch(run)

    def fetch(self, since: float) -> None:
        """Refresh the mirrors of the open runs that are older than `since`."""
        self._mirrors.fetch(since)

    def seen(self, record: RunRecord) -> Path | None:
        """Return the mirror, refreshed if it is a few seconds old."""
        if record.remote_dir is not None:
            self._mirrors.refresh()
        return record.run_dir

    def exchange(self, record: RunRecord) -> Exchange | None:
        """Return access to the watchdogs, through the login node."""
        return SshExchange(self._ssh, record.remote_dir) if record.remote_dir else None

    def request_cancel(self, record: RunRecord) -> None:
        """Mark the run as cancelled, on the host and here."""
        self._mark(record, "mkdir -p {0} && touch {0}/cancel_requested")
        super().request_cancel(record)

    def withdraw_cancel(self, record: RunRecord) -> None:
        """Remove the cancellation mark, on the host and here."""
        self._mark(record, "rm -f {0}/cancel_requested")
        super().withdraw_cancel(record)

    def _mark(self, record: RunRecord, script: str) -> None:
        if record.remote_dir is not None:
            self._ssh.bash(script.format(shlex.quote(record.remote_dir)))


class SshExchange:
    """The folder of a run's watchdogs on the login node."""

    def __init__(self, ssh: SshConnection, remote_dir: str) -> None:
        self._ssh = ssh
        self._logs = f"{remote_dir}/logs"

    def _bash(self, command: str) -> "subprocess.CompletedProcess[str]":
        folder = "$(ls -d attempt-* 2>/dev/null | sort -t- -k2n | tail -n 1)/watchdog"
        return self._ssh.bash(f'cd {shlex.quote(self._logs)} && cd "{folder}" && {command}')

    def ask(self, name: str) -> None:
        """Query all watchdogs of the newest attempt."""
        done = self._bash(f": >ask-{name}")
        if done.returncode != 0:
            raise LauncherError(f"{self._logs}: {NO_WATCHDOG}: {error_line(done.stderr)}")

    def answers(self, name: str) -> Iterable[bytes]:
        """Return the received answers."""
        return self._bash(f"cat answer-{name}-*.json 2>/dev/null").stdout.encode().splitlines()

    def withdraw(self, name: str) -> None:
        """Remove the query and its answers."""
        self._bash(f"rm -f ask-{name} answer-{name}-*.json")


_mirrors_of = functools.cache(Mirrors)


# ---- The code


@dataclass(frozen=True, kw_only=True)
class WorkingTree:
    """A repository's files."""

    root: Path
    """The top of the repository."""

    names: tuple[str, ...]
    """Files and symbolic links below the root, those of submodules included."""

    def require_small(self, limit_bytes: int | None) -> None:
        """Refuse a project that exceeds the size limit.

        Raises:
            LauncherError: the project is too large; the message names the largest files.
        """
        limit = _CODE_BYTES if limit_bytes is None else limit_bytes
        sizes = {name: (self.root / name).lstat().st_size for name in self.names}
        if (whole := sum(sizes.values())) <= limit:
            return
        biggest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_NAMED]
        shown = ", ".join(f"{name} ({rounded_size(sizes[name])})" for name in biggest)
        raise LauncherError(
            f"{self.root} holds {rounded_size(whole)} that git does not ignore, more than the "
            f"{format_size(limit)} that are taken for code; the biggest: {shown}. Write data into "
            ".gitignore and bring it there yourself, or set code_limit in the profile"
        )


def working_tree(folder: Path) -> WorkingTree:
    """Return the repository that contains `folder`.

    Raises:
        LauncherError: git is not installed, or the folder is not a repository.
    """
    try:
        top = rev_parse(folder, "--show-toplevel")
    except FileNotFoundError:
        why = "git is not in PATH, and only git knows what belongs to a project"
        raise LauncherError(why) from None
    except subprocess.CalledProcessError as error:
        message = first_line(os.fsdecode(error.stderr)).removeprefix("fatal: ")
        raise LauncherError(
            f"{folder}: {message}. Which files belong to the project is asked of git: `git init` "
            "there (what .gitignore names stays here), or submit from the login node"
        ) from None
    except subprocess.SubprocessError as error:
        raise LauncherError(f"{folder}: {error}") from None
    if not is_own_tree(folder):
        raise LauncherError(
            f"{folder}: its .git points to another repository or working tree, and the files of "
            "that one would be copied; submit from there, or check .git"
        )
    root = Path(top)
    return WorkingTree(root=root, names=tuple(dict.fromkeys(_files(root, ""))))


def _files(root: Path, below: str) -> Iterator[str]:
    """Yield the files of the repository `below` the root, and of nested repositories."""
    listed = run_git(root / below, "ls-files", "-z", "-t", "-co", "--exclude-standard")
    if listed.returncode != 0:
        raise LauncherError(f"git ls-files in {root / below}: {os.fsdecode(listed.stderr).strip()}")
    for entry in os.fsdecode(listed.stdout).split("\0")[:-1]:
        if (listed_name := _LISTED.match(entry)) is None:
            raise LauncherError(f"git ls-files in {root / below} prints {entry[:80]!r}")
        name = str(Path(below, listed_name[1]))
        path = root / name
        through_link = any((root / parent).is_symlink() for parent in list(Path(name).parents)[:-1])
        if through_link or not os.path.lexists(path):
            continue  # git still lists a file that was deleted, or replaced by a link
        if path.is_symlink() or not path.is_dir():
            yield name
        elif (path / ".git").exists():  # a submodule, or a nested repository
            yield from _files(root, name)
