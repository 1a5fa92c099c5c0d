"""How far a TrainJob is, as Kubeflow Trainer is told."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.trainer_server import TrainerServer
from tests.support.watchdog import program
from tests.unit.templates.test_entrypoint import DONE, Pod


@pytest.fixture(scope="module")
def trainer_status() -> ModuleType:
    return program("trainer_status")


def row(step: int, when: float, **more: Any) -> dict[str, Any]:
    return {"version": 1, "time": when, "attempt": 0, "restart": 0, "step": step, **more}


def test_a_status_has_percentage_time_left_and_figures(trainer_status: ModuleType) -> None:
    rows = [row(step, 1000 + 2 * step, loss=1 / step, epoch=0) for step in range(1, 31)]
    rows.append(row(30, 1070, test_accuracy=0.5))
    assert trainer_status.status_of(rows, {"steps": 40}) == {
        "lastUpdatedTime": "1970-01-01T00:17:50Z",
        "metrics": [
            {"name": "step", "value": "30"},
            {"name": "loss", "value": "0.0333333"},
            {"name": "test_accuracy", "value": "0.5"},
        ],
        "progressPercentage": 75,
        "estimatedRemainingSeconds": 23,
    }


def test_what_is_not_known_is_left_out(trainer_status: ModuleType) -> None:
    assert trainer_status.status_of([], {}) is None
    assert trainer_status.status_of([{"step": "7", "time": 1}, {}], {}) is None
    only = trainer_status.status_of([row(7, 10, loss=None, note="x", big=float("inf"))], {})
    assert only == {
        "lastUpdatedTime": "1970-01-01T00:00:10Z",
        "metrics": [{"name": "step", "value": "7"}],
    }
    restarted = [row(7, 10), {**row(5, 100), "restart": 1}]
    status = trainer_status.status_of(restarted, {"steps": 10})
    assert status["progressPercentage"] == 50
    assert "estimatedRemainingSeconds" not in status, "one record has no speed"
    beyond = trainer_status.status_of([row(7, 10)], {"steps": 5})
    assert "progressPercentage" not in beyond
    by_record = trainer_status.status_of([row(7, 10, steps=14)], {"steps": None})
    assert by_record["progressPercentage"] == 50


def test_a_status_is_what_the_schema_of_trainjobs_admits(trainer_status: ModuleType) -> None:
    many = {f"{'x' * 70}{number}": 10.0**number for number in range(300)}
    status = trainer_status.status_of([row(1, 1, **many), row(2, 1e6)], {"steps": 10**9})
    assert len(status["metrics"]) <= 256
    for metric in trainer_status.status_of([row(1, 1, **many)], {})["metrics"]:
        assert 1 <= len(metric["name"]) <= 64
        assert 1 <= len(metric["value"]) <= 64
    assert status["estimatedRemainingSeconds"] <= 2**31 - 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrainerServer]:
    with TrainerServer(tmp_path) as server:
        yield server


def write(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def test_the_server_gets_new_records_with_the_newest_token(
    trainer_status: ModuleType, server: TrainerServer, tmp_path: Path
) -> None:
    status = trainer_status.TrainerStatus(tmp_path, server.environ)
    status.send()
    assert server.posts == [], "there is no record"
    write(tmp_path, row(1, 1.0), row(2, 2.0))
    (tmp_path / "outcome.json").write_text(json.dumps({"steps": 4}, indent=1))
    status.send()
    status.send()
    ((path, token, message),) = server.posts
    assert (path, token) == ("/status", "Bearer first")
    assert message["trainerStatus"]["progressPercentage"] == 50
    (tmp_path / "token").write_text("second\n")
    write(tmp_path, row(4, 4.0))
    status.finish()
    assert server.posts[1][1] == "Bearer second"
    assert server.posts[1][2]["trainerStatus"]["progressPercentage"] == 100


def test_it_is_sent_every_ten_seconds_at_most(
    trainer_status: ModuleType, server: TrainerServer, tmp_path: Path
) -> None:
    status = trainer_status.TrainerStatus(tmp_path, server.environ)
    for now in range(100, 125):
        write(tmp_path, row(now, 1.0))
        status.look(float(now))
        status.thread.join()
    assert len(server.posts) == 3


def test_a_server_that_refuses_or_is_away_costs_one_line(
    trainer_status: ModuleType,
    server: TrainerServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer = 403
    status = trainer_status.TrainerStatus(tmp_path, server.environ)
    for step in range(3):
        write(tmp_path, row(step, 1.0))
        status.send()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "watchdog: no status to the trainer: HTTP Error 403: Forbidden"
    other = {**server.environ, "KUBEFLOW_TRAINER_SERVER_CA_CERT": ""}
    status = trainer_status.TrainerStatus(tmp_path, other)
    status.send()
    assert "certificate verify failed" in capsys.readouterr().err


def test_without_the_servers_variables_nothing_is_sent(
    trainer_status: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, row(1, 1.0))
    status = trainer_status.TrainerStatus(tmp_path, {})
    status.look(100.0)
    status.finish()
    assert not status.thread.is_alive()


@pytest.mark.parametrize("tells", [False, True])
def test_only_pods_of_trainjobs_have_it(tells: bool, tmp_path: Path) -> None:
    """Trainer gives them the variable with the address of its server."""
    pod = Pod(tmp_path, more={"stall_timeout": "1h"})
    server = {"KUBEFLOW_TRAINER_SERVER_URL": "https://127.0.0.1:9/"} if tells else {}
    assert pod.run("exit 0", **server) == DONE
    assert len([*pod.runs.glob("logs/*/*/watchdog/trainer_status.py")]) == tells
