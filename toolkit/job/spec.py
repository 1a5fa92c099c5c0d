"""The job file: what to run, on what, and what to do when it is stopped or fails.

A `JobSpec` is portable: nothing in it names a site. The profile decides where it runs.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from toolkit.errors import InputError, Problem, SpecError
from toolkit.job import types
from toolkit.job.kubernetes_options import KubernetesOptions
from toolkit.job.loader import assign, frozen, override, validate
from toolkit.job.sbatch_options import SbatchOptions
from toolkit.job.sweep import Point, Sweep, expand, leaks, misread
from toolkit.job.types import Checked, FrozenModel, Prepared, Text
from toolkit.text import secret_scan
from toolkit.text.yaml_reader import Document, KeyPath, read_file


class NodeRange(FrozenModel):
    """The fewest nodes that a job can run on, and the most that it uses."""

    min: types.PositiveInt
    """With fewer, torchrun waits ten minutes for another node; then the attempt has failed."""

    max: types.PositiveInt
    """The job starts with as many as are free, and others join later; this machine starts all."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        few, many = given.get("min"), given.get("max")
        if isinstance(few, int) and isinstance(many, int) and few > many:
            return [f"min {few} is more than max {many}"]
        return []


class Resources(FrozenModel):
    """The resources of one job; every value but `nnodes` is per node."""

    nnodes: Annotated[
        Annotated[types.PositiveInt, Tag("[count]")] | Annotated[NodeRange, Tag("[range]")],
        Discriminator(lambda v: "[range]" if isinstance(v, dict | NodeRange) else "[count]"),
    ] = 1
    """Nodes, on Kubernetes pods; one torchrun starts on each. `{min: 2, max: 4}` continues when
    nodes are lost. See [elasticity](../how-to/elasticity.md)."""

    nproc_per_node: types.PositiveInt = 1
    """Workers that torchrun starts on each node, usually one per GPU."""

    gpus_per_node: types.NaturalInt = 0
    """GPUs on each node."""

    cpus_per_node: types.PositiveInt | None = None
    """CPUs on each node; by default one per worker."""

    memory_bytes: types.Size | None = Field(default=None, alias="memory")
    """Memory on each node, like `64GiB`; by default the site decides."""

    shm_bytes: types.Size | None = Field(default=None, alias="shm")
    """Shared memory for data loaders, on Kubernetes and with podman; part of `memory`. By default,
    as much as memory allows."""

    @property
    def min_nodes(self) -> int:
        """The fewest nodes to run on."""
        return self.nnodes.min if isinstance(self.nnodes, NodeRange) else self.nnodes

    @property
    def max_nodes(self) -> int:
        """The most nodes to run on."""
        return self.nnodes.max if isinstance(self.nnodes, NodeRange) else self.nnodes

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return self.min_nodes < self.max_nodes

    @property
    def cpus(self) -> int:
        """The CPUs on each node: one per worker if the job does not say."""
        return self.cpus_per_node or self.nproc_per_node


class Stop(FrozenModel):
    """How a run is stopped: by walltime, preemption, `kubectl drain`, or you."""

    grace_s: types.Duration = Field(default=60, alias="grace", json_schema_extra={"default": "60s"})
    """How long a checkpoint may take, between the warning and the kill. On Slurm, `scancel` and a
    preemption without GraceTime leave KillWait instead."""

    protect_children: bool = True
    """A rank's child processes that are Python, such as the workers of a DataLoader, keep the
    signal of the stop until their rank has ended, so that the rank can end well. With `false`, the
    workers of a DataLoader die of it at once, and torch raises an error in the rank."""


class Retries(FrozenModel):
    """How often a failed run is retried; the script must continue from its newest checkpoint."""

    in_job: types.NaturalInt = 0
    """Restarts of the workers by torchrun inside the running job, as after a killed rank."""

    requeue: types.NaturalInt = 0
    """New attempts after failures that may pass: a lost node, a killed rank. On Slurm on the same
    nodes where all are well and their number is fixed; else, and after such an attempt without a
    new step, through the queue.

    Attempts after a preemption, the time limit, or an operator's requeue are not counted, but on
    Slurm, on this machine and for a PyTorchJob 0 also forbids them, except in a
    [chain](../how-to/sweeps.md#a-chain-of-jobs). If a script writes no `outcome.json`, the time
    limit counts as a failure.
    """

    preemptions: types.NaturalInt | None = None
    """New attempts after a preemption, the time limit, or an operator's requeue; by default any
    number, as long as `no_progress` allows. On Kubernetes with a `runs_claim`, how often each pod
    of a Job or JobSet is replaced beyond `requeue`: 4 times by default; for other pods, the key is
    refused."""

    no_progress: types.PositiveInt = 3
    """The run ends after this many attempts in a row without a new step in `outcome.json`; a run
    without this file has no such limit. Pods count their own starts."""


class Notify(FrozenModel):
    """The receivers of [notifications](../how-to/monitoring.md#notifications)."""

    events: Annotated[
        tuple[Literal["end", "failure", "requeue", "stall"], ...], Field(min_length=1)
    ] = ("end", "failure")
    """Which events: `end`, the run has ended, well or not; `failure`, an attempt has failed, also
    if another one follows; `requeue`, an attempt has ended and another one follows; `stall`, [the
    ranks hang](../how-to/hangs.md). Pods that start again or were stopped send only `stall`."""

    webhook: types.Webhook | None = None
    """An address that takes the notification as JSON by POST, or `$NAME` if it is a secret: the
    variable NAME under the job's `secrets`."""

    webhook_file: types.SecretFile | None = None
    """A file that holds the address, where the supervisor runs."""

    command: types.ShellLine | None = None
    """A command of the shell that reads the JSON from its standard input; the text is also in
    `$NOTIFY_TEXT`. Its shell is killed after ten seconds."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        webhooks = [key for key in ("webhook", "webhook_file") if given.get(key) is not None]
        if len(webhooks) == 2:
            return ["give webhook or webhook_file; found both"]
        if not webhooks and not given.get("command"):
            return ["give a webhook, webhook_file or command; found none of them"]
        return []

    @property
    def variable(self) -> str:
        """The variable that holds the address of the webhook; empty if none does."""
        return self.webhook[1:] if self.webhook and self.webhook.startswith("$") else ""


class Mount(FrozenModel):
    """A folder that the job needs from outside."""

    source: types.MountSource
    """The folder on the node: an absolute path (in pods only with `pod_security: privileged`). On
    Kubernetes also `claim:NAME` (a volume claim), `configmap:NAME`, `secret:NAME`,
    `nfs:SERVER:/PATH` (not with `pod_security: restricted`), or `empty:` for a scratch folder that
    is lost with the pod, `empty:10GiB` for one of limited size."""

    target: types.AbsolutePath
    """The path inside the job."""

    read_only: types.Flag = False
    """Whether the job may only read it; without containers nothing enforces this."""

    @property
    def kind(self) -> str:
        """The kind of source: `path`, or the word before its colon."""
        return "path" if self.source.startswith("/") else self.source.partition(":")[0]

    @property
    def named(self) -> str:
        """The rest of the source: a name, `SERVER:/PATH`, or a size; the path of a folder."""
        return self.source if self.kind == "path" else self.source.partition(":")[2]


class Secret(FrozenModel):
    """The location of a secret's value; job files never contain the value itself."""

    secret: types.SecretName | None = None
    """The name of the Kubernetes Secret."""

    key: types.SecretKey | None = None
    """The key in it."""

    file: types.SecretFile | None = None
    """A file that only you may read (`chmod 600`); the script reads it on its node, on Slurm and on
    this machine."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        given_keys = {key for key in ("secret", "key", "file") if given.get(key) is not None}
        if given_keys in ({"secret", "key"}, {"file"}):
            return []
        listed = " and ".join(sorted(given_keys)) or "none of them"
        return [f"give secret and key, or file; found {listed}"]


WISHES = ("ok", "any", "fail")
"""How another run must end: with success, in any way, or with a failure."""


class Dependency(FrozenModel):
    """A run or sweep point to wait for, by URI, name or run directory, under one of three keys."""

    ok: Text | None = None
    """The run must succeed. If it ends in another way, Slurm cancels this job; if it has already
    ended so, this job is refused. A run without a key means this."""

    any: Text | None = None
    """The run must end."""

    fail: Text | None = None
    """The run must fail. If it succeeds, Slurm cancels this job; if it has already succeeded, this
    job is refused."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        wishes = [wish for wish in WISHES if given.get(wish) is not None]
        if len(wishes) != 1:
            return [f"give one of ok, any and fail; found {' and '.join(wishes) or 'none'}"]
        return [] if given[wishes[0]] else [f"{wishes[0]}: the run has no name"]

    @property
    def wish(self) -> str:
        """The required end: ok, any or fail."""
        return next(wish for wish in WISHES if getattr(self, wish) is not None)

    @property
    def run(self) -> str:
        """The run's URI, name or run directory."""
        return str(getattr(self, self.wish))


def _by_name(value: object) -> object:
    types.refuse_ambiguous(value)
    return {"ok": value} if isinstance(value, str) else value


After = tuple[Annotated[Dependency, Prepared(_by_name)], ...]
"""Runs to wait for, all of them."""

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")
_LAUNCHER_MODULES = ("torch.distributed.launch", "torch.distributed.run")


def _launcher_of(given: Mapping[str, Any]) -> str:
    """Return the launcher of ranks that a job's module or command is; "" if it is none."""
    command = given.get("command")
    words = [str(word) for word in command] if isinstance(command, tuple) else []
    program = words[0].rpartition("/")[2] if words else ""
    if program in _LAUNCHERS and not (program == "accelerate" and words[1:2] != ["launch"]):
        return program
    module = given.get("module")
    if program.startswith("python") and "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
    return module if module in _LAUNCHER_MODULES else ""


class JobSpec(FrozenModel):
    """One training job."""

    version: types.FormatVersion = types.VERSION
    """The version of the [format](formats.md) in which the file is written."""

    name: types.JobName
    """The job's name; `toolkit submit` and `toolkit run` call their runs NAME-DATE-TIME-XXXX."""

    module: types.ModuleName | None = None
    """The Python module that every worker runs, as after `python -m`."""

    script: types.Program | None = None
    """The Python file that every worker runs; a relative path is below the working directory
    (`workdir`). If it is `$TRAIN_RUN_DIR/FILE`, in the run directory, torchrun forks the workers
    from itself."""

    command: (
        Annotated[
            tuple[Text, ...],
            Checked(types.program_first),
            types.schema_extra(minItems=1, prefixItems=[{"type": "string", "pattern": "^[^-]"}]),
        ]
        | None
    ) = None
    """Any program and its first arguments, started once per worker instead of Python."""

    args: tuple[types.Argument, ...] = ()
    """Arguments of the module, script or command. Numbers count as they are written.
    `$TRAIN_RUN_DIR` and `$TRAIN_ATTEMPT` are replaced, and by torchrun `$local_rank`; other `$NAME`
    reach the program as they are."""

    image: types.Image | None = None
    """The container image, if the profile runs containers."""

    workdir: types.AbsolutePath | None = None
    """The working directory of the workers; by default the image's, or the submit folder without
    containers and with apptainer."""

    resources: Resources = Field(default_factory=Resources.model_construct)
    """The resources that the job needs."""

    time_limit_s: types.Duration | None = Field(default=None, alias="time_limit")
    """How long the job may run, like `4h`: on Slurm after each start from the queue, on this
    machine in each attempt, on Kubernetes over all restarts of pods, from the submission or the
    last admission by Kueue. By default Slurm decides, and elsewhere there is no limit."""

    env: dict[types.EnvName, Text] = Field(default={})
    """Environment variables of every worker."""

    stop: Stop = Field(default_factory=Stop.model_construct)
    """What happens between the warning and the kill."""

    retries: Retries = Field(default_factory=Retries.model_construct)
    """What happens after a failure."""

    start: Literal["cold", "warm"] = "cold"
    """How ranks start: `cold`, each imports torch, or `warm`, a process on each node has imported
    torch and forks them. [Warm ranks](../how-to/failures.md#warm-starts) restart in a fraction of
    the time. Only for `script` and `module`."""

    stall_timeout_s: types.Limit | None = Field(default=None, alias="stall_timeout")
    """A run without a step for so long, like `10m`, is [stalled](../how-to/hangs.md): the ranks
    that keep the others waiting, or else rank 0, are named and killed, which is a failure as
    `retries` counts them. While a rank [computes](../how-to/hangs.md#a-rank-that-computes), none
    is killed for ten times as long, and at least an hour. With a time given, output counts as a
    step in a script that writes no `metrics.jsonl`. By default, a job on this machine, in a chain,
    or with `retries.in_job`, `retries.requeue`, `log_pattern` or notifications of stalls, learns
    the time from the run's own steps, and a stall is only reported; other jobs, and all with
    `supervisor: none`, have no watchdog, as with `never`."""

    log_pattern: types.LogPattern | None = None
    """A regular expression of Python that finds `(?P<step>…)` and other figures, like
    `(?P<loss>…)`, in the output of rank 0 (see `log_rank`): they are recorded as [the run's
    steps](../reference/goodput.md#steps-from-the-output), if the script records none."""

    log_rank: Literal["first", "last"] | None = None
    """Whose output `log_pattern` reads, that of the `first` rank or of the `last`; by default of
    the first."""

    notify: Notify | None = None
    """Notifications of the run; by default those of the profile."""

    secrets: Annotated[dict[types.EnvName, Secret | None], Prepared(types.secrets_by_name)] = Field(
        default={}
    )
    """Secret environment variables: names, or `{NAME: {secret: …, key: …}}` for Kubernetes, or
    `{NAME: {file: …}}`; never values."""

    sbatch: SbatchOptions = Field(default={})
    """More options of sbatch, by their long names: `true` for one without a value, null to cancel
    what the profile sets. Only Slurm uses them."""

    mounts: tuple[Mount, ...] = ()
    """Folders that the job needs from outside."""

    kubernetes: KubernetesOptions = Field(default_factory=KubernetesOptions.model_construct)
    """Settings that only Kubernetes uses."""

    sweep: Sweep | None = None
    """Many runs of this job with different arguments or variables."""

    after: After = ()
    """Runs on the same cluster to wait for; on Slurm. A run without a key must succeed."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        problems = []
        entries = [key for key in ("module", "script", "command") if given.get(key) is not None]
        if len(entries) != 1:
            which = " and ".join(entries) or "none of them"
            problems.append(f"give one of module, script and command; found {which}")
        if given.get("command") == ():
            problems.append("command: the list is empty; name the program first")
        if launcher := _launcher_of(given):
            problems.append(
                f"{launcher} would start in each rank of torchrun, and start ranks of its own; "
                "write script: FILE.py, and resources: {nproc_per_node: N}"
            )
        argv = [
            word
            for key in ("command", "args")
            if isinstance(given.get(key), tuple)
            for word in given[key]
        ]
        if argv[1 if given.get("command") else 0 :][:1] == ["--"]:
            problems.append(
                "the first argument is '--', which torchrun's own command line would swallow; "
                "put another one before it"
            )
        forks_itself = str(given.get("script") or "").startswith(types.IN_RUN_DIR)
        if given.get("start") == "warm" and (given.get("command") or forks_itself):
            problems.append(
                "start: warm changes nothing, since torchrun forks a function's ranks; leave it out"
                if forks_itself
                else "start: warm forks Python, and command starts any program; write script or "
                "module, or leave it out"
            )
        if given.get("log_rank") and not given.get("log_pattern"):
            problems.append("log_rank has no effect without log_pattern: set log_pattern too")
        env, secrets = (given.get(key) or () for key in ("env", "secrets"))
        if isinstance(env, dict) and isinstance(secrets, dict | tuple):
            problems += (
                f"{name!r} is in both env and secrets: keep one"
                for name in sorted({str(name) for name in secrets} & set(env))
            )
        sweep, args = given.get("sweep"), given.get("args", ())
        if isinstance(sweep, dict):  # as a file holds it
            with contextlib.suppress(ValidationError):
                sweep = Sweep.model_validate(sweep)
        # pydantic reports an argument that is not a string.
        texts = isinstance(args, tuple) and all(isinstance(word, str) for word in args)
        if isinstance(sweep, Sweep) and texts:
            try:
                points = expand(sweep, args)
            except ValueError as error:
                return [*problems, str(error)]
            swept = {name for point in points for name in point.env}
            problems += (
                f"{name!r} is in both sweep and secrets: keep one"
                for name in sorted(
                    swept & set(secrets if isinstance(secrets, dict | tuple) else ())
                )
            )
        return problems

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the sweep; empty without a sweep."""
        return () if self.sweep is None else expand(self.sweep, self.args)

    def at(self, point: Point) -> "JobSpec":
        """Return the job of one point, without the sweep."""
        args, env = tuple(map(str, point.args)), {**self.env, **point.env}
        changes = {"sweep": None, "args": args, "env": env}
        return self.model_copy(update=changes)

    @property
    def program(self) -> tuple[str, ...]:
        """The module, script or command, as it follows torchrun's own options."""
        if self.module is not None:
            return ("-m", self.module)
        if self.script is not None:
            return (self.script,)
        assert self.command is not None
        return ("--no-python", *self.command)

    @property
    def entry(self) -> tuple[str, ...]:
        """The program with its arguments."""
        return (*self.program, *map(types.ArgumentWord, self.args))

    @property
    def carried(self) -> bool:
        """Whether the workers' script is submitted with the run, like the files of a call."""
        return self.script is not None and self.script.startswith(types.IN_RUN_DIR)

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of everything the file sets."""
        canonical = json.dumps(self.as_written(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def as_written(self) -> dict[str, Any]:
        """Return the content of a job file for this job, without keys that have their defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def replace(self, **changes: Any) -> "JobSpec":
        """Return the job with other values, checked like a job file.

        Keys are those of the job file, like `args` or `**{"resources.nnodes": 4}`. Values are those
        of the job file as Python objects: `"4h"`, `["--epochs", "3"]`, `{"min": 2, "max": 4}`; None
        resets a key to its default.

        Raises:
            SpecError: every problem of the changed job.
        """
        written = Document(data=frozen(self.as_written()), source=f"job {self.name!r}")
        return _checked(assign(written, changes))


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a job file.

    Args:
        path: The YAML file.
        overrides: Assignments like `resources.nnodes=4`, applied before anything is checked.

    Raises:
        SpecError: every problem of the file and of the overrides.
    """
    return _checked(read_job(path, overrides))


def read_job(path: str | Path, overrides: Iterable[str] = ()) -> Document:
    """Return a job file as a document that knows the place of each key, with overrides applied.

    Raises:
        SpecError: the file cannot be read.
    """
    return override(read_file(Path(path), SpecError), overrides, JobSpec)


def _checked(document: Document) -> JobSpec:
    job = validate(JobSpec, document, SpecError)
    if problems := [*leaked_secrets(job), *misread(document)]:
        raise SpecError(
            [Problem(place=document.place(at), message=reason) for at, reason in problems]
        )
    return job


def leaked_secrets(job: JobSpec) -> list[tuple[KeyPath, str]]:
    """Return the path of each key that holds a secret, with the problem."""
    plain = {key: value for key, value in job.as_written().items() if key != "sweep"}
    return [*secret_scan.leaks_of_document(plain), *(leaks(job.sweep) if job.sweep else ())]


def parse_dependency(text: str) -> Dependency:
    """Read `RUN[:ok|any|fail]`, as `toolkit submit --after` takes it.

    Raises:
        InputError: the text names no run.

    >>> parse_dependency("slurm://c/7:any").any, parse_dependency("slurm://c/7").ok
    ('slurm://c/7', 'slurm://c/7')
    """
    run, _, wish = text.rpartition(":")
    if wish not in WISHES:
        run, wish = text, "ok"
    if not run:
        raise InputError(f"--after {text}: names no run; write it like slurm://CLUSTER/1234:any")
    return Dependency.model_validate({wish: run})
