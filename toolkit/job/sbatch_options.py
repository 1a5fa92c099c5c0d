"""The options of sbatch that a profile or a job may set, and those that the toolkit sets itself.

Names and kinds: the manual page sbatch(1) of Slurm 22.05, and the documented additions up to 25.11.
`toolkit check --server` asks a site's own sbatch which of them it knows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from toolkit.errors import nearest
from toolkit.job.types import Checked, Prepared, Text, refuse_ambiguous


def names(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


FLAGS = names("""
    consolidate-segments contiguous hold ignore-pbs overcommit oversubscribe reboot spread-job
    spread-segments stepmgr use-min-nodes
""")
"""Options that take no value."""

OPTIONAL = names("""
    exclusive get-user-env nice no-kill oom-kill-step propagate
""")
"""Options that take a value or none."""

VALUED = names("""
    account acctg-freq batch bb bbf begin cluster-constraint comment constraint container
    container-id core-spec cores-per-socket cpu-freq deadline delay-boot distribution exclude
    extra extra-node-info gpu-bind gpu-freq gres gres-flags hint kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem-bind mincpus network nodefile nodelist partition power
    prefer priority profile qos reservation segment sockets-per-node switches thread-spec
    threads-per-core time-min tmp tres-bind wait-all-nodes wckey
""")
"""Options that need a value."""

_WORKERS = (
    "there is one task per node, which starts the workers; "
    "set resources.nnodes and resources.nproc_per_node"
)
_GPUS = (
    "set resources.gpus_per_node, and gpus_flag in the profile for the option that requests them"
)
_MEMORY = (
    "set resources.memory, per node, and memory_flag in the profile for the option that requests it"
)
_LOG = "the log belongs to the run directory, and continues after a requeue"
_WAITS = "the toolkit reads sbatch's answer; `toolkit submit --follow` waits"
_ENVIRONMENT = "the script needs the environment it is submitted in; use 'env' and 'secrets'"

DECIDED = {
    "array": "set 'sweep': its points become the tasks of an array",
    "chdir": "relative paths are below the submit folder; write absolute ones",
    "clusters": "the toolkit queries one cluster; submit on a login node of the other",
    **dict.fromkeys(("cpus-per-gpu", "cpus-per-task"), "set resources.cpus_per_node"),
    "dependency": "set 'after', or use `toolkit submit --after RUN`",
    **dict.fromkeys(("error", "open-mode", "output"), _LOG),
    **dict.fromkeys(("export", "export-file"), _ENVIRONMENT),
    **dict.fromkeys(("gid", "uid"), "submit as the user who is to own the job"),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"), _GPUS),
    **dict.fromkeys(("help", "parsable", "quiet", "usage", "verbose", "version", "wait"), _WAITS),
    "input": "a training program reads no standard input; name the file in 'args'",
    "job-name": "set the key 'name'",
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    "nodes": "set resources.nnodes",
    **dict.fromkeys(("ntasks", "ntasks-per-core", "ntasks-per-gpu"), _WORKERS),
    **dict.fromkeys(("ntasks-per-node", "ntasks-per-socket"), _WORKERS),
    **dict.fromkeys(("requeue", "no-requeue"), "set retries.requeue"),
    "signal": "set stop.grace, from which the warning follows",
    "test-only": "`toolkit check --server` tests without submitting",
    "time": "set time_limit",
    "tres-per-task": "set 'resources'",
    "wrap": "the job runs the rendered script; set module, script or command",
}
"""Options that follow from other keys, each with its fix."""

ALLOWED = FLAGS | OPTIONAL | VALUED

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _check_name(name: str) -> str:
    plain = name.lstrip("-").replace("_", "-")
    if name in DECIDED:
        raise ValueError(f"{name!r} is set by the toolkit: {DECIDED[name]}")
    if name in ALLOWED:
        return name
    if plain in ALLOWED | DECIDED.keys():
        raise ValueError(f"{name!r} is written {plain!r} here, as in sbatch's manual")
    meant = nearest(plain, sorted(ALLOWED | DECIDED.keys())) if len(plain) > 1 else None
    way_out = f"did you mean {meant!r}?" if meant else "write its long name, as in sbatch's manual"
    raise ValueError(f"sbatch knows no option {name!r}; {way_out}")


def _check_value(value: object) -> object:
    refuse_ambiguous(value)
    if isinstance(value, tuple | list | dict):
        kind = "a mapping" if isinstance(value, dict) else "a list"
        raise ValueError(f'an option has one value, not {kind}; write it as Slurm does, like "a,b"')
    if value is False:
        raise ValueError("leave the option out; null cancels what the profile sets")
    if isinstance(value, float):
        raise ValueError(f'a number with a decimal point has no unique form; write "{value}"')
    if value == "":
        raise ValueError("the value is empty; write true for an option without a value")
    if isinstance(value, str) and (match := _CONTROL.search(value)):
        raise ValueError(f"it holds {match[0]!r}, which no #SBATCH line can hold")
    return value


def _check_kinds(options: dict[str, Any]) -> dict[str, Any]:
    problems = []
    for name, value in options.items():
        if name in VALUED and value is True:
            problems.append(f"{name} needs a value")
        if name in FLAGS and value is not True and value is not None:
            problems.append(f"{name} takes no value; write true")
        gres = str(value).split(",") if name == "gres" else []
        if any(re.match(r"(gres[/:])?gpu(:|=|$)", word) for word in gres):
            problems.append(f"gres asks for GPUs: {_GPUS}")
    if problems:
        raise ValueError("; ".join(problems))
    return options


SbatchValue = Annotated[bool | int | str | None, Prepared(_check_value)]
"""`true` for an option without a value, a number, a string, or null to cancel the profile's."""

SbatchOptions = Annotated[
    dict[Annotated[Text, Checked(_check_name)], SbatchValue], Checked(_check_kinds)
]
"""Options by their long names without dashes."""


def merged(layers: Iterable[Mapping[str, SbatchValue]]) -> dict[str, str | None]:
    """Merge layers of options, the last wins; None is the value of an option without one.

    >>> merged([{"comment": "site", "nice": 5}, {"comment": None, "exclusive": True}])
    {'nice': '5', 'exclusive': None}
    """
    chosen: dict[str, SbatchValue] = {}
    for layer in layers:
        chosen |= layer
    return {
        name: None if value is True else str(value)
        for name, value in chosen.items()
        if value is not None
    }
