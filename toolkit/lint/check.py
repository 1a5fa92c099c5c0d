"""The rules for each kind of file, and the functions that check a text against all rules."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from toolkit.errors import InputError, Problem
from toolkit.lint.bash.parser import readable_lines
from toolkit.lint.manifests.rules import (
    object_names,
    operators,
    processes,
    resources,
    schema,
    security,
    training,
    volumes,
)
from toolkit.lint.manifests.rules import rendezvous as manifest_rendezvous
from toolkit.lint.manifests.rules.schema import CRD_RULE, Schemas, schema_violations
from toolkit.lint.manifests.wrapped import unwrapped
from toolkit.lint.rulebook import MANIFESTS, SCRIPTS, TRAINING, Rule, Violation, allowed_rules
from toolkit.lint.scripts.rules import directives, exit_status, rendezvous, signals, tasks
from toolkit.lint.scripts.script import BatchScript, Site, read_batch_script
from toolkit.lint.scripts.submitted import submitted_scripts
from toolkit.lint.scripts.values import uncovered
from toolkit.lint.templates import (
    MANIFEST_TEMPLATE,
    SCRIPT_TEMPLATE,
    script_template_line,
    unfilled,
    yaml_template_line,
)
from toolkit.lint.training.rules import (
    checkpoint,
    data_parallel,
    loss,
    optimizer,
    process_group,
    sampler,
    spawn,
    stop,
)
from toolkit.lint.training.script import read_training_script
from toolkit.text.control import printable
from toolkit.text.manifests import Stream, View, read_manifests
from toolkit.text.yaml_reader import KeyPath

SCRIPT_RULES = (
    *SCRIPTS.order((directives, rendezvous, exit_status, tasks, signals)),
    SCRIPT_TEMPLATE,
)
"""The rules for batch scripts."""

TRAINING_RULES = TRAINING.order(
    (data_parallel, sampler, loss, optimizer, process_group, spawn, checkpoint, stop)
)
"""The rules for training scripts in Python."""

MANIFEST_RULES = (
    *MANIFESTS.order(
        (
            *(schema, volumes, manifest_rendezvous, object_names, operators, security),
            *(resources, processes, training),
        )
    ),
    CRD_RULE,
    MANIFEST_TEMPLATE,
)
"""The rules for manifests."""

_ELSEWHERE = tomllib.loads(
    Path(__file__).with_name("planner_and_site_rules.toml").read_text(encoding="utf-8")
)
"""The texts of the rules that the planner and the sites implement."""

JOB_RULES = tuple(Rule(id=id, **texts) for id, texts in _ELSEWHERE["job"].items())
"""The rules of `plan` for a job and a profile; `render` and `submit` enforce the same rules."""

SITE_RULES = tuple(Rule(id=id, **texts) for id, texts in _ELSEWHERE["site"].items())
"""The rules of `check --server` at a Slurm site, for job files and scripts."""

CLUSTER_RULES = tuple(Rule(id=id, **texts) for id, texts in _ELSEWHERE["cluster"].items())
"""The rules of `check --server` at a Kubernetes cluster, for job files and manifests."""


_MOST_LINES = 20_000
"""Maximum number of lines in a batch script, enough for a sweep of as many points."""


def check_script(text: str, source: str, site: Site | None = None) -> list[Problem]:
    """Return the problems of a batch script, sorted by line, without duplicates.

    A comment `# toolkit: allow RULE` on the line, or alone on the line above, suppresses a finding.
    A nested script that goes to sbatch as a here-document is also checked.

    Raises:
        InputError: its bash cannot be parsed; the error includes the problems of the lines above.
    """
    if not text.strip():
        raise InputError("the file is empty", place=source)
    if text.count("\n") > _MOST_LINES:
        raise InputError(f"more than {_MOST_LINES:,} lines; is it a script?", place=source)
    site = site or Site()
    if (line := script_template_line(text)) is not None:
        what = "this is a template of a script"
        return [_problem(SCRIPT_TEMPLATE, f"{source}:{line}", what)]
    try:
        script = read_batch_script(text, source, site)
    except InputError as error:
        raise InputError(in_order([*error.problems, *_above(text, error, site)])) from None
    problems = _script_problems(script)
    for inner in submitted_scripts(script):
        with suppress(InputError):  # an expansion by the outer shell may be half of a command
            inside = _script_problems(read_batch_script(inner.text, source, site))
            problems += (
                _moved(problem, inner.line - 1)
                for problem in inside
                if problem.rule not in inner.decided
            )
    return in_order(problems)


_LOOKS_BELOW = frozenset(
    {"failure-masked", "log-truncated", "nodes-unused", "srun-without-wait"}
    | {"signal-orphans", "signal-unhandled", "trap-blocked", "wait-interrupted"}
)
"""The rules that need the whole script, including the commands below an error."""


def _above(text: str, error: InputError, site: Site) -> list[Problem]:
    """Return the problems of the commands above a syntax error."""
    source = (error.problems[0].place or "").rpartition(":")[0]
    lines = readable_lines(text, source, before=_line(error.problems[0]))
    above = "".join(text.splitlines(keepends=True)[:lines])
    try:
        script = read_batch_script(above, source, site)
    except InputError:
        return []
    return [problem for problem in _script_problems(script) if problem.rule not in _LOOKS_BELOW]


def _moved(problem: Problem, lines: int) -> Problem:
    """Return a problem with its line shifted by `lines`, for a text inside a file."""
    source = (problem.place or "").rpartition(":")[0]
    return replace(problem, place=f"{source}:{_line(problem) + lines}")


def _script_problems(script: BatchScript) -> list[Problem]:
    text, source = script.text, script.source
    allowed = allowed_rules(text, [(comment.line, comment.text) for comment in script.comments])
    problems = []
    for rule, violation in SCRIPTS.violations(script):
        if rule.id not in allowed.get(violation.at, ()):
            place = f"{source}:{violation.at}"
            message = f"{uncovered(violation.what)}; {violation.fix or rule.fix}"
            problems.append(Problem(place=place, message=message, rule=rule.id))
    return problems


def _problem(rule: Rule, place: str, what: str) -> Problem:
    return Problem(place=place, message=f"{what}; {rule.fix}", rule=rule.id)


def check_training_script(text: str, source: str) -> list[Problem]:
    """Return the problems of a Python training script, sorted by line, without duplicates.

    A comment `# toolkit: allow RULE` on the line, or alone on the line above, suppresses a finding.

    Raises:
        InputError: the script cannot be parsed as Python.
    """
    script = read_training_script(text, source)
    allowed = allowed_rules(text, enumerate(text.splitlines(), start=1))
    problems = []
    for rule, violation in TRAINING.violations(script):
        if rule.id not in allowed.get(violation.at, ()):
            place = f"{source}:{violation.at}"
            message = f"{printable(violation.what)}; {violation.fix or rule.fix}"
            problems.append(Problem(place=place, message=message, rule=rule.id))
    return in_order(problems)


def check_manifests(
    text: str, source: str, *, pod_security: str | None = None, schemas: Schemas | None = None
) -> list[Problem]:
    """Return the problems of a stream of manifests, sorted by line, without duplicates.

    A comment `# toolkit: allow RULE` on the line, or alone on the line above, suppresses a finding.

    `pod_security` is the Pod Security level of the namespace, if known. `schemas` come from the
    CustomResourceDefinitions of the cluster.

    Raises:
        InputError: the YAML cannot be parsed, or a document is not an object.
    """
    what = "this is a template of a manifest"
    try:
        stream = unwrapped(read_manifests(text, source, pod_security=pod_security))
    except InputError:
        if (line := yaml_template_line(text)) is None:
            raise
        return [_problem(MANIFEST_TEMPLATE, f"{source}:{line}", what)]
    if views := unfilled(stream):
        more = f" and {len(views) - 1} more places" if len(views) > 1 else ""
        what = f"{what}: {views[0].text()!r}{more}"
        place = views[0].manifest.place(views[0].path)
        return not_allowed([_problem(MANIFEST_TEMPLATE, place, what)], text)
    problems = []
    for rule, violation in manifest_violations(stream, schemas):
        place = violation.at.manifest.place(violation.at.path)
        message = f"{violation.what}; {violation.fix or rule.fix}"
        problems.append(Problem(place=place, message=message, rule=rule.id))
    return in_order(not_allowed(problems, text))


def manifest_violations(
    stream: Stream, schemas: Schemas | None = None
) -> Iterator[tuple[Rule, Violation[View]]]:
    """Yield all violations; a rule's violation hides schema violations of the same value."""
    reported: set[tuple[int, KeyPath]] = set()
    for rule, violation in MANIFESTS.violations(stream):
        reported.add((violation.at.manifest.index, violation.at.path))
        yield rule, violation
    for violation in schema_violations(stream, schemas) if schemas else ():
        if (violation.at.manifest.index, violation.at.path) not in reported:
            yield CRD_RULE, violation


def not_allowed(problems: Iterable[Problem], text: str) -> list[Problem]:
    """Return the problems of a manifest that no comment suppresses."""
    allowed = allowed_rules(text, enumerate(text.splitlines(), start=1))
    return [problem for problem in problems if problem.rule not in allowed.get(_line(problem), ())]


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by line, without duplicates."""
    return sorted(dict.fromkeys(problems), key=_line)


def _line(problem: Problem) -> int:
    match = re.search(r":(\d{1,18})$", problem.place or "")
    return int(match[1]) if match else 0
