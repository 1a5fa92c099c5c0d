"""The commands for files that people write and read: new, init, check, schema, supervisor."""

from __future__ import annotations  # naming a type must not import it

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

import toolkit
from toolkit.cli import exit_status
from toolkit.cli.main import JSON, SET, cli, example, without_secrets
from toolkit.cli.output import echo_json, first_of, note, note_origins, say, shown_meanwhile, write
from toolkit.errors import InputError

if TYPE_CHECKING:
    from toolkit.checks import Finding


@cli.command(epilog=example("toolkit new my-model && cd my-model && toolkit run job.yaml"))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--example",
    "job",
    metavar="NAME",
    help="Train with the toolkit's own code, without a script: digits, chars, fashion-mnist, "
    "shuttle or sweep.",
)
def new(folder: Path, job: str | None) -> None:
    """Write a project into a new folder: a job file, a script to start from, profiles.

    Nothing in DIR is overwritten: exit status 2 if it holds anything.
    """
    written = toolkit.write_project(folder, example=job)
    shown = [path for path in written if path.relative_to(folder).parts[:2] != ("k8s", "base")]
    for path in [*shown, folder / "k8s" / "base"]:
        say(f"written: {path}")
    place = f"./{folder}" if str(folder).startswith("-") else str(folder)
    say(f"next: cd {shlex.quote(place)} && toolkit run job.yaml")


@cli.command(epilog=example("toolkit init && toolkit submit jobs/digits.yaml --follow"))
@click.option(
    "--kind",
    type=click.Choice(["slurm", "kubernetes", "local"]),
    help="The scheduler; by default Slurm if it is found here, else Kubernetes, else this machine.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="The profile's name; by default that of the cluster, of the kubeconfig's context, or "
    "`local`.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write; by default one among your own profiles.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the profile; do not write a file.")
@click.option("--force", is_flag=True, help="Overwrite the profile, and make it the default.")
def init(
    kind: str | None, name: str | None, output: Path | None, only_print: bool, force: bool
) -> None:
    """Detect the site, and write a profile of it: the default one, if there is none."""
    from toolkit.profile import draft
    from toolkit.profile.detect import discover

    site = discover()
    made = draft.draft(site, kind=kind, name=name)
    if only_print:
        write(made.text)
        return
    for line in draft.found_lines(site):
        say(line)
    path, is_default = draft.keep_draft(made, output=output, force=force)
    say("")
    role = "the default profile from now on" if is_default else "the default profile is unchanged"
    say(f"written: {path}, {role}")
    to = "" if is_default else f" --to {path if output else made.name}"
    say(f"next: read it, then `toolkit submit JOB.yaml{to} --follow`")


@cli.command(epilog=example("toolkit check train.sbatch"))
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@SET
@click.option(
    "--to",
    multiple=True,
    metavar="PROFILE",
    help="Also check that it works there; without it, the default profile counts, if there is one.",
)
@click.option("--server", is_flag=True, help="Also query the site or cluster; submits nothing.")
@click.option(
    "--schemas",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Check manifests by the CustomResourceDefinitions in a folder (kubectl get crd -o yaml).",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Start the ranks of a `module: train` job on this machine's CPUs; they compare three "
    "small steps with those of one process.",
)
@JSON
def check(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    to: tuple[str, ...],
    server: bool,
    schemas: Path | None,
    verify: bool,
    as_json: bool,
) -> None:
    """List errors in job files, or in your own scripts or manifests.

    A script is a batch script, or a training script in Python (FILE.py), which is not executed. In
    a folder, all such files below it are checked, except in hidden folders and virtual
    environments.

    Exit status 0 if nothing is wrong, 1 if a rule or the site reports a problem or the site does
    not answer, 2 if a file or the profile cannot be used.
    """
    with shown_meanwhile(f"checking {files[0]}"):
        from toolkit import checks
        from toolkit.lint.folders import is_folder

        several = len(files) > 1 or is_folder(files[0])
        content = "" if several else checks.kind_of_file(files[0])
        default = None if to else toolkit.default_profile()
    if several:
        if verify:
            raise click.UsageError("--verify proves one job; name one file")
        _check_many(files, overrides, to, server=server, schemas=schemas, as_json=as_json)
        return
    (file,) = files
    if verify and content != "job":
        raise click.UsageError("--verify is for jobs")
    if content == "script" and overrides:
        raise click.UsageError("--set is for jobs, not for scripts")
    if content == "training" and (to or overrides or server or schemas):
        raise click.UsageError(
            "a training script is only checked as Python code; leave out the options"
        )
    if content == "manifests" and overrides:
        raise click.UsageError("--set is for jobs, not for manifests")
    if default is not None:
        to = (default,) if _is_for(content, default) else ()
    if server and content == "job" and not to:
        raise click.UsageError("--server queries the site of a profile; name one with --to")
    note_origins(to)
    try:
        findings = toolkit.check(
            file, overrides, to=to, server=server, schemas=schemas, verify=verify
        )
    except InputError as error:
        findings = [checks.finding(problem) for problem in error.problems]
    _show(findings, as_json=as_json)
    if content == "manifests" and not server:
        note(_unchecked([file], schemas))
    if findings:
        sys.exit(exit_status.of_findings(findings))
    if as_json:
        return
    if content != "job":
        say(f"{file}: fine")
        return
    job = toolkit.load(file, overrides)
    for name in to:
        note(toolkit.plan(job, toolkit.load_profile(name)).notes)
    if not to:
        refused = toolkit.check(file, overrides, to=["local"])
        note(f"`toolkit run` refuses it here: {one.message}" for one in refused)
    need = job.resources
    nodes = f"{need.min_nodes} to {need.max_nodes}" if need.elastic else need.max_nodes
    where = f" for {', '.join(to)}" if to else ""
    points = f", at {len(job.points)} points" if job.points else ""
    say(f"{file}: fine{where}: {nodes} x {need.nproc_per_node} processes{points}")


def _check_many(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    to: tuple[str, ...],
    *,
    server: bool,
    schemas: Path | None,
    as_json: bool,
) -> None:
    """Check files and folders; each option counts for the kinds of files that take it."""
    from toolkit import checks
    from toolkit.lint.folders import files_to_check, is_folder

    default = None if to else toolkit.default_profile()
    note_origins(to or ([default] if default else []))
    findings: list[checks.Finding] = []
    manifests: list[Path] = []
    count = 0
    for path in dict.fromkeys(files):
        try:
            inside = files_to_check(path) if is_folder(path) else [path]
        except InputError as error:
            findings += map(checks.finding, error.problems)
            continue
        count += len(inside)
        for file in inside:
            content = checks.kind_of_file(file)
            names = to or ((default,) if default and _is_for(content, default) else ())
            options = {"server": server and bool(names or content != "job"), "schemas": schemas}
            findings += checks.check_among_others(file, overrides, to=names, **options)
            manifests += [file] if content == "manifests" and not server else []
    findings = list(dict.fromkeys(findings))
    _show(findings, as_json=as_json)
    note(_unchecked(manifests, schemas))
    if findings:
        sys.exit(exit_status.of_findings(findings))
    if not as_json:
        say(f"{count} file{'s' if count > 1 else ''}: fine")


def _unchecked(files: Sequence[Path], schemas: Path | None) -> tuple[str, ...]:
    """Return a note on object kinds without a schema, or nothing."""
    from toolkit.checks import unchecked_kinds

    kinds = sorted({kind for file in files for kind in unchecked_kinds(file, schemas=schemas)})
    what = f"the fields of {', '.join(kinds)} are not checked; add --schemas DIR or --server"
    return (f"{what}; names, labels and pod templates are",) if kinds else ()


def _show(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        echo_json([{key: _masked(v) for key, v in asdict(one).items()} for one in findings])
        return
    for finding in first_of(findings, "findings"):
        say(without_secrets(str(finding)), err=finding.rule is None)


def _masked(value: object) -> object:
    return without_secrets(value) if isinstance(value, str) else value


def _is_for(content: str, profile: str) -> bool:
    """Whether the default profile is one that a kind of file is checked with."""
    if content == "job":
        return True
    try:
        kind = toolkit.load_profile(profile).kind
    except InputError:
        return False  # toolkit.check() reports the problem if it needs the profile
    return (content, kind) in (("script", "slurm"), ("manifests", "kubernetes"))


@cli.command(epilog=example("toolkit schema profile > profile.schema.json"))
@click.argument("what", type=click.Choice(["job", "profile"]), default="job")
def schema(what: str) -> None:
    """Print the JSON Schema of the job file, or of profiles, for editors."""
    made = toolkit.json_schema() if what == "job" else toolkit.profile_schema()
    echo_json(made)


@cli.command(epilog=example("toolkit supervisor digits.yaml --unpack sources"))
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--unpack",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write the sources into a new folder.",
)
def supervisor(file: Path, unpack: Path | None) -> None:
    """Show which supervisor a script or manifest carries: its checksum, and whether it is ours."""
    carried = toolkit.carried_supervisor(file)
    if unpack is not None:
        if unpack.exists():
            raise InputError(f"{unpack} exists already; name a new folder")
        for name, source in carried.sources.items():
            path = unpack / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
    whose = "that of this version" if carried.is_ours else "not that of this version"
    say(f"sha256 {carried.sha256}: {len(carried.sources)} files, {whose} of the toolkit")
    if not carried.is_ours:
        sys.exit(exit_status.FAILED)
