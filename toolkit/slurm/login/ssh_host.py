"""A login node that is reached by ssh: code goes there, jobs are submitted there, logs come back.

A run directory there holds, beside what every run directory holds:

    code/         the project as it was when the run was submitted
    submitted/    what sbatch answered, for whoever asks again after the connection was cut
"""

import functools
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from toolkit.errors import LauncherError
from toolkit.profile import SlurmProfile
from toolkit.rendering import path_quote
from toolkit.runs import run_directory
from toolkit.runs.registry import RunRecord
from toolkit.runs.state_dir import state_folder
from toolkit.slurm.login.host import Folder, Login
from toolkit.slurm.login.mirror import Mirrors
from toolkit.slurm.login.ssh import Host, Hung, Lost, host_of
from toolkit.slurm.login.working_tree import WorkingTree, working_tree
from toolkit.slurm.squeue import first_line
from toolkit.slurm.submission import DOUBTFUL

__all__ = ["There"]

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""How long to wait before each new try when the connection was cut: a minute in all."""

_MAKE = """\
set -e
mkdir -p {base}
{venv}
mkdir -p {runs}
cd {runs}
mkdir {name}
mkdir -p {name}/logs {name}/submitted {name}/code/{below}
pwd
readlink {latest} || echo
"""

_LOCKED = """\
cd {folder} || exit
exec 9>>submitted/lock
flock 9 2>/dev/null || :  # until whoever was cut off has ended, too; not all file systems can
"""

_SUBMIT = """\
[ ! -e {key} ] || exec cat {key}
{doubt}
: >{key}.begun || exit
{secrets}
{sbatch} >{key}.answer 2>{key}.said
status=$?
[ $status -ne 0 ] || mv {key}.answer {key}
cat {key} 2>/dev/null
cat {key}.said >&2
exit $status
"""
"""What sbatch says goes into files first: nothing of it is lost with the connection."""


class There(Login):
    """A login node that is reached by ssh."""

    remote = True
    cwd = ""  # nothing of a job is in the home folder there

    def __init__(self, profile: SlurmProfile, host: Host, mirrors: Mirrors) -> None:
        """Prepare to reach it.

        Args:
            profile: The site.
            host: The login node.
            mirrors: The mirrors of its run directories.
        """
        self._profile = profile
        self._host = host
        self._mirrors = mirrors
        self._tree: WorkingTree | None = None
        self._before = ""
        self.command = host.command

    @classmethod
    def of(cls, profile: SlurmProfile, environ: Mapping[str, str] = os.environ) -> "There":
        """Return the login node of a profile; all in this process share its connection."""
        host = host_of(profile.host)
        return cls(profile, host, _mirrors_of(host, state_folder(environ) / "mirrors" / host.name))

    # ---- A new run

    def make(self, name: str) -> Folder:
        """Make the run directory there, and its mirror here."""
        start = Path.cwd()
        tree = self._tree = working_tree(start)
        tree.require_small(self._profile.code_limit_bytes)
        below = start.resolve().relative_to(tree.root.resolve())
        done = self._host.bash(
            _MAKE.format(
                base=self._path(""),
                venv=self._venv_check(),
                runs=path_quote(self._profile.below(self._profile.runs_dir)),
                name=shlex.quote(name),
                below=shlex.quote(str(below)),
                latest=self._latest(tree),
            )
        )
        if done.returncode != 0:
            raise LauncherError(f"{self._host.name}: {done.stderr.strip() or done.stdout.strip()}")
        runs, latest, *_ = [*done.stdout.split("\n"), "", ""]
        if not runs.startswith("/") or not f"{runs}{latest}".isprintable():
            raise LauncherError(f"{self._host.name}: {runs[:200]!r} is no folder for runs")
        there = f"{runs}/{name}"
        here = run_directory.make(self._mirrors.folder, name)
        self._before = latest
        return Folder(here=here, there=there, start=str(Path(there, "code", below)))

    def _venv_check(self) -> str:
        venv = self._profile.venv
        if venv is None or venv.startswith("/"):
            return ":"
        path = self._profile.below(venv)
        why = (
            f"there is no virtual environment {path}; make it once: ssh {self._host.name} "
            f"'python3 -m venv {path} && {path}/bin/pip install torch'"
        )
        there = f"[ -f {path_quote(path)}/bin/activate ]"
        return f"{there} || {{ echo {shlex.quote(why)} >&2; exit 1; }}"

    def _path(self, path: str) -> str:
        return path_quote(self._profile.remote_dir.rstrip("/") + (path and f"/{path}"))

    def _latest(self, tree: WorkingTree) -> str:
        """Return the link that leads to the code of the project's newest run."""
        return self._path(f"latest/{tree.root.name}")

    def bring(self, folder: Folder) -> None:
        """Copy the code and the files of the mirror to the host."""
        assert self._tree is not None
        tree = self._tree
        there = f"{self._host.name}:{folder.there}/"
        names = b"".join(os.fsencode(name) + b"\0" for name in tree.names)
        # Files are compared by content: two edits within a second have one time and size.
        # Unchanged files are hard links, so they must not be written to.
        same = ("--checksum", "--chmod=Du+rwx,F-w", "--from0", "--files-from=-")
        before = [f"--link-dest={self._before}"] if self._before else []
        self._sync("-lpt", *same, *before, f"{tree.root}/", f"{there}code/", names=names)
        self._sync("-rlt", f"{folder.here}/", there)
        latest = self._latest(tree)
        code = shlex.quote(f"{folder.there}/code")
        self._host.bash(f"mkdir -p {self._path('latest')}\nln -sfn {code} {latest}")

    def _sync(self, *words: str, names: bytes = b"") -> None:
        done = self._host.rsync(*words, names=names)
        if done.returncode != 0:
            message = done.stderr.strip().partition("\n")[0]
            raise LauncherError(f"rsync to {self._host.name}: {message}")

    def discard(self, folder: Folder, *, begun: bool) -> None:
        """Remove the run directory there and its mirror."""
        shutil.rmtree(folder.here, ignore_errors=True)
        self._host.bash(f"rm -rf {shlex.quote(folder.there)}")

    # ---- Submission

    def sbatch(
        self,
        argv: Sequence[str],
        *,
        folder: Folder,
        key: str,
        again: bool,
        secrets: Mapping[str, str],
    ) -> "CompletedProcess[str]":
        """Submit a job, or return the recorded answer if it was submitted before.

        Secrets stand in what bash reads from its stdin: on no command line, and in no file.
        """
        place = f"submitted/{key}"
        script = _LOCKED + _SUBMIT
        return self._host.bash(
            script.format(
                folder=shlex.quote(folder.there),
                key=place,
                doubt=":" if again else f"[ ! -e {place}.begun ] || exit {DOUBTFUL}",
                secrets="\n".join(f"export {n}={shlex.quote(v)}" for n, v in secrets.items()),
                sbatch=shlex.join(argv),
            )
        )

    def answers(self, folder: Folder, keys: Sequence[str]) -> dict[str, str]:
        """Return what sbatch has answered; a connection that was cut off is waited for."""
        lines = [f"[ ! -e submitted/{key} ] || echo {key} $(cat submitted/{key})" for key in keys]
        script = _LOCKED.format(folder=shlex.quote(folder.there)) + "\n".join(lines)
        pairs = (line.partition(" ") for line in self._host.bash(script).stdout.splitlines())
        return {key: answer for key, _, answer in pairs}

    def keep(self, folder: Folder, *, jobs: Sequence[str], launch: str) -> None:
        """Write the record of the submission into the remote run directory.

        Raises:
            LauncherError: it cannot be written; the jobs are submitted all the same.
        """
        wanted = [
            f"grep -qsxF {shlex.quote(line)} jobs.jsonl || echo {shlex.quote(line)} >>jobs.jsonl"
            for line in jobs
        ]
        if launch:
            wanted.append(f"printf %s {shlex.quote(launch)} >launch.json")
        script = _LOCKED.format(folder=shlex.quote(folder.there)) + " &&\n".join(wanted)
        done = _patiently(lambda: self._host.bash(script))
        if done.returncode != 0:
            raise LauncherError(
                f"the jobs are submitted, but {self._host.name}:{folder.there} cannot be written: "
                f"{first_line(done.stderr)}"
            )

    def as_there(self, record: RunRecord) -> RunRecord:
        """Return a record with which the toolkit opens the run on the login node."""
        assert record.remote_dir is not None
        there = Path(record.remote_dir)
        profile = {k: v for k, v in record.profile.items() if k not in ("via", "remote_dir")}
        profile["runs_dir"] = str(there.parent)
        return replace(record, profile=profile, run_dir=there, remote_dir=None)

    # ---- An earlier run

    def watch(self, run: object) -> None:
        """Register that a process has this run open."""
        self._mirrors.watch(run)

    def fetch(self, since: float) -> None:
        """Make sure that the mirrors of the open runs are not older than `since`."""
        self._mirrors.fetch(since)

    def seen(self, record: RunRecord) -> Path | None:
        """Return the mirror, brought up to date if it is older than seconds."""
        if record.remote_dir is not None:
            self._mirrors.refresh()
        return record.run_dir

    def request_cancel(self, record: RunRecord) -> None:
        """Leave the mark of a cancelled run, there and here."""
        self._mark(record, "mkdir -p {0} && touch {0}/cancel_requested")
        if record.run_dir is not None:
            record.run_dir.mkdir(parents=True, exist_ok=True)
            run_directory.request_cancel(record.run_dir)

    def withdraw_cancel(self, record: RunRecord) -> None:
        """Take the mark back, there and here."""
        self._mark(record, "rm -f {0}/cancel_requested")
        if record.run_dir is not None:
            run_directory.withdraw_cancel(record.run_dir)

    def _mark(self, record: RunRecord, script: str) -> None:
        if record.remote_dir is not None:
            self._host.bash(script.format(shlex.quote(record.remote_dir)))


@functools.cache
def _mirrors_of(host: Host, folder: Path) -> Mirrors:
    return Mirrors(host, folder)


def _patiently(
    ask: Callable[[], "CompletedProcess[str]"],
) -> "CompletedProcess[str]":
    """Retry until the host answers, for a minute."""
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except Hung:
            raise
        except Lost:
            time.sleep(pause_s)
    return ask()
