"""Detects what a job can run on: a Slurm cluster, Kubernetes contexts, this machine."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.text.quantities import whole_number

__all__ = ["Ask", "Context", "Discovery", "Namespace", "Partition", "SlurmSite", "discover"]

_TIMEOUT_S = 20
"""A login shell that mounts homes, or a driver that is stuck, must not hang everything."""

_SERVICE_ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
_RUNTIMES = ("apptainer", "singularity", "podman", "docker", "enroot")

Ask = Callable[[Sequence[str]], str | None]
"""Runs a command and returns its output; None where it is not there or has failed."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition and what its largest nodes have; None where Slurm does not say."""

    name: str
    is_default: bool
    time_limit: str
    nodes: int
    cpus: int | None
    memory_bytes: int | None
    gpus: int
    gpu_types: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """A Slurm cluster as its users see it."""

    cluster: str
    version: str
    kill_wait_s: int | None
    knows_gpus: bool
    """Whether its select plugin knows `--gpus-per-node`."""

    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]
    """The user's, the default one first; none where no accounts are kept."""

    pyxis: bool

    @property
    def partition(self) -> Partition | None:
        """The partition to begin with: the default one, or the largest."""
        default = next((p for p in self.partitions if p.is_default), None)
        return default or max(self.partitions, key=lambda p: p.nodes, default=None)


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context of the kubeconfig, or the cluster in which this runs (with no name)."""

    name: str
    namespace: str
    current: bool


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What kubectl may see of a namespace; nothing where it may not."""

    workloads: tuple[str, ...]
    """What a job can become there, the one to begin with first."""

    has_runtime: bool
    """Whether the TrainingRuntime of k8s/base is there, which a TrainJob needs."""

    queues: tuple[str, ...]
    """Kueue's LocalQueues."""

    claims: tuple[str, ...]
    """PersistentVolumeClaims that all nodes can write to."""

    pod_security: str | None
    """The Pod Security level that is enforced."""


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """All that was found."""

    host: str
    slurm: SlurmSite | None
    contexts: tuple[Context, ...]
    namespace: Namespace | None
    """That of the context that is used; None where its cluster does not answer kubectl."""

    modules: bool
    """Whether there is a `module` command."""

    runtimes: tuple[str, ...]
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int | None
    venv: Path | None
    """The virtual environment that is active, or in which the toolkit itself is installed."""

    torchrun: bool
    """Whether there is a torchrun in it."""

    @property
    def context(self) -> Context | None:
        """The context that is used: the current one, or the first."""
        current = [context for context in self.contexts if context.current]
        return next(iter((*current, *self.contexts)), None)


def discover(
    *,
    ask: Ask | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    prefix: str | None = None,
) -> Discovery:
    """Look around.

    Args:
        ask: How commands are run.
        environ: The variables of the user.
        root: Where the files of this machine begin.
        prefix: Where this Python is installed.
    """
    ask = ask or _ask
    venv = _venv(environ, prefix or (sys.prefix if sys.prefix != sys.base_prefix else ""))
    listed = ask(["nvidia-smi", "-L"]) or ""
    types = (ask(["bash", "-lc", "type -t module"]) or "").strip().splitlines()
    site = Discovery(
        host=socket.gethostname(),
        slurm=_slurm(ask),
        contexts=tuple(_contexts(environ, root)),
        namespace=None,
        modules=types[-1:] in (["function"], ["alias"]),
        runtimes=tuple(name for name in _RUNTIMES if ask([name, "--version"]) is not None),
        gpus=tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed, re.MULTILINE)),
        cpus=os.cpu_count() or 1,
        memory_bytes=_memory(root),
        venv=venv,
        torchrun=venv is not None and (venv / "bin/torchrun").exists(),
    )
    return replace(site, namespace=_namespace(ask, site.context)) if site.context else site


def _ask(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _venv(environ: Mapping[str, str], prefix: str) -> Path | None:
    folder = environ.get("VIRTUAL_ENV") or prefix
    return Path(folder) if folder and (Path(folder) / "bin/activate").is_file() else None


def _memory(root: Path) -> int | None:
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^MemTotal: +(\d{1,18}) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


# ---- Slurm


def _slurm(ask: Ask) -> SlurmSite | None:
    text = ask(["scontrol", "show", "config"])
    config = dict(re.findall(r"^(\w+) *= *(.*?) *$", text or "", re.MULTILINE))
    if "ClusterName" not in config:
        return None
    seconds = re.match(r"(\d{1,9}) sec", config.get("KillWait", ""))
    return SlurmSite(
        cluster=config["ClusterName"],
        version=config.get("SLURM_VERSION", ""),
        kill_wait_s=int(seconds[1]) if seconds else None,
        knows_gpus="cons_tres" in config.get("SelectType", "cons_tres"),
        partitions=_partitions(ask(["sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G"]) or ""),
        accounts=_accounts(ask),
        pyxis="--container-image" in (ask(["srun", "--help"]) or ""),
    )


def _partitions(text: str) -> tuple[Partition, ...]:
    """Read sinfo's rows, one for each kind of node of each partition."""
    by_name: dict[str, Partition] = {}
    for line in text.splitlines():
        columns = line.strip().split("|")
        if len(columns) != 7 or columns[1] != "up":
            continue
        name, _, limit, nodes, cpus, memory, gres = columns
        kinds = re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", gres)
        before = by_name.get(name)
        kind = Partition(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            time_limit=limit,
            nodes=_number(nodes) or 0,
            cpus=_number(cpus),
            memory_bytes=(_number(memory) or 0) * 2**20 or None,
            gpus=sum(whole_number(number) or 0 for _, number in kinds),
            gpu_types=tuple(word for word, _ in kinds if word),
        )
        by_name[name] = kind if before is None else _both(before, kind)
    return tuple(by_name.values())


def _both(one: Partition, other: Partition) -> Partition:
    return Partition(
        name=one.name,
        is_default=one.is_default,
        time_limit=one.time_limit,
        nodes=one.nodes + other.nodes,
        cpus=max(one.cpus or 0, other.cpus or 0) or None,
        memory_bytes=max(one.memory_bytes or 0, other.memory_bytes or 0) or None,
        gpus=max(one.gpus, other.gpus),
        gpu_types=tuple(dict.fromkeys((*one.gpu_types, *other.gpu_types))),
    )


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return whole_number(match[0]) if match else None


def _accounts(ask: Ask) -> tuple[str, ...]:
    user = (ask(["id", "-un"]) or "").strip()
    rows = ask(["sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account"])
    first = ask(["sacctmgr", "-nP", "show", "user", user, "format=defaultaccount"]) or ""
    names = [first.strip(), *sorted((rows or "").split())] if rows else []
    return tuple(dict.fromkeys(name for name in names if name))


# ---- Kubernetes


def _contexts(environ: Mapping[str, str], root: Path) -> list[Context]:
    paths = environ.get("KUBECONFIG") or f"{environ.get('HOME', '')}/.kube/config"
    by_name: dict[str, Context] = {}
    current = ""
    for path in filter(None, paths.split(":")):
        config = _kubeconfig(Path(path))
        current = current or str(config.get("current-context") or "")
        for entry in config.get("contexts") or ():
            if isinstance(entry, dict) and isinstance(entry.get("context"), dict):
                name, inner = str(entry.get("name")), entry["context"]
                context = Context(
                    name=name, namespace=str(inner.get("namespace") or "default"), current=False
                )
                by_name.setdefault(name, context)  # of two files, the first one counts
    contexts = [
        Context(name=c.name, namespace=c.namespace, current=c.name == current)
        for c in by_name.values()
    ]
    namespace = root / _SERVICE_ACCOUNT / "namespace"
    if environ.get("KUBERNETES_SERVICE_HOST") and namespace.is_file():
        inside = namespace.read_text(encoding="utf-8").strip()
        contexts.append(Context(name="", namespace=inside, current=not current))
    return contexts


def _kubeconfig(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}


def _namespace(ask: Ask, context: Context) -> Namespace | None:
    """Ask kubectl; a forbidden query returns nothing."""
    kubectl = ["kubectl", *(["--context", context.name] if context.name else [])]
    kubectl += ["--namespace", context.namespace, "--request-timeout=5s", "get"]

    def get(*what: str) -> dict[str, Any]:
        try:
            read = json.loads(ask([*kubectl, *what]) or "{}")
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}

    def items(kind: str) -> list[dict[str, Any]]:
        return list(get(kind, "--output=json").get("items") or ())

    groups = {str(group.get("name")) for group in get("--raw", "/apis").get("groups") or ()}
    if not groups:
        return None
    # Others have this group, too.
    served = get("--raw", "/apis/kubeflow.org/v1") if "kubeflow.org" in groups else {}
    names = {
        "PyTorchJob": any(r.get("name") == "pytorchjobs" for r in served.get("resources") or ()),
        "TrainJob": "trainer.kubeflow.org" in groups,
        "JobSet": "jobset.x-k8s.io" in groups,
        "Job": True,
    }
    runtimes = items("trainingruntimes.trainer.kubeflow.org") if names["TrainJob"] else []
    queues = items("localqueues.kueue.x-k8s.io") if "kueue.x-k8s.io" in groups else []
    shared = [
        claim
        for claim in items("persistentvolumeclaims")
        if "ReadWriteMany" in (claim.get("spec") or {}).get("accessModes", ())
    ]
    labels = get("namespace", context.namespace, "--output=json").get("metadata", {}).get("labels")
    return Namespace(
        workloads=tuple(kind for kind, is_there in names.items() if is_there),
        has_runtime="torch-deploy-toolkit" in map(_name, runtimes),
        queues=tuple(map(_name, queues)),
        claims=tuple(map(_name, shared)),
        pod_security=(labels or {}).get("pod-security.kubernetes.io/enforce"),
    )


def _name(thing: Mapping[str, Any]) -> str:
    return str(thing["metadata"]["name"])
