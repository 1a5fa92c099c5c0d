"""The lines of all pods of a run, merged, while pods come, start again and are made anew."""

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Missing
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.pod_log import Lines, PodLog, starts_of
from toolkit.kubernetes.pods import attempt_of
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.runs.log_reader import LogView

__all__ = ["Round", "read_lines"]

_POLL_S = 1.0
"""Poll interval of the list of pods, in seconds."""


_LAST_ROUNDS = 4
"""Poll interval for the rest of the logs of pods that have ended, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The pods at one moment."""

    pods: Sequence[Object]
    """The pods, in the order in which their lines are shown."""

    ended: bool = True
    """Whether nothing more will be printed."""


def read_lines(
    cluster: Cluster,
    kind: Kind,
    view: LogView,
    look: Callable[[], Round],
    prefix: Callable[[Object], str],
) -> Iterator[str]:
    """Yield the lines that pods have printed.

    Args:
        cluster: Where they run.
        kind: The cluster of the pods.
        view: Which lines are wanted, and whether to go on until all has ended.
        look: Returns the current pods.
        prefix: Returns the prefix of the lines of a pod.
    """
    lines: Lines = queue.Queue()
    logs: dict[str, PodLog] = {}
    last_round = not view.follow
    rounds = 0
    try:
        while True:
            with contextlib.suppress(Away) if view.follow else contextlib.nullcontext():
                seen = look()
                last_round = last_round or seen.ended or _passed(seen.pods, view)
                for pod in _wanted(seen.pods, view):
                    metadata = pod["metadata"]
                    new = PodLog(pod=metadata["name"], prefix=prefix(pod), view=view)
                    log = logs.setdefault(metadata["uid"], new)
                    starts = list(starts_of(pod, kind.container))
                    if view.follow:
                        log.follow(cluster, starts, lines)
                        continue
                    for start in starts:
                        with contextlib.suppress(Missing):
                            yield from log.shown(log.read(cluster, start, follow=False))
                        yield from log.rest()
            look_again = time.monotonic() + _POLL_S
            reading = most = 0
            while (
                (reading := sum(log.active for log in logs.values()))
                or not lines.empty()
                or not last_round
            ):
                if reading < most:  # a container has ended; what follows it may be there soon
                    look_again = min(look_again, time.monotonic() + _POLL_S / 5)
                most = reading
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=_POLL_S / 20)
                    if isinstance(line, LauncherError):
                        raise line
                    yield line
                if not last_round and time.monotonic() > look_again:
                    break
            # One that was being read when all had ended may have started again before that.
            if last_round:
                rounds += 1
                if rounds == _LAST_ROUNDS or not any(log.behind for log in logs.values()):
                    return
    finally:
        for log in logs.values():
            log.stop()


def _wanted(pods: Sequence[Object], view: LogView) -> Sequence[Object]:
    """Return the pods of the attempt that is wanted; all where nothing counts attempts."""
    if view.attempt is None:
        return pods
    return [pod for pod in pods if attempt_of(pod) in (view.attempt, None)]


def _passed(pods: Sequence[Object], view: LogView) -> bool:
    """Whether a later attempt than the requested one has started."""
    wanted = view.attempt
    return wanted is not None and any((attempt_of(pod) or 0) > wanted for pod in pods)
