"""Containers on Slurm: real ones by podman, and what pyxis and apptainer are told."""

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, Cluster, Until, _without_slurm
from tests.slurm_site import Site, events, failure, nodes_of, output
from toolkit.launchers.slurm import SlurmLauncher, SlurmRun

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

# As bad as it gets: it ignores what it is told, in a session of its own, holding nothing open.
STUBBORN = """
trap '' TERM USR1 INT HUP
setsid sh -c "trap '' TERM USR1 INT HUP; while :; do sleep 1; done" </dev/null >/dev/null 2>&1 &
touch "$TRAIN_RUN_DIR/began-$RANK"
while :; do sleep 1; done
"""


@pytest.fixture(scope="session")
def image() -> None:
    """The image that jobs/ name, built as `make image` does; unchanged parts are there already."""
    if reason := _without_slurm():
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the container tests: {reason}")
        pytest.skip(reason)
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
def test_two_nodes_train_in_podman_with_mounts_variables_and_secrets(
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
        args=["--task", "digits", "--epochs", "2"],
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
    said += "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert not any(value in said for value in hidden.values())
    (folder / "go").touch()
    assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    assert json.loads((folder / "outcome.json").read_text())["status"] == "done"
    (start,) = events(run, "start")
    assert start["world_size"] == 2
    nothing_left()


@pytest.mark.slurm
def test_cancel_writes_a_checkpoint_from_within_the_containers(
    image: None, containers: Containers, nothing_left: Callable[[], None], until: Until
) -> None:
    run = containers.submit_long()
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    run.cancel()
    assert run.wait(120).state is toolkit.RunState.CANCELLED, failure(run)
    (stopped,) = events(run, "stopped")
    assert events(run, "checkpoint")[-1]["step"] == stopped["step"]
    nothing_left()


@pytest.mark.slurm
@pytest.mark.parametrize("end", ["scancel", "walltime", "podman is killed"])
def test_a_container_that_ignores_every_signal_ends_with_its_job(
    image: None,
    containers: Containers,
    nothing_left: Callable[[], None],
    until: Until,
    end: str,
) -> None:
    run = containers.run_workers(STUBBORN, stop={"grace": "1s"}, time_limit="10m")
    folder = run.run_dir
    assert folder is not None
    until(lambda: len(list(folder.glob("began-*"))) == 2, "both workers are there")
    slurm = containers.cluster.slurm
    if end == "scancel":
        slurm("scancel", run.job_id)
    elif end == "walltime":
        soon = subprocess.run(["date", "+%FT%T"], capture_output=True, text=True, check=True)
        slurm("scontrol", "update", f"jobid={run.job_id}", f"EndTime={soon.stdout.strip()}")
    else:
        for entry in json.loads(containers.cluster("ps", "--json")):
            if entry["command"].startswith("podman run"):
                os.kill(entry["pid"], signal.SIGKILL)
    assert run.wait(180).state is not toolkit.RunState.SUCCEEDED
    nothing_left()


@pytest.mark.slurm
def test_a_powered_off_nodes_containers_are_gone_and_the_job_ends_elsewhere(
    image: None, containers: Containers, nothing_left: Callable[[], None], until: Until
) -> None:
    steps = '["--task", "digits", "--steps", "3000", "--checkpoint-every", "50"]'
    run = containers.submit(f"args={steps}")
    until(lambda: events(run, "checkpoint"), "a first checkpoint")
    lost = nodes_of(containers.cluster, run)[-1]
    containers.cluster("power-off", lost)
    try:
        assert run.wait(300).state is toolkit.RunState.SUCCEEDED, failure(run)
    finally:
        containers.cluster("power-on", lost)
    (done,) = events(run, "done")
    assert (done["step"], done["attempt"]) == (3000, 1)
    # It remembers the container, which the next one that starts there clears away.
    assert "Exited" in containers.left(lost)
    again = containers.run_workers("exit 0", resources={"nnodes": 4, "cpus_per_node": 1})
    assert again.wait(120).state is toolkit.RunState.SUCCEEDED, failure(again)
    nothing_left()
