"""Kubernetes compatibility checks: fields missing in a kind of object, and limits of pods."""

import re
from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.job.kubernetes_options import Workload, is_image_name
from toolkit.job.spec import JobSpec
from toolkit.planning.plans import OWN_FOLDERS, SCRIPT_VARIABLES, environment, refusal
from toolkit.planning.pods import payload_dir_of, workload_of
from toolkit.profile import KubernetesProfile

NAME_MAX = 63
"""Maximum length of a pod name, which is also a host name (RFC 1035)."""

ENTRYPOINT_VARIABLES = ("JOB_COMPLETION_INDEX", "HOSTNAME", "IFS")
"""Variables that the pods' supervisor reads; neither secrets nor `env` may set them."""

TRAINJOB_ITEMS_MAX = 128
"""Maximum number of arguments, and of variables, in a TrainJob (its CustomResourceDefinition,
Trainer 2.3)."""

OWN_WORDS = 9 + 16
"""Maximum number of arguments before the job's own in a rendered manifest: torchrun's and the
supervisor's, without one for each variable of torchrun."""

_LONGEST_POD: dict[Workload, str] = {
    "PyTorchJob": "{name}-worker-{last}",
    "TrainJob": "{name}-node-0-{last}-xxxxx",
    "JobSet": "{name}-node-0-{last}-xxxxx",
    "Job": "{name}-{last}-xxxxx",
}
"""The controllers' name for the last pod, by kind of object."""

_LEVELS = {"path": ("privileged",), "nfs": ("privileged", "baseline")}
"""Pod Security levels that allow a kind of volume; every level allows the other kinds (Pod
Security Standards: hostPath, volume types)."""

_NO_COLON = "Kubernetes does not allow ':' in the mount path {!r}; choose another path"


def kubernetes_problems(
    job: JobSpec, profile: KubernetesProfile, run_name: str
) -> Iterator[Problem]:
    """Yield why a job cannot run in a namespace of a cluster."""
    kind = workload_of(job, profile)
    for name, place in job.secrets.items():
        if place is not None and place.file is not None:
            yield refusal(
                "secret-not-in-cluster",
                f"secrets: {name!r} is in a file, which pods cannot see; write {{secret: …, "
                f"key: …}} for profile {profile.name!r}",
                *("secrets", name),
            )
        elif place is None and profile.secret is None:
            yield refusal(
                "secret-not-in-cluster",
                f"secrets: {name} has no source; write {{{name}: {{secret: …, key: …}}}} in the "
                f"job, or the key 'secret' in profile {profile.name!r}",
                *("secrets", name),
            )
    yield from _overwritten_variables(job, profile)
    if job.resources.elastic and kind != "PyTorchJob":
        yield refusal(
            "elastic-workload",
            f"nnodes with min and max: when a pod is lost, the others of a {kind} wait until it "
            "is replaced. Only a PyTorchJob continues with fewer: write `workload: PyTorchJob`, or "
            "one number of nodes",
            *("resources", "nnodes"),
        )
    elif job.resources.elastic and profile.master:
        yield refusal(
            "elastic-master",
            f"nnodes with min and max: profile {profile.name!r} sets a Master, and no worker "
            "continues without it; leave out `master`, or write one number of nodes",
            *("resources", "nnodes"),
        )
    elif job.retries.in_job and job.resources.max_nodes > 1 and profile.master:
        yield refusal(
            "in-job-master",
            f"retries.in_job {job.retries.in_job}: profile {profile.name!r} sets a Master, whose "
            "operator gives torchrun a static rendezvous, so that torchrun cannot start the ranks "
            "of several pods again; leave out `master`, or use retries.requeue",
            *("retries", "in_job"),
        )
    if profile.master and kind != "PyTorchJob":
        yield refusal(
            "master-workload",
            f"workload {kind}: profile {profile.name!r} sets a Master, which only a PyTorchJob "
            "has; leave out `master`, or write `workload: PyTorchJob`",
            *("kubernetes", "workload"),
        )
    counted = kind in ("Job", "JobSet") and profile.runs_claim is not None
    if (limit := job.retries.preemptions) is not None and not counted:
        yield refusal(
            "preemptions-uncounted",
            f"retries.preemptions {limit}: on Kubernetes only pods of a Job or JobSet with "
            "runs_claim have such a limit; leave it out: --set retries.preemptions=null",
            *("retries", "preemptions"),
        )
    if kind == "TrainJob":
        yield from _beyond_trainjob(job, profile)
    if job.image and not is_image_name(job.image):
        yield refusal(
            "image-of-another-runtime",
            f"image {job.image!r} is not an image name that nodes of profile "
            f"{profile.name!r} can pull; write it like registry.example.com/team/train:1.2",
            "image",
        )
    yield from _mount_problems(job, profile)
    yield from name_problems(job, kind, run_name)


def _overwritten_variables(job: JobSpec, profile: KubernetesProfile) -> Iterator[Problem]:
    """Yield the variables and secrets that the supervisor would overwrite or interpret.

    Unlike a script, the supervisor also sees the variables of `env` in its environment.
    """
    for key, names, taken in (
        ("secrets", job.secrets, (*ENTRYPOINT_VARIABLES, "PATH")),
        ("env", {**profile.env, **job.env}, ENTRYPOINT_VARIABLES),  # an image may set PATH
    ):
        for name in sorted(names):
            if name in taken or re.fullmatch(SCRIPT_VARIABLES, name):
                yield refusal(
                    "variable-overwritten",
                    f"{key}: {name!r} is a variable of the pods' supervisor; use another name",
                    *((key, name) if name in getattr(job, key) else ()),
                )


def _beyond_trainjob(job: JobSpec, profile: KubernetesProfile) -> Iterator[Problem]:
    """Yield the options without a field in a TrainJob or its runtimePatches (Trainer 2.3)."""
    site = f" of profile {profile.name!r}"
    for key, given, whose in (
        ("host_network", profile.host_network, site),
        ("gang_scheduler", profile.gang_scheduler, site),
        ("ttl", profile.ttl_s is not None, site),
        (
            f"image_pull_policy {profile.image_pull_policy}",
            profile.image_pull_policy != "IfNotPresent",
            site,
        ),
        ("priority_class", job.kubernetes.priority_class or profile.priority_class, ""),
        ("workdir", job.workdir, ""),
    ):
        if given:
            yield refusal(
                "trainjob-cannot-say",
                f"a TrainJob has no field for {key}{whose}; leave it out, or write "
                "`workload: JobSet`",
                *(("workdir",) if key == "workdir" else ()),
            )
    # The run directory and the started pods; submitted files add two more.
    own = 4 if payload_dir_of(job) else 2
    names = {*environment(job, profile), *job.secrets}
    if (count := own + sum(not name.startswith("PET_") for name in names)) > TRAINJOB_ITEMS_MAX:
        yield refusal(
            "trainjob-cannot-say",
            f"a TrainJob takes {TRAINJOB_ITEMS_MAX} variables; these are {count}, "
            f"{count - len({*job.env, *job.secrets})} of them from profile {profile.name!r} and "
            "the toolkit; read some from a file in the program, or write `workload: JobSet`",
            "env",
        )
    own = OWN_WORDS + sum(name.startswith("PET_") for name in names)
    if (words := own + len(job.entry)) > TRAINJOB_ITEMS_MAX:
        yield refusal(
            "trainjob-cannot-say",
            f"a TrainJob takes {TRAINJOB_ITEMS_MAX} words on a command line; these are {words}, "
            f"{own} of them torchrun's and the supervisor's; put arguments into a file, or write "
            "`workload: JobSet`",
            "args",
        )


def _mount_problems(job: JobSpec, profile: KubernetesProfile) -> Iterator[Problem]:
    taken = ("/tmp", "/dev/shm", profile.runs_dir.rstrip("/"))
    if profile.runs_dir.rstrip("/") in OWN_FOLDERS:
        yield refusal(
            "mount-target-taken",
            f"runs_dir {profile.runs_dir!r} of profile {profile.name!r} would hide a folder of the "
            "container; write a separate folder, like /runs",
        )
    if ":" in profile.runs_dir:
        yield refusal("mount-unwritable", f"runs_dir: {_NO_COLON.format(profile.runs_dir)}")
    whose = f" of profile {profile.name!r}"
    for place, key, mount in (
        *((f"mounts[{at}]{whose}", (), mount) for at, mount in enumerate(profile.mounts)),
        *((f"mounts[{at}]", ("mounts", at), mount) for at, mount in enumerate(job.mounts)),
    ):
        if mount.target.rstrip("/") in OWN_FOLDERS:
            yield refusal(
                "mount-target-taken",
                f"{place}: a mount at {mount.target!r} would hide a folder of the container; "
                "choose another target, like /data",
                *key,
            )
        elif mount.target.rstrip("/") in taken:
            yield refusal(
                "mount-target-taken",
                f"{place}: {mount.target!r} is taken; every pod has its own {', '.join(taken)}",
                *key,
            )
        if ":" in mount.target:
            yield refusal("mount-unwritable", f"{place}: {_NO_COLON.format(mount.target)}", *key)
        folders = {"path": mount.source, "nfs": mount.named.partition(":/")[2]}
        if ".." in folders.get(mount.kind, "").split("/"):
            yield refusal(
                "mount-unwritable",
                f"{place}: Kubernetes does not allow '..' in {mount.source!r}; write the full path",
                *key,
            )
        allowed = _LEVELS.get(mount.kind)
        if allowed and profile.pod_security not in allowed:
            what = "folder of the node" if mount.kind == "path" else "NFS server"
            yield refusal(
                "mount-forbidden",
                f"{place}: Pod Security {profile.pod_security!r} of profile {profile.name!r} "
                f"allows no {what} ({mount.source!r}); write claim:NAME",
                *key,
            )


def name_problems(job: JobSpec, kind: Workload, run_name: str) -> Iterator[Problem]:
    """Yield a problem if the run's name makes the name of its last pod too long."""
    longest = _LONGEST_POD[kind].format(name=run_name, last=job.resources.max_nodes - 1)
    if len(longest) > NAME_MAX:
        yield refusal(
            "name-too-long",
            f"the pod name {longest!r} has {len(longest)} characters, more than {NAME_MAX}; "
            "shorten 'name'",
            "name",
        )
