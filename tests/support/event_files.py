"""The curves of a folder of event files, read by the format, and by TensorBoard itself."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.unit.runs.test_googles_goodput import PACKAGE

READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
board.Reload()
print(json.dumps([(event.step, event.value) for event in board.Scalars(sys.argv[2])]))
"""


def events(folder: Path) -> Iterator[Event]:
    """Yield the events in the order in which TensorBoard reads them: length, CRC, event, CRC."""
    for path in sorted(folder.glob("events.out.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def curve(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    """Return a curve as TensorBoard shows it: a start voids what is recorded from its step on."""
    found: dict[int, float] = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            found = {step: value for step, value in found.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == tag:
                assert event.step not in found, "a step came twice"
                found[event.step] = value.simple_value
    return sorted(found.items())


def read_by_tensorboard(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    """Return a curve as TensorBoard reads it; without TensorBoard the test is skipped."""
    if not PACKAGE.is_dir():
        if os.environ.get("CI"):
            pytest.fail("CI must have tensorboard")
        pytest.skip("needs tensorboard; see tests/peers.sh")
    done = subprocess.run(
        [sys.executable, "-c", READ, folder, tag],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [(step, value) for step, value in json.loads(done.stdout)]
