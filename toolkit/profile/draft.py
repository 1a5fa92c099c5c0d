"""Drafts a profile from the detected facts, with comments on what to edit."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError
from toolkit.profile import configuration_folder
from toolkit.profile.detect import Context, Discovery, Partition, SlurmSite
from toolkit.text import untrusted
from toolkit.text.own_files import make_folder
from toolkit.text.quantities import format_duration, format_size
from toolkit.text.yaml_reader import write_document

KINDS = ("slurm", "kubernetes", "local")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The name of a profile and the text of its file."""

    name: str
    text: str


def draft(site: Discovery, *, kind: str | None = None, name: str | None = None) -> Draft:
    """Return a profile of the detected facts: Slurm first, then Kubernetes, else this machine.

    Args:
        site: The detected facts.
        kind: `slurm`, `kubernetes` or `local`; by default the first that was detected.
        name: The profile's name; by default that of the cluster.

    Raises:
        InputError: the requested scheduler was not detected, or the name cannot be a file name.
    """
    if name is not None and not re.fullmatch(r"\w[\w.-]*", name):
        message = f"{name!r} cannot be a profile's name; take letters, digits, '-', '_' and '.'"
        raise InputError(message, place="--name")
    current = site.context
    kind = kind or ("slurm" if site.slurm else "kubernetes" if current else "local")
    if kind == "slurm":
        if site.slurm is None:
            raise InputError(
                "no Slurm cluster answers here; go to a login node, or write "
                "--kind local or kubernetes"
            )
        lines, default_name = _slurm(site, site.slurm), site.slurm.cluster
    elif kind == "kubernetes":
        if current is None:
            raise InputError("no kubeconfig names a context; set KUBECONFIG, or write --kind local")
        lines, default_name = _kubernetes(site, current), current.name or "k8s"
    else:
        lines, default_name = _local(site), "local"
    name = name or re.sub(r"[^\w.-]+", "-", default_name).strip("-.") or kind
    return Draft(name=name, text="\n".join(lines) + "\n")


def keep_draft(
    made: Draft, *, output: Path | None = None, force: bool = False
) -> tuple[Path, bool]:
    """Write a profile; return its file, and whether it is the default profile now.

    It becomes the default profile if no other one is; with `force`, in any case.

    Raises:
        InputError: the file exists already, or cannot be written.
    """
    folder = configuration_folder()
    path = output or folder / "profiles" / f"{made.name}.yaml"
    default = folder / "default"
    try:
        make_folder(path.parent)
        try:
            untrusted.write_bytes(path, os.fsencode(made.text), anew=not force)
        except FileExistsError:
            message = "exists already; --force overwrites it, --print only shows the new one"
            raise InputError(message, place=str(path)) from None
        entry = str(path.absolute()) if output else f"profiles/{path.name}"
        before = default.read_text(encoding="utf-8").strip() if default.is_file() else entry
        if before != entry and not force:
            return path, False
        make_folder(folder)
        untrusted.write_bytes(default, os.fsencode(f"{entry}\n"))
    except OSError as error:
        raise InputError(f"{error.filename or path} cannot be written: {error.strerror}") from None
    return path, True


def found_lines(discovery: Discovery) -> Iterator[str]:
    """Yield lines that describe the detected facts."""
    site = discovery.slurm
    if site is None:
        yield "Slurm: none (scontrol does not answer)"
    else:
        yield f"Slurm {site.version}, cluster {site.cluster}"
        yield from (f"  partition {_described(p)}" for p in site.partitions)
        yield f"  accounts: {', '.join(site.accounts) or 'none'}"
    if not discovery.contexts:
        yield "Kubernetes: no kubeconfig names a context"
    for context in discovery.contexts:
        where = f"context {context.name}" if context.name else "this pod's own cluster"
        current = " (current)" if context.current else ""
        yield f"Kubernetes: {where}{current}, namespace {context.namespace}"
        if context == discovery.context and discovery.namespace:
            yield f"  workloads: {', '.join(discovery.namespace.workloads)}"
            yield f"  queues: {', '.join(discovery.namespace.queues) or 'none'}"
            yield f"  shared claims: {', '.join(discovery.namespace.claims) or 'none'}"
        elif context == discovery.context:
            yield "  its cluster does not answer kubectl"
    pyxis = ("pyxis",) if site and site.pyxis else ()
    yield f"containers: {', '.join((*pyxis, *discovery.runtimes)) or 'no runtime'}"
    yield f"GPUs here: {', '.join(discovery.gpus) or 'none'}"
    yield f"modules: {'yes' if discovery.modules else 'no'}"
    without = "" if discovery.torchrun else ", without torchrun"
    if discovery.environment:
        yield f"environment: {discovery.environment}"
        return
    venv = f"{discovery.venv}{without}" if discovery.venv else "none is active"
    yield f"virtual environment: {venv}"


def _described(partition: Partition) -> str:
    types = "/".join(partition.gpu_types)
    facts = [
        f"{partition.nodes} nodes",
        f"{partition.cpus} CPUs" if partition.cpus else "",
        format_size(partition.memory_bytes) if partition.memory_bytes else "",
        f"{partition.gpus} GPUs{f' ({types})' if types else ''}" if partition.gpus else "no GPUs",
        f"time limit {partition.time_limit}",
    ]
    default = " (default)" if partition.is_default else ""
    return f"{partition.name}{default}: {', '.join(filter(None, facts))}"


def _entry(key: str, value: object, why: str = "") -> str:
    """Return a line of YAML, with a comment."""
    text = write_document({key: value}).strip()
    return f"{text}  # {_plain(why)}" if why else text


def _first(key: str, values: Sequence[str]) -> str:
    """Return a line with the first value; the comment names the others."""
    others = ", ".join(values[1:])
    return _entry(key, values[0], f"there are also: {others}" if others else "")


def _plain(text: str) -> str:
    return re.sub(r"[^\x20-\x7e\xa0-\ud7ff]", "?", text)


def _head(site: Discovery, what: str) -> Iterator[str]:
    yield f"# {_plain(what)}, as `toolkit init` found it on {_plain(site.host)}."
    yield "# Every key: docs/reference/profiles.md. Fill in the lines that begin with # as needed."


def _node(gpus: int, cpus: int | None, memory_bytes: int | None) -> str:
    facts = [f"gpus: {gpus}"]
    facts += [f"cpus: {cpus}"] if cpus else []
    facts += [f"memory: {format_size(memory_bytes)}"] if memory_bytes else []
    return f"node: {{{', '.join(facts)}}}"


def _slurm(discovery: Discovery, site: SlurmSite) -> Iterator[str]:
    yield from _head(discovery, f"Slurm {site.version}, cluster {site.cluster}")
    yield "kind: slurm"
    yield ""
    yield "# Partitions:"
    yield from (f"#   {_plain(_described(partition))}" for partition in site.partitions)
    chosen = site.partition
    if chosen is not None:
        yield _entry("partition", chosen.name)
        yield f"{_node(chosen.gpus, chosen.cpus, chosen.memory_bytes)}  # its largest nodes"
        if len(chosen.gpu_types) > 1:
            yield f"# gpu_type: {chosen.gpu_types[0]}  # where it matters which GPUs a job gets"
    if not site.knows_gpus:
        yield _entry("gpus_flag", "gres", "the select plugin does not support --gpus-per-node")
    yield ""
    if site.accounts:
        yield _first("account", site.accounts)
    else:
        yield "# account: NAME  # Slurm knows no account of yours"
    yield "# qos: NAME"
    if site.kill_wait_s:
        yield _entry("kill_wait", format_duration(site.kill_wait_s), "KillWait of the cluster")
    yield ""
    yield "# Run directories: below the folder in which you submit, unless the path is absolute."
    yield "# All nodes must share this folder."
    yield "runs_dir: runs"
    yield ""
    yield "# How workers run: bare (modules, venv); pyxis, apptainer or podman (in a job's image)."
    runtimes = [*(["pyxis"] if site.pyxis else []), *discovery.runtimes]
    yield f"# Found on {_plain(discovery.host)}: {', '.join(runtimes) or 'no container runtime'}."
    yield "runtime: bare"
    if discovery.modules:
        yield "# modules: [cuda/12.8]  # `module avail` lists them"
    if discovery.environment:
        yield _entry("environment", discovery.environment)
    elif discovery.venv is not None:
        why = "" if discovery.torchrun else "it has no torchrun yet: pip install torch"
        yield _entry("venv", str(discovery.venv), why)
    else:
        yield "# venv: /PATH  # or environment: conda:NAME; none is active, and workers need torch"


def _kubernetes(discovery: Discovery, chosen: Context) -> Iterator[str]:
    where = f"context {chosen.name}" if chosen.name else "the cluster of this pod"
    yield from _head(discovery, f"Kubernetes, {where}")
    yield "kind: kubernetes"
    if chosen.name:
        others = [other.name for other in discovery.contexts if other.name and other != chosen]
        yield _first("context", [chosen.name, *others])
    yield _entry("namespace", chosen.namespace)
    site = discovery.namespace
    if site is None:
        yield "# workload: TrainJob  # or JobSet, or Job; PyTorchJob by default"
    else:
        yield _first("workload", site.workloads)
        if "TrainJob" in site.workloads and not site.has_runtime:
            where = _plain(chosen.namespace)
            yield f"# TrainJobs need a runtime: kubectl apply -n {where} -k k8s/base/trainer"
        if site.pod_security in ("restricted", "baseline", "privileged"):
            yield _entry("pod_security", site.pod_security)
        if site.queues:
            yield _first("queue", site.queues)
    yield ""
    claims = site.claims if site else ()
    if "runs" in claims:  # the claim of k8s/base; any other may be meant for something else
        yield _first("runs_claim", sorted(claims, key=lambda name: name != "runs"))
    else:
        there = f" (there are: {', '.join(claims)})" if claims else ""
        claim = f"a PersistentVolumeClaim{there}; without one that all nodes can write to"
        yield f"# runs_claim: NAME  # {_plain(claim)}, checkpoints are lost with their pod"
    yield "# secret: NAME  # the Secret for the job's `secrets`"
    yield "# node: {gpus: 8}  # the size of a node; jobs that cannot fit are then refused"
    yield "# node_selector: {LABEL: VALUE}"


def _local(site: Discovery) -> Iterator[str]:
    yield from _head(site, "This machine")
    yield "kind: local"
    yield _node(len(site.gpus), site.cpus, site.memory_bytes)
    yield "runs_dir: runs  # below the folder in which you start"
