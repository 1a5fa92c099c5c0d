"""Access to the watchdogs of a run's pods: a command in each pod queries the watchdog there."""

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Missing
from toolkit.kubernetes.client.exec import execute
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.pods import is_up
from toolkit.runs.evidence.stacks import NO_WATCHDOG

_AT_ONCE = 8

_ASK = """\
cd "$TRAIN_RUN_DIR/logs" 2>/dev/null || exit 0  # without a watchdog there is no answer
_newest=`ls -d attempt-* | sort -t - -k 2 -n | tail -n 1`
cd "$_newest/watchdog" 2>/dev/null || exit 0
: >"ask-$1"
_looks=0
until cat answer-"$1"-"$HOSTNAME"-*.json 2>/dev/null || [ "$_looks" -ge 50 ]; do
  _looks=`expr "$_looks" + 1`
  sleep 0.2
done
rm -f answer-"$1"-"$HOSTNAME"-*.json
"""

_WITHDRAW = 'rm -f "$TRAIN_RUN_DIR"/logs/attempt-*/watchdog/ask-"$1"'


class PodsExchange:
    """The watchdog folders of the pods; on a shared volume it may be one folder."""

    def __init__(self, cluster: Cluster, selector: str, container: str) -> None:
        self._cluster, self._selector, self._container = cluster, selector, container
        self._answers: list[bytes] = []

    def ask(self, name: str) -> None:
        """Query the watchdogs of all pods, and wait for their answers."""
        self._answers = self._in_all_pods(_ASK, name)
        if not any(self._answers):
            raise LauncherError(f"no pod has answered: {NO_WATCHDOG}")

    def answers(self, name: str) -> Iterable[bytes]:
        """Return the answers of the pods."""
        return [line for answer in self._answers for line in answer.splitlines()]

    def withdraw(self, name: str) -> None:
        """Remove the query."""
        self._in_all_pods(_WITHDRAW, name)

    def _in_all_pods(self, script: str, name: str) -> list[bytes]:
        """Return a script's output in each running pod, except for pods that end meanwhile."""

        def printed(pod: str) -> bytes:
            parts: list[bytes] = []
            argv = ("sh", "-c", script, "sh", name)
            with contextlib.suppress(Away, Missing):
                execute(self._cluster, pod, self._container, argv, show=parts.append)
            return b"".join(parts)

        pods = filter(is_up, self._cluster.pods(self._selector))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(printed, [pod["metadata"]["name"] for pod in pods]))
