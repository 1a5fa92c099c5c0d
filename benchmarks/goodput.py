"""What a run keeps of its time under a fixed schedule of faults: the toolkit beside its peers.

Run as `make bench-goodput`; needs root, like the sandbox. Each contender trains the same model on
two nodes, to the same number of steps at the same pace, with a checkpoint as often, and is hit by
the faults of `SCHEDULE`:

- toolkit: `train`, submitted by the toolkit, with restarts in the job and requeues;
- plain: as a person writes it: sbatch --requeue, a trap that requeues the job at Slurm's warning,
  torchrun --max-restarts=3, torch.save (`plain_training.py`);
- Lightning: its Trainer with auto-requeue, a rank for each task of srun, as its documentation has
  it (`lightning_training.py`), and `--requeue`.

A fault comes so many seconds after the run's first step, or once the run makes steps again after
the fault before, whichever is later: every contender is hit by all of them. It comes half way
between two checkpoints, since chance would decide otherwise how many steps each of them loses. A
run that does not come back by itself is submitted again by hand: 60 s after its last step if its
job has ended, as if a person had looked, and after 150 s if the job stands still. These seconds
count.

Where the time of each run went is counted as `toolkit goodput` does it, until Slurm has the job as
completed, from the files of `train` or of `train/telemetry.py` in the other scripts. The summary:

- goodput: steps that count ÷ elapsed time. ETTR is the same figure; beside it, Google's goodput and
  NVIDIA's uptime, all of them as in docs/reference/goodput.md;
- pace: steps by pace ÷ elapsed time. A framework with slower steps has more goodput, and less here;
- elapsed: seconds from the submission to the end of the job;
- again: steps that were made again; starts: of the ranks; by hand: submissions by hand.

With several rounds, what is shown of a contender is its round with the median goodput. A target is
missed where a peer has more goodput than the toolkit, or needs less time for the same steps.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.recovery import ENDED, HandTrial, until
from tests.conftest import ROOT
from tests.system.chaos.arena import SlurmArena, living, own_slurm, ranks
from tests.system.chaos.faults import Scene, kill, power_off, preempt
from tests.system.chaos.frame import Trial
from toolkit.cli.summary import goodput_lines
from toolkit.runs.views.goodput import Goodput, goodput_of

STEPS, PACE_S, EVERY = 2200, 0.08, 100
"""Steps, the seconds that each of them takes at least, and from checkpoint to checkpoint."""

ALONE_S, STANDS_STILL_S, PATIENCE_S = 60.0, 150.0, 1200.0
LEAD_S, TIME_LEFT_S = 50, 100
"""When Slurm warns a job before its time is over; how much the walltime fault leaves of it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the schedule."""

    at_s: float
    """Seconds after the first step of the run."""

    what: str
    """What happens: the row of the table."""

    inject: Callable[[Scene], object]

    heals_after_s: float = 0.0
    """When what the fault has broken works again."""


def kill_rank_1(scene: Scene) -> None:
    """Kill rank 1, which is on the last node."""
    for pid in ranks(scene.trial)[1]:
        kill(pid)


def end_time(scene: Scene) -> None:
    """Let the time of the job be over soon; Slurm warns it before."""
    scene.slurm.cluster.end_in(TIME_LEFT_S, scene.trial.job_id)


SCHEDULE = (
    Fault(at_s=15, what="rank 1 is killed (SIGKILL)", inject=kill_rank_1),
    Fault(
        at_s=40,
        what="the job's last node loses its power, for 30 s",
        inject=power_off,
        heals_after_s=30,
    ),
    Fault(
        at_s=90,
        what="preemption: an urgent job of a second needs all nodes",
        inject=preempt,
        heals_after_s=10,
    ),
    Fault(
        at_s=110,
        what=f"walltime: the job's time is over in {TIME_LEFT_S} s, of which Slurm warns it "
        f"{LEAD_S} s before, or up to 60 s sooner",
        inject=end_time,
    ),
)
"""The kill schedule; the last fault comes before a run without any could be over."""


def schedule_table(schedule: Sequence[Fault] = SCHEDULE) -> str:
    """Return the schedule as a table for docs/reference/goodput.md."""
    rows = [f"| {fault.at_s:.0f} | {fault.what} |" for fault in schedule]
    return "\n".join(["| seconds | fault |", "|---|---|", *rows]) + "\n"


class Record(NamedTuple):
    """The newest step of a run."""

    step: int
    time: float


def newest_step(folder: Path) -> Record | None:
    """Return the newest step that a run has recorded, from the end of `metrics.jsonl`."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            whole = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    row = json.loads(whole[-1]) if whole else None
    return row and Record(int(row["step"]), float(row["time"]))


HEAD = f"""\
#!/bin/bash
#SBATCH --job-name=hand
#SBATCH --partition=low
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=2G
#SBATCH --time=10
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=SIGNAL@{LEAD_S}
source {ROOT}/.venv/bin/activate
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=1 COUNTED=$1 STEPS=$2 EVERY={EVERY}
export TRAIN_RUN_DIR=$1 TRAIN_ATTEMPT=$(wc -l <"$1/attempts") TRAIN_ATTEMPT_BEGAN=$(date +%s.%N)
echo >>"$1/attempts"
"""
"""What both scripts by hand begin with; the last two lines are for telemetry."""

PLAIN = f"""\
{HEAD.replace("SIGNAL", "B:USR1")}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-backend=c10d --rdzv-endpoint="$head_node:$((61000 + SLURM_JOB_ID % 4000))" \\
  --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" {ROOT}/benchmarks/plain_training.py &
while kill -0 $! 2>/dev/null; do wait $!; status=$?; done
exit "$status"
"""

LIGHTNING = f"""\
{HEAD.replace("SIGNAL", "SIGUSR1")}
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec python "$0"' \\
  {ROOT}/benchmarks/lightning_training.py
"""
"""Lightning itself needs neither RANK nor WORLD_SIZE; telemetry does."""


class Contender(NamedTuple):
    """How runs of a contender are submitted: `again`, after their job has ended."""

    submit: Callable[[SlurmArena, str, int], Trial]
    again: Callable[[SlurmArena, Trial], object]


def by_toolkit(arena: SlurmArena, name: str, steps: int) -> Trial:
    """Submit a run of the toolkit, with restarts in the job."""
    words = (
        f"args.1={ROOT}/benchmarks/paced_task.py:PacedTask",
        f"args.3={steps}",
        "retries.in_job=3",
        f"stop.grace={LEAD_S - 30}s",  # the toolkit has Slurm warn 30 s before that
        "time_limit=10m",
        f"name={name}",
    )
    return arena.submit(words, pace=PACE_S, every=EVERY)


def by_hand(script: str) -> Contender:
    """Return the contender that a script by hand is."""

    def submit(arena: SlurmArena, name: str, steps: int) -> Trial:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=arena.folder))
        (folder / "pace").write_text(f"{PACE_S}")
        (folder / "steps_wanted").write_text(f"{steps}")
        (folder / "hand.sbatch").write_text(script)
        (folder / "attempts").touch()
        trial = HandTrial(run=None, folder=folder)  # type: ignore[arg-type]  # nothing asks it
        again(arena, trial)
        return trial

    def again(arena: SlurmArena, trial: Trial) -> None:
        folder = trial.folder
        argv = ("sbatch", "--parsable", f"--output={folder}/log", f"{folder}/hand.sbatch")
        words = (f"{folder}", (folder / "steps_wanted").read_text())
        (folder / "job_id").write_text(arena.cluster.slurm(*argv, *words))

    return Contender(submit, again)


CONTENDERS: Mapping[str, Contender] = {
    "toolkit": Contender(by_toolkit, lambda arena, trial: arena.go_on(trial)),
    "plain": by_hand(PLAIN),
    "Lightning": by_hand(LIGHTNING),
}


@dataclass
class Course:
    """A run under the schedule, watched from its first step until its job has completed."""

    arena: SlurmArena
    trial: Trial
    contender: Contender
    steps: int
    story: list[str] = field(default_factory=list)
    """What happened, with the seconds since the first step."""
    by_hand: int = 0
    """How often the run was submitted again."""
    _begin_s: float = 0.0
    _watched_s: float = 0.0
    """Since when nothing is known to have happened to the job."""

    def play(self, schedule: Sequence[Fault]) -> float:
        """Let the faults hit the run; return when it has ended."""
        until(lambda: newest_step(self.trial.run_dir))
        self._begin_s = time.time()
        deadline, waiting = self._begin_s + PATIENCE_S, list(schedule)
        hit_starts, heal_s = 0, float("inf")
        while (now := time.time()) < deadline:
            time.sleep(0.25)
            newest = newest_step(self.trial.run_dir)
            assert newest is not None
            silent_s = now - max(newest.time, self._watched_s)
            if heal_s < now:
                heal_s = float("inf")
                self.arena.heal()
            if newest.step >= self.steps or silent_s > 2:
                state = self.arena.job(self.trial).get("JobState")
                if state == "COMPLETED" and newest.step >= self.steps:
                    return time.time()
                self._look_after(silent_s, state)
            elif (
                waiting
                and now >= self._begin_s + waiting[0].at_s
                and abs(newest.step % EVERY - EVERY / 2) <= EVERY / 20
                and heal_s == float("inf")
                and (starts := self._starts(newest)) > hit_starts
            ):
                fault, hit_starts = waiting.pop(0), starts
                self._note(fault.what)
                fault.inject(Scene(self.arena, self.trial, random.Random(1)))
                if fault.heals_after_s:
                    heal_s = time.time() + fault.heals_after_s
        sys.exit(f"the run did not end; its story: {self.story}; its files: {self.trial.run_dir}")

    def _starts(self, newest: Record) -> int:
        """Return how often ranks were started; 0 while the newest start has made no step."""
        moments = [float(event["time"]) for event in self.trial.events("start")]
        return len(moments) if newest.time > max(moments, default=0.0) else 0

    def _look_after(self, silent_s: float, state: str | None) -> None:
        """Submit a run again that does not come back by itself."""
        ended = state in ENDED
        if silent_s < (ALONE_S if ended else STANDS_STILL_S):
            return
        if not ended:
            self.arena.slurm("scancel", self.trial.job_id)
            until(lambda: self.arena.job(self.trial).get("JobState") in ENDED)
        self.by_hand += 1
        self._note(f"did not come back ({state}); submitted again by hand after {silent_s:.0f} s")
        self._watched_s = time.time()
        self.contender.again(self.arena, self.trial)

    def _note(self, what: str) -> None:
        self.story.append(f"{time.time() - self._begin_s:4.0f} s: {what}")


class Round(NamedTuple):
    """A run of a contender, when it is over."""

    goodput: Goodput
    by_hand: int
    story: Sequence[str]


def play(arena: SlurmArena, name: str, steps: int, schedule: Sequence[Fault]) -> Round:
    """Let a contender train under the schedule."""
    contender, submitted_s = CONTENDERS[name], time.time()
    trial = contender.submit(arena, name.lower(), steps)
    course = Course(arena, trial, contender, steps)
    try:
        ended_s = course.play(schedule)
    finally:
        arena.restore()
        arena.slurm("scancel", trial.job_id)
        until(lambda: not living(trial))
    goodput = goodput_of(trial.run_dir, submitted=submitted_s, until=ended_s)
    return Round(goodput, course.by_hand, course.story)


def median_round(rounds: Sequence[Round]) -> Round:
    """Return the round with the median goodput; of two, the lower one."""
    shares = [one.goodput.share for one in rounds]
    return rounds[shares.index(statistics.median_low(shares))]


def summary(shown: Mapping[str, Round]) -> Iterator[str]:
    """Yield a line for each contender, with the targets that the toolkit misses."""
    names = ("goodput", "ETTR", "Google", "NVIDIA", "pace", "elapsed", "again", "starts", "by hand")
    yield f"{'':9}" + "".join(f"{name:>9}" for name in names)
    for name, (goodput, hand, _) in shown.items():
        made = (goodput.steps * PACE_S) / goodput.elapsed_s
        others = ("ETTR (Meta)", "goodput (Google)", "uptime (NVIDIA)")
        shares = (goodput.share, *(goodput.definitions[other] for other in others), made)
        counts = (goodput.steps_again, goodput.starts, hand)
        yield (
            f"{name:9}"
            + "".join(f"{share:9.1%}" for share in shares)
            + f"{goodput.elapsed_s:7.1f} s"
            + "".join(f"{count:9}" for count in counts)
        )
    yield from missed(shown)


def missed(shown: Mapping[str, Round]) -> Iterator[str]:
    """Yield a line for each target that the toolkit misses."""
    if "toolkit" not in shown:
        return
    ours = shown["toolkit"].goodput
    for name, (theirs, _, _) in shown.items():
        if theirs.share > ours.share:
            yield f"missed: goodput {ours.share:.1%}, {name} {theirs.share:.1%}"
        if theirs.elapsed_s < ours.elapsed_s:
            yield f"missed: {ours.elapsed_s:.1f} s, {name} {theirs.elapsed_s:.1f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of all contenders (default 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default {STEPS})")
    parser.add_argument("--only", default="", help="a part of the name of the contenders")
    parser.add_argument("--no-faults", action="store_true", help="what is lost without any")
    parser.add_argument("--keep", action="store_true", help="the files of the runs")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="goodput-", dir="/tmp"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    schedule = () if given.no_faults else SCHEDULE
    rounds: dict[str, list[Round]] = {name: [] for name in CONTENDERS if given.only in name}
    with own_slurm(folder) as arena:
        for number in range(given.rounds):
            for name, played in rounds.items():
                load = os.getloadavg()[0]
                played.append(play(arena, name, given.steps, schedule))
                print(f"round {number + 1}, load average before it {load:.1f}")
                print("\n".join(goodput_lines(name, played[-1].goodput)))
                for line in played[-1].story:
                    print(f"  {line}")
                sys.stdout.flush()
    print("\n".join(summary({name: median_round(played) for name, played in rounds.items()})))
    if given.keep:
        print(f"files of the runs: {folder}/slurm")
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
