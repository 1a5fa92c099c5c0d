"""Detects where a job can run: a Slurm cluster, Kubernetes contexts, this machine."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.job import types
from toolkit.job.environment import of_slurm_command
from toolkit.text.answers import (
    json_object,
    plain,
    row_format,
    settings,
    table,
    user_of,
    values,
)
from toolkit.text.quantities import whole_number

_TIMEOUT_S = 20
"""The limit of a command: a login shell that mounts homes, or a driver, may hang."""

_SERVICE_ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
_RUNTIMES = ("apptainer", "singularity", "podman", "docker", "enroot")

_SINFO = {
    "%P": "PARTITION",
    "%a": "AVAIL",
    "%l": "TIMELIMIT",
    "%D": "NODES",
    "%c": "CPUS",
    "%m": "MEMORY",
    "%G": "GRES",
}
"""Fields of sinfo's format, and the header of each."""

Ask = Callable[[Sequence[str]], str | None]
"""Runs a command and returns its output; None if it does not exist or fails."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition and the size of its largest nodes; None for what Slurm does not report."""

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
    """Whether the select plugin supports `--gpus-per-node`."""

    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]
    """The user's accounts, the default one first; none if Slurm keeps no accounts."""

    pyxis: bool

    @property
    def partition(self) -> Partition | None:
        """The suggested partition: the default one, or the largest."""
        default = next((p for p in self.partitions if p.is_default), None)
        return default or max(self.partitions, key=lambda p: p.nodes, default=None)


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context of the kubeconfig, or without a name the cluster of this pod."""

    name: str
    namespace: str
    current: bool


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """A namespace as far as kubectl may read it."""

    workloads: tuple[str, ...]
    """The kinds of objects that a job can become, the suggested one first."""

    has_runtime: bool
    """Whether the namespace has the TrainingRuntime of k8s/base, which a TrainJob needs."""

    queues: tuple[str, ...]
    """Kueue's LocalQueues."""

    claims: tuple[str, ...]
    """PersistentVolumeClaims that all nodes can mount for writing."""

    pod_security: str | None
    """The Pod Security level that is enforced."""


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """All detected facts."""

    host: str
    slurm: SlurmSite | None
    contexts: tuple[Context, ...]
    namespace: Namespace | None
    """The namespace of `context`; None if its cluster does not answer kubectl."""

    modules: bool
    """Whether login shells have the command `module`."""

    runtimes: tuple[str, ...]
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int | None
    venv: Path | None
    """The active virtual environment, or the one in which the toolkit is installed."""

    environment: str
    """The active environment of conda or pixi, as profiles name it, where `venv` is None; or ''."""

    torchrun: bool
    """Whether the virtual environment has a torchrun."""

    @property
    def context(self) -> Context | None:
        """The suggested context: the current one, or the first."""
        current = [context for context in self.contexts if context.current]
        return next(iter((*current, *self.contexts)), None)


def discover(
    *,
    ask: Ask | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    prefix: str | None = None,
) -> Discovery:
    """Return the facts of this machine and of the schedulers that it reaches.

    A test replaces the commands, the user's variables, the root of the file system, and the folder
    in which this Python is installed.
    """
    ask = ask or _ask
    prefix = prefix or (sys.prefix if sys.prefix != sys.base_prefix else "")
    active = "" if environ.get("VIRTUAL_ENV") else _environment(environ)
    if active and prefix and not (Path(prefix) / "bin/torchrun").exists():
        prefix = ""  # the toolkit's own, as from pipx
    venv = Path(environ.get("VIRTUAL_ENV") or prefix)
    has_venv = venv != Path() and (venv / "bin/activate").is_file()
    listed = plain(ask(["nvidia-smi", "-L"]) or "")
    meminfo = root / "proc/meminfo"
    facts = meminfo.read_text(encoding="utf-8") if meminfo.is_file() else ""
    memory = re.search(r"^MemTotal: +(\d{1,18}) kB", facts, re.MULTILINE)
    module = values(ask(["bash", "-lc", 'echo "==module|$(type -t module)|=="']) or "", "module")
    site = Discovery(
        host=socket.gethostname(),
        slurm=_slurm(ask),
        contexts=tuple(_contexts(environ, root)),
        namespace=None,
        modules=module in (["function"], ["alias"]),
        runtimes=tuple(name for name in _RUNTIMES if ask([name, "--version"]) is not None),
        gpus=tuple(re.findall(r"GPU \d+: (.*) \(UUID: \S+\)$", listed, re.MULTILINE)),
        cpus=os.cpu_count() or 1,
        memory_bytes=int(memory[1]) * 1024 if memory else None,
        venv=venv if has_venv else None,
        environment="" if has_venv else _environment(environ),
        torchrun=has_venv and (venv / "bin/torchrun").exists(),
    )
    return replace(site, namespace=_namespace(ask, site.context)) if site.context else site


def _environment(environ: Mapping[str, str]) -> str:
    manager = "conda" if "CONDA_EXE" in environ else "micromamba"
    found = f"{manager}:{environ.get('CONDA_PREFIX', '')}"
    if place := environ.get("PIXI_PROJECT_ROOT"):
        name = environ.get("PIXI_ENVIRONMENT_NAME", "default")
        found = f"pixi:{place}" + (f"#{name}" if name != "default" else "")
    return found if re.fullmatch(types.ENVIRONMENT, found) else ""


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
            env=of_slurm_command(asks=True),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# ---- Slurm


def _slurm(ask: Ask) -> SlurmSite | None:
    config = settings(ask(["scontrol", "show", "config"]) or "", "Configuration data as of")
    if "ClusterName" not in config:
        return None
    seconds = re.match(r"(\d{1,9}) sec", config.get("KillWait", ""))
    # Without --exact, a row is of several kinds of nodes and holds the smallest, like `32+`.
    sinfo = ask(["sinfo", "-o", row_format(*_SINFO), "--exact"])
    user = user_of(ask(["id"]) or "")

    def accounts(field: str, *query: str, header: str) -> list[str]:
        asked = ["sacctmgr", "-p", "show", *query, f"format=cluster,user,{field}"]
        rows = table(ask(asked) or "", ("User", header), separator="|") or []
        return [account for name, account in rows if name == user != ""]

    known = accounts("account", "assoc", f"user={user}", header="Account")
    default = accounts("defaultaccount", "user", user, header="Def Acct")
    names = [*default, *sorted(known)] if known else []
    srun = plain(ask(["srun", "--help"]) or "")
    return SlurmSite(
        cluster=config["ClusterName"],
        version=config.get("SLURM_VERSION", ""),
        kill_wait_s=int(seconds[1]) if seconds else None,
        knows_gpus="cons_tres" in config.get("SelectType", "cons_tres"),
        partitions=tuple(_partitions(sinfo or "")),
        accounts=tuple(dict.fromkeys(filter(None, names))),
        pyxis=re.search(r"^ +--container-image=", srun, re.MULTILINE) is not None,
    )


def _partitions(text: str) -> Iterator[Partition]:
    """Parse the rows of sinfo, one for each kind of node of each partition."""
    rows: dict[str, list[list[str]]] = {}
    for columns in table(text, list(_SINFO.values())) or ():
        if columns[1] == "up":
            rows.setdefault(columns[0], []).append(columns)
    for name, kinds in rows.items():
        gpus = [re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", kind[6]) for kind in kinds]
        yield Partition(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            time_limit=kinds[0][2],
            nodes=sum(_number(kind[3]) for kind in kinds),
            cpus=max(_number(kind[4]) for kind in kinds) or None,
            memory_bytes=max(_number(kind[5]) for kind in kinds) * 2**20 or None,
            gpus=max(sum(_number(count) for _, count in node) for node in gpus),
            gpu_types=tuple(dict.fromkeys(word for node in gpus for word, _ in node if word)),
        )


def _number(text: str) -> int:
    """Return the number at the beginning of a text; 0 without one."""
    match = re.match(r"\d+", text)
    return whole_number(match[0]) or 0 if match else 0


# ---- Kubernetes


def _contexts(environ: Mapping[str, str], root: Path) -> list[Context]:
    paths = environ.get("KUBECONFIG") or f"{environ.get('HOME', '')}/.kube/config"
    namespaces: dict[str, str] = {}
    current = ""
    for path in filter(None, paths.split(":")):
        config: Any = None
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        config = config if isinstance(config, dict) else {}
        current = current or str(config.get("current-context") or "")
        listed = config.get("contexts")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("context"), dict):
                # Of two files, the first one counts.
                namespace = str(entry["context"].get("namespace") or "default")
                namespaces.setdefault(str(entry.get("name")), namespace)
    contexts = [
        Context(name=name, namespace=namespace, current=name == current)
        for name, namespace in namespaces.items()
    ]
    file = root / _SERVICE_ACCOUNT / "namespace"
    if environ.get("KUBERNETES_SERVICE_HOST") and file.is_file():
        own_namespace = file.read_text(encoding="utf-8").strip()
        contexts.append(Context(name="", namespace=own_namespace, current=not current))
    return contexts


def _namespace(ask: Ask, context: Context) -> Namespace | None:
    """Return what kubectl may read of a context's namespace; None if the cluster is silent."""
    kubectl = ["kubectl", *(["--context", context.name] if context.name else [])]
    kubectl += ["--namespace", context.namespace, "--request-timeout=5s", "get"]

    def get(*what: str) -> dict[str, Any]:
        return json_object(ask([*kubectl, *what]) or "", "kind")

    def items(kind: str) -> list[dict[str, Any]]:
        return list(get(kind, "--output=json").get("items") or ())

    groups = {str(group.get("name")) for group in get("--raw", "/apis").get("groups") or ()}
    if not groups:
        return None
    # Other operators also have this group.
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
