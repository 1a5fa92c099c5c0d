"""Files held to rules: job files with their profiles, and batch scripts that people wrote."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit.batch_scripts.checking import SCRIPT_RULES, check_script
from toolkit.batch_scripts.directives import is_batch_script
from toolkit.batch_scripts.scripts import BatchScript, read_batch_script
from toolkit.documents import Document, read_document, read_text
from toolkit.errors import InputError, PlanError, Problem
from toolkit.launchers.slurm_queue import Command, run_command
from toolkit.planning import plan
from toolkit.profile import Profile, load_profile
from toolkit.rendering import render
from toolkit.rules import JOB_RULES, SITE_RULES, Rule
from toolkit.runs import ask_site
from toolkit.spec import JobSpec, load
from toolkit.validation import override

__all__ = ["Finding", "check", "finding", "is_script"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, and by which rule."""

    file: str
    """Where it stands; of a site's own word, the command that was asked."""

    line: int | None
    """The line, where there is one."""

    rule: str | None
    """The rule's id; None where the file cannot be used at all."""

    message: str
    """What is wrong, with the value and the way out."""

    reason: str
    """Why it matters, whatever the values."""

    fix: str
    """The way out, whatever the values."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        found = f"[{self.rule}] {self.message}" if self.rule else self.message
        return f"{place}: {found}" if place else found


def check(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    to: Sequence[str | Profile] = (),
    server: bool = False,
    command: Command = run_command,
) -> list[Finding]:
    """Return everything that is wrong with a job file, or with a batch script.

    Args:
        path: The file. One that begins with `#!`, holds `#SBATCH` lines or has the suffix
            `.sbatch`, `.sh`, `.slurm` or `.job` is a batch script.
        overrides: Assignments to keys of a job file.
        to: Profiles that a job file must work with.
        server: Whether the Slurm site is asked, too; nothing is submitted.
        command: How Slurm's commands are run for a batch script.

    Raises:
        InputError: the file cannot be read, or describes no job.
        LauncherError: the site gives no answer.
    """
    path = Path(path)
    if is_script(path):
        return _script_findings(path, server=server, command=command)
    job = load(path, overrides)
    document = _document(path, overrides)
    found: list[Finding] = []
    for name in to:
        try:
            profile = load_profile(name) if isinstance(name, str) else name
            render(plan(job, profile))
        except InputError as error:
            usable = isinstance(error, PlanError)
            found += (finding(p, document if usable else None) for p in error.problems)
    if found or not server:
        return list(dict.fromkeys(found))
    return [finding(problem) for name in to for problem in ask_site(job, to=name)]


def is_script(path: Path) -> bool:
    """Whether a file is a batch script rather than a job file."""
    try:
        return is_batch_script(path.name, read_text(path))
    except InputError:
        return False  # whoever reads it will say why it cannot be read


def _document(path: Path, overrides: Iterable[str]) -> Document:
    return override(read_document(read_text(path), str(path)), overrides, JobSpec)


@cache
def _rules() -> Mapping[str, Rule]:
    return {rule.id: rule for rule in (*SCRIPT_RULES, *JOB_RULES, *SITE_RULES)}


def finding(problem: Problem, document: Document | None = None) -> Finding:
    """Return a problem with the words of its rule; `document` knows the lines of keys."""
    place = problem.place
    if place is None and document is not None:
        place = document.place(problem.key) if problem.key else document.source
    match = re.fullmatch(r"(.*):(\d+)", place or "")
    rule = _rules().get(problem.rule or "")
    return Finding(
        file=match[1] if match else place or "",
        line=int(match[2]) if match else None,
        rule=problem.rule,
        message=problem.message,
        reason=rule.reason if rule else "",
        fix=rule.fix if rule else "",
    )


# ---- Batch scripts


def _script_findings(path: Path, *, server: bool, command: Command) -> list[Finding]:
    text = read_text(path)
    found = check_script(text, str(path))
    if server:
        found += _site_findings(read_batch_script(text, str(path)), path, command)
    return [finding(problem) for problem in found]


def _site_findings(script: BatchScript, path: Path, command: Command) -> list[Problem]:
    """Ask the site about a script: account, QOS, folders, and sbatch's own verdict."""
    from toolkit.launchers.slurm_access import account_findings, log_folder, path_findings, verdict

    def place(name: str) -> str:
        option = script.options.get(name)
        return f"{path}:{option.line}" if option else str(path)

    options = {name: script.value(name) for name in script.options}
    found = account_findings(options, command, place=place)
    found += verdict(script.text, command, place=str(path))
    places = []
    for name in ("output", "error"):
        if (value := options.get(name)) and (folder := log_folder(value)):
            way_out = "make it: Slurm does not, and the job fails without a log"
            places.append(("writes", folder, place(name), way_out))
    if chdir := options.get("chdir"):
        places.append(("folder", chdir, place("chdir"), "make it, or correct --chdir"))
    return found + path_findings(places, command)
