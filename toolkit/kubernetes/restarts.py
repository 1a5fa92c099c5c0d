"""The restarts of a run, as far as its pods show them. Pure.

Kubernetes keeps the last termination of each container, and the failed pods of a Job. It does not
show torchrun's restarts within a pod.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from toolkit.kubernetes.pods import (
    Death,
    attempt_of,
    container_statuses,
    disruption,
    last_words,
    seconds_of,
    short_name,
)
from toolkit.kubernetes.workloads import Object
from toolkit.runs.evidence.restarts import Restart


class _Gap(NamedTuple):
    """The time without a pod, and the reason."""

    ended: float
    began: float
    why: str


def restarts_of(pods: Iterable[Object]) -> list[Restart]:
    """Return the restarts of a run, oldest first; for restarts without a trace, only the count."""
    by_name: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in sorted(pods, key=_made):
        by_name[short_name(pod)].append(pod)
    gaps: list[_Gap] = []
    for gap in sorted(gap for own in by_name.values() for gap in _gaps(own)):
        # A pod that ends before all pods are back belongs to the same interruption.
        if gaps and gap.ended <= gaps[-1].began:
            gaps[-1] = gaps[-1]._replace(began=max(gap.began, gaps[-1].began))
        else:
            gaps.append(gap)
    count = max([len(gaps), *map(_count, by_name.values())])
    first = min((_made(pod) for own in by_name.values() for pod in own), default=0.0)
    unknown = [_Gap(first, first, "unknown, as its pods are gone")] * (count - len(gaps))
    return [
        Restart(
            attempt=0, restart=number, why=gap.why, time=gap.ended, away_s=gap.began - gap.ended
        )
        for number, gap in enumerate([*unknown, *gaps])
    ]


def _gaps(pods: Sequence[Object]) -> Iterator[_Gap]:
    """Yield the times without a pod; `pods` are the successive pods of one name."""
    for pod in pods:
        for one in container_statuses(pod):
            now, end = one.get("state") or {}, (one.get("lastState") or {}).get("terminated")
            began = _of(now.get("running") or now.get("terminated"), "startedAt")
            if end and one.get("restartCount"):
                yield _gap(pod, end, began)
    for pod, following in pairwise(pods):
        ends = [(one.get("state") or {}).get("terminated") for one in container_statuses(pod)]
        end = next(filter(None, ends), {})
        yield _gap(pod, end, _made(following), taken=disruption(pod))


def _gap(pod: Object, end: Object, began: float, *, taken: str = "") -> _Gap:
    ended = _of(end, "finishedAt") or began
    words = last_words(str(end.get("message") or ""))
    death = Death(
        pod=short_name(pod),
        exit_code=int(end.get("exitCode") or 0),
        reason=str(end.get("reason") or ""),
        finished="",
        words=replace(words, verdict="") if words.cause else words,
    )
    why = taken or (str(death) if end else f"{short_name(pod)}: ended without a trace")
    return _Gap(ended, max(ended, began), why)


def _count(pods: Sequence[Object]) -> int:
    """Return how often one of the pods was restarted, the maximum over all counters."""
    counts = (int(one.get("restartCount") or 0) for pod in pods for one in container_statuses(pod))
    return max([len(pods) - 1 + sum(counts), *(attempt_of(pod) or 0 for pod in pods)])


def _made(pod: Object) -> float:
    return seconds_of(pod["metadata"].get("creationTimestamp"))


def _of(state: Object | None, key: str) -> float:
    return seconds_of((state or {}).get(key))
