"""Every rule by the kind of file, and the functions that hold a text to them, all at once."""

import re
from collections.abc import Iterable, Iterator

from toolkit.errors import InputError, Problem
from toolkit.lint.manifests.rules import (
    object_names,
    operators,
    processes,
    resources,
    schema,
    security,
    training,
    volumes,
)
from toolkit.lint.manifests.rules import rendezvous as manifest_rendezvous
from toolkit.lint.manifests.rules.schema import CRD_RULE, Schemas, schema_violations
from toolkit.lint.registry import MANIFESTS, SCRIPTS, Rule, Violation, allowed_rules
from toolkit.lint.scripts.rules import directives, exit_status, rendezvous, signals, tasks
from toolkit.lint.scripts.script import read_batch_script
from toolkit.lint.scripts.values import uncovered
from toolkit.text.manifests import Stream, View, read_manifests
from toolkit.text.yaml_reader import KeyPath

__all__ = [
    *("CLUSTER_RULES", "JOB_RULES", "MANIFEST_RULES", "SCRIPT_RULES", "SITE_RULES"),
    *("check_manifests", "check_script", "in_order", "manifest_violations", "not_allowed"),
]

SCRIPT_RULES = SCRIPTS.order((directives, rendezvous, exit_status, tasks, signals))
"""The rules for batch scripts."""

MANIFEST_RULES = (
    *MANIFESTS.order(
        (
            *(schema, volumes, manifest_rendezvous, object_names, operators, security),
            *(resources, processes, training),
        )
    ),
    CRD_RULE,
)
"""The rules for manifests."""


def check_script(text: str, source: str) -> list[Problem]:
    """Return the problems of a batch script, by line; each one once.

    A comment `# toolkit: allow RULE` on the line, or alone on the one above, takes a finding back.

    Raises:
        InputError: its bash cannot be read.
    """
    if not text.strip():
        raise InputError([Problem(place=source, message="the file is empty")])
    script = read_batch_script(text, source)
    allowed = allowed_rules(text, [(comment.line, comment.text) for comment in script.comments])
    problems = []
    for rule, violation in SCRIPTS.violations(script):
        if rule.id not in allowed.get(violation.at, ()):
            place = f"{source}:{violation.at}"
            message = f"{uncovered(violation.what)}; {violation.fix or rule.fix}"
            problems.append(Problem(place=place, message=message, rule=rule.id))
    return in_order(problems)


def check_manifests(
    text: str,
    source: str,
    *,
    pod_security: str | None = None,
    schemas: Schemas | None = None,
) -> list[Problem]:
    """Return the problems of a stream of manifests, by line; each one once.

    A comment `# toolkit: allow RULE` on the line, or alone on the one above, takes a finding back.

    Args:
        text: YAML, of one document or of several.
        source: The file's name.
        pod_security: The Pod Security level of the namespace, where it is known.
        schemas: Those of the cluster's own kinds.

    Raises:
        InputError: it cannot be read, or a document is not an object.
    """
    stream = read_manifests(text, source, pod_security=pod_security)
    problems = []
    for rule, violation in manifest_violations(stream, schemas):
        place = violation.at.manifest.place(violation.at.path)
        message = f"{violation.what}; {violation.fix or rule.fix}"
        problems.append(Problem(place=place, message=message, rule=rule.id))
    return in_order(not_allowed(problems, text))


def manifest_violations(
    stream: Stream, schemas: Schemas | None = None
) -> Iterator[tuple[Rule, Violation[View]]]:
    """Yield what all rules find; what a schema has against a place of a rule is left out."""
    reported: set[tuple[int, KeyPath]] = set()
    for rule, violation in MANIFESTS.violations(stream):
        reported.add((violation.at.manifest.index, violation.at.path))
        yield rule, violation
    for violation in schema_violations(stream, schemas) if schemas else ():
        if (violation.at.manifest.index, violation.at.path) not in reported:
            yield CRD_RULE, violation


def not_allowed(problems: Iterable[Problem], text: str) -> list[Problem]:
    """Return those problems of a manifest that no comment of its text takes back."""
    allowed = allowed_rules(text, enumerate(text.splitlines(), start=1))
    return [problem for problem in problems if problem.rule not in allowed.get(_line(problem), ())]


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems by line, each once."""
    return sorted(dict.fromkeys(problems), key=_line)


def _line(problem: Problem) -> int:
    match = re.search(r":(\d{1,18})$", problem.place or "")
    return int(match[1]) if match else 0


# ---- Rules that the planner and the sites apply; their functions stand there


JOB_RULES = (
    Rule(
        id="gpus-exceed-node",
        finds="more GPUs per node than a node of the profile has",
        reason="No node could ever take the job.",
        fix="lower resources.gpus_per_node, or correct `node` in the profile",
    ),
    Rule(
        id="workers-exceed-gpus",
        finds="more workers than GPUs on a node",
        reason="Two workers would share a GPU, which NCCL refuses.",
        fix="set resources.nproc_per_node to the number of GPUs",
    ),
    Rule(
        id="cpus-exceed-node",
        finds="more CPUs per node than a node of the profile has",
        reason="No node could ever take the job.",
        fix="lower resources.cpus_per_node, or correct `node` in the profile",
    ),
    Rule(
        id="memory-exceeds-node",
        finds="more memory per node than a node of the profile has",
        reason="No node could ever take the job.",
        fix="lower resources.memory, or correct `node` in the profile",
    ),
    Rule(
        id="shm-exceeds-memory",
        finds="shared memory as large as the memory that it is part of",
        reason="Full shared memory would have the kernel kill the job.",
        fix="lower resources.shm, or raise resources.memory",
    ),
    Rule(
        id="stop-beyond-time-limit",
        finds="a time limit that the end of a run alone takes up",
        reason="The job would be told to stop before it has begun.",
        fix="raise time_limit, or lower stop.grace",
    ),
    Rule(
        id="stop-beyond-signal",
        finds="a `stop.grace` that is longer than Slurm can warn ahead",
        reason="sbatch takes 65535 s at most.",
        fix="lower stop.grace",
    ),
    Rule(
        id="elastic-without-restarts",
        finds="a range of nodes without `retries.in_job`",
        reason="The ranks of the other nodes end with the lost one, and nobody starts them again.",
        fix="set retries.in_job",
    ),
    Rule(
        id="elastic-gpus-per-task",
        finds="a range of nodes where the profile asks for GPUs per task",
        reason="The number of tasks is not known when the job is submitted.",
        fix="write gpus_flag: gres into the profile",
    ),
    Rule(
        id="elastic-workload",
        finds="a range of nodes for a Kubernetes object other than a PyTorchJob",
        reason="All others start anew as a whole, or wait for the pod that is lost.",
        fix="write workload: PyTorchJob, or one number of nodes",
    ),
    Rule(
        id="elastic-master",
        finds="a range of nodes where the profile wants a Master",
        reason="The workers cannot go on without it.",
        fix="leave out `master`, or write one number of nodes",
    ),
    Rule(
        id="sweep-elsewhere",
        finds="a sweep for this machine",
        reason="Its points are the tasks of a job array, or objects of a cluster.",
        fix="submit the points one by one",
    ),
    Rule(
        id="sweep-elastic",
        finds="a sweep with a range of nodes",
        reason="An elastic run queues jobs of its own, which a task of an array cannot.",
        fix="write one number of nodes",
    ),
    Rule(
        id="sweep-max-running",
        finds="`sweep.max_running` on Kubernetes without a queue",
        reason="Nobody would hold points back: all would run at once.",
        fix="name a queue of Kueue, or leave it out",
    ),
    Rule(
        id="after-elsewhere",
        finds="`after` for a place other than Slurm",
        reason="Nothing there would wait.",
        fix="use `toolkit wait RUN && toolkit submit …`",
    ),
    Rule(
        id="image-missing",
        finds="no image, where the profile runs containers",
        reason="There is nothing to start.",
        fix="set the key `image`",
    ),
    Rule(
        id="image-of-another-runtime",
        finds="an image that the container runtime of the profile cannot read",
        reason="The step would fail on every node.",
        fix="push it to a registry, or make a file of the right kind",
    ),
    Rule(
        id="container-option-taken",
        finds="a container option in the profile that the script sets itself",
        reason="The second one would win, and the script lose its hold of the container.",
        fix="leave it out",
    ),
    Rule(
        id="mount-elsewhere",
        finds="a volume claim, or another volume of Kubernetes, where there is no Kubernetes",
        reason="It is no folder.",
        fix="write a path",
    ),
    Rule(
        id="mount-forbidden",
        finds="a folder of the node or of an NFS server, where Pod Security forbids it",
        reason="The pods would be refused when they are made.",
        fix="write claim:NAME",
    ),
    Rule(
        id="mount-target-taken",
        finds="two mounts at one place, or one over what is the container's own",
        reason="One of them would hide the other.",
        fix="choose another target",
    ),
    Rule(
        id="mount-unwritable",
        finds="a path that the container runtime or Kubernetes cannot be told",
        reason="They separate paths by a sign that is in it, or take no `..`.",
        fix="choose another path, or make a link to the folder",
    ),
    Rule(
        id="mount-without-container",
        finds="a mount with another target, where there are no containers",
        reason="The folder would not be where the job looks for it.",
        fix="make source and target equal",
    ),
    Rule(
        id="name-too-long",
        finds="a name that makes the names of pods too long",
        reason="Kubernetes takes 63 characters.",
        fix="shorten the name",
    ),
    Rule(
        id="secret-in-job",
        finds="a secret that is written down in a job or a profile",
        reason="Files are copied, committed and shown.",
        fix="name it under `secrets`",
    ),
    Rule(
        id="secret-not-in-cluster",
        finds="a secret that no pod can see",
        reason="The variable would be missing.",
        fix="write {secret: …, key: …}",
    ),
    Rule(
        id="trainjob-cannot-say",
        finds="what a TrainJob and its runtimePatches have no field for",
        reason="The pods would be made without it.",
        fix="leave it out, or write workload: JobSet",
    ),
    Rule(
        id="variable-overwritten",
        finds="a variable of the name of one of the pods' entrypoint",
        reason="The entrypoint would overwrite it.",
        fix="use another name",
    ),
    Rule(
        id="workers-beyond-machine",
        finds="thousands of workers on one machine",
        reason="No machine has processors for them; what was meant is a cluster.",
        fix="simulate fewer nodes, or submit to a cluster",
    ),
    Rule(
        id="secret-overwritten",
        finds="a secret whose name begins with an underscore and a small letter, or is one of the "
        "shell's",
        reason="The rendered script would overwrite it, or go by it.",
        fix="use another name",
    ),
)
"""What `plan` holds a job and a profile to; `render` and `submit` refuse by them, too."""

SITE_RULES = (
    Rule(
        id="site-kill-wait",
        finds="a KillWait that is not the profile's",
        reason="scancel and preemption leave a checkpoint another time than is believed.",
        fix="write the site's `kill_wait` into the profile",
    ),
    Rule(
        id="site-preempt-mode",
        finds="a site that cancels what it preempts",
        reason="`retries.requeue` cannot help then.",
        fix="submit the script again with `continue`",
    ),
    Rule(
        id="site-array-size",
        finds="a sweep with more points than MaxArraySize",
        reason="sbatch refuses the array.",
        fix="make several sweeps of it",
    ),
    Rule(
        id="site-version",
        finds="a Slurm that is older than the scripts are tried with",
        reason="Requeues and steps differ between versions.",
        fix="try a requeue before you rely on it",
    ),
    Rule(
        id="site-partition",
        finds="a partition that does not exist, or none where the site has no default one",
        reason="sbatch refuses the job.",
        fix="name one that there is",
    ),
    Rule(
        id="site-partition-state",
        finds="a partition that is not up",
        reason="Jobs wait until it is.",
        fix="wait, or name another one",
    ),
    Rule(
        id="site-time-limit",
        finds="a time limit beyond that of the partition, or none where the default is too short",
        reason="The job waits for ever, or is over before it has begun.",
        fix="set time_limit to what the partition allows",
    ),
    Rule(
        id="site-nodes",
        finds="more nodes than the partition has or gives to one job",
        reason="The job waits for ever.",
        fix="ask for fewer, or name another partition",
    ),
    Rule(
        id="site-option",
        finds="an option that the site's sbatch refuses",
        reason="Its version does not have it, or does not take the value.",
        fix="leave it out",
    ),
    Rule(
        id="site-account",
        finds="an account that is not yours, where the site enforces them",
        reason="sbatch refuses the job.",
        fix="name one of yours (sacctmgr show assoc user=$USER)",
    ),
    Rule(
        id="site-qos",
        finds="a QOS that the site does not have, or not for you",
        reason="sbatch refuses the job.",
        fix="name one of yours (sacctmgr show assoc user=$USER format=qos)",
    ),
    Rule(
        id="site-refuses",
        finds="a script that `sbatch --test-only` refuses",
        reason="It would refuse the real one.",
        fix="see what it says",
    ),
    Rule(
        id="site-path",
        finds="a folder or file that is not there, or cannot be written, where jobs are submitted",
        reason="The job cannot begin, or leaves no log.",
        fix="make it, or correct the path",
    ),
)
"""The rules of `check --server` at a Slurm site, for a job file and for a script."""

CLUSTER_RULES = (
    Rule(
        id="server-refuses",
        finds="an object that the API server refuses in a dry run",
        reason="It would refuse the real one.",
        fix="see what it says",
    ),
)
"""The rules of `check --server` at a Kubernetes cluster, for a job file and for manifests."""
