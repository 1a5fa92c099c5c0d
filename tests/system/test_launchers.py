"""The contract of all launchers: real processes, real Slurm, the fake API.

A launcher of another package, by an entry point, is one of them (tests/support/toy_launcher).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster, Until
from tests.fakes.kubernetes import FakeKubernetes
from toolkit import launcher_plugins
from toolkit.api import launcher_for

TOY = ROOT / "tests/support/toy_launcher"

# For tests that need no second torchrun: each imports torch.
ONE_NODE = {"nnodes": 1, "cpus_per_node": 1}

# Long enough that no busy machine comes to its end before it is cancelled.
FOREVER = "echo begun; trap 'echo stopped; exit 75' TERM; while :; do sleep 0.1; done"


@dataclass(frozen=True)
class Place:
    """A profile, and the environment in which its scheduler answers."""

    profile: toolkit.Profile
    environ: dict[str, str] = field(default_factory=dict)

    def submit(self, shell: str, *, name: str = "probe", **more: object) -> toolkit.Run:
        job = toolkit.JobSpec.model_validate(
            {
                "name": name,
                "command": ("bash", "-c", shell),
                "image": "localhost/train:latest",
                "resources": {"nnodes": 2, "cpus_per_node": 1},
                "stop": {"grace": "20s"},
                **more,
            }
        )
        return toolkit.submit(job, to=self.profile)

    def toolkit(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [TOOLKIT, *argv], capture_output=True, text=True, check=False, cwd=ROOT
        )


@pytest.fixture(params=["local", pytest.param("slurm", marks=pytest.mark.slurm), "k8s", "toy"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    runs = str(tmp_path / "runs")
    if request.param == "local":
        yield Place(toolkit.LocalProfile(name="here", runs_dir=runs))
    elif request.param == "toy":
        yield request.getfixturevalue("toy")
    elif request.param == "slurm":
        cluster: Cluster = request.getfixturevalue("cluster")
        for name in ("PATH", "SLURM_CONF", "SANDBOX_DIR"):
            monkeypatch.setenv(name, cluster.environ[name])
        yield Place(toolkit.SlurmProfile(name="sandbox", runs_dir=runs, venv=str(ROOT / ".venv")))
        cluster.slurm("scancel", "--user=root")
    else:
        path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)  # where the fake's containers find torchrun
        with FakeKubernetes(auto_run=True) as server:
            kubeconfig = tmp_path / "kubeconfig"
            server.kubeconfig(kubeconfig)
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            yield Place(toolkit.KubernetesProfile(name="k", namespace="default"))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until) -> Iterator[Place]:
    """The batch system of tests/support/toy_launcher, with room for one job at a time."""
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setenv("PYTHONPATH", str(TOY))  # for the commands of the toolkit
    launcher_plugins.kinds.cache_clear()
    (tmp_path / "toy.yaml").write_text(f"kind: toy\nruns_dir: {tmp_path}/runs\nspool: {tmp_path}\n")
    with subprocess.Popen([sys.executable, TOY / "toyq.py", tmp_path, "1"]) as daemon:
        until((tmp_path / "socket").exists, "toyq answers")
        yield Place(toolkit.load_profile(str(tmp_path / "toy.yaml")))
        daemon.terminate()
    launcher_plugins.kinds.cache_clear()


def output(run: toolkit.Run) -> str:
    return "\n".join(run.logs())


def begun(run: toolkit.Run, ranks: int = 2) -> bool:
    """Whether all ranks have started; the log may not exist yet."""
    try:
        return output(run).count("begun") == ranks
    except toolkit.LauncherError:
        return False


def test_a_run_succeeds_and_its_log_can_be_read(place: Place) -> None:
    run = place.submit('echo "rank $RANK of $WORLD_SIZE"')
    followed = list(run.logs(follow=True))
    status = run.wait(180)
    assert (status.state, status.reason) == (toolkit.RunState.SUCCEEDED, ""), followed
    for rank in (0, 1):
        assert sum(f"rank {rank} of 2" in line for line in followed) == 1


def test_a_failed_run_says_that_it_failed_and_why(place: Place) -> None:
    run = place.submit("echo to stderr >&2; exit 3", resources=ONE_NODE)
    status = run.wait(180)
    assert status.state is toolkit.RunState.FAILED
    assert status.reason


def test_cancel_stops_a_run_and_the_ranks_are_told(place: Place, until: Until) -> None:
    run = place.submit(FOREVER)
    until(lambda: begun(run), "both ranks have begun")
    assert run.status().state is toolkit.RunState.RUNNING
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    assert run.failure() is None


WARM = """
import os, signal, torch, torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(64, 3))
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # of this node
    for step, (batch,) in enumerate(DataLoader(data, batch_size=8, num_workers=2)):
        if (step, start, dist.get_rank()) == (4, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    print(f"made {step + 1} steps, forked: {'fork_server' in parent}", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("local", marks=pytest.mark.slow),  # in test_warm_kills.py, too
        pytest.param("slurm", marks=pytest.mark.slurm),
        "k8s",
        pytest.param("toy", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_warm_ranks_are_forked_and_go_on_after_a_kill(place: Place, tmp_path: Path) -> None:
    (script := tmp_path / "warm.py").write_text(WARM)
    retries = {"in_job": 1}
    run = place.submit("", script=str(script), command=None, start="warm", retries=retries)
    status = run.wait(300)
    assert status.state is toolkit.RunState.SUCCEEDED, output(run)
    assert output(run).count("made 8 steps, forked: True") == 2, output(run)


@pytest.mark.slow
def test_cancelling_what_has_ended_changes_nothing(place: Place) -> None:
    run = place.submit("true")
    ended = run.wait(180)
    run.cancel()
    assert run.status() == ended


@pytest.mark.slow
def test_another_process_opens_a_run_by_its_uri(place: Place, until: Until) -> None:
    run = place.submit(FOREVER)
    until(lambda: begun(run), "both ranks have begun")
    shown = json.loads(place.toolkit("status", run.uri, "--json").stdout)
    assert (shown["uri"], shown["name"], shown["state"]) == (run.uri, run.name, "RUNNING")
    done = place.toolkit("cancel", run.uri)
    assert done.returncode == 0, done.stderr
    waited = place.toolkit("wait", run.uri, "--timeout", "120")
    assert waited.returncode == 1
    assert "CANCELLED" in waited.stderr
    listed = json.loads(place.toolkit("list", "--json").stdout)
    assert [(row["uri"], row["state"]) for row in listed] == [(run.uri, "CANCELLED")]


@pytest.mark.slow
def test_a_second_submit_is_a_second_run(place: Place) -> None:
    first, second = place.submit("echo first"), place.submit("echo second")
    assert first.uri != second.uri
    assert first.name != second.name
    for run in (first, second):
        assert run.wait(180).state is toolkit.RunState.SUCCEEDED
    assert [run.uri for run in toolkit.list_runs()] == [first.uri, second.uri]


def test_waiting_too_short_is_a_timeout_and_no_verdict(place: Place) -> None:
    run = place.submit(FOREVER, resources=ONE_NODE)
    with pytest.raises(TimeoutError):
        run.wait(0)
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED


@pytest.mark.slow
def test_a_run_is_found_by_its_name(place: Place) -> None:
    run = place.submit("true")
    run.wait(180)
    assert toolkit.open_run(run.name).uri == run.uri


def test_a_plan_of_another_place_is_no_business_of_a_launcher(place: Place) -> None:
    """Every kind of profile has exactly one launcher."""
    assert (
        type(launcher_for(place.profile)).__name__
        == {
            "local": "LocalLauncher",
            "slurm": "SlurmLauncher",
            "kubernetes": "KubernetesLauncher",
            "toy": "ToyLauncher",
        }[place.profile.kind]
    )


# ---- What the supervisor brings to a scheduler of another package

FAILS_ONCE = """
echo "attempt $TRAIN_ATTEMPT"
[ "$TRAIN_ATTEMPT" != 0 ] || [ "$RANK" = 0 ] || kill -KILL $$
[ "$TRAIN_ATTEMPT" != 0 ] || exec sleep 1000
"""


def test_another_scheduler_queues_a_failed_attempt_again(toy: Place, until: Until) -> None:
    two_ranks = {"nproc_per_node": 2, "cpus_per_node": 2}
    run = toy.submit(FAILS_ONCE, resources=two_ranks, retries={"requeue": 1})
    behind = toy.submit(FOREVER, resources=ONE_NODE)
    assert behind.status().state is toolkit.RunState.PENDING
    status = run.wait(300)
    assert status.state is toolkit.RunState.SUCCEEDED, output(run)
    for attempt in (0, 1):
        assert f"attempt {attempt}" in "\n".join(run.logs(attempt=attempt))
    (restart,) = run.restarts()
    assert restart.why == "failed: rank 1 on node-0: killed by SIGKILL"
    until(lambda: begun(behind, ranks=1), "the next job has the slot")
    behind.cancel()
    assert behind.wait(300).state is toolkit.RunState.CANCELLED
    assert output(behind).count("stopped") == 1, "its rank was told"


def test_another_scheduler_queues_an_attempt_no_more_often_than_the_job_says(toy: Place) -> None:
    run = toy.submit("echo begun; exit 3", resources=ONE_NODE, retries={"requeue": 1})
    assert run.wait(300).state is toolkit.RunState.FAILED
    assert len(run.restarts()) == 1


def test_another_schedulers_job_is_cancelled_while_it_waits(toy: Place) -> None:
    first, second = (toy.submit(shell, resources=ONE_NODE) for shell in (FOREVER, "echo begun"))
    second.cancel()
    assert second.wait(300).state is toolkit.RunState.CANCELLED
    first.cancel()
    assert first.wait(300).state is toolkit.RunState.CANCELLED
    assert not (Path(str(second.run_dir)) / "logs/attempt-0").exists(), "it has never begun"


def test_the_watchdog_answers_on_another_scheduler(toy: Place, until: Until) -> None:
    program = "import time; print('begun', flush=True); time.sleep(1000)"
    run = toy.submit(f'exec python3 -c "{program}"', stall_timeout="1h")
    until(lambda: begun(run), "both ranks have begun")
    assert [rank.rank for rank in run.stacks().ranks] == [0, 1]
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
