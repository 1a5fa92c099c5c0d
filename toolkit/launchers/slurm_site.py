"""What a Slurm site says of itself, and where a plan believes something else."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess

from toolkit.errors import LauncherError, Problem
from toolkit.feasibility import SIGNAL_SLACK_S, warning_lead_s
from toolkit.planning import SlurmPlan
from toolkit.quantities import format_duration

__all__ = ["site_findings"]

OLDEST = (22, 5)
"""The oldest Slurm that the rendered scripts are tried with."""

_CONFIG = "scontrol show config"
_SINFO = ("sinfo", "-h", "-o", "%P|%l|%L|%s|%D|%a")


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """A line of sinfo; None stands for no limit."""

    name: str
    is_default: bool
    longest_s: int | None
    default_s: int | None
    most_nodes: int | None
    nodes: int
    state: str


def site_findings(
    plan: SlurmPlan, command: Callable[[Sequence[str]], "CompletedProcess[str]"]
) -> list[Problem]:
    """Return where the site contradicts the plan, each with the reason and the way out.

    Submits nothing: it reads `scontrol show config` and `sinfo`, and has sbatch parse the options
    with `--usage`, which ends it before it looks for a script.

    Raises:
        LauncherError: the site gives no answer, or one that cannot be understood.
    """
    config = _config(_answer(command, _CONFIG.split()))
    partitions = _partitions(_answer(command, _SINFO))
    return [
        *_config_findings(plan, config),
        *_partition_findings(plan, partitions),
        *_option_findings(plan, command),
    ]


def _answer(
    command: Callable[[Sequence[str]], "CompletedProcess[str]"], argv: Sequence[str]
) -> str:
    done = command(argv)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip().partition("\n")[0]
        raise LauncherError(f"{argv[0]} refused: {said or f'exit status {done.returncode}'}")
    return done.stdout


def _config(text: str) -> dict[str, str]:
    found = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))
    if missing := {"ClusterName", "KillWait", "PreemptMode", "SLURM_VERSION"} - found.keys():
        raise LauncherError(f"{_CONFIG} says nothing of {', '.join(sorted(missing))}")
    return found


def _config_findings(plan: SlurmPlan, config: dict[str, str]) -> list[Problem]:
    found = []
    profile = plan.profile
    seconds = re.match(r"(\d+) sec", config["KillWait"])
    if seconds is not None and int(seconds[1]) != profile.kill_wait_s:
        there = format_duration(int(seconds[1]))
        found.append(
            f"KillWait is {there}, and profile {profile.name!r} says "
            f"{format_duration(profile.kill_wait_s)}; write kill_wait: {there}"
        )
    if plan.job.retries.requeue and "CANCEL" in config["PreemptMode"].upper():
        found.append(
            f"PreemptMode is {config['PreemptMode']}: a preempted job is cancelled and not queued "
            "again; after a preemption submit the script again with `sbatch FILE RUN_DIR continue`"
        )
    version = re.match(r"(\d+)\.(\d+)", config["SLURM_VERSION"])
    if version is not None and (int(version[1]), int(version[2])) < OLDEST:
        found.append(
            f"SLURM_VERSION is {config['SLURM_VERSION']}, and the script is tried with "
            f"{OLDEST[0]}.{OLDEST[1]:02} and later; try a requeue before you rely on it"
        )
    return [Problem(place=_CONFIG, message=message) for message in found]


def _partitions(text: str) -> list[_Partition]:
    found = []
    for line in text.splitlines():
        try:
            name, longest, default, size, nodes, state = line.split("|")
            found.append(
                _Partition(
                    name=name.rstrip("*"),
                    is_default=name.endswith("*"),
                    longest_s=_seconds(longest),
                    default_s=_seconds(default),
                    most_nodes=_count(size.rpartition("-")[2]),
                    nodes=int(nodes),
                    state=state,
                )
            )
        except ValueError:
            raise LauncherError(f"sinfo's answer cannot be understood: {line!r}") from None
    return found


def _seconds(text: str) -> int | None:
    """Return the seconds of `30:00`, `4:00:00` or `2-00:00:00`; None for no limit.

    >>> _seconds("30:00"), _seconds("4:00:00"), _seconds("2-00:00:01"), _seconds("infinite")
    (1800, 14400, 172801, None)
    """
    if text in ("infinite", "n/a", "UNLIMITED"):
        return None
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds


def _count(text: str) -> int | None:
    return None if text in ("infinite", "UNLIMITED") else int(text)


def _partition_findings(plan: SlurmPlan, partitions: list[_Partition]) -> list[Problem]:
    wanted = dict(plan.sbatch).get("partition")
    names = wanted.split(",") if wanted else [p.name for p in partitions if p.is_default]
    there = ", ".join(sorted({p.name for p in partitions})) or "none"
    if not names:
        message = f"no partition is the default one; name one of {there} in the profile"
        return [Problem(place="sinfo", message=message)]
    reasons = []
    for name in names:
        rows = [partition for partition in partitions if partition.name == name]
        found = [f"there is no partition {name!r}; there are {there}"]
        if rows:
            found = list(_too_much(plan, rows[0], nodes=sum(row.nodes for row in rows)))
        if not found:
            return []  # Slurm takes the first one that can
        reasons += found
    return [Problem(place="sinfo", message=message) for message in reasons]


def _too_much(plan: SlurmPlan, partition: _Partition, *, nodes: int) -> list[str]:
    job, name = plan.job, partition.name
    found = []
    if partition.state != "up":
        found.append(f"partition {name!r} is {partition.state}; jobs wait until it is up")
    limit_s, longest_s = job.time_limit_s, partition.longest_s
    if limit_s and longest_s is not None and limit_s > longest_s:
        longest = format_duration(longest_s)
        found.append(
            f"time_limit {format_duration(limit_s)} exceeds MaxTime {longest} of partition "
            f"{name!r}; write time_limit: {longest} and let retries.requeue go on from there"
        )
    given_s = partition.default_s or longest_s
    needed_s = warning_lead_s(job) + SIGNAL_SLACK_S
    if limit_s is None and given_s is not None and given_s <= needed_s:
        found.append(
            f"partition {name!r} gives {format_duration(given_s)} where a job names no time, and "
            f"the end of a run alone takes {format_duration(needed_s)}; set time_limit"
        )
    most = min(nodes, nodes if partition.most_nodes is None else partition.most_nodes)
    if job.resources.nnodes > most:
        what = "nodes" if most == nodes else "nodes for one job (MaxNodes)"
        found.append(
            f"nnodes {job.resources.nnodes} exceeds the {most} {what} of partition {name!r}; "
            "ask for fewer, or name another partition"
        )
    return found


def _option_findings(
    plan: SlurmPlan, command: Callable[[Sequence[str]], "CompletedProcess[str]"]
) -> list[Problem]:
    """Have the site's own sbatch parse each option: it knows those of its version."""
    found = []
    for name, value in plan.sbatch:
        option = f"--{name}" if value is None else f"--{name}={value}"
        done = command(["sbatch", option, "--usage"])
        if done.returncode != 0:
            said = re.sub(r"^\S*sbatch: (error: )?", "", done.stderr.strip()).partition("\n")[0]
            message = f"this site's sbatch refuses it: {said}; leave it out, or ask for its version"
            found.append(Problem(place=f"--{name}", message=message))
    return found
