"""The job file: what to run, on what, and what to do when it is stopped or fails.

A `JobSpec` is portable: nothing in it names a site. Where it runs is the profile's business.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    Strict,
)
from pydantic_core import PydanticCustomError

from toolkit import secrecy
from toolkit.documents import Ambiguous, Document, KeyPath, read_document, read_text
from toolkit.errors import InputError, Problem, SpecError
from toolkit.fields import (
    ENV_NAME,
    RESERVED_NAMES,
    AbsolutePath,
    Duration,
    EnvName,
    Image,
    JobName,
    ModuleName,
    MountSource,
    NaturalInt,
    PositiveInt,
    Program,
    SecretFile,
    SecretKey,
    SecretName,
    Size,
    program_first,
    schema_extra,
)
from toolkit.sbatch_options import SbatchOptions, options_schema
from toolkit.validation import FrozenModel, Text, override, validate

__all__ = [
    "JobSpec",
    "Mount",
    "Resources",
    "Retries",
    "Secret",
    "Stop",
    "field_docstrings",
    "json_schema",
    "leaked_secrets",
    "load",
]


class Resources(FrozenModel):
    """What one job asks of the machines; all but `nnodes` counts per node."""

    nnodes: PositiveInt = 1
    """Nodes; one torchrun starts on each."""

    nproc_per_node: PositiveInt = 1
    """Workers that torchrun starts on each node, usually one per GPU."""

    gpus_per_node: NaturalInt = 0
    """GPUs on each node."""

    cpus_per_node: PositiveInt | None = None
    """CPUs on each node; as many as workers where it is left out."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory on each node, like `64GiB`; the site's default where it is left out."""

    shm_bytes: Size | None = Field(default=None, alias="shm")
    """Shared memory for data loaders; part of `memory`. Containers have 64 MiB by default."""


class Stop(FrozenModel):
    """How a run is stopped: by walltime, preemption, a drained node, or you."""

    grace_s: Duration = Field(default=60, alias="grace", json_schema_extra={"default": "60s"})
    """How long a checkpoint may take between the warning and the kill."""


class Retries(FrozenModel):
    """How often a failed run is tried again; each try resumes from the newest checkpoint."""

    in_job: NaturalInt = 0
    """Restarts of the workers by torchrun inside the running job, as after a killed rank."""

    requeue: NaturalInt = 0
    """New starts of the whole job after failures that may pass: a lost node, a killed rank.

    On Slurm, those after a preemption or when time was over do not count, but with 0 there are none
    of them either. Of a script that writes no `outcome.json`, running out of time counts, too.
    """

    no_progress: PositiveInt = 3
    """Attempts in a row without a new step in `outcome.json` after which a Slurm job ends."""


class Mount(FrozenModel):
    """A folder from outside that the job needs."""

    source: MountSource
    """The folder on the node: an absolute path, or `claim:NAME` for a Kubernetes volume claim."""

    target: AbsolutePath
    """Where the job sees it."""

    read_only: Annotated[bool, Strict()] = False
    """Whether the job may only read it; without containers nothing holds it to that."""

    @property
    def claim(self) -> str | None:
        """The name of the volume claim, or None for a folder."""
        kind, _, name = self.source.partition(":")
        return name if kind == "claim" else None


class Secret(FrozenModel):
    """Where a secret's value is found; the value itself is never written down."""

    secret: SecretName | None = None
    """The name of the Kubernetes Secret."""

    key: SecretKey | None = None
    """The key in it."""

    file: SecretFile | None = None
    """A file that only you may read (`chmod 600`), read by the script on its node; here and on
    Slurm."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        there = {key for key in ("secret", "key", "file") if given.get(key) is not None}
        if there in ({"secret", "key"}, {"file"}):
            return []
        found = " and ".join(sorted(there)) or "none of them"
        return [f"secret and key say where it is, or file does; found {found}"]


def _secrets_by_name(value: object) -> object:
    """Turn a list of names into a mapping whose values say nothing about the place."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, tuple | list):
        raise PydanticCustomError("secrets_type", "names are wanted")
    names = [item for item in value if isinstance(item, str)]
    found = [f"a name is wanted, not {item!r}" for item in value if not isinstance(item, str)]
    found += (name.reason for name in names if isinstance(name, Ambiguous))
    found += (f"{name!r} stands twice" for name in sorted(set(names)) if names.count(name) > 1)
    if found:
        raise ValueError("; ".join(found))
    return dict.fromkeys(names)


class JobSpec(FrozenModel):
    """One training job."""

    name: JobName
    """The job's name; runs are called NAME-DATE-TIME-XXXX."""

    module: ModuleName | None = None
    """The Python module that every worker runs, as after `python -m`."""

    script: Program | None = None
    """The Python file that every worker runs; a relative path is below the submit folder."""

    command: (
        Annotated[
            tuple[Text, ...],
            AfterValidator(program_first),
            schema_extra(minItems=1, prefixItems=[{"type": "string", "pattern": "^[^-]"}]),
        ]
        | None
    ) = None
    """Any program and its first arguments, started once per worker in place of Python."""

    args: tuple[Text, ...] = ()
    """Arguments of the module, script or command."""

    image: Image | None = None
    """The container image, where the profile runs containers."""

    workdir: AbsolutePath | None = None
    """The folder in which the workers start; where it is left out, the image's own, or the submit
    folder where there are no containers."""

    resources: Resources = Field(default_factory=Resources)
    """What the job needs."""

    time_limit_s: Duration | None = Field(default=None, alias="time_limit")
    """How long the job may run, like `4h`; the site's default where it is left out."""

    env: dict[EnvName, Text] = Field(default={})
    """Environment variables of every worker."""

    stop: Stop = Field(default_factory=Stop)
    """What happens between the warning and the kill."""

    retries: Retries = Field(default_factory=Retries)
    """What happens after a failure."""

    secrets: Annotated[dict[EnvName, Secret | None], BeforeValidator(_secrets_by_name)] = Field(
        default={}
    )
    """Secret environment variables: names, or `{NAME: {secret: …, key: …}}` for Kubernetes, or
    `{NAME: {file: …}}`; never values."""

    sbatch: SbatchOptions = Field(default={})
    """More options of sbatch, by their long names: `true` for one without a value, null to take
    back what the profile sets. Other places ignore them."""

    mounts: tuple[Mount, ...] = ()
    """Folders from outside."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        found = []
        entries = [key for key in ("module", "script", "command") if given.get(key) is not None]
        if len(entries) != 1:
            which = " and ".join(entries) or "none of them"
            found.append(f"one of module, script and command says what to run; found {which}")
        if given.get("command") == ():
            found.append("command: the list is empty; name the program first")
        words = [
            word
            for key in ("command", "args")
            if isinstance(given.get(key), tuple)
            for word in given[key]
        ]
        if words[1 if given.get("command") else 0 :][:1] == ["--"]:
            found.append(
                "the first argument is '--', which torchrun's own command line would swallow; "
                "put another one before it"
            )
        env, secrets = (given.get(key) or () for key in ("env", "secrets"))
        if isinstance(env, dict) and isinstance(secrets, dict | tuple):
            found += (
                f"{name!r} stands under env and under secrets; keep one"
                for name in sorted({str(name) for name in secrets} & set(env))
            )
        return found

    @property
    def entry(self) -> tuple[str, ...]:
        """What follows torchrun's own options: the module, script or command with `args`."""
        if self.module is not None:
            return ("-m", self.module, *self.args)
        if self.script is not None:
            return (self.script, *self.args)
        assert self.command is not None
        return ("--no-python", *self.command, *self.args)

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of everything the file sets."""
        canonical = json.dumps(self.as_written(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def as_written(self) -> dict[str, Any]:
        """Return the job as a job file holds it, without the keys left at their defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a job file.

    Args:
        path: The YAML file.
        overrides: Assignments like `resources.nnodes=4`, applied before anything is checked.

    Raises:
        SpecError: Every problem of the file and of the overrides.
    """
    document = override(_document(Path(path)), overrides, JobSpec)
    job = validate(JobSpec, document, SpecError)
    if leaks := leaked_secrets(job):
        raise SpecError([Problem(place=document.place(at), message=reason) for at, reason in leaks])
    return job


def leaked_secrets(job: JobSpec) -> list[tuple[KeyPath, str]]:
    """Return where a secret is written down, and what to do about it."""
    found: list[tuple[KeyPath, str]] = []
    for key, words in (("command", job.command or ()), ("args", job.args)):
        found += (((key, at), reason) for at, reason in secrecy.leaks_of_words(key, words))
    for key, entries in (("env", job.env), ("sbatch", job.sbatch)):
        leaks = secrecy.leaks_of_mapping(key, entries)
        found += (((key, name), reason) for name, reason in leaks)
    return found


def _document(path: Path) -> Document:
    try:
        return read_document(read_text(path), str(path))
    except InputError as error:
        raise SpecError(error.problems) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job file; descriptions are the docstrings of the fields."""
    schema = JobSpec.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    known = {"type": "string", "pattern": f"^(?!(?:{RESERVED_NAMES.pattern})$){ENV_NAME}$"}
    place = {"anyOf": [{"$ref": "#/$defs/Secret"}, {"type": "null"}]}
    schema["properties"] |= {
        "env": {
            "type": "object",
            "propertyNames": known,
            "additionalProperties": {"type": "string"},
            "default": {},
        },
        "secrets": {
            "anyOf": [
                {"type": "array", "items": known, "uniqueItems": True},
                {"type": "object", "propertyNames": known, "additionalProperties": place},
            ],
            "default": {},
        },
        "sbatch": options_schema(),
    }
    schema["$defs"]["Secret"]["oneOf"] = [
        {
            "required": list(needed),
            "properties": {key: {"not": {"type": "null"}} for key in needed}
            | {key: {"type": "null"} for key in left_out},
        }
        for needed, left_out in ((("secret", "key"), ("file",)), (("file",), ("secret", "key")))
    ]
    for model in (JobSpec, Resources, Stop, Retries, Mount, Secret):
        part = schema if model is JobSpec else schema["$defs"][model.__name__]
        for name, text in field_docstrings(model).items():
            alias = model.model_fields[name].alias or name
            # Beside a $ref, a description must not replace what the reference says.
            part["properties"][alias]["description"] = text
            part["properties"][alias].pop("title", None)
    schema["oneOf"] = [
        {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
        for key in ("module", "script", "command")
    ]
    return schema


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Read the string below each field from the source; pydantic would do it at every import."""
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found
