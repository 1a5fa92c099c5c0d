"""Pods as operators make them of rendered manifests, run for real by `podman kube play`."""

import copy
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import toolkit
from tests.conftest import ROOT, Until
from toolkit.rendering import payload

Object = dict[str, Any]

PROGRAMS = ("podman", "runc", "catatonit", "iptables", "debootstrap")

TOOLS = ("pip", "pip3", "gcc", "cc", "make", "git", "curl")
"""Tools of the build, which in an image are of use only to an intruder."""

# It works without systemd and with cgroups of both versions. A kubelet sets no ulimits; podman's
# own are higher than some machines allow.
CONTAINERS_CONF = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""

STEPS = 600
"""Some seconds of training, with a checkpoint in the first one."""

ENDLESS = 1_000_000
"""More than there is time for, however long a test takes to stop it."""

JOB = {
    "name": "digits",
    "module": "train",
    "args": ["--task", "digits", "--steps", str(STEPS), "--checkpoint-every", "20"],
    "image": "localhost/train:latest",
    "resources": {"nnodes": 2, "memory": "2GiB", "shm": "64MiB"},
    "env": {"OMP_NUM_THREADS": "1"},
    "stop": {"grace": "60s"},
    "retries": {"requeue": 1},
}


class Kubelet:
    """Runs the pods of one job, with a network and a claim of their own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"kube-{uuid.uuid4().hex[:8]}"
        self.folder, self.runs = folder, folder / "runs"
        self.runs.mkdir()
        os.chown(self.runs, 1000, 1000)  # as fsGroup gives a volume to the group
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        self.environ = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self.supervisor = folder / "supervisor"
        self.supervisor.mkdir()
        (self.supervisor / payload.FILE).write_bytes(payload.archive("kubernetes"))
        self.played: list[Path] = []

    def __enter__(self) -> "Kubelet":
        # No pod reaches anything but the other; podman's own network would stay behind.
        self.podman("network", "create", "--internal", "--disable-dns", self.name)
        (network,) = json.loads(self.podman("network", "inspect", self.name))
        subnet = network["subnets"][0]["subnet"].rpartition(".")[0]
        self.addresses = [f"{subnet}.{10 + index}" for index in range(2)]
        claim: Object = yaml.safe_load((ROOT / "k8s/base/claim.yaml").read_text())
        bound = {"driver": "local", "type": "none", "mount-options": "bind", "device": self.runs}
        claim["metadata"] = {
            "name": self.name,
            "annotations": {f"volume.podman.io/{key}": str(value) for key, value in bound.items()},
        }
        self._play(claim)
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self.podman("volume", "rm", "--force", self.name)
        self.podman("network", "rm", "--force", self.name)

    def podman(self, *argv: str) -> str:
        """Run podman; return its output."""
        done = subprocess.run(
            ["podman", *argv], env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"podman {argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def _play(self, thing: Object, *options: str) -> None:
        path = self.folder / f"{thing['kind']}-{thing['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(thing))
        if thing["kind"] == "Pod":
            self.played.append(path)
        self.podman("kube", "play", f"--network={self.name}", *options, str(path))

    def start(self, pods: Sequence[Object], hosts: Mapping[str, int]) -> list[str]:
        """Start pods, which find each other by these names; return their containers."""
        # In place of the cluster's DNS.
        aliases = [{"ip": self.addresses[n], "hostnames": [host]} for host, n in hosts.items()]
        for pod, address in zip(pods, self.addresses, strict=True):
            text = json.dumps(pod)
            # podman shares an emptyDir between all pods by its name.
            for name in ("tmp", "shm"):
                own = json.dumps(f"{pod['metadata']['name']}-{name}")
                text = text.replace(f'"name": "{name}"', f'"name": {own}')
            changed = json.loads(text)
            changed["spec"]["hostAliases"] = aliases
            for volume in changed["spec"]["volumes"]:
                if volume.pop("configMap", None):  # podman 4.3 reads no binaryData
                    volume["hostPath"] = {"path": str(self.supervisor), "type": "Directory"}
            self._play(changed, f"--ip={address}")
        return [f"{pod['metadata']['name']}-{pod['spec']['containers'][0]['name']}" for pod in pods]

    def wait(self, containers: Sequence[str]) -> list[int]:
        """Wait for the end of containers; return their exit statuses."""
        return [int(line) for line in self.podman("wait", *containers).split()]

    def down(self) -> None:
        """Remove the pods and their emptyDirs."""
        while self.played:
            self.podman("kube", "down", str(self.played.pop()))


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    """podman with the image; `make image` rebuilds it after changes."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if reason := "needs root" if os.getuid() else f"needs {', '.join(missing)}" if missing else "":
        if os.environ.get("CI"):
            pytest.fail(f"CI must run pods: {reason}")
        pytest.skip(f"{reason}; see tests/packages.sh")
    done = subprocess.run(["make", "image"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Kubelet(tmp_path) as made:
        yield made


def workload(kind: str, claim: str) -> Object:
    """Render the job; return the object that becomes pods."""
    given = {"workload": kind, "runs_claim": claim, "image_pull_policy": "Never"}
    plan = toolkit.plan(
        toolkit.JobSpec.model_validate(JOB), toolkit.KubernetesProfile.model_validate(given)
    )
    *_, thing = yaml.safe_load_all(toolkit.render(plan))
    assert thing["kind"] == kind
    return dict(thing)


def with_steps(thing: Object, steps: int) -> Object:
    """Return a Job that trains for so many steps, in the same run directory."""
    changed = copy.deepcopy(thing)
    args = changed["spec"]["template"]["spec"]["containers"][0]["args"]
    args[args.index("--steps") + 1] = str(steps)
    return changed


def job_pods(thing: Object) -> tuple[list[Object], dict[str, int]]:
    """Make the pods of an Indexed Job as its controller does, and the names of its Service."""
    name = thing["metadata"]["name"]
    template = thing["spec"]["template"]
    pods = [
        pod(template, f"{name}-{index}", {"JOB_COMPLETION_INDEX": str(index)}) for index in (0, 1)
    ]
    return pods, {f"{name}-{index}.{template['spec']['subdomain']}": index for index in (0, 1)}


def pytorchjob_pods(thing: Object) -> tuple[list[Object], dict[str, int]]:
    """Make the pods of a PyTorchJob as the Training Operator does, and its Services' names."""
    name, spec = thing["metadata"]["name"], thing["spec"]
    template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    pods = []
    for index in (0, 1):
        added = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": spec["nprocPerNode"]}
        # The kubelet reads the number from a label of the operator.
        added["JOB_COMPLETION_INDEX"] = str(index)
        pods.append(pod(template, f"{name}-worker-{index}", added))
    return pods, {f"{name}-worker-{index}": index for index in (0, 1)}


def pod(template: Object, hostname: str, added: Mapping[str, str]) -> Object:
    """Make a pod of a template; what starts it again after its end is not here."""
    made = copy.deepcopy(template)
    made["metadata"]["name"] = f"{hostname}-{uuid.uuid4().hex[:5]}"
    made["spec"] |= {"hostname": hostname, "restartPolicy": "Never"}
    made["spec"]["containers"][0]["env"] += [{"name": k, "value": v} for k, v in added.items()]
    return {"apiVersion": "v1", "kind": "Pod", **made}


def confinement(kubelet: Kubelet, container: str) -> dict[str, str]:
    """Return the kernel's status of a container's first process."""
    process = Path("/proc", kubelet.podman("inspect", "--format={{.State.Pid}}", container).strip())
    lines = (line.split(":", 1) for line in (process / "status").read_text().splitlines())
    found = {key: " ".join(value.split()) for key, value in lines}
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    # Mount point and options, the fifth and sixth field of proc(5)'s mountinfo.
    found["root"] = next(line[5].split(",")[0] for line in mounts if line[4] == "/")
    places = (Path("root", folder) for folder in ("usr/bin", "usr/local/bin"))
    tools = [tool for place in places for tool in TOOLS if (process / place / tool).exists()]
    found["tools"] = " ".join(tools)
    return found


@pytest.mark.slow
def test_two_restricted_pods_of_a_job_stop_for_a_signal_to_one_and_go_on_to_the_end(
    kubelet: Kubelet, until: Until
) -> None:
    thing = workload("Job", kubelet.name)
    containers = kubelet.start(*job_pods(with_steps(thing, ENDLESS)))
    until(lambda: list(kubelet.runs.glob("*/checkpoints/*/*/manifest.json")), "a checkpoint")
    for container in containers:
        assert confinement(kubelet, container).items() >= {
            ("Uid", "1000 1000 1000 1000"),
            ("Gid", "1000 1000 1000 1000"),
            ("CapEff", "0" * 16),
            ("CapBnd", "0" * 16),
            ("NoNewPrivs", "1"),
            ("Seccomp", "2"),
            ("root", "ro"),
            ("tools", ""),
        }
    kubelet.podman("stop", "--time=60", containers[1])
    assert kubelet.wait(containers) == [138, 138]
    (run_dir,) = kubelet.runs.iterdir()
    stopped = json.loads((run_dir / "outcome.json").read_text())
    assert stopped["status"] == "preempted"
    # Neither pod has failed, though torchrun has ended with 1 in both.
    assert list(run_dir.glob("logs/**/failed")) == []

    # What the job's controller does then.
    kubelet.down()
    last = stopped["step"] + 100
    again = job_pods(with_steps(thing, last))
    assert kubelet.wait(kubelet.start(*again)) == [0, 0]
    assert end_of(run_dir) == ("done", last, [(2, 0), (2, stopped["step"])])


@pytest.mark.slow
def test_two_restricted_pods_of_a_pytorchjob_train_to_the_end(kubelet: Kubelet) -> None:
    thing = workload("PyTorchJob", kubelet.name)
    assert kubelet.wait(kubelet.start(*pytorchjob_pods(thing))) == [0, 0]
    (run_dir,) = kubelet.runs.iterdir()
    assert end_of(run_dir) == ("done", STEPS, [(2, 0)])


def end_of(run_dir: Path) -> tuple[str, int, list[tuple[int, int]]]:
    """Return outcome and last step of a run, and of each start its ranks and its first step."""
    outcome = json.loads((run_dir / "outcome.json").read_text())
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    starts = []
    for event in events:
        if event["event"] == "start":
            starts.append((event["world_size"], 0))
        if event["event"] == "resume":
            starts[-1] = (starts[-1][0], event["step"])
    assert list(run_dir.glob(f"checkpoints/*/step-{outcome['step']:08}/manifest.json"))
    return outcome["status"], outcome["step"], starts
