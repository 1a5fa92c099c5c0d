"""The pods of the objects in a stream, and the torchruns of their containers."""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.lint.bash.ast import SimpleCommand
from toolkit.lint.bash.parser import read_script
from toolkit.lint.scripts.interpreter import Torchrun, Walk
from toolkit.lint.scripts.script import read_batch_script
from toolkit.text.manifests import Manifest, Stream, View
from toolkit.text.quantities import parse_duration

WORKLOADS = ("PyTorchJob", "TrainJob", "JobSet", "Job", "Pod")
"""The kinds that run containers."""

_GROUPS = {
    "PyTorchJob": "kubeflow.org",
    "TrainJob": "trainer.kubeflow.org",
    "TrainingRuntime": "trainer.kubeflow.org",
    "ClusterTrainingRuntime": "trainer.kubeflow.org",
    "JobSet": "jobset.x-k8s.io",
    "Job": "batch",
    "Pod": "",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Pods:
    """The pods of one template."""

    owner: Manifest
    """The object that creates the pods."""

    role: str = ""
    """Master, Worker, or a replicated job's name; empty for an object with a single template."""

    template: View
    """The metadata and spec of the pods."""

    job: View
    """The spec of the enclosing batch Job or role; for a Pod, the pod itself."""

    count: int | None = None
    """The number of these pods; None if it is not in the manifest."""

    together: int | None = None
    """The number of all pods of the object; None if unknown."""

    partly: bool = False
    """Whether the manifest has only a part of the pod, as in a runtime or a runtime patch."""

    @property
    def spec(self) -> View:
        """The spec of the pods."""
        return self.template.at("spec")

    @property
    def kind(self) -> str:
        """The object's kind; empty if its API group is unknown."""
        known = _GROUPS.get(self.owner.kind) == self.owner.group
        return self.owner.kind if known else ""

    @property
    def several(self) -> bool:
        """Whether the object has several pods, which must rendezvous."""
        return self.together is not None and self.together > 1

    @functools.cached_property
    def containers(self) -> tuple["Container", ...]:
        """The containers, without init containers."""
        return self._containers("containers")

    @functools.cached_property
    def all_containers(self) -> tuple["Container", ...]:
        """The containers and init containers."""
        return (*self.containers, *self._containers("initContainers"))

    def _containers(self, key: str) -> tuple["Container", ...]:
        return tuple(
            Container(pods=self, view=one, resources=one.at("resources"))
            for one in self.spec.at(key).items()
        )

    @functools.cached_property
    def labels(self) -> dict[str, str]:
        """The labels of the pods, including the labels that the operator adds."""
        added: dict[str, str] = {}
        name = self.owner.name
        if self.kind == "PyTorchJob":
            added = {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-type": self.role.lower(),
            }
            if self.role == "Master":
                added["training.kubeflow.org/job-role"] = "master"
        elif self.kind == "Job":
            added = {"batch.kubernetes.io/job-name": name, "job-name": name}
        elif self.kind in ("JobSet", "TrainJob"):
            added = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": self.role,
                "batch.kubernetes.io/job-name": f"{name}-{self.role}-0",
                "job-name": f"{name}-{self.role}-0",
            }
        return added | self.template.labels("metadata", "labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class Container:
    """A container, or a TrainJob's trainer, which becomes a container."""

    pods: Pods
    view: View
    resources: View

    @property
    def name(self) -> str:
        """The container's name."""
        return self.view.text("name")

    @property
    def security(self) -> View:
        """The container's securityContext."""
        return self.view.at("securityContext")

    @property
    def argv(self) -> list[str]:
        """The command and its arguments."""
        return [*self.view.words("command"), *self.view.words("args")]

    @functools.cached_property
    def env(self) -> dict[str, View]:
        """The environment variables by name; each entry has `value` or `valueFrom`."""
        return {entry.text("name"): entry for entry in self.view.at("env").items()}


@functools.lru_cache(maxsize=1)
def pods_of(stream: Stream) -> tuple[Pods, ...]:
    """Return the pods of all objects of a stream."""
    return tuple(pods for manifest in stream.manifests for pods in _pods(manifest))


def init_containers_of(stream: Stream) -> Iterator["Container"]:
    """Yield the init containers of a stream."""
    for pods in pods_of(stream):
        yield from pods.all_containers[len(pods.containers) :]


@functools.lru_cache(maxsize=1)
def containers_of(stream: Stream) -> tuple[Container, ...]:
    """Return the containers of a stream, and the trainers of TrainJobs."""
    containers = [container for pods in pods_of(stream) for container in pods.containers]
    for manifest in stream.of("TrainJob"):
        spec = manifest.view.at("spec")
        trainer = spec.at("trainer")
        if manifest.group == _GROUPS["TrainJob"] and trainer:
            nodes = trainer.whole("numNodes")
            pods = Pods(  # its runtime defines the rest
                owner=manifest,
                role="node",
                template=View(value=None, path=spec.path, manifest=manifest),
                job=spec,
                count=nodes,
                together=nodes,
                partly=True,
            )
            resources = trainer.at("resourcesPerNode")
            containers.append(Container(pods=pods, view=trainer, resources=resources))
    return tuple(containers)


def _pods(manifest: Manifest) -> Iterator[Pods]:
    if _GROUPS.get(manifest.kind) != manifest.group:
        if manifest.group not in _SERVE:
            yield from _anywhere(manifest)
        return
    spec = manifest.view.at("spec")
    match manifest.kind:
        case "Pod":
            view = manifest.view
            yield Pods(owner=manifest, template=view, job=view, count=1, together=1)
        case "Job":
            count = _number(spec.at("parallelism"))
            template = spec.at("template")
            yield Pods(owner=manifest, template=template, job=spec, count=count, together=count)
        case "PyTorchJob":
            roles = dict(spec.at("pytorchReplicaSpecs").entries())
            counts = {role: _number(entry.at("replicas")) for role, entry in roles.items()}
            for role, entry in roles.items():
                yield Pods(
                    owner=manifest,
                    role=role,
                    template=entry.at("template"),
                    job=entry,
                    count=counts[role],
                    together=_sum([*counts.values()]),
                )
        case "JobSet":
            yield from _of_jobset(manifest, spec)
        case "TrainingRuntime" | "ClusterTrainingRuntime":
            yield from _of_jobset(manifest, spec.at("template", "spec"), partly=True)
        case "TrainJob":
            for patch in spec.at("runtimePatches").items():
                jobset = patch.at("trainingRuntimeSpec", "template", "spec")
                yield from _of_jobset(manifest, jobset, partly=True)


def _of_jobset(manifest: Manifest, spec: View, *, partly: bool = False) -> Iterator[Pods]:
    jobs = list(spec.at("replicatedJobs").items())
    counts = []
    for job in jobs:
        replicas, each = _number(job.at("replicas")), _number(job.at(*_JOB, "parallelism"))
        counts.append(None if replicas is None or each is None else replicas * each)
    for job, count in zip(jobs, counts, strict=True):
        inner = job.at(*_JOB)
        yield Pods(
            owner=manifest,
            role=job.text("name"),
            template=inner.at("template"),
            job=inner,
            count=None if partly else count,
            together=None if partly else _sum(counts),
            partly=partly,
        )


_SERVE = ("apps", "serving.knative.dev", "apiextensions.k8s.io")
"""API groups without training pods: services that run permanently, and kinds without pods."""


def _anywhere(manifest: Manifest) -> Iterator[Pods]:
    """Yield the pod templates of an unknown kind, at any depth."""
    waiting = [manifest.view.at("spec")]
    while waiting:
        view = waiting.pop()
        if view.text("kind") and view.text("apiVersion"):
            continue  # a separate object
        template = view.at("template")
        if any(one.at("name") for one in template.at("spec", "containers").items()):
            yield Pods(owner=manifest, template=template, job=view, partly=True)
            continue
        waiting += reversed([*(entry for _, entry in view.entries()), *view.items()])


_JOB = ("template", "spec")


def _number(view: View) -> int | None:
    return view.whole() if view else 1  # the default of every kind


def _sum(counts: list[int | None]) -> int | None:
    numbers = [count for count in counts if count is not None]
    return sum(numbers) if len(numbers) == len(counts) else None


# ---- Container processes: torchrun, its options, and the shell that runs it

SHUTDOWN_TIMEOUT_S = 30
"""torchrun's default shutdown timeout for workers, in seconds (torch, elastic agent)."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A torchrun that a container starts."""

    container: Container
    options: Mapping[str, str]
    """The options by long name; unknown parts of a value stay as written."""

    shell: str
    """The shell that is the container's first process; empty if torchrun is the first process."""

    script: str
    """The script of the shell."""

    passes: bool
    """Whether SIGTERM reaches torchrun."""

    maps: bool
    """Whether the shell or the toolkit's supervisor sets the exit status."""

    @property
    def pods(self) -> Pods:
        """The pods of the container."""
        return self.container.pods

    def option(self, name: str) -> str | None:
        """Return an option from the command line or a `PET_…` variable; None if it is not set."""
        if name in self.options:
            return self.options[name]
        variable = f"PET_{name.upper().replace('-', '_')}"
        if variable in self.container.env:
            return self.container.env[variable].text("value")
        return "" if variable in self.script else None


@functools.lru_cache(maxsize=1)
def launches(stream: Stream) -> tuple[Launch, ...]:
    """Return the torchruns of all containers in a stream."""
    parsed = (_launch(container) for container in containers_of(stream))
    return tuple(launch for launch in parsed if launch is not None)


def _launch(container: Container) -> Launch | None:
    argv = container.argv
    outer = _walked(shlex.join(argv))
    if outer is None:
        return None
    shell, script, rest = shell_of(argv)
    inner = rest if '"$@"' in script or re.search(r"\bexec\b.* \$@", script) else []
    started = _walked(shlex.join(inner)) if inner else outer
    if started is None or not started.torchruns:
        return None
    torchrun = started.torchruns[0]
    return Launch(
        container=container,
        options={name: option.text for name, option in torchrun.options.items()},
        shell=shell,
        script=script,
        passes=not shell or _passes(shell, script, outer, None if inner else torchrun),
        maps=(bool(shell) and any(call.name in ("exit", "return") for call in outer.calls))
        or any(re.search(r"(^|[/.])supervisor(\.pyz)?$", word) for word in argv),
    )


@functools.lru_cache(maxsize=32)
def _walked(text: str) -> Walk | None:
    """Return the walk over a command; None if it cannot start torchrun or be parsed."""
    if "torchrun" not in text and "torch.distributed" not in text and "$@" not in text:
        return None
    try:
        return read_batch_script(f"#!/bin/bash\n{text}\n", "").walk
    except InputError:
        return None


def shell_of(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the shell of a command line, its script and the script's arguments."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _SHELLS:
            after = words[index + 1 :]
            for place, option in enumerate(after):
                if option.startswith("-") and not option.startswith("--") and "c" in option:
                    rest = after[place + 1 :]
                    return name, rest[0] if rest else "", rest[2:]
                if not option.startswith(("-", "+")):
                    break
            return "", "", []
        if name in ("exec", "torchrun") or name.startswith("python"):
            break
    return "", "", []


def _passes(shell: str, script: str, walk: Walk, torchrun: Torchrun | None) -> bool:
    """Whether a shell forwards SIGTERM to torchrun.

    `exec` does, and so does a trap with the child in the background. bash replaces itself with the
    last command of `-c 'a; b'` (from 5.1 on, tested); dash, which is `sh` on Debian and Ubuntu,
    does not.
    """
    if any("TERM" in trap.signals or "15" in trap.signals for trap in walk.traps):
        return True
    if torchrun is None:
        return re.search(r'\bexec\b[^\n;|&]*\s("\$@"|\$@)\s*$', script, re.MULTILINE) is not None
    if torchrun.call.name == "exec":
        return torchrun.call.piped_to is None
    return shell == "bash" and _is_last(script, torchrun)


def _is_last(script: str, torchrun: Torchrun) -> bool:
    """Whether a shell's last command is torchrun, in the foreground and with the same words."""
    try:
        commands = read_script(script, "").commands
    except InputError:
        return False
    item = commands[-1] if commands else None
    nodes = item.pipelines[-1].nodes if item and not item.background else ()
    if len(nodes) != 1 or not isinstance(nodes[0], SimpleCommand):
        return False
    alone = len(commands) == 1 and len(commands[0].pipelines) == 1
    same = [word.shown for word in nodes[0].words] == [
        word.shown for word in torchrun.call.node.words
    ]
    return same and (alone or not nodes[0].redirections)


def seconds(text: str | None) -> int | None:
    """Return an option's value in seconds; None if it is not a number.

    >>> seconds("60"), seconds("1.5"), seconds(""), seconds(None)
    (60, 2, None, None)
    """
    try:
        return parse_duration(f"{text}s") if text else None
    except ValueError:
        return None
