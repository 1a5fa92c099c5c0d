"""How far a run is, as pods tell whoever watches them."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

import toolkit
from tests.support.trainer_server import TrainerServer
from tests.unit.kubernetes.live import Live
from toolkit.cli.summary import summary_lines, summary_of, top_rows
from toolkit.errors import LauncherError
from toolkit.kubernetes import glimpse
from toolkit.kubernetes.client.connection import Denied
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.glimpse import Glimpse
from toolkit.runs.evidence.progress import ProgressReader
from toolkit.runs.state import RunState

PRINTING = """
import pathlib, sys, time
for step in range(1, 41):
    print(f"step {step}/40 loss {1 / step:.3f}", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""

STALLED = """
import json, os, pathlib
logs = pathlib.Path(os.environ["TRAIN_RUN_DIR"], "logs/attempt-0/watchdog")
stall = {"version": 1, "time": 0, "stalled": True, "why": "no step for 9 s"}
(logs / "stalls.jsonl").write_text(json.dumps(stall) + "\\n")
"""
"""Writes what the watchdog would, a long time later."""


@pytest.mark.parametrize("workload", ["TrainJob"])
def test_the_trainer_is_told_how_far_a_script_is_that_only_prints(
    live: Live, tmp_path: Path
) -> None:
    job: dict[str, Any] = {
        "command": ["python3", "-c", PRINTING],
        "args": [str(tmp_path / "told")],
        "log_pattern": r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)",
    }
    with TrainerServer(tmp_path) as server:
        # As the controller sets them where its feature gate TrainJobStatus is on.
        run = live.submit(env=server.environ, **job)
        # The first status may come in the midst of the steps, the next one ten seconds later.
        live.until(lambda: server.posts and _percentage(server) == 100, "all steps are told")
        (tmp_path / "told").touch()
        assert live.ended(run).state is RunState.SUCCEEDED, live.told(run)
    path, token, message = server.posts[-1]
    assert (path, token) == ("/status", "Bearer first")
    metrics = {each["name"]: each["value"] for each in message["trainerStatus"]["metrics"]}
    assert metrics == {"step": "40", "loss": "0.025"}


@pytest.mark.parametrize("workload", ["JobSet"])
def test_status_shows_the_steps_of_a_run_on_a_claim(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glimpse, "PAUSE_S", 0.0)
    run = live.submit(
        command=["python3", "-c", STALLED + PRINTING],
        args=[str(tmp_path / "told")],
        log_pattern=r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)",
    )
    seen: list[dict[str, Any]] = []

    def shows_all() -> bool:
        seen.append(summary_of(run))
        return "step 40/40 (100%), loss 0.025" in "\n".join(summary_lines(seen[-1]))

    live.until(shows_all, "the status shows the last step")
    # Another process of the user's has a handle of its own, and so has each look of `top`.
    again = toolkit.open_run(run.uri)
    readers: dict[str, ProgressReader] = {}
    (row,) = top_rows([(again, again.status())], readers)
    assert row.progress is not None and row.progress.step == 40
    assert seen[-1]["stall"] == "no step for 9 s"
    (tmp_path / "told").touch()
    assert live.ended(run).state is RunState.SUCCEEDED, live.told(run)
    assert summary_of(run)["progress"] is None


def test_who_may_not_run_commands_in_pods_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Guarded:
        def pods(self, selector: str) -> list[Any]:
            asked.append(selector)
            raise Denied("pods is forbidden")

    monkeypatch.setattr(glimpse, "PAUSE_S", 0.0)
    one, cluster = Glimpse(), cast(Cluster, Guarded())
    assert [one.folder(cluster, "run=a", "node") for _ in range(3)] == [None] * 3
    assert asked == ["run=a"]


def printed(name: str, size: int, begin: int, content: bytes) -> bytes:
    return f"{name} {size} {begin}\n".encode() + content


def test_ends_of_files_are_kept_at_their_places() -> None:
    one = Glimpse()
    metrics = [json.dumps({"time": step, "step": step, "attempt": 0}) + "\n" for step in range(9)]
    text = "".join(metrics).encode()
    at = len("".join(metrics[:6]))
    one._keep(printed("metrics.jsonl", at, 20, text[20:at]) + printed("outcome.json", 0, 0, b""))
    folder = one._folder
    assert folder is not None
    reader = ProgressReader(folder)
    progress = reader.progress()
    assert progress and progress.step == 5
    one._keep(printed("metrics.jsonl", len(text), at, text[at:]))
    progress = reader.progress()
    assert progress and progress.step == 8
    # The run directory was emptied, and filled again.
    one._keep(printed("metrics.jsonl", len(metrics[0]), 0, metrics[0].encode()))
    progress = reader.progress()
    assert progress and progress.step == 0


@pytest.mark.parametrize(
    "words",
    [
        b"../x 3 0\nabc",
        b"logs/attempt-0/../../x 3 0\nabc",
        b"metrics.jsonl 9 0\nabc",
        b"metrics.jsonl 0 9\nabc",
        b"metrics.jsonl " + b"9" * 99 + b" 0\nabc",
        b"\xff\x00",
        b"sh: not found",
    ],
)
def test_what_a_pod_prints_otherwise_is_left_out(words: bytes) -> None:
    one = Glimpse()
    one._keep(words)
    assert one._folder is None


def test_a_pod_that_does_not_stop_printing_is_left_alone() -> None:
    output = glimpse._Bounded()
    with pytest.raises(LauncherError, match="more than it was asked for"):
        for _ in range(1000):
            output.take(b"x" * 32_000)


def _percentage(server: TrainerServer) -> object:
    return server.posts[-1][2]["trainerStatus"]["progressPercentage"]
