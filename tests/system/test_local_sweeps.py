"""Sweeps on this machine, for real: points that take turns, fail, are cancelled and continued."""

import json
import os
import subprocess
from pathlib import Path
from string import Template

import pytest

import toolkit
from tests.conftest import TOOLKIT, Until
from toolkit.runs.state import RunState

# Each point says what it was given, and waits.
POINT = """
echo "$0 $1 $SEED begun" && touch "$TRAIN_RUN_DIR/begun"
trap 'echo stopping; exit 143' TERM
until [ -e "$TRAIN_RUN_DIR/../go" ]; do sleep 0.1; done
[ "$1" != 2 ] || [ -e "$TRAIN_RUN_DIR/../mended" ] || { echo "a is too large" >&2; exit 7; }
"""


def submit(folder: Path, **changes: object) -> toolkit.Run:
    sweep = {"grid": {"--a": [1, 2], "env.SEED": [0, 1]}, "max_running": 2, **changes}
    job = toolkit.JobSpec.model_validate(
        {"name": "points", "command": ["bash", "-c", POINT], "sweep": sweep}
    )
    profile = toolkit.LocalProfile(name="here", runs_dir=str(folder / "runs"))
    # One CPU for each would do; this machine may have one.
    plan = toolkit.plan(job.replace(resources={"cpus_per_node": 1}), profile)
    return toolkit.submit(plan)


def states(run: toolkit.Run) -> str:
    return " ".join(status.state.name[0] for status in run.statuses())


def go(run: toolkit.Run) -> toolkit.RunStatus:
    Path(str(run.run_dir), "go").touch()
    return run.wait(300)


def test_points_run_to_their_own_ends_and_can_be_continued(tmp_path: Path, until: Until) -> None:
    run = submit(tmp_path)
    until(
        lambda: states(run) in ("R R P P", "R P P P"),
        "the first points run",
        seen=lambda: states(run),
    )
    assert run.status().state is RunState.RUNNING
    assert run.points[3].status().reason == "other points run"
    status = go(run)
    assert (status.state, status.reason) == (RunState.FAILED, "2 SUCCEEDED, 2 FAILED")
    again = toolkit.open_run(run.uri)
    assert states(again) == "S S F F"
    assert [point.name for point in again.points] == [
        f"{run.name}/000{index}-a={a}-seed={seed}"
        for index, (a, seed) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)])
    ]
    lines = [line for line in again.logs() if line.endswith("begun")]
    assert lines == [
        f"[{point.name.rpartition('/')[2]}] [rank 0] --a {a} {seed} begun"
        for point, (a, seed) in zip(again.points, [(1, 0), (1, 1), (2, 0), (2, 1)], strict=True)
    ]
    assert "exit status 7" in toolkit.open_run(f"{run.uri}_2").status().reason
    with pytest.raises(toolkit.LauncherError, match="is continued by hand: bash") as refused:
        toolkit.resubmit(again)
    Path(str(run.run_dir), "mended").touch()
    command = str(refused.value).partition("by hand: ")[2]
    path = f"{TOOLKIT.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env={**os.environ, "PATH": path})
    assert states(again) == "S S S S"
    attempts = [
        len([*Path(str(point.run_dir), "logs").glob("attempt-*")]) for point in again.points
    ]
    assert attempts == [1, 1, 2, 2]


def test_a_point_is_cancelled_alone_and_a_sweep_with_all_that_wait(
    tmp_path: Path, until: Until
) -> None:
    run = submit(tmp_path, max_running=1)
    until(lambda: Path(str(run.points[0].run_dir), "begun").exists(), "the first point runs")
    run.points[2].cancel()
    assert states(run) == "R P C P"
    run.points[0].cancel()
    until(lambda: Path(str(run.points[1].run_dir), "begun").exists(), "the next one runs")
    assert states(run) == "C R C P"
    run.cancel()
    assert run.wait(300).state is RunState.CANCELLED
    assert states(run) == "C C C C"
    assert [status.reason for status in run.statuses()] == [
        "cancelled: stopped by a signal; not started again",
        "cancelled: stopped by a signal; not started again",
        *["never started"] * 2,
    ]


def test_a_sweep_whose_supervisor_is_killed_does_not_seem_to_wait(
    tmp_path: Path, until: Until
) -> None:
    run = submit(tmp_path, max_running=1)
    until(lambda: Path(str(run.points[0].run_dir), "begun").exists(), "the first point runs")
    pid = int(Path(str(run.run_dir), "running.lock").read_text())
    os.kill(pid, 9)
    until(lambda: run.points[0].status().state.final, "the point that ran is stopped")
    assert [status.reason for status in run.statuses()[1:]] == [
        "the sweep has ended before this point was started"
    ] * 3


def test_every_point_reaches_torchrun_byte_for_byte_and_executes_nothing(tmp_path: Path) -> None:
    hostile = [
        "it's $HOME `x` \\",
        "two\nlines\t*",
        '"quoted" # no',
        "",
        "$$",
        "--",
        "$(touch executed)${TRAIN_RUN_DIR}/x y",
        "\"; touch executed; '\n$(touch executed)",
    ]
    spec = toolkit.JobSpec.model_validate(
        {
            "name": "hostile",
            "module": "train",
            "args": ["first", "--out=$TRAIN_RUN_DIR", "--text", "old"],
            "env": {"V": "job"},
            "sweep": {"zip": {"--text": hostile, "env.V": hostile}},
        }
    )
    script = tmp_path / "run.sh"
    script.write_text(toolkit.render(toolkit.plan(spec, toolkit.LocalProfile(name="here"))))
    torchrun = tmp_path / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        "with open(os.environ['TRAIN_RUN_DIR'] + '/seen', 'w') as seen:\n"
        "    json.dump([sys.argv, os.environ['V']], seen)\n"
    )
    torchrun.chmod(0o755)
    path = f"{torchrun.parent}{os.pathsep}{TOOLKIT.parent}{os.pathsep}{os.environ['PATH']}"
    runs = tmp_path / "it's a $(touch executed) folder"
    subprocess.run(
        ["bash", script, runs], check=True, cwd=tmp_path, env={**os.environ, "PATH": path}
    )
    for value, point in zip(hostile, spec.points, strict=True):
        argv, variable = json.loads((runs / point.name / "seen").read_text())
        words = [Template(word).safe_substitute() for word in argv]  # as torchrun reads them
        known = value.replace("${TRAIN_RUN_DIR}", str(runs / point.name))
        text = ["--text=--"] if value == "--" else ["--text", known]
        out = f"--out={runs / point.name}"
        assert words[-len(text) - 4 :] == ["-m", "train", "first", out, *text]
        assert variable == value
    assert not list(tmp_path.rglob("executed"))
