"""Every kind of workload really trains: rendered, submitted, made into pods that run.

On the fake cluster (tests/fakes/kubernetes) controllers do what was seen of the real ones, and the
pods' entrypoint, torchrun and ranks are processes of this machine. `make test-cluster` runs them on
a real one.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.fakes.kubernetes.kubelet import container_status, exit_code
from tests.fakes.kubernetes.real import CLAIM, FakeCluster, is_real
from tests.support import loader_training
from tests.train.conftest import Start
from tests.train.support import held
from tests.unit.kubernetes.live import Live
from tests.unit.kubernetes.site import (
    CANCELLED,
    FAILED,
    SUCCEEDED,
    WORKLOADS,
)
from toolkit.kubernetes.status import state_of
from toolkit.kubernetes.workloads import KINDS
from toolkit.runs.evidence.stacks import Stacks

pytestmark = pytest.mark.any_cluster

STEPS, EVERY = 150, 10
HELD_AT = 2 * EVERY + 5
TINY = ("--task", "digits", "--checkpoint-every", str(EVERY))
_STEP = re.compile(r"\[rank \d+\] step (\d+)/")


HELD: dict[str, Any] = {
    # As a text, since a real cluster's image has no tests.
    "command": ["python3", "-c", Path(held.__file__).read_text()],
    # It is the last pod that stays, so that the others see it die, as they see any.
    "env": {"OMP_NUM_THREADS": "1", "HELD_AT": str(HELD_AT), "HELD_BY": "HOSTNAME=-1"},
}


def submit(live: Live, *args: str, nnodes: int = 2, **job: Any) -> toolkit.Run:
    return live.submit(args=[*TINY, *args], resources={"nnodes": nnodes}, **job)


def follow(live: Live, run: toolkit.Run, until: Callable[[str], bool]) -> None:
    """Read what a run prints until there is a certain line."""
    lines = run.logs(follow=True)
    try:
        if any(map(until, lines)):
            return
    finally:
        lines.close()  # type: ignore[attr-defined]  # it is a generator
    pytest.fail(f"it ended before its second checkpoint: {run.status()}, {live.told(run)}")


def is_after_a_checkpoint(line: str) -> bool:
    found = _STEP.search(line)
    return found is not None and int(found[1]) > 2 * EVERY


def is_held(line: str) -> bool:
    return line.endswith(f"{held.SAYING}{HELD_AT}")


def is_saved(live: Live, run: toolkit.Run) -> bool:
    return any(event["step"] == 2 * EVERY for event in live.events(run, "checkpoint"))


def undisturbed(folder: Path) -> Any:
    """Return the outcome of the same training where nothing happens to it."""
    start = Start(folder)
    try:
        flags = (*TINY, f"--steps={STEPS}")
        return start.whole(2, *flags, run_dir=folder / "alone").outcome()
    finally:
        start.end_all()


def went_on_to_its_end(live: Live, run: toolkit.Run) -> toolkit.Goodput:
    """Wait for the end of a run that was interrupted once; return its goodput."""
    status = live.ended(run)
    assert status.state is SUCCEEDED, (status, live.told(run))
    outcome = live.outcome(run)
    assert (outcome["status"], outcome["step"]) == ("done", STEPS)
    resumed = live.events(run, "resume")
    assert resumed and all(event["step"] > 0 for event in resumed), "it went on where it was"
    assert run.scheduled(), "its pods say when they were made and given nodes"
    goodput = run.goodput()
    assert (goodput.steps, goodput.starts) == (STEPS, len(resumed) + 1)
    return goodput


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_lost_pod_is_replaced_and_the_run_goes_on_to_its_end(live: Live) -> None:
    run = submit(live, "--steps", str(STEPS), **HELD)
    follow(live, run, is_held)
    live.until(lambda: is_saved(live, run), "there is a checkpoint to go on from")
    pod = live.cluster.pods(run.name)[-1]["metadata"]["name"]
    # Each way to lose a pod once; what follows is the same for all.
    {
        "PyTorchJob": live.cluster.kill,
        "TrainJob": lambda name: live.cluster.delete(name, live.cluster.namespace, kind="Pod"),
        "JobSet": live.cluster.kill,
        "Job": live.cluster.evict,
    }[live.workload](pod)
    goodput = went_on_to_its_end(live, run)
    # Ranks that are told to stop save before they do; a pod that is killed loses steps. A real
    # kubelet gives even a pod that is deleted by force a second or two.
    is_lost = live.workload in {"PyTorchJob", "JobSet"}
    if not is_real():
        assert (goodput.steps_again > 0, goodput.seconds["lost work"] > 0) == (is_lost, is_lost)


def these_and_slowly_others(*quick: str) -> pytest.MarkDecorator:
    others = [kind for kind in WORKLOADS if kind not in quick]
    slow = (pytest.param(kind, marks=pytest.mark.slow) for kind in others)
    return pytest.mark.parametrize("workload", [*quick, *slow])


@pytest.mark.skipif(is_real(), reason="takes a node's power away")
@these_and_slowly_others("TrainJob")
@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), -1])
def test_a_lost_node_is_survived(live: Live, index: int, tmp_path: Path) -> None:
    """Its pod stays, being deleted, and another one takes its place elsewhere."""
    env = {**HELD["env"], "HELD_BY": f"HOSTNAME=-{abs(index)}"}
    run = submit(live, "--steps", str(STEPS), **{**HELD, "env": env})
    follow(live, run, is_held)
    live.until(lambda: is_saved(live, run), "there is a checkpoint to go on from")
    pod = live.cluster.pods(run.name)[index]["metadata"]["name"]
    assert isinstance(live.cluster, FakeCluster)
    node = live.cluster.cut_power(pod)
    if live.workload == "PyTorchJob":  # whose pods have fixed names
        advice = f"if it is down, `kubectl delete pod {pod} --force` lets worker-"
        live.until_reason(run, advice)
        live.cluster.delete_by_force(pod)
    went_on_to_its_end(live, run)
    # Once is enough, as the training is the same in all.
    if (live.workload, index) == ("TrainJob", -1):
        assert live.outcome(run)["metrics"] == undisturbed(tmp_path)["metrics"]
    left = [p for p in live.cluster.pods(run.name) if p["spec"]["nodeName"] == node]
    assert [p["status"]["phase"] for p in left] == ["Running"] * (live.workload != "PyTorchJob")


@pytest.mark.parametrize("workload", ["JobSet"])
def test_the_stacks_of_all_pods_are_shown_and_who_stands_elsewhere_comes_first(live: Live) -> None:
    run = submit(live, "--steps", str(STEPS), stall_timeout="1h", **HELD)
    follow(live, run, is_held)
    seen: list[Stacks] = []

    def one_waits() -> bool:
        """Its stack is read at another moment than its collectives: it may not be there yet."""
        seen.append(run.stacks())
        functions = [{frame.function for frame in rank.stack} for rank in seen[-1].ranks]
        begun = {rank.collectives for rank in seen[-1].ranks}
        # In the backward pass, or where ranks compare what must be equal.
        return len(begun) == 2 and "train_step" in functions[0] and "_stay" in functions[1]

    live.until(one_waits, "the first rank waits in a collective that the held one has not begun")
    stacks = seen[-1]
    first, held_rank = stacks.ranks
    assert (first.rank, held_rank.rank, stacks.missing) == (0, 1, [])
    assert first.node != held_rank.node
    run.cancel()


@pytest.mark.slow
@pytest.mark.skipif(is_real(), reason="cuts a pod off")
@pytest.mark.parametrize("workload", ["PyTorchJob"])
def test_the_others_start_again_when_the_first_pod_is_cut_off(live: Live) -> None:
    """A real torchrun hangs on the store of the rendezvous, whatever the time-outs."""
    stop, retries = {"grace": "5s"}, {"in_job": 0, "requeue": 3}
    run = submit(live, "--steps", "1000000", "--timeout-s", "20", stop=stop, retries=retries)
    follow(live, run, is_after_a_checkpoint)
    first, other = (pod["metadata"]["name"] for pod in live.cluster.pods(run.name))
    assert isinstance(live.cluster, FakeCluster)
    live.cluster.freeze(first)
    logs = live.cluster.root / "claims" / CLAIM / run.name / "logs/attempt-0"
    ended, lost = logs / other / "ended", "the first pod, where the nodes meet, was lost"
    live.until(lambda: ended.exists() and lost in ended.read_text(), "the other pod has failed")
    live.cluster.delete(first, live.cluster.namespace, kind="Pod")
    live.until(lambda: live.events(run, "resume"), "both pods train again")
    run.cancel()


JOINS_AND_STAYS = """#!{python}
# In the last pod, once: a torchrun that joins the rendezvous and then hangs.
import os, pathlib, sys, time
joined = pathlib.Path(__file__).with_name("joined")
if not os.environ["HOSTNAME"].endswith("-1") or joined.exists():
    os.execv({torchrun!r}, [{torchrun!r}, *sys.argv[1:]])
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
def stay(*_, **__):
    joined.touch()
    time.sleep(3600)
RendezvousStoreInfo.build = stay
options = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--rdzv"))
conf = dict(word.split("=") for word in os.environ["PET_RDZV_CONF"].split(","))
given = RendezvousParameters(
    "c10d", options["rdzv-endpoint"], options["rdzv-id"], 2, 2, {local_addr!r}, **conf
)
backend, store = c10d_rendezvous_backend.create_backend(given)
create_handler(store, backend, given).next_rendezvous()
"""


@pytest.mark.slow
@pytest.mark.skipif(is_real(), reason="replaces torchrun")
@pytest.mark.parametrize("workload", ["JobSet"])
@pytest.mark.parametrize("local_addr", ["z.invalid", "0.invalid"])
def test_a_pod_that_is_lost_between_joining_and_starting_its_ranks_makes_nobody_wait_long(
    live: Live, tmp_path: Path, local_addr: str
) -> None:
    """Torchrun sorts nodes by address, and waits for the address of the first of them only."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    own = Path(sys.executable).parent
    text = JOINS_AND_STAYS.format(
        python=sys.executable, torchrun=str(own / "torchrun"), local_addr=local_addr
    )
    (bin_dir / "torchrun").write_text(text)
    (bin_dir / "torchrun").chmod(0o755)
    path = f"{bin_dir}:{own}:/usr/bin:/bin"
    env = {"OMP_NUM_THREADS": "1", "PATH": path}
    run = submit(live, "--steps", "20", env=env, retries={"in_job": 1, "requeue": 2})
    live.until((bin_dir / "joined").exists, "the last pod has joined")
    live.cluster.evict(live.cluster.pods(run.name)[-1]["metadata"]["name"])
    status = live.ended(run)
    assert status.state is SUCCEEDED, (status, live.told(run))


@these_and_slowly_others("PyTorchJob", "TrainJob")
def test_a_failure_of_the_users_making_is_not_tried_again(live: Live) -> None:
    run = submit(live, "--steps", "1", "--lr", "nonsense", nnodes=1)
    status = live.ended(run)
    assert status.state is FAILED, (status, live.told(run))
    pod, *_ = live.cluster.pods(run.name)
    assert exit_code(pod) == 42, "what the operator of a PyTorchJob takes for final"
    assert container_status(pod)["restartCount"] == 0
    assert "nonsense" in status.reason, "and why is told"
    # Pods that replace it end at once, until the object has failed as well.
    kind = KINDS[live.workload]
    live.until(
        lambda: state_of(kind, live.cluster.job(run.name, kind=live.workload))[0] is FAILED,
        "the object has failed",
    )
    now = run.status()
    assert now.state is FAILED and status.reason in now.reason


# TrainJob has the longest way down to a pod.
@pytest.mark.parametrize("workload", WORKLOADS if is_real() else ["TrainJob"])
def test_a_cancelled_run_writes_a_checkpoint_within_its_grace(live: Live) -> None:
    run = submit(live, "--steps", "1000000")
    follow(live, run, is_after_a_checkpoint)
    run.cancel()
    assert run.wait(live.cluster.patience_s).state is CANCELLED
    live.until(lambda: not live.cluster.pods(run.name), "its pods are gone")
    assert live.outcome(run)["status"] == "preempted"
    assert live.events(run, "stopped"), "the last step is kept"


# A Job's pods have the least between the signal and torchrun.
@pytest.mark.parametrize("workload", WORKLOADS if is_real() else ["Job"])
def test_a_cancelled_script_with_loader_workers_writes_its_checkpoint(live: Live) -> None:
    text = Path(loader_training.__file__).read_text()
    command = ["python3", "-c", text, "fork", "1000000"]
    run = live.submit(command=command, resources={"nnodes": 2})
    follow(live, run, lambda line: line.endswith("step 5"))
    run.cancel()
    assert run.wait(live.cluster.patience_s).state is CANCELLED
    live.until(lambda: not live.cluster.pods(run.name), "its pods are gone")
    assert int(live.cluster.read(f"{run.name}/saved")) >= 5
