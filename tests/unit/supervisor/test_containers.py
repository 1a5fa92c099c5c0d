"""The commands that start containers, word by word; tests/system/test_containers.py runs them."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from toolkit.supervisor import containers
from toolkit.supervisor.containers import Container, Node, apptainer_argv, podman_argv

ENVIRON = {
    "HOME": "/root",
    "SLURM_JOB_ID": "7",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2",
    "PET_LOG_DIR": "/r/logs/attempt-0/node-1",
    "NCCL_DEBUG": "INFO",
    "TRAIN_ATTEMPT": "0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "KEY": "pa55",
    "MY_SLURM": "x",
}
NAMES = ["NCCL_DEBUG", "PET_LOG_DIR", "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_NODEID"]


def node(environ: Mapping[str, str] = ENVIRON, user: str = "0:0") -> Node:
    return Node(environ, ["/r", "/tmp/own"], "boot-9", user)


def test_apptainer_sees_the_mounts_and_the_run_directory() -> None:
    plain = Container("apptainer", "docker://debian:12", "x")
    full = plain._replace(
        mounts=["/data:/data:ro"], workdir="/w", gpus=True, options=["--writable-tmpfs"]
    )
    assert apptainer_argv("/opt/apptainer", plain, node()) == [
        *("/opt/apptainer", "exec", "--cleanenv", "--no-home"),
        *("--bind", "/r:/r", "--bind", "/tmp/own:/tmp/own", "docker://debian:12"),
    ]
    assert apptainer_argv("apptainer", full, node()) == [
        *("apptainer", "exec", "--cleanenv", "--no-home", "--nv", "--bind", "/data:/data:ro"),
        *("--bind", "/r:/r", "--bind", "/tmp/own:/tmp/own", "--pwd", "/w", "--writable-tmpfs"),
        "docker://debian:12",
    ]


@pytest.mark.parametrize("program", ["/usr/bin/apptainer", "singularity"])
def test_values_of_variables_are_on_no_command_line_of_apptainer(program: str) -> None:
    """Everybody on the node can read command lines."""
    container = Container("apptainer", "a.sif", "x", secrets=["KEY", "UNSET"])
    prefix = program.rpartition("/")[2].upper() + "ENV_"
    names = sorted([*NAMES, "CUDA_VISIBLE_DEVICES", "KEY", "TRAIN_ATTEMPT"])
    given = containers.apptainer_environ(program, container, node())
    assert given == {prefix + name: ENVIRON[name] for name in names}
    assert "pa55" not in "".join(apptainer_argv(program, container, node()))


def test_podman_gets_variables_by_name_and_stays_in_the_jobs_cgroup() -> None:
    container = Container("podman", "localhost/train:1", "digits", shm="1024", secrets=["KEY"])
    names = sorted([*NAMES, "KEY", "TRAIN_ATTEMPT"])
    assert podman_argv(container, node(), "/tmp/own/conmon") == [
        *("podman", "run", "--rm", "--replace", "--name", "digits-7-1"),
        *("--label", "torch-deploy-toolkit=boot-9", "--conmon-pidfile", "/tmp/own/conmon"),
        *("--interactive", "--log-driver=none", "--cgroups=disabled", "--network=host"),
        *("--shm-size=1024", "--ulimit=host", "--security-opt=label=disable", "--user", "0:0"),
        *(word for name in names for word in ("--env", name)),
        *("--volume", "/r:/r", "--volume", "/tmp/own:/tmp/own", "localhost/train:1"),
    ]


@pytest.mark.parametrize(
    ("step_gpus", "asked", "devices"),
    [("0,3", True, ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]), ("0", False, []), ("", True, [])],
)
def test_podman_gets_the_gpus_of_the_step(step_gpus: str, asked: bool, devices: list[str]) -> None:
    """Those are all that there are in the container, which counts them from 0."""
    environ = {**ENVIRON, "SLURM_STEP_GPUS": step_gpus}
    words = podman_argv(Container("podman", "i", "x", gpus=asked), node(environ), "p")
    assert [words[at + 1] for at, word in enumerate(words) if word == "--device"] == devices
    assert "CUDA_VISIBLE_DEVICES" not in words


@pytest.mark.parametrize("user", ["0:0", "1000:100"])
def test_podman_keeps_the_users_number(user: str) -> None:
    container = Container("podman", "i", "x", mounts=["/a:/b:ro"], workdir="/w", options=["--o=1"])
    words = podman_argv(container, node(user=user), "p")
    assert words[words.index("--user") + 1] == user
    assert ("--userns=keep-id" in words) is (user == "1000:100")
    assert words[-10:] == [
        *("--volume", "/a:/b:ro", "--volume", "/r:/r", "--volume", "/tmp/own:/tmp/own"),
        *("--workdir", "/w", "--o=1", "i"),
    ]


PODMAN = """#!/bin/sh
case "$*" in
*label=torch-deploy-toolkit=*) printf 'b\\nc\\n'; exit $LISTED ;;
ps*) printf 'c\\na\\nb\\n' ;;
rm*) echo "$@" >>"$RECORD" ;;
image*) exit $EXISTS ;;
esac
"""


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in; return where it writes down what it has removed."""
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    record = tmp_path / "record"
    for name, value in {"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(record)}.items():
        monkeypatch.setenv(name, value)
    return record


@pytest.mark.parametrize(("listed", "removed"), [("0", "rm --force a\n"), ("125", "")])
def test_containers_of_an_earlier_boot_are_removed_and_no_others(
    podman: Path, monkeypatch: pytest.MonkeyPatch, listed: str, removed: str
) -> None:
    """A power cut has left them; without a whole list of this boot's, none is removed."""
    monkeypatch.setenv("LISTED", listed)
    containers.remove_containers_of_earlier_boots("boot-9")
    assert (podman.read_text() if podman.exists() else "") == removed


@pytest.mark.parametrize(
    ("image", "exists", "nowhere"),
    [
        ("localhost/a:1", "0", False),
        ("localhost/a:1", "1", True),
        ("localhost/a:1", "125", False),
        ("debian:12", "1", False),
    ],
)
def test_only_an_image_of_podmans_own_can_be_nowhere(
    podman: Path, monkeypatch: pytest.MonkeyPatch, image: str, exists: str, nowhere: bool
) -> None:
    monkeypatch.setenv("EXISTS", exists)
    assert containers.is_nowhere(image) is nowhere


def test_a_boot_is_named_by_the_kernel_and_the_first_process() -> None:
    assert sys.platform == "linux"
    kernel, _, began = containers.boot_id().rpartition("-")
    assert kernel == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert began.isdigit()
