"""The newest records of a run, printed from time to time by a command in one of its pods.

The output of the pod is untrusted: it only fills files with fixed names in a folder of this
process, which are read as carefully as a run directory.
"""

import functools
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Hashable
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Denied
from toolkit.kubernetes.client.exec import execute
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.pods import index_of, is_up
from toolkit.text import untrusted

PAUSE_S = 10.0
"""Minimum interval between two queries of a run."""

_TIMES_LONGER = 20
"""Minimum pause as a multiple of the query's duration, which bounds the load of many runs."""

_LAST_BYTES = 1 << 17
"""Maximum number of new bytes printed per file; earlier ones are skipped."""

_MOST_BYTES = 1 << 20
"""Maximum output of a pod."""

_PROGRAM = f"""\
cd "$TRAIN_RUN_DIR" 2>/dev/null || exit 0
show() {{  # FILE BYTES, where so many bytes are known
  _size=0 _from=$2
  [ ! -f "$1" ] || _size=`wc -c <"$1"`
  if [ "$_from" -gt "$_size" ]; then _from=0; fi
  if [ $((_size - _from)) -gt {_LAST_BYTES} ]; then _from=$((_size - {_LAST_BYTES})); fi
  echo "$1" $((_size)) $((_from))
  if [ "$_size" -gt "$_from" ]; then tail -c +$((_from + 1)) "$1" | head -c $((_size - _from)); fi
}}
show metrics.jsonl "$1"
show outcome.json 0
_newest=`ls -d logs/attempt-* 2>/dev/null | sort -t - -k 2 -n | tail -n 1`
for _name in stalls stragglers ranks steps; do
  show "${{_newest:-logs/attempt-0}}/watchdog/$_name.jsonl" 0
done
"""

_MOST_FILES = 6
"""Maximum number of files."""

_HEAD = re.compile(
    rb"(metrics\.jsonl|outcome\.json|logs/attempt-\d{1,9}/watchdog/(?:stalls|stragglers|ranks|steps)\.jsonl)"
    rb" (\d{1,15}) (\d{1,15})"
)


class Glimpse:
    """A folder with the ends of a run's record files, each at its original offset."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._next = 0.0

    def folder(self, cluster: Cluster, selector: str, container: str) -> Path | None:
        """Return the folder, after a query if the last one is old; None if nothing is known.

        Args:
            cluster: The cluster of the run.
            selector: Selects its pods.
            container: Their container.
        """
        if (began := time.monotonic()) >= self._next:
            pause_s = PAUSE_S
            try:
                self._ask(cluster, selector, container)
            except Denied:
                pause_s = float("inf")
            except LauncherError:
                pass  # the next query may succeed
            took_s = time.monotonic() - began
            self._next = began + max(pause_s, _TIMES_LONGER * took_s)
        return self._folder

    def _ask(self, cluster: Cluster, selector: str, container: str) -> None:
        running = [pod for pod in cluster.pods(selector) if is_up(pod)]
        if not running:
            return
        pod = min(running, key=index_of)  # without a claim, only that of rank 0 has the records
        known = self._size("metrics.jsonl")
        output = _Bounded()
        argv = ("sh", "-c", _PROGRAM, "sh", str(known))
        execute(cluster, pod["metadata"]["name"], container, argv, show=output.take)
        self._keep(bytes(output.content))

    def _size(self, name: str) -> int:
        if self._folder is None or not (path := self._folder / name).exists():
            return 0
        return path.stat().st_size

    def _keep(self, printed: bytes) -> None:
        """Write the complete parts of a pod's output into the files."""
        for _ in range(_MOST_FILES):
            line, _, printed = printed.partition(b"\n")
            if not (head := _HEAD.fullmatch(line)):
                return
            size, begin = int(head[2]), int(head[3])
            content, printed = printed[: size - begin], printed[size - begin :]
            if not 0 <= size - begin == len(content):
                return
            self._write(head[1].decode(), begin, content)

    def _write(self, name: str, begin: int, content: bytes) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="toolkit-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._size(name) != begin:
            untrusted.write_bytes(path, b"")
            os.truncate(path, begin)  # the part before is unknown: a hole
        untrusted.write_bytes(path, content, append=True)


class _Bounded:
    """Output of a bounded length."""

    def __init__(self) -> None:
        self.content = bytearray()

    def take(self, part: bytes) -> None:
        self.content += part
        if len(self.content) > _MOST_BYTES:
            raise LauncherError("a pod prints more than it was asked for")


@functools.lru_cache(maxsize=512)
def glimpse_of(key: Hashable) -> Glimpse:
    """Return the glimpse of a run, one per process, even if the run is opened several times.

    Args:
        key: The cluster and the run.
    """
    return Glimpse()
