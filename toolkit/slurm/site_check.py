"""Compares a plan with the configuration that a Slurm site reports."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess

from toolkit.errors import LauncherError, Problem
from toolkit.planning.slurm import SIGNAL_SLACK_S, SlurmPlan, warning_lead_s
from toolkit.rendering import render
from toolkit.slurm.access_check import account_findings, path_findings, verdict
from toolkit.text.quantities import format_duration, whole_number

__all__ = ["site_findings"]

OLDEST = (22, 5)
"""The oldest Slurm that the rendered scripts are tried with."""

_CONFIG = "scontrol show config"
_PARTITIONS = "scontrol show partition"  # sinfo leaves out cloud nodes that are not started


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """What limits a partition's jobs; None stands for no limit."""

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

    Submits nothing: it reads the configuration, the partitions and the user's associations, looks
    at folders, and has sbatch parse the options (`--usage`) and the script (`--test-only`).

    Raises:
        LauncherError: the site gives no answer, or one that cannot be understood.
    """
    config = _config(_answer(command, _CONFIG.split()))
    partitions = _partitions(_answer(command, [*_PARTITIONS.split(), "--oneliner"]))
    refused = [
        *_partition_findings(plan, partitions),
        *_option_findings(plan, command),
        *account_findings(dict(plan.sbatch), command, place=lambda name: f"--{name}"),
    ]
    return [
        *_config_findings(plan, config),
        *(refused or verdict(render(plan), command)),
        *path_findings(_places(plan), command),
    ]


def _places(plan: SlurmPlan) -> Iterator[tuple[str, str, str, str]]:
    """Yield which folders and files must be there, on the node where jobs are submitted."""
    profile, job = plan.profile, plan.job
    runs_dir = profile.below(profile.runs_dir)
    yield "makes", runs_dir, "runs_dir", "make it, or correct the profile's runs_dir"
    if profile.venv is not None:
        activate = f"{profile.below(profile.venv)}/bin/activate"
        yield "file", activate, "venv", "make it, or correct the profile's venv"
    if profile.runtime == "bare" and job.workdir is not None:
        yield "folder", job.workdir, "workdir", "make it, or correct workdir"
    if profile.runtime != "bare" and job.image is not None and job.image.startswith("/"):
        yield "file", job.image, "image", "bring it there, or correct image"


def _found(rule: str, place: str, message: str) -> Problem:
    return Problem(rule=rule, place=place, message=message)


def _answer(
    command: Callable[[Sequence[str]], "CompletedProcess[str]"], argv: Sequence[str]
) -> str:
    done = command(argv)
    if done.returncode != 0:
        message = (done.stderr + done.stdout).strip().partition("\n")[0]
        raise LauncherError(f"{argv[0]} refused: {message or f'exit status {done.returncode}'}")
    return done.stdout


def _config(text: str) -> dict[str, str]:
    settings = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))
    if missing := {"ClusterName", "KillWait", "PreemptMode", "SLURM_VERSION"} - settings.keys():
        raise LauncherError(f"{_CONFIG} says nothing of {', '.join(sorted(missing))}")
    return settings


def _config_findings(plan: SlurmPlan, config: dict[str, str]) -> list[Problem]:
    problems = []
    profile = plan.profile
    seconds = re.match(r"(\d{1,9}) sec", config["KillWait"])
    if seconds is not None and int(seconds[1]) != profile.kill_wait_s:
        there = format_duration(int(seconds[1]))
        message = (
            f"KillWait is {there}, and profile {profile.name!r} says "
            f"{format_duration(profile.kill_wait_s)}; write kill_wait: {there}"
        )
        problems.append(_found("site-kill-wait", _CONFIG, message))
    if plan.job.retries.requeue and "CANCEL" in config["PreemptMode"].upper():
        message = (
            f"PreemptMode is {config['PreemptMode']}: a preempted job is cancelled and not queued "
            "again; after a preemption submit the script again with `sbatch FILE RUN_DIR continue`"
        )
        problems.append(_found("site-preempt-mode", _CONFIG, message))
    most = config.get("MaxArraySize", "")
    if (limit := whole_number(most)) is not None and len(plan.points) > limit:
        message = (
            f"{len(plan.points)} points exceed MaxArraySize {most}, which is how many tasks an "
            "array may have; make several sweeps of it"
        )
        problems.append(_found("site-array-size", _CONFIG, message))
    version = re.match(r"(\d{1,9})\.(\d{1,9})", config["SLURM_VERSION"])
    if version is not None and (int(version[1]), int(version[2])) < OLDEST:
        message = (
            f"SLURM_VERSION is {config['SLURM_VERSION']}, and the script is tried with "
            f"{OLDEST[0]}.{OLDEST[1]:02} and later; try a requeue before you rely on it"
        )
        problems.append(_found("site-version", _CONFIG, message))
    return problems


def _partitions(text: str) -> list[_Partition]:
    partitions = []
    for line in text.splitlines():
        settings = dict(word.partition("=")[::2] for word in line.split())
        try:
            partitions.append(
                _Partition(
                    name=settings["PartitionName"],
                    is_default=settings["Default"] == "YES",
                    longest_s=_seconds(settings["MaxTime"]),
                    default_s=_seconds(settings["DefaultTime"]),
                    most_nodes=None
                    if settings["MaxNodes"] == "UNLIMITED"
                    else int(settings["MaxNodes"]),
                    nodes=int(settings["TotalNodes"]),
                    state=settings["State"],
                )
            )
        except (KeyError, ValueError):
            raise LauncherError(f"{_PARTITIONS}: cannot be understood: {line!r}") from None
    return partitions


def _seconds(text: str) -> int | None:
    """Return the seconds of `00:30:00` or `2-00:00:00`; None for no limit.

    >>> _seconds("00:30:00"), _seconds("2-00:00:01"), _seconds("UNLIMITED"), _seconds("NONE")
    (1800, 172801, None, None)
    """
    if text in ("UNLIMITED", "NONE"):
        return None
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds


def _partition_findings(plan: SlurmPlan, partitions: list[_Partition]) -> list[Problem]:
    wanted = dict(plan.sbatch).get("partition")
    names = wanted.split(",") if wanted else [p.name for p in partitions if p.is_default]
    there = ", ".join(sorted({p.name for p in partitions})) or "none"
    if not names:
        message = f"no partition is the default one; name one of {there} in the profile"
        return [_found("site-partition", _PARTITIONS, message)]
    reasons: list[tuple[str, str]] = []
    by_name = {partition.name: partition for partition in partitions}
    for name in names:
        problems = [("site-partition", f"there is no partition {name!r}; there are {there}")]
        if name in by_name:
            problems = _too_much(plan, by_name[name])
        if not problems:
            return []  # Slurm takes the first one that can
        reasons += problems
    return [_found(rule, _PARTITIONS, message) for rule, message in reasons]


def _too_much(plan: SlurmPlan, partition: _Partition) -> list[tuple[str, str]]:
    job, name = plan.job, partition.name
    excesses = []
    if partition.state != "UP":
        why = f"partition {name!r} is {partition.state}; jobs wait until it is up"
        excesses.append(("site-partition-state", why))
    limit_s, longest_s = job.time_limit_s, partition.longest_s
    if limit_s and longest_s is not None and limit_s > longest_s:
        longest = format_duration(longest_s)
        why = (
            f"time_limit {format_duration(limit_s)} exceeds MaxTime {longest} of partition "
            f"{name!r}; write time_limit: {longest} and let retries.requeue go on from there"
        )
        excesses.append(("site-time-limit", why))
    given_s = partition.default_s or longest_s
    needed_s = warning_lead_s(job) + SIGNAL_SLACK_S
    if limit_s is None and given_s is not None and given_s <= needed_s:
        why = (
            f"partition {name!r} gives {format_duration(given_s)} where a job names no time, and "
            f"the end of a run alone takes {format_duration(needed_s)}; set time_limit"
        )
        excesses.append(("site-time-limit", why))
    nodes = partition.nodes
    most = min(nodes, nodes if partition.most_nodes is None else partition.most_nodes)
    if job.resources.min_nodes > most:
        what = "nodes" if most == nodes else "nodes for one job (MaxNodes)"
        why = (
            f"nnodes {job.resources.min_nodes} exceeds the {most} {what} of partition {name!r}; "
            "ask for fewer, or name another partition"
        )
        excesses.append(("site-nodes", why))
    return excesses


def _option_findings(
    plan: SlurmPlan, command: Callable[[Sequence[str]], "CompletedProcess[str]"]
) -> list[Problem]:
    """Have the site's own sbatch parse each option: it knows those of its version."""
    problems = []
    for name, value in plan.sbatch:
        option = f"--{name}" if value is None else f"--{name}={value}"
        done = command(["sbatch", option, "--usage"])
        if done.returncode != 0:
            complaint = re.sub(r"^\S*sbatch: (error: )?", "", done.stderr.strip()).partition("\n")[
                0
            ]
            message = (
                f"this site's sbatch refuses it: {complaint}; leave it out, or ask for its version"
            )
            problems.append(_found("site-option", f"--{name}", message))
    return problems
