"""`toolkit check`: applies the rules to job files, batch scripts and Kubernetes manifests."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import InputError, PlanError, Problem, ProfileError, in_one_line
from toolkit.job.spec import JobSpec, load, read_job
from toolkit.lint import check as lint
from toolkit.lint.folders import files_to_check, is_folder
from toolkit.lint.manifests.rules.schema import Schemas, is_known, read_schemas, schemas_of
from toolkit.lint.rulebook import Rule, Violation
from toolkit.lint.scripts.options import is_batch_script
from toolkit.lint.scripts.script import Site, read_batch_script
from toolkit.lint.training.script import read_training_script
from toolkit.local.train_arguments import proof_problems, train_problems
from toolkit.planning import plan
from toolkit.planning.arguments import argument_problems
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.local import LocalPlan
from toolkit.profile import KubernetesProfile, Profile, SlurmProfile, as_profile
from toolkit.rendering import render
from toolkit.text.manifests import Manifest, View, is_manifest, read_manifests
from toolkit.text.yaml_reader import Document, KeyPath, read_text

if TYPE_CHECKING:
    from toolkit.slurm.commands import Command

_RULES = {
    rule.id: rule
    for rule in (
        *lint.SCRIPT_RULES,
        *lint.TRAINING_RULES,
        *lint.JOB_RULES,
        *lint.MANIFEST_RULES,
        *lint.SITE_RULES,
        *lint.CLUSTER_RULES,
    )
}
_MOST_POINTS = 20
"""Limit of checked points per sweep; points differ only in arguments and variables."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem, with the rule that found it."""

    file: str
    """The file; for an answer of the site, the command that was run."""

    line: int | None
    """The line; None if the problem belongs to no line."""

    rule: str | None
    """The rule's id; None if the file cannot be used at all."""

    message: str
    """The problem, with the value and a fix."""

    reason: str
    """Why the rule exists."""

    fix: str
    """The fix in general terms."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        text = f"[{self.rule}] {self.message}" if self.rule else self.message
        return in_one_line(f"{place}: {text}" if place else text)


def check(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    to: Sequence[str | Profile] = (),
    server: bool = False,
    schemas: str | Path | None = None,
    verify: bool = False,
    command: "Command | None" = None,
    api_client: Any = None,
) -> list[Finding]:
    """Return all problems of a job, a script, or Kubernetes manifests.

    Args:
        path: The file. It is a training script if its suffix is `.py`; a batch script if it begins
            with `#!`, has `#SBATCH` lines or has the suffix `.sbatch`, `.sh`, `.slurm` or `.job`;
            a stream of manifests if its documents have `apiVersion` and `kind`. For a folder, all
            such files below it are checked; an unusable file is a finding without a rule.
        overrides: Assignments to keys of a job file.
        to: The profiles that a job file must work with; for manifests, the profile of their
            namespace; for a batch script, the profile of its site.
        server: Whether to query the Slurm site or the cluster as well; nothing is submitted.
        schemas: A folder with the CustomResourceDefinitions that apply to manifests.
        verify: Whether to start the ranks of a job that trains with `train` on the CPUs of this
            machine, and to compare its first steps with the steps of one process.
        command: Runs Slurm's commands for a batch script; by default as subprocesses.
        api_client: A `kubernetes.client.ApiClient`; without it, the kubeconfig or the pod's own
            cluster is used.

    Raises:
        InputError: the file cannot be read, or does not describe a job.
        LauncherError: the site does not answer.
    """
    path, overrides = Path(path), tuple(overrides)  # overrides are read more than once
    if is_folder(path):
        options = {"to": to, "server": server, "schemas": schemas}
        more = {"command": command, "api_client": api_client}
        return [
            one
            for file in files_to_check(path)
            for one in check_among_others(file, overrides, **options, **more)
        ]
    content = kind_of_file(path)
    if content == "training":
        problems = lint.check_training_script(read_text(path), str(path))
        return [finding(problem) for problem in problems]
    if content == "script":
        profiles = [as_profile(profile) for profile in to]
        if server and command is None:
            from toolkit.slurm.commands import run_command as command
        problems = _script_problems(path, profiles, command if server else None)
        return [finding(problem) for problem in problems]
    schema_set = read_schemas(Path(schemas)) if schemas is not None else None
    if content == "manifests":
        sites = [as_profile(profile) for profile in to]
        problems = _manifest_problems(
            path, sites, schemas=schema_set, server=server, api_client=api_client
        )
        return [finding(problem) for problem in problems]
    findings = _job_findings(path, overrides, to, schemas=schema_set)
    if server and not findings:
        job = load(path, overrides)
        for profile in map(as_profile, to):
            if isinstance(profile, KubernetesProfile):
                text = render(_shortened(plan(job, profile)))
                rendered = read_manifests(text, f"rendered for {profile.name}")
                problems = [*_server_problems(rendered.manifests, profile, api_client)]
            else:
                from toolkit.api import ask_site

                problems = ask_site(job, to=profile)
            findings += map(finding, problems)
    if verify and not findings:
        job, document = load(path, overrides), read_job(path, overrides)
        findings += [finding(problem, document) for problem in proof_problems(job)]
    return list(dict.fromkeys(findings))


def check_among_others(file: Path, overrides: tuple[str, ...], **options: Any) -> list[Finding]:
    """Check one of several files: each option applies only to the kinds of files that take it."""
    content = kind_of_file(file)
    try:
        return check(
            file,
            overrides if content == "job" else (),
            **{**options, "to": profiles_for(content, options["to"])},
        )
    except InputError as error:
        return [finding(problem) for problem in error.problems]


def profiles_for(content: str, profiles: Iterable[str | Profile]) -> list[Profile]:
    """Return the profiles that apply to a kind of file."""
    kinds = {"script": SlurmProfile, "manifests": KubernetesProfile}
    if content == "job":
        return [as_profile(profile) for profile in profiles]
    if content not in kinds:
        return []
    return [one for one in map(as_profile, profiles) if isinstance(one, kinds[content])]


def unchecked_kinds(path: Path, *, schemas: str | Path | None = None) -> list[str]:
    """Return the kinds in a manifest file without a known schema."""
    schema_set = read_schemas(Path(schemas)) if schemas is not None else None
    try:
        manifests = read_manifests(read_text(path), str(path)).manifests
    except InputError:
        return []
    return sorted(
        {
            f"{manifest.kind} ({manifest.group})" if manifest.group else manifest.kind
            for manifest in manifests
            if not is_known(manifest, schema_set)
        }
    )


def kind_of_file(path: Path) -> Literal["job", "manifests", "script", "training"]:
    """Return the kind of a file: a job, Kubernetes objects, a batch or a training script."""
    if path.suffix == ".py":
        return "training"
    try:
        text = read_text(path)
    except InputError:
        return "job"  # the job reader reports the error
    if is_batch_script(path.name, text):
        return "script"
    return "manifests" if is_manifest(text) else "job"


def finding(problem: Problem, document: Document | None = None) -> Finding:
    """Return a problem with the texts of its rule; `document` locates the keys."""
    if document is not None:
        problem = document.located(problem)
    match = re.fullmatch(r"(.*):(\d{1,18})", problem.place or "", re.DOTALL)
    rule = _RULES.get(problem.rule or "")
    return Finding(
        file=match[1] if match else problem.place or "",
        line=int(match[2]) if match else None,
        rule=problem.rule,
        message=problem.message,
        reason=rule.reason if rule else "",
        fix=rule.fix if rule else "",
    )


# ---- Job files


def _job_findings(
    path: Path, overrides: Iterable[str], to: Iterable[str | Profile], *, schemas: Schemas | None
) -> list[Finding]:
    """Plan and render a job for each profile; check the manifests that Kubernetes gets."""
    job, document = load(path, overrides), read_job(path, overrides)
    findings = [finding(problem, document) for problem in argument_problems(job)]
    kinds = set[str]()
    for name in to:
        try:
            profile = as_profile(name)
            kinds.add(profile.kind)
            made = plan(job, profile)
            if isinstance(made, LocalPlan):
                problems = _refused_here(made, path)
                findings += (finding(problem, document) for problem in problems)
            if isinstance(made, KubernetesPlan):
                from toolkit.runs.run import new_run_name

                plan(job, profile, run_name=new_run_name(job.name))  # runs have longer names
                problems = _rendered_problems(_shortened(made), schemas)
                findings += (finding(problem, document) for problem in problems)
            render(made)
        except InputError as error:
            places = document if isinstance(error, PlanError) else None
            findings += (finding(problem, places) for problem in error.problems)
    entry = [*train_problems(job, here=kinds == {"local"}), *_script_faults(job, path)]
    return [*findings, *(finding(problem, document) for problem in entry)]


def _refused_here(made: LocalPlan, path: Path) -> Iterator[Problem]:
    """Yield why `toolkit run` would refuse a plan."""
    from toolkit.local.launcher import LocalLauncher

    beside = _places_of_script(made.job, path)
    for problem in LocalLauncher(made.profile).refusals(made):
        if problem.rule != "script-missing" or not any(place.is_file() for place in beside):
            yield problem


def _places_of_script(job: JobSpec, path: Path) -> list[Path]:
    """Return the possible paths of a job's script: check and submission may use other folders."""
    if job.script is None or job.carried:
        return []
    return [Path(folder, job.workdir or "", job.script) for folder in (".", path.parent)]


def _script_faults(job: JobSpec, path: Path) -> Iterator[Problem]:
    """Yield why a job's script cannot be read as Python, if it is here."""
    script = next((place for place in _places_of_script(job, path) if place.is_file()), None)
    if script is not None and script.suffix == ".py":
        try:
            read_training_script(read_text(script), str(script))
        except InputError as error:
            yield from error.problems


def _shortened(made: KubernetesPlan) -> KubernetesPlan:
    return replace(made, points=made.points[:_MOST_POINTS])


def _rendered_problems(made: KubernetesPlan, schemas: Schemas | None) -> Iterator[Problem]:
    """Yield the problems of a rendered manifest, each with the key of the job that causes it."""
    unpatched: set[tuple[str, str]] | None = None
    for rule, violation in _rendered_violations(made, schemas):
        key, where = _key_of(violation.at), "rendered"
        if made.patches:
            if unpatched is None:
                options = made.job.kubernetes.model_copy(update={"patches": ()})
                job = made.job.model_copy(update={"kubernetes": options})
                profile = made.profile.model_copy(update={"patches": ()})
                plain = _shortened(plan(job, profile, run_name=made.run_name))
                unpatched = {(r.id, v.what) for r, v in _rendered_violations(plain, schemas)}
            if (rule.id, violation.what) not in unpatched:
                key, where = ("kubernetes", "patches"), "patched"
        yield Problem(
            key=key,
            message=f"{violation.what}; {violation.fix or rule.fix} (in the "
            f"{violation.at.manifest.kind} {where} for {made.profile.name!r}: "
            f"{violation.at.where})",
            rule=rule.id,
        )


_KEYS: dict[str | int, KeyPath] = {
    "activeDeadlineSeconds": ("time_limit",),
    "args": ("args",),
    **dict.fromkeys(("backoffLimit", "backoffLimitPerIndex"), ("retries", "requeue")),
    **dict.fromkeys(("completions", "parallelism"), ("resources", "nnodes")),
    **dict.fromkeys(("hostPath", "nfs", "volumeMounts", "volumes"), ("mounts",)),
    "image": ("image",),
    "maxRestarts": ("retries", "requeue"),
    **dict.fromkeys(("minReplicas", "maxReplicas", "replicas"), ("resources", "nnodes")),
    "name": ("name",),
    **dict.fromkeys(("nprocPerNode", "numProcPerNode"), ("resources", "nproc_per_node")),
    "numNodes": ("resources", "nnodes"),
    "priorityClassName": ("kubernetes", "priority_class"),
    "sizeLimit": ("resources", "shm"),
    "terminationGracePeriodSeconds": ("stop", "grace"),
}
"""The last key of a manifest path with a known origin, and the job's key."""


def _key_of(at: View) -> KeyPath:
    """Return the job's key behind a value of a rendered manifest; empty if no key sets it.

    The job file may lack this key: then the value comes from the profile or from other keys.
    """
    path = at.path
    if "env" in path:
        name = at.manifest.view.at(*path[: path.index("env") + 2]).text("name")
        return ("env", name) if name else ("env",)
    if path[-2:-1] in (("requests",), ("limits",)):
        key = {"cpu": "cpus_per_node", "memory": "memory"}.get(str(path[-1]), "gpus_per_node")
        return ("resources", key)
    if path[-1:] in (("kueue.x-k8s.io/queue-name",), ("kueue.x-k8s.io/priority-class",)):
        return ("kubernetes", "queue")
    return next((_KEYS[part] for part in reversed(path) if part in _KEYS), ())


def _rendered_violations(
    made: KubernetesPlan, schemas: Schemas | None
) -> list[tuple[Rule, Violation[View]]]:
    source = f"rendered for {made.profile.name}"
    stream = read_manifests(render(made), source, pod_security=made.profile.pod_security)
    return list(lint.manifest_violations(stream, schemas))


# ---- Manifests


def _manifest_problems(
    path: Path, sites: Sequence[Profile], *, schemas: Schemas | None, server: bool, api_client: Any
) -> list[Problem]:
    site: KubernetesProfile | None = None
    for profile in sites:
        if not isinstance(profile, KubernetesProfile):
            what = f"profile {profile.name!r} is not of a Kubernetes cluster; manifests are for one"
            raise ProfileError(what)
        site = site or profile
    text = read_text(path)
    manifests = read_manifests(text, str(path)).manifests
    cluster = site or KubernetesProfile(name="current")
    if server and schemas is None:
        from toolkit.kubernetes.client.resources import definitions

        objects = [manifest.data for manifest in manifests]
        schemas = schemas_of(definitions(objects, cluster, api_client=api_client))
    level = site.pod_security if site else None
    problems = lint.check_manifests(text, str(path), pod_security=level, schemas=schemas)
    if server:
        problems += lint.not_allowed(_server_problems(manifests, cluster, api_client), text)
    return lint.in_order(problems)


def _server_problems(
    manifests: Sequence[Manifest], site: KubernetesProfile, api_client: Any
) -> Iterator[Problem]:
    """Yield why the API server would refuse the objects, by a dry run."""
    from toolkit.kubernetes import dry_run

    named = [manifest for manifest in manifests if manifest.name]
    answers = dry_run([manifest.data for manifest in named], site, api_client=api_client)
    for manifest, (_, refusal) in zip(named, answers, strict=True):
        # A dry run creates nothing, so the server does not find objects of the same file.
        missing = re.search(r'"([^"]+)" not found', refusal)
        if refusal and not (missing and any(one.name == missing[1] for one in manifests)):
            yield Problem(
                place=manifest.place(("metadata", "name")),
                message=f"the cluster refuses {manifest.kind} {manifest.name!r}: {refusal}",
                rule="server-refuses",
            )


# ---- Batch scripts


def _script_problems(
    path: Path, profiles: Sequence[Profile], command: "Command | None"
) -> list[Problem]:
    """Check a script; with a command also against the site: account, folders, sbatch's verdict."""
    text, site = read_text(path), Site()
    for profile in profiles:
        if not isinstance(profile, SlurmProfile):
            what = f"profile {profile.name!r} is not of a Slurm cluster; batch scripts are for one"
            raise ProfileError(what)
        version = profile.slurm_version
        slurm = tuple(map(int, version.split(".")[:2])) if version else (0, 0)
        site = Site(
            slurm=(slurm[0], slurm[1]) if version else None,
            plugin_options=frozenset(profile.plugin_options),
        )
    if command is None:
        return lint.check_script(text, str(path), site)
    from toolkit.slurm.site_check import (
        account_findings,
        log_folder,
        path_findings,
        slurm_version,
        verdict,
    )

    site = replace(site, slurm=slurm_version(command) or site.slurm)
    problems = lint.check_script(text, str(path), site)
    refusals = verdict(text, command, place=str(path))
    if not refusals:  # then unknown options belong to a plug-in
        problems = [one for one in problems if one.rule != "directive-unknown"]
    script = read_batch_script(text, str(path))

    def place(name: str) -> str:
        option = script.options.get(name)
        return f"{path}:{option.line}" if option else str(path)

    options = {name: script.value(name) for name in script.options}
    problems += account_findings(options, command, place=place)
    problems += refusals
    places = []
    for name in ("output", "error"):
        if (value := options.get(name)) and (folder := log_folder(value)):
            way_out = "make it: Slurm does not, and the job fails without a log"
            places.append(("writes", folder, place(name), way_out))
    if chdir := options.get("chdir"):
        places.append(("folder", chdir, place("chdir"), "make it, or correct --chdir"))
    return problems + path_findings(places, command)
