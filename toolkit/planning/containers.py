"""Containers on Slurm: the syntax of images and mounts of each runtime, and its limits.

Pure. The flags are those of pyxis' args.c, of `apptainer exec --help` and of podman-run(1).
"""

import re
from pathlib import PurePosixPath

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec, Mount
from toolkit.profile import SlurmProfile

__all__ = ["image_for", "mounts_for", "refusals_of_containers"]

_NOT_ITS_FILE = {"pyxis": (".tar", ".sif"), "apptainer": (), "podman": (".sif", ".sqsh")}
"""Suffixes of image files that belong to another runtime."""

_FILE = {"pyxis": "enroot import -o FILE.sqsh", "podman": "podman save -o FILE.tar"}
"""The command that makes an image file for the runtime."""

_OURS = {
    "pyxis": ("--container-image", "--container-workdir", "--container-mount-home"),
    "apptainer": ("--pwd", "--cwd"),
    "podman": (
        *("--cgroups", "--detach", "-d", "--name", "--network", "--net", "--tty", "-t"),
        *("--user", "-u", "--userns", "--workdir", "-w"),
    ),
}
"""Options that the script sets itself, since it needs their values to control the container."""

_NEVER_TARGETS = ("", "/dev", "/proc", "/sys")
"""Targets at which a mount would hide the container's own folder."""


def image_for(runtime: str, image: str) -> str:
    """Return how a runtime writes an image; a path is a file that holds it.

    Enroot, which pyxis uses, separates a registry from the name with `#` and takes a digest in the
    place of a tag (enroot, src/docker.sh). An image with a transport of its own is unchanged.

    >>> image_for("pyxis", "nvcr.io/nvidia/pytorch:25.01"), image_for("pyxis", "ubuntu:24.04")
    ('nvcr.io#nvidia/pytorch:25.01', 'ubuntu:24.04')
    >>> image_for("pyxis", "registry.example.com/train:v2@sha256:0f1e")
    'registry.example.com#train:sha256:0f1e'
    >>> image_for("apptainer", "ubuntu:24.04"), image_for("podman", "/images/train.tar")
    ('docker://ubuntu:24.04', 'docker-archive:/images/train.tar')
    """
    if "://" in image:
        return image
    if image.startswith("/"):
        return f"docker-archive:{image}" if image.endswith(".tar") else image
    if runtime == "apptainer":
        return f"docker://{image}"
    if runtime != "pyxis":
        return image
    if digest := re.fullmatch(r"(.+?)(?::[^:/@]+)?@(\w+:\w+)", image):
        image = f"{digest[1]}:{digest[2]}"
    registry, slash, rest = image.partition("/")
    if slash and re.search("[.:]|^localhost$", registry):
        return f"{registry}#{rest}"
    return image


def mounts_for(job: JobSpec, profile: SlurmProfile) -> tuple[str, ...]:
    """Return the mounts as every runtime writes them: `SOURCE:TARGET` or `SOURCE:TARGET:ro`."""
    return tuple(
        f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")
        for mount in (*profile.mounts, *job.mounts)
    )


def refusals_of_containers(job: JobSpec, profile: SlurmProfile) -> list[Problem]:
    """Return why the site's runtime cannot run this job's container; none if it can."""
    runtime = profile.runtime
    problems = [
        Problem(rule="image-of-another-runtime", message=why, key=("image",))
        for why in _image_problems(job.image or "", runtime)
    ]
    for place, mounts in (
        (f"profile {profile.name!r}: mounts", profile.mounts),
        ("mounts", job.mounts),
    ):
        for index, mount in enumerate(mounts):
            key = ("mounts", index) if place == "mounts" else ()
            for rule, why in _mount_problems(mount, runtime):
                problems.append(Problem(rule=rule, message=f"{place}[{index}]: {why}", key=key))
    for index, option in enumerate(profile.container_options):
        if (name := option.partition("=")[0]) in _OURS[runtime]:
            message = (
                f"profile {profile.name!r}: container_options[{index}]: {name} is set by the "
                "script, which needs it as it is; leave it out"
            )
            problems.append(Problem(rule="container-option-taken", message=message))
    return problems


def _image_problems(image: str, runtime: str) -> list[str]:
    if image.startswith("localhost/") and runtime != "podman":
        return [
            f"image {image!r} is in podman's store of the machine that built it, which {runtime} "
            f"does not read; push it to a registry, or make a file (podman save -o FILE.tar"
            f"{', enroot import' if runtime == 'pyxis' else ''}) and write its path"
        ]
    if image.startswith("/") and PurePosixPath(image).suffix in _NOT_ITS_FILE[runtime]:
        return [f"image {image!r} is no file for {runtime}; make one with {_FILE[runtime]}"]
    if image.startswith("/") and runtime == "podman" and not image.endswith(".tar"):
        return [f"image {image!r} is no archive; make one with {_FILE[runtime]}"]
    return []


def _mount_problems(mount: Mount, runtime: str) -> list[tuple[str, str]]:
    if mount.kind != "path":
        return [("mount-elsewhere", f"{mount.source!r} exists only on Kubernetes; write a path")]
    # Pyxis writes them to a fstab as they are (NVIDIA/pyxis, issue 133).
    never = ",:" + (" \t" if runtime == "pyxis" else "")
    problems = [
        ("mount-unwritable", f"{runtime} takes no {sign!r} in a path; make a link without it")
        for sign in never
        if sign in mount.source + mount.target
    ]
    if mount.target.rstrip("/") in _NEVER_TARGETS:
        why = f"{mount.target!r} is the container's own; choose another target"
        problems.append(("mount-target-taken", why))
    return problems
