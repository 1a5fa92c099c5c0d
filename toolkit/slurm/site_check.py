"""Compares a plan or a script with a Slurm site, and with the permissions of its user.

A site reports its configuration, partitions and associations (accounts, QOS). The checks also test
folders, and the site's sbatch parses the options and the script; nothing is submitted.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from toolkit.errors import LauncherError, Problem
from toolkit.planning.slurm import SIGNAL_SLACK_S, SlurmPlan, warning_lead_s
from toolkit.rendering import render
from toolkit.slurm.commands import Command, config_of, refused
from toolkit.text.answers import error_line, plain, table, user_of, values
from toolkit.text.quantities import format_duration, parse_duration, whole_number

_OLDEST = (22, 5)
"""The oldest Slurm version that the rendered scripts are tested with."""

_CONFIG = "scontrol show config"
_PARTITIONS = "scontrol show partition"  # sinfo omits cloud nodes that are not started
_TEST_ONLY = "sbatch --test-only"

_SUBMIT = """
umask 077
file=$(mktemp) || exit
printf %s "$@" >"$file" && sbatch --test-only "$file"
status=$?
rm -f "$file"
exit $status
"""
"""The script is passed in arguments, which also works on a remote login node."""

_ARGUMENT_MAX = 30_000  # characters of at most 4 bytes; Linux takes 128 KiB for one argument

_OF_SBATCH = re.compile(r"(\S*sbatch|allocation failure): ")

_PATH_CHECK = """
for word; do
  kind=${word%%:*} path=${word#*:} fault=
  case $path in '~/'*) path=$HOME/${path#'~/'} ;; esac
  case $kind in
    makes)
      up=$path
      while [ ! -e "$up" ] && [ "$up" != . ] && [ "$up" != / ]; do up=$(dirname -- "$up"); done
      if [ ! -d "$up" ]; then fault="$up is not a folder"
      elif [ ! -w "$up" ]; then fault="$up cannot be written"; fi ;;
    writes)
      if [ ! -d "$path" ]; then fault="there is no such folder"
      elif [ ! -w "$path" ]; then fault="it cannot be written"; fi ;;
    folder) [ -d "$path" ] || fault="there is no such folder" ;;
    file) [ -e "$path" ] || fault="there is no such file" ;;
  esac
  echo "==fault|$fault|=="
done
"""


_CRED_EXPIRE_S = 120
"""Slurm's default delay before a requeued job starts, in seconds."""

_OF_A_PARTITION = {
    *("PartitionName", "Default", "DefaultTime", "MaxNodes", "MaxTime", "State", "TotalNodes")
}
"""The required settings in the line of a partition."""


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """The limits of a partition's jobs; None means unlimited."""

    name: str
    is_default: bool
    longest_s: int | None
    default_s: int | None
    most_nodes: int
    nodes: int
    state: str


def site_findings(plan: SlurmPlan, command: Command) -> list[Problem]:
    """Return the conflicts between the site and the plan, each with the reason and the fix.

    Raises:
        LauncherError: the site does not answer, or its answer cannot be parsed.
    """
    config = config_of(_answer(command, _CONFIG))
    if missing := {"ClusterName", "KillWait", "PreemptMode", "SLURM_VERSION"} - config.keys():
        raise LauncherError(f"{_CONFIG} says nothing of {', '.join(sorted(missing))}")
    partitions = _partitions(_answer(command, _PARTITIONS, "--oneliner"))
    refusals = [
        *_problems(_PARTITIONS, _partition_findings(plan, partitions)),
        *_option_findings(plan, command),
        *account_findings(dict(plan.sbatch), command, place=lambda name: f"--{name}"),
    ]
    return [
        *_problems(_CONFIG, _config_findings(plan, config)),
        *(refusals or verdict(render(plan), command)),
        *path_findings(_required_paths(plan), command),
    ]


def _required_paths(plan: SlurmPlan) -> Iterator[tuple[str, str, str, str]]:
    """Yield the folders and files that must exist on the login node."""
    profile, job = plan.profile, plan.job
    runs_dir = profile.below(profile.runs_dir)
    yield "makes", runs_dir, "runs_dir", "make it, or correct the profile's runs_dir"
    if profile.venv is not None:
        activate = f"{profile.below(profile.venv)}/bin/activate"
        yield "file", activate, "venv", "make it, or correct the profile's venv"
    if profile.runtime == "bare" and job.workdir is not None:
        yield "folder", job.workdir, "workdir", "make it, or correct workdir"
    if profile.runtime != "bare" and job.image is not None and job.image.startswith("/"):
        yield "file", job.image, "image", "copy it there, or correct image"


def _problems(place: str, findings: Iterable[tuple[str, str]]) -> list[Problem]:
    return [Problem(rule=rule, place=place, message=message) for rule, message in findings]


def _answer(command: Command, query: str, *options: str) -> str:
    argv = [*query.split(), *options]
    done = command(argv)
    if done.returncode != 0:
        raise refused(argv[0], done)
    return done.stdout


def _config_findings(plan: SlurmPlan, config: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield rule and message for each setting that conflicts with the plan."""
    profile = plan.profile
    seconds = re.match(r"(\d{1,9}) sec", config["KillWait"])
    if seconds is not None and int(seconds[1]) != profile.kill_wait_s:
        there = format_duration(int(seconds[1]))
        yield (
            "site-kill-wait",
            f"KillWait is {there}, and profile {profile.name!r} says "
            f"{format_duration(profile.kill_wait_s)}; write kill_wait: {there}",
        )
    if plan.job.retries.requeue and "CANCEL" in config["PreemptMode"].upper():
        yield (
            "site-preempt-mode",
            f"PreemptMode is {config['PreemptMode']}: a preempted job is cancelled and not queued "
            "again, unless its partition or QOS has PreemptMode=REQUEUE; after a preemption submit "
            "the script again with `sbatch FILE RUN_DIR continue`",
        )
    expire = re.search(r"\bcred_expire=(\d{1,9})", config.get("AuthInfo", ""))
    if plan.job.retries.requeue and expire and int(expire[1]) > _CRED_EXPIRE_S:
        yield (
            "site-cred-expire",
            f"cred_expire is {format_duration(int(expire[1]))}: after a lost node, "
            "or behind a long epilog, a requeued job waits so long (BeginTime); ask the "
            f"administrators for cred_expire={_CRED_EXPIRE_S} or less in AuthInfo",
        )
    most = config.get("MaxArraySize", "")
    if (limit := whole_number(most)) is not None and len(plan.points) > limit:
        yield (
            "site-array-size",
            f"{len(plan.points)} points exceed MaxArraySize {most}, which is how many tasks an "
            "array may have; make several sweeps of it",
        )
    version = re.match(r"(\d{1,9})\.(\d{1,9})", config["SLURM_VERSION"])
    if version is not None and (int(version[1]), int(version[2])) < _OLDEST:
        yield (
            "site-version",
            f"SLURM_VERSION is {config['SLURM_VERSION']}, and the script is tested with "
            f"{_OLDEST[0]}.{_OLDEST[1]:02} and later; try a requeue before you rely on it",
        )


def _partitions(text: str) -> list[_Partition]:
    partitions = []
    for line in plain(text).split("\n"):
        _, mark, row = line.partition("PartitionName=")
        settings = dict(word.partition("=")[::2] for word in f"{mark}{row}".split())
        if not settings.keys() >= _OF_A_PARTITION:
            continue  # other output of the site
        try:
            nodes, most = settings["TotalNodes"], settings["MaxNodes"]
            longest, default = settings["MaxTime"], settings["DefaultTime"]
            partition = _Partition(
                name=settings["PartitionName"],
                is_default=settings["Default"] == "YES",
                longest_s=None if longest == "UNLIMITED" else parse_duration(longest),
                default_s=None if default == "NONE" else parse_duration(default),
                most_nodes=int(nodes) if most == "UNLIMITED" else min(int(most), int(nodes)),
                nodes=int(nodes),
                state=settings["State"],
            )
        except ValueError:
            raise LauncherError(f"{_PARTITIONS}: cannot be understood: {line!r}") from None
        partitions.append(partition)
    if not partitions:
        raise LauncherError(f"{_PARTITIONS} names no partition, and prints {text[:200]!r}")
    return partitions


def _partition_findings(plan: SlurmPlan, partitions: list[_Partition]) -> list[tuple[str, str]]:
    requested = dict(plan.sbatch).get("partition")
    names = requested.split(",") if requested else [p.name for p in partitions if p.is_default]
    there = ", ".join(sorted({p.name for p in partitions})) or "none"
    if not names:
        message = f"there is no default partition; name one of {there} in the profile"
        return [("site-partition", message)]
    findings: list[tuple[str, str]] = []
    by_name = {partition.name: partition for partition in partitions}
    for name in names:
        excesses = [
            ("site-partition", f"partition {name!r} does not exist; this cluster has {there}")
        ]
        if name in by_name:
            excesses = list(_excesses(plan, by_name[name]))
        if not excesses:
            return []  # Slurm chooses the first partition that fits
        findings += excesses
    return findings


def _excesses(plan: SlurmPlan, partition: _Partition) -> Iterator[tuple[str, str]]:
    """Yield rule and message for each limit of a partition that the job exceeds."""
    job, name = plan.job, partition.name
    if partition.state != "UP":
        follows = "jobs wait until it is up" if partition.state == "DOWN" else "sbatch refuses jobs"
        yield "site-partition-state", f"partition {name!r} is {partition.state}; {follows}"
    limit_s, longest_s = job.time_limit_s, partition.longest_s
    if limit_s and longest_s is not None and limit_s > longest_s:
        longest = format_duration(longest_s)
        yield (
            "site-time-limit",
            f"time_limit {format_duration(limit_s)} exceeds MaxTime {longest} of partition "
            f"{name!r}; write time_limit: {longest} and let retries.requeue continue from there",
        )
    given_s = partition.default_s or longest_s
    needed_s = warning_lead_s(job) + SIGNAL_SLACK_S
    if limit_s is None and given_s is not None and given_s <= needed_s:
        yield (
            "site-time-limit",
            f"partition {name!r} gives {format_duration(given_s)} where a job names no time, and "
            f"the end of a run alone takes {format_duration(needed_s)}; set time_limit",
        )
    most = partition.most_nodes
    if job.resources.min_nodes > most:
        what = "nodes" if most == partition.nodes else "nodes for one job (MaxNodes)"
        yield (
            "site-nodes",
            f"nnodes {job.resources.min_nodes} exceeds the {most} {what} of partition {name!r}; "
            "ask for fewer, or name another partition",
        )


def _option_findings(plan: SlurmPlan, command: Command) -> Iterator[Problem]:
    """Have the site's sbatch parse each option: it knows the options of its version."""
    for name, value in plan.sbatch:
        option = f"--{name}" if value is None else f"--{name}={value}"
        done = command(["sbatch", option, "--usage"])
        if done.returncode != 0:
            why = re.sub(r"^\S*sbatch: (error: )?", "", error_line(done.stderr))
            message = f"this site's sbatch refuses it: {why}; leave it out, or ask for its version"
            yield Problem(rule="site-option", place=f"--{name}", message=message)


def slurm_version(command: Command) -> tuple[int, int] | None:
    """Return the site's Slurm version, like `(23, 2)`; None if it is unknown."""
    version = config_of(command(_CONFIG.split()).stdout).get("SLURM_VERSION", "")
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(match[1]), int(match[2])) if match else None


def account_findings(
    options: dict[str, str | None], command: Command, *, place: Callable[[str], str]
) -> list[Problem]:
    """Compare account and QOS with the user's associations; without accounting, return nothing.

    `options` maps the long names of sbatch options to values; `place` returns an option's location.
    """
    account, qos = options.get("account"), options.get("qos")
    if not account and not qos:
        return []
    config = config_of(command(_CONFIG.split()).stdout)
    rules = set(config.get("AccountingStorageEnforce", "none").split(","))
    try:
        user = user_of(command(["id"]).stdout)
        query = ["show", "assoc", f"user={user}", "format=cluster,user,account,qos"]
        answer = command(["sacctmgr", "-p", *query])
    except LauncherError:
        return []
    found = table(answer.stdout, ("User", "Account", "QOS"), separator="|") or []
    rows = [row[1:] for row in found if row[0] == user]
    if not user or answer.returncode != 0 or not rows:
        return []
    problems = []
    accounts = sorted({row[0] for row in rows if row[0]})
    if account and account not in accounts and "associations" in rules:
        message = f"{user} has no account {account!r}; name one of {', '.join(accounts)}"
        problems += _problems(place("account"), [("site-account", message)])
    own = [row for row in rows if row[0] == account] or rows
    allowed = sorted({name for row in own for name in row[1].split(",") if name})
    if qos and allowed and qos not in allowed and "qos" in rules:
        message = f"{user} has no QOS {qos!r}; name one of {', '.join(allowed)}"
        problems += _problems(place("qos"), [("site-qos", message)])
    return problems


def verdict(script: str, command: Command, *, place: str | None = None) -> list[Problem]:
    """Have sbatch check the text of a script as if it were submitted (`--test-only`)."""
    starts = range(0, len(script), _ARGUMENT_MAX)
    chunks = [script[start : start + _ARGUMENT_MAX] for start in starts]
    done = command(["sh", "-c", _SUBMIT, "sh", *chunks])
    if done.returncode == 0:
        return []
    if done.returncode == 127 or "Unable to contact" in done.stderr:
        raise LauncherError(f"cannot query sbatch: {done.stderr.strip()}")
    lines = [line for line in plain(done.stderr).split("\n") if not line.startswith("Try ")]
    own = [line for line in lines if _OF_SBATCH.match(line)] or lines
    messages = filter(None, (re.sub(r"^(\S*sbatch: )?(error: )?", "", line) for line in own))
    message = f"{_TEST_ONLY} refuses it: {'; '.join(messages) or 'and does not say why'}"
    return _problems(place or _TEST_ONLY, [("site-refuses", message)])


def path_findings(places: Iterable[tuple[str, str, str, str]], command: Command) -> list[Problem]:
    """Check folders and files on the login node.

    Args:
        places: The required access (`makes` or `writes` in it, `folder`, `file`), the path, its
        location in the file, and the fix.
        command: Runs commands on the login node.
    """
    required = list(places)
    if not required:
        return []
    arguments = [f"{kind}:{path}" for kind, path, _, _ in required]
    done = command(["sh", "-c", _PATH_CHECK, "sh", *arguments])
    answers = values(done.stdout, "fault")
    if done.returncode != 0 or len(answers) != len(required):
        raise LauncherError(f"cannot check folders: {done.stderr.strip()}")
    return [
        Problem(rule="site-path", place=place, message=f"{path}: {answer}; {way_out}")
        for (_, path, place, way_out), answer in zip(required, answers, strict=True)
        if answer
    ]


def log_folder(pattern: str) -> str | None:
    """Return the folder of a log from `--output`; None if it depends on the job.

    >>> log_folder("logs/%j.out"), log_folder("%x-%j.out"), log_folder("logs/%x/%j.out")
    ('logs', None, None)
    """
    folder = str(PurePosixPath(pattern).parent)
    return None if folder == "." or "%" in folder or pattern == "/dev/null" else folder
