"""Containers on Slurm: real ones by podman, and the options of pyxis and apptainer."""

import copy
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, Cluster, Until
from tests.support.slurm_site import Site, events, failure, nodes_of
from toolkit.slurm import SlurmLauncher, SlurmRun

NODES = ("node1", "node2", "node3", "node4")

# What each worker finds where it runs, before it trains.
WORKER = """
facts=$TRAIN_RUN_DIR/facts-$RANK
{
  [ ! -e /run/.containerenv ] || echo "in a container of $(hostname)"
  echo "user $(id -u), HOME $HOME, in $PWD"
  echo "word <$WORD>, secret ${#TOKEN_FILE_KEY} ${#SITE_KEY}"
  touch /given/new 2>/dev/null || echo "read-only: $(cat /given/file)"
  [ -e "$OUTSIDE" ] || echo "nothing else of the node"
} >"$facts.new"
mv "$facts.new" "$facts"
until [ -e "$TRAIN_RUN_DIR/go" ]; do sleep 0.1; done
exec python -m train "$@"
"""

# The worst case: it ignores signals, in a session of its own, and holds no file open.
STUBBORN = """
trap '' TERM USR1 INT HUP
setsid sh -c "trap '' TERM USR1 INT HUP; while :; do sleep 1; done" </dev/null >/dev/null 2>&1 &
touch "$TRAIN_RUN_DIR/began-$RANK"
while :; do sleep 1; done
"""


# Each stand-in records its arguments, and runs the command on the node itself, with only that part
# of the environment that the real one passes on.
APPTAINER = r"""#!/bin/bash
printf '%s\n' "$@" >"RECORD/apptainer-$SLURM_NODEID"
kept=(PATH="VENV/bin:/usr/bin:/bin" SLURM_CONF="$SLURM_CONF")
while IFS= read -r -d '' pair; do
  case $pair in PREFIXENV_*) kept+=("${pair#PREFIXENV_}") ;; esac
done < <(env -0)
while [ "$1" != IMAGE ]; do shift; done
cd ROOT && exec env -i "${kept[@]}" "${@:2}"
"""
SRUN = r"""#!/bin/bash
[ "$1" != --help ] || { echo "      --container-image=…   [pyxis]"; exit; }
printf '%s\n' "$@" >RECORD/srun
for word; do
  shift
  case $word in --container-* | --no-container-*) ;; *) set -- "$@" "$word" ;; esac
done
PATH=VENV/bin:$PATH exec REAL "$@"
"""
PODMAN = r"""#!/bin/bash
[ "$1" != run ] || printf '%s\n' "$@" >"RECORD/podman-$SLURM_NODEID"
"""


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> None:
    """The image that jobs/ name, built as `make image` does; unchanged parts are there already.

    That fixture skips where there can be no cluster.
    """
    assert cluster.folder.is_dir()
    done = subprocess.run(["make", "image"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Containers(Site):
    """A site whose jobs run in containers."""

    def use(self, **changes: object) -> None:
        changes = {"runtime": "podman", "venv": None, **changes}
        self.profile = toolkit.SlurmProfile.model_validate(
            {**self.profile.model_dump(by_alias=True, exclude_unset=True), **changes}
        )
        self.launcher = SlurmLauncher(self.profile, command=self._command)

    def run_workers(self, script: str, *overrides: str, **more: object) -> SlurmRun:
        """Submit a job whose workers run a script of bash that lies in a read-only mount."""
        given = self.runs.parent / "given"
        given.mkdir(exist_ok=True)
        (given / "worker.sh").write_text(script)
        (given / "file").write_text("given")
        job = {
            "name": "worker",
            "image": "localhost/train:latest",
            "command": ["bash", "/given/worker.sh"],
            "resources": {"nnodes": 2, "cpus_per_node": 1, "memory": "2GiB", "shm": "1GiB"},
            "mounts": [{"source": str(given), "target": "/given", "read_only": True}],
            **more,
        }
        return self.launcher.submit(toolkit.plan(toolkit.JobSpec.model_validate(job), self.profile))

    def left(self, node: str) -> str:
        """Return the containers that a node has or remembers."""
        return self.cluster.slurm(
            *("srun", "-w", node, "--mem=64M", "-n1", "podman", "ps", "--all", "--noheading")
        )


@pytest.fixture
def containers(cluster: Cluster, tmp_path: Path) -> Iterator[Containers]:
    made = Containers(cluster, tmp_path)
    made.use()
    yield made
    cluster.slurm("scancel", "--user=root")


@pytest.fixture
def nothing_left(containers: Containers, until: Until) -> Callable[[], None]:
    """Wait until no node has a container, nor a process of a job."""

    def wait() -> None:
        until(lambda: json.loads(containers.cluster("ps", "--json")) == [], "no process is left")
        until(lambda: not any(map(containers.left, NODES)), "no container is left")

    return wait


@pytest.mark.slurm
def test_podman_has_mounts_variables_and_secrets_and_cancel_writes_a_checkpoint(
    image: None,
    containers: Containers,
    nothing_left: Callable[[], None],
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = {"TOKEN_FILE_KEY": "pa55-from-the-file", "SITE_KEY": "pa55-from-the-login"}
    (tmp_path / "key").write_text(hidden["TOKEN_FILE_KEY"])
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("SITE_KEY", hidden["SITE_KEY"])
    monkeypatch.setitem(containers.cluster.environ, "SITE_KEY", hidden["SITE_KEY"])
    run = containers.run_workers(
        WORKER,
        args=["--task", "digits", "--steps", "1000000", "--checkpoint-every", "50"],
        env={"WORD": "it's $HOME, 100%", "OUTSIDE": str(ROOT)},
        secrets={"TOKEN_FILE_KEY": {"file": str(tmp_path / "key")}, "SITE_KEY": None},
        workdir="/opt",
    )
    folder = run.run_dir
    assert folder is not None
    until(lambda: len(list(folder.glob("facts-?"))) == 2, "both workers are there")
    hosts = nodes_of(containers.cluster, run)
    for rank, host in enumerate(hosts):
        assert (folder / f"facts-{rank}").read_text().splitlines() == [
            f"in a container of {host}",
            "user 0, HOME /tmp, in /opt",
            f"word <it's $HOME, 100%>, secret {' '.join(str(len(v)) for v in hidden.values())}",
            "read-only: given",
            "nothing else of the node",
        ]
    shown = json.loads(containers.cluster("ps", "--json"))
    workers = [entry for entry in shown if entry["command"].startswith("bash /given/worker.sh")]
    assert {entry["node"] for entry in workers} == set(hosts)
    said = "".join(entry["command"] for entry in shown)
    files = [path for path in folder.rglob("*") if path.is_file()]
    said += "".join(path.read_text(errors="replace") for path in files)
    assert not any(value in said for value in hidden.values())
    (folder / "go").touch()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED, failure(run)
    (stopped,) = events(run, "stopped")
    assert events(run, "checkpoint")[-1]["step"] == stopped["step"]
    nothing_left()


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("end", ["scancel", "walltime", "podman run", "supervisor node"])
def test_a_container_that_ignores_every_signal_ends_with_its_job(
    image: None,
    containers: Containers,
    nothing_left: Callable[[], None],
    until: Until,
    end: str,
) -> None:
    run = containers.run_workers(STUBBORN, stop={"grace": "60s"}, time_limit="10m")
    folder = run.run_dir
    assert folder is not None
    until(lambda: len(list(folder.glob("began-*"))) == 2, "both workers are there")
    slurm = containers.cluster.slurm
    if end == "scancel":
        slurm("scancel", run.job_id)
    elif end == "walltime":
        containers.cluster.end_in(10, run.job_id)
    else:
        for entry in json.loads(containers.cluster("ps", "--json")):
            if end in entry["command"] and "srun" not in entry["command"]:
                os.kill(entry["pid"], signal.SIGKILL)
    assert run.wait(180).state is not toolkit.RunState.SUCCEEDED
    nothing_left()


@pytest.mark.slow
@pytest.mark.slurm
def test_a_powered_off_nodes_containers_are_gone_and_the_job_ends_elsewhere(
    image: None, containers: Containers, nothing_left: Callable[[], None], until: Until
) -> None:
    steps = '["--task", "digits", "--steps", "1500", "--checkpoint-every", "50"]'
    run = containers.submit(f"args={steps}")
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    lost = nodes_of(containers.cluster, run)[-1]
    containers.cluster("power-off", lost)
    try:
        assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    finally:
        containers.cluster("power-on", lost)
    (done,) = events(run, "done")
    assert (done["step"], done["attempt"]) == (1500, 1)
    # It remembers the container, which the next one that starts there clears away.
    assert containers.left(lost)
    again = containers.run_workers("exit 0", resources={"nnodes": 4, "cpus_per_node": 1})
    assert again.wait(300).state is toolkit.RunState.SUCCEEDED, failure(again)
    nothing_left()


@pytest.mark.slurm
def test_an_image_that_is_nowhere_ends_the_job_with_that_reason(
    image: None, containers: Containers, nothing_left: Callable[[], None]
) -> None:
    run = containers.submit("image=localhost/nowhere:1")
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert run.run_dir is not None
    assert re.fullmatch(
        r"fatal: node\d: podman has no image localhost/nowhere:1 here, and nowhere to pull it "
        "from; not queued again\n",
        (run.run_dir / "logs/attempt-0/reason").read_text(),
    )
    nothing_left()


@pytest.mark.slow
@pytest.mark.slurm
def test_what_a_container_cannot_do_is_told_by_its_outcome(
    image: None, containers: Containers, nothing_left: Callable[[], None]
) -> None:
    run = containers.submit('args=["--task", "nothing"]', "retries.in_job=0")
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert run.run_dir is not None
    reason = (run.run_dir / "logs/attempt-0/reason").read_text()
    assert reason.startswith("fatal: --task: unknown task 'nothing'; "), failure(run)
    nothing_left()


@pytest.mark.slurm
def test_a_base_without_python_is_refused_by_name(image: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    argv = ["podman", "build", "--quiet", "--tag=localhost/no-python", "-f", "-", str(tmp_path)]
    subprocess.run(argv, input="FROM scratch\nCOPY file /\n", text=True, check=True)
    try:
        done = subprocess.run(
            [ROOT / "train/build-image", "localhost/no-python", "--image=localhost/no-python"],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run(["podman", "rmi", "localhost/no-python"], check=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "build-image: localhost/no-python has no python3 that works; choose a base with Python: "
    )


def stand_in(containers: Containers, folder: Path, name: str, text: str, **values: object) -> Path:
    """Put a stand-in first in the PATH of the login node; return where it writes things down."""
    record, programs = folder / "record", folder / "bin"
    record.mkdir()
    programs.mkdir()
    known = {"RECORD": record, "VENV": ROOT / ".venv", "ROOT": ROOT, **values}
    for key, value in known.items():
        text = re.sub(rf"\b{key}(?=\b|ENV_)", str(value), text)
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
    environ = containers.cluster.environ
    path = f"{programs}:{environ['PATH']}"
    containers.cluster = copy.copy(containers.cluster)
    containers.cluster.environ = {**environ, "PATH": path, "SITE_KEY": "pa55"}
    return record


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize(("program", "nnodes"), [("apptainer", 2), ("singularity", 1)])
def test_apptainer_is_told_mounts_image_and_names_and_the_job_trains(
    containers: Containers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    nnodes: int,
) -> None:
    sif = tmp_path / "train.sif"
    sif.touch()
    text = APPTAINER.replace("IMAGE", str(sif))
    record = stand_in(containers, tmp_path, program, text, PREFIX=program.upper())
    monkeypatch.setenv("SITE_KEY", "pa55")
    data = {"source": "/usr/share/zoneinfo", "target": "/data", "read_only": True}
    containers.use(runtime="apptainer", mounts=[data], container_options=["--writable-tmpfs"])
    run = containers.submit(
        *("args.3=1", f"image={sif}", "secrets=[SITE_KEY]", "workdir=/workspace"),
        *(f"resources.nnodes={nnodes}", "resources.gpus_per_node=2", "retries.requeue=0"),
    )
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    for node in range(nnodes):
        words = (record / f"apptainer-{node}").read_text().splitlines()
        assert words[: words.index("torchrun")][:14] == [
            *("exec", "--cleanenv", "--no-home", "--nv"),
            *("--bind", "/usr/share/zoneinfo:/data:ro"),
            *("--bind", f"{run.run_dir}:{run.run_dir}", "--bind", words[9]),
            *("--pwd", "/workspace", "--writable-tmpfs", str(sif)),
        ]
        assert re.fullmatch(r"(/tmp/supervisor\.\w+):\1", words[9])
        assert words[14] == "env"
        assert "pa55" not in "".join(words)


@pytest.mark.slow
@pytest.mark.slurm
def test_pyxis_is_told_mounts_image_and_names_and_the_job_trains(
    containers: Containers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = next(
        place
        for folder in containers.cluster.environ["PATH"].split(":")
        if (place := Path(folder, "srun")).exists()
    )
    record = stand_in(containers, tmp_path, "srun", SRUN, REAL=real)
    monkeypatch.setenv("SITE_KEY", "pa55")
    data = {"source": "/usr/share/zoneinfo", "target": "/data", "read_only": True}
    containers.use(runtime="pyxis", mounts=[data], container_options=["--container-writable"])
    run = containers.submit(
        *("args.3=1", "image=registry.example.com/team/train:v2", "secrets=[SITE_KEY]"),
        *("workdir=/workspace", "retries.requeue=0"),
    )
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    words = (record / "srun").read_text().splitlines()
    assert words[: words.index("python3")] == [
        *("--export=ALL", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        "--container-image=registry.example.com#team/train:v2",
        "--no-container-mount-home",
        f"--container-mounts=/usr/share/zoneinfo:/data:ro,{run.run_dir}:{run.run_dir}",
        *("--container-workdir=/workspace", "--container-env=SITE_KEY", "--container-writable"),
    ]
    assert "pa55" not in "".join(words)


@pytest.mark.slurm
def test_podman_gets_the_gpus_of_the_step_by_their_numbers(
    containers: Containers, tmp_path: Path
) -> None:
    record = stand_in(containers, tmp_path, "podman", PODMAN)
    run = containers.submit("resources.gpus_per_node=2", "retries.requeue=0")
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    for node in (0, 1):
        words = (record / f"podman-{node}").read_text().splitlines()
        devices = [words[at + 1] for at, word in enumerate(words) if word == "--device"]
        assert devices == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
        # Those are all that there are in it, counted from 0.
        assert "CUDA_VISIBLE_DEVICES" not in words


@pytest.mark.parametrize(
    ("runtime", "job", "profile", "reason"),
    [
        (
            "pyxis",
            {},
            {},
            "image 'localhost/train:latest' is in podman's store of the machine that built it, "
            "which pyxis does not read; push it to a registry, or make a file (podman save -o "
            "FILE.tar, enroot import) and write its path",
        ),
        (
            "podman",
            {"image": "/images/train.sif"},
            {},
            "image '/images/train.sif' is not a file for podman; create one with podman save "
            "-o FILE.tar",
        ),
        (
            "podman",
            {"mounts": [{"source": "/a,b", "target": "/c"}]},
            {},
            "mounts[0]: podman takes no ',' in a path; make a link without it",
        ),
        (
            "pyxis",
            {"image": "debian:12"},
            {"mounts": [{"source": "/the data", "target": "/c"}]},
            "profile 'site': mounts[0]: pyxis takes no ' ' in a path; make a link without it",
        ),
        (
            "apptainer",
            {"image": "debian:12", "mounts": [{"source": "/srv/root", "target": "/"}]},
            {},
            "mounts[0]: '/' belongs to the container; choose another target",
        ),
        (
            "podman",
            {"mounts": [{"source": "claim:data", "target": "/c"}]},
            {},
            "mounts[0]: 'claim:data' exists only on Kubernetes; write a path",
        ),
        (
            "podman",
            {},
            {"container_options": ["--device=/dev/fuse", "--network=bridge"]},
            "profile 'site': container_options[1]: --network is set by the script, which needs it "
            "as it is; leave it out",
        ),
    ],
)
def test_what_no_container_of_the_site_can_do_is_refused(
    runtime: str, job: dict[str, object], profile: dict[str, object], reason: str
) -> None:
    base = {"name": "x", "module": "train", "image": "localhost/train:latest"}
    spec = toolkit.JobSpec.model_validate(base | job)
    site = toolkit.SlurmProfile.model_validate({"name": "site", "runtime": runtime, **profile})
    with pytest.raises(toolkit.PlanError) as refused:
        toolkit.plan(spec, site)
    assert str(refused.value) == reason
