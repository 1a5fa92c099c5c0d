"""What a start runs on, as it is recorded."""

import platform
import socket
from pathlib import Path

import torch

from tests.train.conftest import Start
from train.runtime.environment import packages_digest


def test_two_ranks_record_their_versions_and_their_node(start: Start, tmp_path: Path) -> None:
    run = start.whole(2, "--task=digits", "--steps=1", run_dir=tmp_path / "run")
    (row,) = [event for event in run.events() if event["event"] == "environment"]
    assert (row["python"], row["torch"]) == (platform.python_version(), torch.__version__)
    assert row["nodes"] == [{"host": socket.gethostname(), "ranks": 2, "gpu": None}]
    assert row["packages_differ"] == []
    assert len(row["packages"]) == 16


def test_the_digest_changes_with_a_version_and_not_with_the_order(tmp_path: Path) -> None:
    digests = []
    for number, version in enumerate(("1.0", "1.0", "1.1")):
        site = tmp_path / str(number)
        for name in (f"b-{version}", "a-2") if number else ("a-2", f"b-{version}"):
            (site / f"{name}.dist-info").mkdir(parents=True)
        digests.append(packages_digest([str(site), "/nowhere"]))
    assert digests[0] == digests[1] != digests[2]
