"""The parameters of an executor: keys of a job file as keywords, or submitit's names."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import Problem, SpecError, nearest
from toolkit.functions.payload import SCRIPT
from toolkit.job.loader import validate
from toolkit.job.sbatch_options import ALLOWED, DECIDED
from toolkit.job.spec import JobSpec
from toolkit.text.yaml_reader import Document

_RESOURCES = ("nnodes", "nproc_per_node", "gpus_per_node", "cpus_per_node", "memory", "shm")
_KEYS = (
    *("name", "time_limit", "env", "image", "workdir", "stop", "retries", "secrets", "sbatch"),
    *("mounts", "after"),
)
_OWN = ("cpus_per_task", "max_running")
_REQUEUE = 3
"""Default number of restarts of a call; submitit's max_num_timeout."""


def _in(unit: str, per: int) -> Callable[[object], str]:
    """Return a function that converts a number into a smaller unit: `per` of them make one."""

    def convert(value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{math.ceil(value * per)}{unit}"
        return str(value)

    return convert


def _slurm_size(value: object) -> str:
    """Return a size of Slurm, like 64GB, 64G, or megabytes, as a job file has it.

    >>> _slurm_size("64GB"), _slurm_size("512M"), _slurm_size(1000)
    ('64GiB', '512MiB', '1000MiB')
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", str(value))
    return f"{match[1]}{match[2] or 'M'}iB" if match else str(value)


def _same(value: object) -> object:
    return value


_SUBMITIT: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "cpus_per_task": ("cpus_per_task", _same),
    "mem_gb": ("memory", _in("MiB", 1024)),
    "nodes": ("nnodes", _same),
    "tasks_per_node": ("nproc_per_node", _same),
    "timeout_min": ("time_limit", _in("s", 60)),
    "slurm_array_parallelism": ("max_running", _same),
    "slurm_cpus_per_task": ("cpus_per_task", _same),
    "slurm_gpus_per_node": ("gpus_per_node", _same),
    "slurm_job_name": ("name", _same),
    "slurm_max_num_timeout": ("retries", lambda value: {"requeue": value}),
    "slurm_mem": ("memory", _slurm_size),
    "slurm_nodes": ("nnodes", _same),
    "slurm_ntasks_per_node": ("nproc_per_node", _same),
    "slurm_signal_delay_s": ("stop", lambda value: {"grace": f"{value}s"}),
    "slurm_time": ("time_limit", _in("s", 60)),
}
"""submitit's names, each with our key and the conversion of its value."""

_INSTEAD = {
    "setup": "set 'prolog' in the profile",
    "srun_args": "the script's own srun starts torchrun",
    "stderr_to_stdout": "each rank has both streams, and the log has them together",
    "teardown": "set 'epilog' in the profile",
    "use_srun": "srun starts torchrun on each node",
}
"""submitit's parameters without a meaning here, each with the reason or a fix."""


def updated(parameters: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with the given ones added or replaced.

    Raises:
        SpecError: unknown names, each with a fix; two names for the same key.
    """
    settings: dict[str, list[str]] = {}
    new: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        if value is None:
            continue  # as in submitit: not set
        try:
            key, setting = _setting(name, value)
        except ValueError as error:
            problems.append(Problem(message=str(error), place=name))
            continue
        settings.setdefault(key, []).append(name)
        new[key] = {**new.get(key, {}), **setting} if isinstance(setting, dict) else setting
    for key, names in settings.items():
        if len(names) > 1 and not isinstance(new[key], dict):
            problems.append(Problem(message=f"{' and '.join(names)} say the same; keep one"))
    if problems:
        raise SpecError(problems)
    merged = dict(parameters)
    for key, value in new.items():
        for other in {"cpus_per_task", "cpus_per_node"} - {key} if key.startswith("cpus") else ():
            merged.pop(other, None)
        old = merged.get(key)
        merged[key] = (
            {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """Return the key of a parameter and its value; raise ValueError if there is no such one."""
    if name in (*_RESOURCES, *_KEYS, *_OWN):
        return name, value
    if name in _SUBMITIT:
        key, convert = _SUBMITIT[name]
        return key, convert(value)
    plain = name.removeprefix("slurm_")
    if plain in _INSTEAD:
        raise ValueError(f"not here: {_INSTEAD[plain]}")
    if name == "slurm_additional_parameters":
        return "sbatch", {str(key).replace("_", "-"): entry for key, entry in value.items()}
    option = plain.replace("_", "-")
    if name.startswith("slurm_") and option in ALLOWED:
        return "sbatch", {option: value}
    if name.startswith("slurm_") and option in DECIDED:
        raise ValueError(f"set by the toolkit: {DECIDED[option]}")
    valid = sorted({*_RESOURCES, *_KEYS, *_OWN, *_SUBMITIT})
    meant = nearest(name, valid)
    hint = f"did you mean {meant!r}? " if meant else ""
    raise ValueError(
        f"unknown parameter; {hint}valid are {', '.join(valid)}, and slurm_OPTION for an option of "
        "sbatch, like slurm_partition"
    )


def name_of(function: object) -> str:
    """Return the name of a function's job.

    >>> name_of(name_of), name_of(lambda: None)
    ('name-of', 'function')
    """
    own = getattr(function, "__name__", type(function).__name__)
    text = re.sub("[^a-z0-9]+", "-", own.lower()).strip("-")[:32].rstrip("-")
    return text if re.match("[a-z]", text) and own != "<lambda>" else "function"


def job_of(parameters: Mapping[str, Any], *, name: str, calls: int = 1, source: str) -> JobSpec:
    """Return the job that makes the calls, each on all its ranks; several calls are a job array.

    Raises:
        SpecError: every parameter that cannot be used.
    """
    resources = {key: parameters[key] for key in _RESOURCES if key in parameters}
    if isinstance(resources.get("nnodes"), dict):
        raise SpecError("nnodes: a call has one number of ranks; write one number of nodes")
    if "cpus_per_task" in parameters:
        ranks, cpus = resources.get("nproc_per_node", 1), parameters["cpus_per_task"]
        whole = isinstance(ranks, int) and isinstance(cpus, int)
        resources["cpus_per_node"] = cpus * ranks if whole else cpus
    data: dict[str, Any] = {"name": name, "script": SCRIPT, "resources": resources}
    data |= {key: parameters[key] for key in _KEYS if key in parameters}
    retries = data.get("retries", {})
    data["retries"] = {"requeue": _REQUEUE, **retries} if isinstance(retries, dict) else retries
    if calls > 1:
        data["sweep"] = {"grid": {"--call": tuple(map(str, range(calls)))}}
        if "max_running" in parameters:
            data["sweep"]["max_running"] = parameters["max_running"]
    return validate(JobSpec, Document(data=data, source=source), SpecError)
