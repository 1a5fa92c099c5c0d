"""Names of variables that a job cannot have, since a rendered script uses them for itself.

The scripts' own variables begin with an underscore and a small letter, and no job may use such a
name: a secret is exported before the script begins, so the script would work with its value, or
overwrite it. The variables of `env` are no such danger on Slurm and on one machine: the script
gives them to torchrun alone. On Kubernetes the entrypoint of the pods finds both in its
environment.
"""

from __future__ import annotations  # naming a profile must not import it

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec
from toolkit.planning.stop_times import refusal

if TYPE_CHECKING:
    from toolkit.profile import KubernetesProfile

__all__ = ["OF_BASH", "OF_PODS", "OF_SCRIPTS", "of_pods", "of_scripts"]

OF_SCRIPTS = re.compile("_[a-z].*")
"""Names of the rendered scripts' own variables."""

OF_BASH = re.compile(
    "_|BASH.*|CDPATH|COLUMNS|COMP_.*|COMPREPLY|COPROC|DIRSTACK|ENV|EPOCH.*|EUID|EXECIGNORE|FIGNORE"
    "|FUNCNAME|FUNCNEST|GLOBIGNORE|GROUPS|HIST.*|HOST(FILE|NAME|TYPE)|IFS|IGNOREEOF|LANG(UAGE)?"
    "|LC_.*|LD_.*|LINENO|LINES|MACHTYPE|MAIL.*|MAPFILE|OLDPWD|OPT(ARG|ERR|IND)|OSTYPE|PATH"
    "|PIPESTATUS|POSIXLY_CORRECT|PPID|PROMPT_.*|PS[0-4]|PWD|PYTHON(HOME|PATH|STARTUP)|RANDOM"
    "|READLINE_.*|REPLY|SECONDS|SHELL(OPTS)?|SHLVL|SRANDOM|TERM|SRUN_.*|SBATCH_.*|TIMEFORMAT|TMOUT|TMPDIR"
    "|UID|USER|LOGNAME"
)
"""Names that mean something to bash (its manual, "Shell Variables"), to the loader of programs, to
Python or to Slurm's commands. bash takes the value of some for arithmetic and prints part of it."""

OF_PODS = frozenset({"JOB_COMPLETION_INDEX", "HOSTNAME", "IFS", "PATH"})
"""Variables that the entrypoint of the pods reads."""


def of_scripts(job: JobSpec) -> Iterator[Problem]:
    """Find secrets that a script for Slurm or for one machine would overwrite or interpret."""
    for name in job.secrets:
        if OF_SCRIPTS.fullmatch(name):
            what = "is a name of the rendered script's own variables; leave out the underscore"
        elif OF_BASH.fullmatch(name):
            what = "means something to the shell that starts torchrun; use another name"
        else:
            continue
        yield from refusal("secret-overwritten", f"secrets: {name!r} {what}", *("secrets", name))


def of_pods(job: JobSpec, profile: KubernetesProfile) -> Iterator[Problem]:
    """Find variables and secrets that the entrypoint of the pods would overwrite or interpret."""
    taken = OF_PODS - {"PATH"}  # which an image may want another value of
    for key, names, forbidden in (
        ("secrets", job.secrets, OF_PODS),
        ("env", {**profile.env, **job.env}, taken),
    ):
        for name in sorted(names):
            if name not in forbidden and not OF_SCRIPTS.fullmatch(name):
                continue
            yield from refusal(
                "variable-overwritten",
                f"{key}: {name!r} is a variable of the pods' entrypoint; use another name",
                *((key, name) if name in getattr(job, key) else ()),
            )
