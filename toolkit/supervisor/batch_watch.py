"""Watches a running step: lists the marks of the nodes every five seconds, and nothing more."""

import os
from typing import TYPE_CHECKING, Optional

from .signs_of_life import SignsOfLife

if TYPE_CHECKING:
    from .batch import Batch

TICK_S, LOOK_TICKS, JOIN_TICKS = 1.0, 5, 15
"""The run directory is checked every second, the nodes' marks every five seconds, the number of an
elastic job's nodes every fifteen."""

HUNG_S = 10
"""How long srun may take to exit once all nodes have ended: srun waits without limit for a node
that has lost its slurmstepd."""

LOOKS_AFTER_FAILURE, LOOKS_TO_END = 24, 6
"""After a node has failed, srun ends the others, unless slurmctld is unreachable: the number of
looks that this may take, and the number of looks between two requests to end the step."""

STOP_MARGIN_S, MOST_STOPS = 14, 3
"""How long after `stop.grace` to repeat a stop, and how often. A torchrun loses a signal that
arrives while it writes to its log. A signal that Slurm or an operator sends to the step may reach a
node before its task has begun; the task then waits for the others."""

REMOVED_STOPS = 6
"""How often to ask a step without a run directory to stop, HUNG_S apart, before killing it: a
torchrun that restarts its ranks can lose a signal."""

LOOKS_AFTER_ERROR, LOOKS_WITHOUT_ERROR = 13, 12
"""For how many looks to read the ranks' errors after a torchrun has logged a failed rank: on a file
server they may arrive a minute late. Without a failure, the number of looks between two reads."""


class Watch:
    """The state of a running step between two looks."""

    def __init__(self, batch: "Batch") -> None:
        self.batch = batch
        self._next_s, self._ticks, self._looks = 0.0, 0, 0
        self._late, self._left = 0, LOOKS_AFTER_FAILURE
        self._kill_s: Optional[float] = None
        self._removed, self._removed_s = 0, 0.0
        self._failed_starts = self._look_until = 0
        logs, nodes, slurm = batch.attempt.logs, batch.nodes.names, batch.slurm
        self._signs = SignsOfLife(logs, nodes, slurm.slurmd_began_s)
        if batch.members is not None:
            unreachable = batch.members.is_unreachable
            self._signs = SignsOfLife(logs, nodes, slurm.slurmd_began_s, unreachable)

    def tick_in_s(self, now_s: float) -> float:
        """Return the time until the next look."""
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
        batch = self.batch
        if batch.members is not None and self._ticks % JOIN_TICKS == 1:
            batch.members.look(batch.endpoint(), batch.nodes.most, batch.say)
        if self._ticks % LOOK_TICKS == 0 and not self.look():
            self._kill_s = now_s + HUNG_S

    def _kill(self, *, hung: bool) -> None:
        if hung:
            self.batch.attempt.note("hung", "")
        if self.batch.srun is not None:
            self.batch.srun.kill()

    def _stop_for_good(self, now_s: float) -> None:
        """Stop the step after the run directory was removed: a restart would begin at step 0."""
        if now_s < self._removed_s:
            return
        self._removed, self._removed_s = self._removed + 1, now_s + HUNG_S
        if self._removed > REMOVED_STOPS:
            self._kill(hung=False)
        else:
            self.batch.stop_step("removed")

    # ---- A look

    def look(self) -> bool:
        """Read the nodes' marks; return whether srun may continue."""
        batch, marks = self.batch, self.batch.marks
        self._looks += 1
        marks.look()
        ended = [node for node in marks.of("ended") if node.isdigit()]
        if len(ended) >= batch.nodes.most:
            return False
        batch.tell_stalls()
        self._look_for_lost_nodes(ended)
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

    def _look_for_lost_nodes(self, ended: "list[str]") -> None:
        batch = self.batch
        lost = self._signs.look(ended)
        if lost is None:
            return
        node = batch.nodes.names[lost.number]
        if lost.restarted:
            try:
                with open(batch.attempt.path("restarted"), "a", encoding="utf-8") as file:
                    file.write(node + "\n")
            except OSError:
                pass
        batch.attempt.note(f"ended-{lost.number}", "1")  # because srun waits for this node
        if batch.members is not None:
            how = "has restarted" if lost.restarted else "does not answer"
            batch.say(f"{node} {how}; the others go on")
            if not batch.told:  # ranks that stop may be writing their checkpoint
                batch.members.go_on_without(node, lost.silent_looks * LOOK_TICKS * TICK_S)
        elif not batch.told:
            batch.stop_step("node_restarted")

    def _look_for_useless_restarts(self) -> None:
        """Stop a torchrun if its next restart of the ranks would fail like the last ones."""
        batch = self.batch
        if batch.policy.restarts and batch.marks.of("oom"):
            batch.stop_step("out_of_memory")
        elif batch.policy.restarts > 1 and self._may_be_repeated():
            failure = batch.repetitions.in_job(all_ended=False)
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
