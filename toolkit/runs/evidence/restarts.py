"""The interruptions of a run, even of a successful one, and how long its ranks were down."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from toolkit.runs.evidence.failure import earlier_failures, first_failure
from toolkit.runs.evidence.rank_folders import RankStart, begins_of, count_starts, starts_of
from toolkit.runs.records.log_reader import attempt_folders, attempt_spans, end_of, modified_at
from toolkit.runs.records.run_directory import reason_of
from toolkit.supervisor.evidence.rank_end import STOPS, exited
from toolkit.supervisor.evidence.torchrun_report import shift_s
from toolkit.text import untrusted
from toolkit.text.quantities import rounded_duration
from toolkit.text.secret_scan import Mask

_MOST_ATTEMPTS = 100
"""Number of newest attempts that are read."""

_COUNTED_NODES = 32
"""Number of node folders that are read when restarts are only counted."""

_LOG_BYTES, _MOST_NOTICED = 8 << 20, 1000
_HEARTBEATS_S = 300
"""A node that lives has written a heartbeat within this time."""

_ZONES_S = 26.5 * 3600
"""The largest difference between two time zones, and a little more."""
_NOTICED = re.compile(
    r"^E(\d{4}) (\d\d:\d\d:\d\d\.\d{1,6}) .*failed \(exitcode: (-?\d{1,9})\) "
    r"local_rank: (\d{1,9}) \(pid: ",
    re.MULTILINE,
)
"""torchrun's log message about a failed rank, which also appears before a restart."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """An interruption, followed by a restart of the ranks."""

    attempt: int
    """The attempt that was interrupted."""

    restart: int
    """The number of earlier restarts of the ranks within that attempt."""

    why: str
    """The first failed rank and its failure; else the attempt's reason."""

    time: float
    """When, in seconds since 1970."""

    away_s: float
    """Seconds until the next start of the ranks."""

    def __str__(self) -> str:
        """Describe it in one line."""
        when = f"{datetime.fromtimestamp(self.time):%H:%M}"
        return f"{self.why} at {when}, {rounded_duration(self.away_s)} until the next start"


def restarts_in(run_dir: Path, mask: Mask | None = None) -> list[Restart]:
    """Return the restarts of a run, the oldest first; only those of the newest 100 attempts."""
    attempts = attempt_folders(run_dir)[-_MOST_ATTEMPTS:]
    found: list[Restart] = []
    for attempt, following in zip_longest(attempts, attempts[1:]):
        starts = starts_of(attempt)
        found += _in_job(run_dir, attempt, starts)
        if following is not None:
            found.append(_of_attempt(run_dir, attempt, starts, following))
    return [_masked(one, mask) for one in found] if mask else found


def count_restarts(run_dir: Path) -> int:
    """Return a run's number of restarts, at less cost; for large attempts, a lower bound."""
    attempts = attempt_folders(run_dir)
    starts = (count_starts(one, most_nodes=_COUNTED_NODES) for one in attempts[-_MOST_ATTEMPTS:])
    return max(len(attempts) - 1, 0) + sum(max(count - 1, 0) for count in starts)


def number_of(count: int) -> str:
    """Return a number of restarts in words, such as `2 restarts`; empty for 0."""
    return f"{count} restart{'s' * (count != 1)}" if count else ""


def in_words(restarts: Sequence[Restart]) -> str:
    """Return the number of interruptions and the last one; empty if there are none."""
    if not restarts:
        return ""
    *earlier, last = restarts
    if not earlier:
        return f"1 restart: {last}"
    away = rounded_duration(sum(one.away_s for one in restarts))
    return f"{number_of(len(restarts))}, {away} in all; the last: {last}"


def _in_job(run_dir: Path, attempt: Path, starts: Sequence[RankStart]) -> Iterator[Restart]:
    """Yield the restarts by torchrun within an attempt."""
    begins = begins_of({(start.began, start.key) for start in starts})
    if len(begins) < 2:
        return
    noticed = _noticed(run_dir, attempt, year=datetime.fromtimestamp(modified_at(attempt)).year)
    noticed = _in_this_zone(noticed, begins)
    dated = [replace(one, restart=bisect_right(begins, one.began) - 1) for one in starts]
    failures = earlier_failures(attempt, dated, {})
    for number, (before, began) in enumerate(pairwise(begins)):
        failure = failures.get(number)
        time = min(max(failure.time, before), began) if failure else began
        seen = [one for one in noticed if before <= one.time <= began]
        # Only a node with failed ranks gets another folder.
        nodes = {one.node for one in dated if one.restart == number and not one.last}
        only = nodes.pop() if len(nodes) == 1 else ""
        why = str(failure) if failure else seen[0].in_words(only) if seen else "unknown"
        if failure and failure.kind == "echo":
            killed = (one for one in seen if one.code < 0 and -one.code not in STOPS)
            why = next((one.in_words(only) for one in killed), why)
        time = seen[0].time if seen else time
        yield Restart(
            attempt=int(attempt.name.removeprefix("attempt-")),
            restart=number,
            why=why,
            time=time,
            away_s=began - time,
        )


def _of_attempt(
    run_dir: Path, attempt: Path, starts: Sequence[RankStart], following: Path
) -> Restart:
    """Return the interruption between an attempt and the following one."""
    number = int(attempt.name.removeprefix("attempt-"))
    failure, text = first_failure(run_dir, number), reason_of(attempt).text
    # The supervisor has judged all evidence, not only the ranks' evidence.
    judged = text.rpartition("; ")[0]
    of_rank = f"{text.partition(':')[0]}: {failure}" if failure else ""
    later = [start.began for start in starts_of(following)]
    began = min(later) if later else modified_at(following / "since")
    time = failure.time if failure else _end_of(attempt, starts) or began
    return Restart(
        attempt=number,
        restart=max(len(begins_of({(start.began, start.key) for start in starts})) - 1, 0),
        why=judged or of_rank or text or "killed",
        time=min(time, began),
        away_s=max(began - time, 0.0),
    )


def _end_of(attempt: Path, starts: Sequence[RankStart]) -> float:
    """Return when an attempt ended, as far as its files show; 0 if they do not."""
    ended = [modified_at(attempt / name) for name in ("exit_status", "reason")]
    if ended[0]:
        return max(ended)
    names = (entry.name for entry in untrusted.entries(attempt) if entry.is_file)
    heartbeat = max((modified_at(attempt / n) for n in names if n.startswith("alive-")), default=0)
    # If the script was killed with its node, the next one has written the reason.
    if heartbeat and (not ended[1] or ended[1] > heartbeat + _HEARTBEATS_S):
        return heartbeat
    last = (max(one.began, modified_at(one.folder / "stderr.log")) for one in starts)
    return ended[1] or max(last, default=0)


class _Noticed(NamedTuple):
    """torchrun's log message about a failed rank."""

    time: float
    code: int
    local_rank: str
    node: str
    """The node's name, if it has a separate log; else empty."""

    def in_words(self, only: str) -> str:
        """Describe it; `only`: the node, if there is only one."""
        node = self.node or only
        return f"local rank {self.local_rank}{node and f' on {node}'}: {exited(self.code)}"


def _noticed(run_dir: Path, attempt: Path, *, year: int) -> list[_Noticed]:
    """Return torchrun's messages about failed ranks in an attempt, in order of time."""
    found: list[_Noticed] = []
    for span in attempt_spans(run_dir, int(attempt.name.removeprefix("attempt-"))):
        try:
            text = end_of(span, _LOG_BYTES).decode(errors="replace")
        except OSError:  # for example, a long log was deleted
            continue
        node = span.path.stem if span.path.name.startswith("node-") else ""
        for day, clock, code, local_rank in _NOTICED.findall(text)[-_MOST_NOTICED:]:
            try:
                when = datetime.strptime(f"{year}{day} {clock}", "%Y%m%d %H:%M:%S.%f")
            except ValueError:
                continue
            found.append(_Noticed(when.timestamp(), int(code), local_rank, node))
    return sorted(found)


def _in_this_zone(noticed: Sequence[_Noticed], begins: Sequence[float]) -> list[_Noticed]:
    """Return messages by this machine's clock: the time zone of the nodes may be another.

    The ranks start again soon after a message. The smallest shift counts that most messages need.
    """
    shifts = Counter(
        shift_s(began - one.time)
        for one in noticed[-_MOST_NOTICED:]
        for began in begins[1:]
        if abs(began - one.time) < _ZONES_S
    )
    shift = min(shifts, key=lambda each: (-shifts[each], abs(each)), default=0)
    return [one._replace(time=one.time + shift) for one in noticed]


def _masked(restart: Restart, mask: Mask) -> Restart:
    return replace(restart, why=mask.hide(restart.why))
