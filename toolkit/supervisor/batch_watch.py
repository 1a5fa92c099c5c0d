"""Looks at a step that runs: what the nodes tell is listed each five seconds, and nothing more."""

import os
from typing import TYPE_CHECKING, Optional

from .elastic import LOOK_TICKS as JOIN_TICKS
from .signs_of_life import SignsOfLife

if TYPE_CHECKING:
    from .batch import Batch

TICK_S, LOOK_TICKS = 1.0, 5
"""The run directory is looked for each second, the nodes' marks each five seconds."""

HUNG_S = 10
"""How long srun may take to end once all nodes have ended: it waits for ever for a node whose
slurmstepd is gone."""

LOOKS_AFTER_FAILURE, LOOKS_TO_END = 24, 6
"""After a node has failed, srun ends the others, unless slurmctld is away: how many looks that may
take, and after how many the step is told to end, again and again."""

STOP_MARGIN_S, MOST_STOPS = 14, 3
"""How long after `stop.grace` a stop is told again, and how often that is. A torchrun loses a
signal that comes while it writes to its log; one that Slurm or an operator has sent to the step may
come to a node before its task has begun, which then waits for the others."""

REMOVED_STOPS = 6
"""How often a step without a run directory is told to stop, HUNG_S apart, before it is killed: a
torchrun that restarts its ranks can lose a signal."""

LOOKS_AFTER_ERROR, LOOKS_WITHOUT_ERROR = 13, 12
"""For so many looks after a torchrun has said that a rank failed, the ranks' errors are looked at:
on a file server they may come a minute late. Else, once in so many looks."""


class Watch:
    """What is known of a running step from look to look."""

    def __init__(self, batch: "Batch") -> None:
        self.batch = batch
        self._next_s, self._ticks, self._looks = 0.0, 0, 0
        self._late, self._left = 0, LOOKS_AFTER_FAILURE
        self._kill_s: Optional[float] = None
        self._removed, self._removed_s = 0, 0.0
        self._failed_starts = self._look_until = 0
        nodes, slurm = batch.nodes.names, batch.slurm
        self._signs = SignsOfLife(batch.attempt.logs, nodes, slurm.slurmd_began_s)

    def tick_in_s(self, now_s: float) -> float:
        """Return how long the next look may be waited for."""
        return min(max(self._next_s - now_s, 0.0), TICK_S)

    def tick(self, now_s: float) -> None:
        """Look at the step, if a look is due."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + TICK_S
        if self._kill_s is not None:
            if now_s >= self._kill_s:
                self._kill(hung=True)
            return
        if self._removed or self.batch.is_removed():
            self._stop_for_good(now_s)
            return
        self._ticks += 1
        if self.batch.nodes.elastic and self._ticks % JOIN_TICKS == 1:
            batch = self.batch
            batch.joiners.look(batch.endpoint(), batch.nodes.most, batch.say)
        if self._ticks % LOOK_TICKS == 0 and not self.look():
            self._kill_s = now_s + HUNG_S

    def _kill(self, *, hung: bool) -> None:
        if hung:
            self.batch.attempt.note("hung", "")
        if self.batch.srun is not None:
            self.batch.srun.kill()

    def _stop_for_good(self, now_s: float) -> None:
        """Stop the step of a run directory that was removed: it would begin again at step 0."""
        if now_s < self._removed_s:
            return
        self._removed, self._removed_s = self._removed + 1, now_s + HUNG_S
        if self._removed > REMOVED_STOPS:
            self._kill(hung=False)
        else:
            self.batch.stop_step("removed")

    # ---- A look

    def look(self) -> bool:
        """Look at what the nodes tell; return whether srun may run on."""
        batch, marks = self.batch, self.batch.marks
        self._looks += 1
        marks.look()
        ended = [node for node in marks.of("ended") if node.isdigit()]
        if len(ended) >= batch.nodes.most:
            return False
        batch.tell_stalls()
        self._look_for_restarts(ended)
        if not batch.nodes.elastic and marks.of("failed"):
            self._left -= 1
            if self._left % LOOKS_TO_END == 0 and marks.step():
                batch.slurm.end_step(marks.step())
            if self._left <= 0:
                return False
        if batch.told or (not batch.nodes.elastic and marks.of("stopped")):
            return self._tell_again()
        self._look_for_useless_restarts()
        return True

    def _tell_again(self) -> bool:
        looks = (self.batch.policy.grace_s + STOP_MARGIN_S) // LOOK_TICKS
        self._late += 1
        if self._late % looks == 0:
            self.batch.signal_step()
        return self._late < MOST_STOPS * looks

    def _look_for_restarts(self, ended: "list[str]") -> None:
        batch = self.batch
        number = self._signs.look(ended)
        if number is None:
            return
        node = batch.nodes.names[number]
        try:
            with open(batch.attempt.path("restarted"), "a", encoding="utf-8") as file:
                file.write(node + "\n")
        except OSError:
            pass
        batch.attempt.note(f"ended-{number}", "1")  # for srun, which waits for it
        if batch.nodes.elastic:
            batch.say(f"{node} has restarted; the others go on")
        elif not batch.told:
            batch.stop_step("node_restarted")

    def _look_for_useless_restarts(self) -> None:
        """Stop a torchrun whose next start of the ranks would end as the last ones."""
        batch = self.batch
        if batch.policy.restarts and batch.marks.of("oom"):
            batch.stop_step("out_of_memory")
        elif batch.policy.restarts > 1 and self._may_be_repeated():
            failure = batch.repeats.look(all_ended=False)
            if failure is not None:  # torchrun would start the ranks a third time
                batch.attempt.note("repeated", failure.line())
                batch.stop_step("repeated")

    def _may_be_repeated(self) -> bool:
        log = self.batch.log
        log.read_on()
        if log.failed_starts != self._failed_starts:
            self._failed_starts = log.failed_starts
            self._look_until = self._looks + LOOKS_AFTER_ERROR
        unknown = log.path == os.devnull or self._looks % LOOKS_WITHOUT_ERROR == 0
        return unknown or self._looks < self._look_until
