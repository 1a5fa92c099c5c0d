"""How far a run is, as pods tell whoever watches them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_server import TrainerServer
from tests.unit.kubernetes.live import Live
from toolkit.runs.state import RunState

PRINTING = """
import pathlib, sys, time
for step in range(1, 41):
    print(f"step {step}/40 loss {1 / step:.3f}", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


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


def _percentage(server: TrainerServer) -> object:
    return server.posts[-1][2]["trainerStatus"]["progressPercentage"]
