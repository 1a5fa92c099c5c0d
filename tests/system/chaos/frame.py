"""One frame for every disturbance: a run that counts its samples, and the checks of its results."""

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import toolkit
from tests.conftest import Cluster
from tests.support.processes import BATCH_ROLE, is_torchrun, with_environment
from tests.support.slurm_site import Site, failure
from tests.system.chaos.counted import SAMPLES
from tests.train.support.reading import same, whole
from toolkit.slurm import SlurmLauncher, SlurmRun
from train.checkpoints import store
from train.rundir.files import read_lines

STEPS, BATCH = 300, 16
TASK = Path(__file__).with_name("counted.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of the task `counted`, and the folder in which its ranks note their samples."""

    run: SlurmRun
    folder: Path

    @property
    def run_dir(self) -> Path:
        assert self.run.run_dir is not None
        return self.run.run_dir

    @property
    def job_id(self) -> str:
        """The newest of its jobs."""
        return self.run.jobs[-1].job_id

    def pace(self, seconds_per_step: float) -> None:
        draft = self.folder / "pace.new"
        draft.write_text(f"{seconds_per_step}")
        draft.replace(self.folder / "pace")

    def events(self, kind: str | None = None, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return the events in their order: all, or of a kind, or of an attempt."""
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [event for event in map(json.loads, lines) if kind in (None, event["event"])]
        return [event for event in found if attempt in (None, event["attempt"])]

    def saved(self, attempt: int = 0) -> bool:
        """Whether an attempt has committed a checkpoint."""
        return bool(self.events("checkpoint", attempt))

    def attempt(self, number: int) -> Path:
        return self.run_dir / f"logs/attempt-{number}"

    def reasons(self) -> list[str]:
        """Return the reasons of the attempts, in their order; "" for an attempt without a reason.

        Whether KillWait was long enough for the script's last words makes no difference.
        """
        count = len(list(self.run_dir.glob("logs/attempt-*")))
        paths = [self.attempt(number) / "reason" for number in range(count)]
        said = [path.read_text().rstrip("\n") if path.exists() else "" for path in paths]
        return [reason.removesuffix("; killed soon after") for reason in said]

    def losses(self) -> dict[int, float]:
        """Loss by step; a step done twice counts as it was done last."""
        lines = read_lines(self.run_dir / "metrics.jsonl")
        return {int(str(m["step"])): float(str(m["loss"])) for m in lines if "loss" in m}

    def steps(self) -> int:
        """Return the newest step in the metrics."""
        return max(self.losses(), default=0)

    def processes(self) -> set[int]:
        """Find what lives of the run, on any node: all that it starts has its directory's name."""
        return with_environment(str(self.run_dir))

    def processes_of(self, attempt: int) -> set[int]:
        """Find which of them train, or start those that do."""
        return with_environment(f"TRAIN_ATTEMPT={attempt}\0") & self.processes()

    def kill_rank(self, rank: int, attempt: int = 0) -> None:
        (worker,) = (
            pid
            for pid in self.processes_of(attempt)
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        )
        os.kill(worker, signal.SIGKILL)

    def kill_torchrun(self, node: int, attempt: int = 0) -> None:
        """Kill torchrun on the node of this number, and not its ranks."""
        (torchrun,) = (
            pid
            for pid in self.processes_of(attempt)
            if is_torchrun(Path(f"/proc/{pid}/cmdline").read_bytes())
            and b"\0RANK=" not in (environment := Path(f"/proc/{pid}/environ").read_bytes())
            and f"\0PET_LOG_DIR={self.attempt(attempt)}/node-{node}\0".encode() in environment
        )
        os.kill(torchrun, signal.SIGKILL)

    def kill_batch_script(self, cluster: Cluster) -> None:
        """Kill the supervisor that the batch script has become, on the first node."""
        (script,) = (
            process["pid"]
            for process in json.loads(cluster("ps", "--json"))
            if BATCH_ROLE in process["command"]
        )
        os.kill(script, signal.SIGKILL)

    def kill_slurmstepd(self, cluster: Cluster, node: str) -> None:
        """Kill the daemon of Slurm that watches torchrun's step on a node, and not its tasks."""
        (number,) = self.step_numbers(0)
        (daemon,) = (
            process["pid"]
            for process in json.loads(cluster("ps", node, "--all", "--json"))
            if process["command"].startswith(f"slurmstepd: [{self.job_id}.{number}]")
        )
        os.kill(daemon, signal.SIGKILL)

    def step_numbers(self, attempt: int) -> set[str]:
        """Return the numbers of the Slurm steps that started torchrun in an attempt."""
        return {path.read_text().strip() for path in self.attempt(attempt).glob("began-*")}

    def wait(self, pace: float = 0) -> toolkit.RunStatus:
        """Train the rest, at full speed unless told otherwise, until the job has ended."""
        self.pace(pace)
        return self.run.wait(300)


def submit(
    site: Site, *overrides: str, pace: float = 0.2, every: int = 10, **profile: object
) -> Trial:
    """Submit the job at a slow pace, with a checkpoint `every` few steps.

    `profile`: more keys of its profile.
    """
    path = write_job(site.runs.parent, pace=pace, every=every)
    changed = site.profile.model_copy(update=profile)
    launcher = SlurmLauncher(changed, command=site._command)
    plan = toolkit.plan(toolkit.load(path, overrides), changed)
    return Trial(run=launcher.submit(plan), folder=path.parent)


def write_job(folder: Path, *, pace: float, every: int) -> Path:
    """Write a job file into a new folder, in which its ranks will note their samples."""
    made = folder / f"counted-{len(list(folder.glob('counted-*')))}"
    made.mkdir(parents=True)
    (made / "pace").write_text(f"{pace}")
    job = {
        "name": "counted",
        "module": "train",
        "args": [
            *("--task", f"{TASK}:Counted", "--steps", str(STEPS), "--global-batch", str(BATCH)),
            *("--checkpoint-every", str(every), "--timeout-s", "600"),
            "--no-verify",  # whose samples would be counted, too
        ],
        "resources": {"nnodes": 2, "cpus_per_node": 1, "memory": "2GiB"},
        "env": {"OMP_NUM_THREADS": "1", "COUNTED": str(made)},
        "retries": {"in_job": 0, "requeue": 3},
    }
    path = made / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def go_on(trial: Trial, site: Site) -> Trial:
    """Submit a run that has ended again, as `toolkit resubmit` does."""
    site.launcher.resubmit(trial.run)
    return trial


def unharmed(
    trial: Trial, reference: Trial, until: Callable[..., None], *, pace: float = 0
) -> None:
    """Insist that a run has ended as if it had never been disturbed, and has left nothing alive."""
    status = trial.wait(pace)
    assert status.state is toolkit.RunState.SUCCEEDED, failure(trial.run)
    until(lambda: not trial.processes(), "no process of the run is left on any node")
    assert trial.reasons()[-1] == "done: all steps made"
    for attempt in range(len(trial.reasons())):
        reason = trial.reasons()[attempt]
        assert reason and not reason.endswith("deciding"), trial.reasons()
    whole_result(trial, reference)


def whole_result(trial: Trial, reference: Trial) -> None:
    """Insist on the bits of the unbroken run, and on each sample once in an epoch."""
    outcome = json.loads((trial.run_dir / "outcome.json").read_text())
    assert (outcome["status"], outcome["step"]) == ("done", STEPS)
    assert same(whole(_last_checkpoint(trial)), whole(_last_checkpoint(reference)))
    assert trial.losses() == reference.losses()
    stream = [number for step in samples_by_step(trial) for number in step]
    assert len(stream) == STEPS * BATCH
    for start in range(0, len(stream), SAMPLES):
        epoch = stream[start : start + SAMPLES]
        assert len(set(epoch)) == len(epoch), "a sample came twice in an epoch"
    assert stream == [number for step in samples_by_step(reference) for number in step]
    consistent(trial)


def consistent(trial: Trial) -> None:
    """Check that every file of the run directory is whole, whenever its processes were killed."""
    for position in store.list_committed(trial.run_dir):
        store.verify(position.path(trial.run_dir))
    outcome = trial.run_dir / "outcome.json"
    assert not outcome.exists() or json.loads(outcome.read_text())["version"] == 1


def _last_checkpoint(trial: Trial) -> Path:
    (best, *_) = store.list_committed(trial.run_dir)
    assert best.step == STEPS
    return best.path(trial.run_dir)


@dataclasses.dataclass
class _Start:
    """What one start of the ranks has recorded."""

    attempt: int
    restart: int
    began: float
    """When its event `start` was recorded."""
    ended: float = math.inf
    """When the next one of the same attempt and restart was: torchrun does not count all."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    resumed_step: int = 0
    resumed_from: str | None = None
    done: bool = False


def samples_by_step(trial: Trial) -> list[list[int]]:
    """Return the samples of each step that counts, as the ranks were given them.

    A step counts as the last start has made it, or, before what that has resumed from, as the
    start has made it that wrote this checkpoint; it may have been killed before it reported that.
    """
    counted: list[list[int]] = []
    starts, end = _starts(trial), STEPS
    (start,) = (start for start in starts if start.done)
    while True:
        # One that was stopped before its first step has left a checkpoint, and no sample.
        if wanted := end - start.resumed_step:
            counted[:0] = list(_given(trial, start))[:wanted]
        if start.resumed_from is None:
            return counted
        end, earlier = start.resumed_step, starts[: starts.index(start)]
        start = _writer(trial, start.resumed_from, earlier)


def _starts(trial: Trial) -> list[_Start]:
    """Return the starts in their order, by the events of their rank 0."""
    starts: list[_Start] = []
    for event in trial.events():
        kind, number = event["event"], (event["attempt"], event["restart"])
        start = next((s for s in reversed(starts) if (s.attempt, s.restart) == number), None)
        if kind == "start":
            if start is not None:
                start.ended = event["time"]
            starts.append(_Start(*number, began=event["time"]))
        elif kind in ("checkpoint", "resume", "done"):  # an error may be any rank's
            assert start is not None, f"{event} is of no start"
            if kind == "checkpoint":
                start.checkpoints.append(event["checkpoint"])
            elif kind == "resume":
                start.resumed_step, start.resumed_from = event["step"], event["checkpoint"]
            else:
                start.done = True
    return starts


def _writer(trial: Trial, checkpoint: str, earlier: list[_Start]) -> _Start:
    """Return which start has written a checkpoint: the last of its attempt if none reported it."""
    attempt = int(Path(checkpoint).parent.name.removeprefix("attempt-"))
    for start in reversed(earlier):
        if checkpoint in start.checkpoints:
            return start
    return next(s for s in reversed(earlier) if s.attempt == attempt and _file_of(trial, s))


def _file_of(trial: Trial, start: _Start) -> Path | None:
    """Return where rank 0 of a start has noted its samples; None if it made no step."""
    found = []
    for path in trial.folder.glob(f"{start.attempt}-*-0.jsonl"):
        if line := path.read_text().partition("\n")[0]:
            first = json.loads(line)
            if first["restart"] == start.restart and start.began <= first["time"] < start.ended:
                found.append(path)
    assert len(found) < 2, f"more than one start of one number: {found}"
    return found[0] if found else None


def _given(trial: Trial, start: _Start) -> Iterator[list[int]]:
    """Yield the samples of each step that a start has made on all of its ranks."""
    first = _file_of(trial, start)
    assert first is not None, f"{start} has noted no sample"
    ranks = sorted(trial.folder.glob(f"{first.name.removesuffix('0.jsonl')}*.jsonl"))
    for lines in zip(*(path.read_text().splitlines() for path in ranks), strict=False):
        yield [number for line in lines for number in json.loads(line)["numbers"]]
