"""Files held to rules: job files with their profiles; batch scripts and manifests of people."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.api import ask_site
from toolkit.errors import InputError, PlanError, Problem, ProfileError
from toolkit.job.loader import override
from toolkit.job.spec import JobSpec, load
from toolkit.lint.manifests.check import MANIFEST_RULES, allowed, check_manifests, faults, in_order
from toolkit.lint.manifests.registry import Fault
from toolkit.lint.manifests.schema import Schemas, read_schemas, schemas_of
from toolkit.lint.manifests.source_map import key_of
from toolkit.lint.rules import CLUSTER_RULES, JOB_RULES, SITE_RULES, Rule
from toolkit.lint.scripts.check import SCRIPT_RULES, check_script
from toolkit.lint.scripts.directives import is_batch_script
from toolkit.lint.scripts.script import BatchScript, read_batch_script
from toolkit.planning import plan
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.profile import KubernetesProfile, Profile, load_profile
from toolkit.rendering import render
from toolkit.runs.run import new_run_name
from toolkit.slurm.squeue import Command, run_command
from toolkit.text.manifest_reader import is_manifest, read_manifests
from toolkit.text.manifests import Manifest
from toolkit.text.yaml_reader import Document, read_document, read_text

__all__ = ["Finding", "check", "finding", "is_manifests", "is_script"]

_MOST_POINTS = 20  # of a sweep, whose points differ in arguments and variables only


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, and by which rule."""

    file: str
    """The file; for an answer of the site, the command that was run."""

    line: int | None
    """The line, where there is one."""

    rule: str | None
    """The rule's id; None where the file cannot be used at all."""

    message: str
    """The mistake, with the value and the way out."""

    reason: str
    """Why the rule exists."""

    fix: str
    """The way out in general terms."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        text = f"[{self.rule}] {self.message}" if self.rule else self.message
        return f"{place}: {text}" if place else text


def check(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    to: Sequence[str | Profile] = (),
    server: bool = False,
    schemas: str | Path | None = None,
    command: Command = run_command,
    api_client: Any = None,
) -> list[Finding]:
    """Return everything that is wrong with a job file, a batch script, or Kubernetes manifests.

    Args:
        path: The file. One that begins with `#!`, holds `#SBATCH` lines or has the suffix
            `.sbatch`, `.sh`, `.slurm` or `.job` is a batch script; one whose documents say
            `apiVersion` and `kind` is a stream of manifests.
        overrides: Assignments to keys of a job file.
        to: Profiles that a job file must work with; of manifests, the one of their namespace.
        server: Whether to query the Slurm site or the cluster as well; nothing is submitted.
        schemas: A folder with CustomResourceDefinitions that manifests are held to.
        command: How Slurm's commands are run for a batch script.
        api_client: A `kubernetes.client.ApiClient`; by kubeconfig or in the cluster without.

    Raises:
        InputError: the file cannot be read, or describes no job.
        LauncherError: the site gives no answer.
    """
    path = Path(path)
    if is_script(path):
        return _script_findings(path, server=server, command=command)
    schema_set = read_schemas(Path(schemas)) if schemas is not None else None
    if is_manifests(path):
        sites = [load_profile(name) if isinstance(name, str) else name for name in to]
        text = read_text(path)
        return _manifest_findings(
            text, path, sites, schemas=schema_set, server=server, api_client=api_client
        )
    job = load(path, overrides)
    document = _document(path, overrides)
    findings: list[Finding] = []
    for name in to:
        try:
            profile = load_profile(name) if isinstance(name, str) else name
            made = plan(job, profile)
            if isinstance(made, KubernetesPlan):
                plan(job, profile, run_name=new_run_name(job.name))  # runs have longer names
                wrong = _rendered_problems(_shortened(made), schema_set)
                findings += (finding(problem, document) for problem in wrong)
            render(made)
        except InputError as error:
            usable = isinstance(error, PlanError)
            findings += (finding(p, document if usable else None) for p in error.problems)
    if findings or not server:
        return list(dict.fromkeys(findings))
    for name in to:
        profile = load_profile(name) if isinstance(name, str) else name
        if isinstance(profile, KubernetesProfile):
            made = _shortened(plan(job, profile))
            rendered = read_manifests(render(made), f"rendered for {profile.name}")
            findings += map(finding, _server_problems(rendered.manifests, profile, api_client))
        else:
            findings += map(finding, ask_site(job, to=profile))
    return list(dict.fromkeys(findings))


def is_manifests(path: Path) -> bool:
    """Whether a file holds Kubernetes objects rather than a job."""
    try:
        return is_manifest(read_text(path))
    except InputError:
        return False  # the reader that follows reports the error


def is_script(path: Path) -> bool:
    """Whether a file is a batch script rather than a job file."""
    try:
        return is_batch_script(path.name, read_text(path))
    except InputError:
        return False  # the reader that follows reports the error


def _document(path: Path, overrides: Iterable[str]) -> Document:
    return override(read_document(read_text(path), str(path)), overrides, JobSpec)


@cache
def _rules() -> Mapping[str, Rule]:
    return {
        rule.id: rule
        for rule in (*SCRIPT_RULES, *JOB_RULES, *MANIFEST_RULES, *SITE_RULES, *CLUSTER_RULES)
    }


def finding(problem: Problem, document: Document | None = None) -> Finding:
    """Return a problem with the words of its rule; `document` knows the lines of keys."""
    place = problem.place
    if place is None and document is not None:
        place = document.place(problem.key) if problem.key else document.source
    match = re.fullmatch(r"(.*):(\d{1,18})", place or "")
    rule = _rules().get(problem.rule or "")
    return Finding(
        file=match[1] if match else place or "",
        line=int(match[2]) if match else None,
        rule=problem.rule,
        message=problem.message,
        reason=rule.reason if rule else "",
        fix=rule.fix if rule else "",
    )


# ---- Manifests


def _manifest_findings(
    text: str,
    path: Path,
    sites: Sequence[Profile],
    *,
    schemas: Schemas | None,
    server: bool,
    api_client: Any,
) -> list[Finding]:
    for other in sites:
        if not isinstance(other, KubernetesProfile):
            what = f"profile {other.name!r} is of no Kubernetes cluster; manifests are for one"
            raise ProfileError(what)
    site = next((one for one in sites if isinstance(one, KubernetesProfile)), None)
    asked = site or KubernetesProfile(name="current")
    manifests = read_manifests(text, str(path)).manifests
    if server and schemas is None:
        from toolkit.kubernetes.client.definitions import definitions

        objects = [manifest.data for manifest in manifests]
        schemas = schemas_of(definitions(objects, asked, api_client=api_client))
    level = site.pod_security if site else None
    findings = check_manifests(text, str(path), pod_security=level, schemas=schemas)
    if server:
        findings += allowed(_server_problems(manifests, asked, api_client), text)
    return [finding(problem) for problem in in_order(findings)]


def _server_problems(
    manifests: Sequence[Manifest], site: KubernetesProfile, api_client: Any
) -> list[Problem]:
    """Return why the API server would refuse the objects, by a dry run."""
    from toolkit.kubernetes import dry_run

    named = [manifest for manifest in manifests if manifest.name]
    answers = dry_run([manifest.data for manifest in named], site, api_client=api_client)
    return [
        Problem(
            place=manifest.place(("metadata", "name")),
            message=f"the cluster refuses {manifest.kind} {manifest.name!r}: {words}",
            rule="server-refuses",
        )
        for manifest, (_, words) in zip(named, answers, strict=True)
        if words and not _only_waits(words, manifests)
    ]


def _only_waits(words: str, manifests: Sequence[Manifest]) -> bool:
    """Whether the server only misses what the same file makes, as a dry run does not."""
    missed = re.search(r'"([^"]+)" not found', words)
    return missed is not None and any(one.name == missed[1] for one in manifests)


def _shortened(made: KubernetesPlan) -> KubernetesPlan:
    return replace(made, points=made.points[:_MOST_POINTS])


def _rendered_problems(made: KubernetesPlan, schemas: Schemas | None) -> Iterator[Problem]:
    """Yield the problems of a rendered manifest, each with the key of the job that causes it."""
    plain: set[tuple[str, str]] | None = None
    for rule, fault in _faults_of(made, schemas):
        key, where = key_of(fault.at), "rendered"
        if made.patches:
            if plain is None:
                plain = {(r.id, f.what) for r, f in _unpatched_faults(made, schemas)}
            if (rule.id, fault.what) not in plain:
                key, where = ("kubernetes", "patches"), "patched"
        yield Problem(
            key=key,
            message=f"{fault.what}; {fault.fix or rule.fix} (in the {fault.at.manifest.kind} "
            f"{where} for {made.profile.name!r}: {fault.at.where})",
            rule=rule.id,
        )


def _unpatched_faults(made: KubernetesPlan, schemas: Schemas | None) -> list[tuple[Rule, Fault]]:
    options = made.job.kubernetes.model_copy(update={"patches": ()})
    job = made.job.model_copy(update={"kubernetes": options})
    profile = made.profile.model_copy(update={"patches": ()})
    return _faults_of(_shortened(plan(job, profile, run_name=made.run_name)), schemas)


def _faults_of(made: KubernetesPlan, schemas: Schemas | None) -> list[tuple[Rule, Fault]]:
    source = f"rendered for {made.profile.name}"
    stream = read_manifests(render(made), source, pod_security=made.profile.pod_security)
    return list(faults(stream, schemas))


# ---- Batch scripts


def _script_findings(path: Path, *, server: bool, command: Command) -> list[Finding]:
    text = read_text(path)
    findings = check_script(text, str(path))
    if server:
        findings += _site_findings(read_batch_script(text, str(path)), path, command)
    return [finding(problem) for problem in findings]


def _site_findings(script: BatchScript, path: Path, command: Command) -> list[Problem]:
    """Check a script against the site: account, QOS, folders, and sbatch's own verdict."""
    from toolkit.slurm.access_check import account_findings, log_folder, path_findings, verdict

    def place(name: str) -> str:
        option = script.options.get(name)
        return f"{path}:{option.line}" if option else str(path)

    options = {name: script.value(name) for name in script.options}
    problems = account_findings(options, command, place=place)
    problems += verdict(script.text, command, place=str(path))
    places = []
    for name in ("output", "error"):
        if (value := options.get(name)) and (folder := log_folder(value)):
            way_out = "make it: Slurm does not, and the job fails without a log"
            places.append(("writes", folder, place(name), way_out))
    if chdir := options.get("chdir"):
        places.append(("folder", chdir, place("chdir"), "make it, or correct --chdir"))
    return problems + path_findings(places, command)
