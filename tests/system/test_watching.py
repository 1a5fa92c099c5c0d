"""`toolkit status --watch`: a run that is shown until it has ended."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from tests.conftest import TOOLKIT, Until
from tests.support import short_torchrun
from tests.support.terminal import OTHER_SCREEN, OWN_SCREEN, SEQUENCE, at_terminal

# A script that writes metrics of its own, and ends when the file `end` is there, with its status.
SCRIPT = """
import json, os, pathlib, time
run_dir = pathlib.Path(os.environ["TRAIN_RUN_DIR"])
step = 0
while not (run_dir / "end").exists():
    step += 1
    with (run_dir / "metrics.jsonl").open("a") as file:
        record = {"time": time.time(), "step": step, "loss": 1 / step, **MORE}
        file.write(json.dumps(record) + "\\n")
    time.sleep(0.05)
raise SystemExit(int((run_dir / "end").read_text() or 0))
"""


@pytest.fixture(autouse=True)
def ended(tmp_path: Path) -> Iterator[None]:
    """No run goes on when its test has failed."""
    yield
    for run_dir in tmp_path.glob("runs/*"):
        (run_dir / "end").touch()


@pytest.fixture
def run(tmp_path: Path, until: Until) -> toolkit.Run:
    return started(tmp_path, until)


def started(tmp_path: Path, until: Until, name: str = "steps", **more: object) -> toolkit.Run:
    script = tmp_path / f"{name}.py"
    script.write_text(f"MORE = {more!r}\n{SCRIPT}")
    env = {"PATH": short_torchrun.installed(tmp_path / f"bin-{name}")}
    job = toolkit.JobSpec.model_validate({"name": name, "script": str(script), "env": env})
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    submitted = toolkit.submit(job, to=profile)
    assert submitted.run_dir is not None
    until((submitted.run_dir / "metrics.jsonl").exists, "it makes steps")
    return submitted


FAILS_ONCE = """
import os, pathlib, sys, time
print("attempt", os.environ["TRAIN_ATTEMPT"], flush=True)
if os.environ["TRAIN_ATTEMPT"] == "0":
    sys.exit(3)
end_s = time.monotonic() + 100
while not pathlib.Path(os.environ["TRAIN_RUN_DIR"], "end").exists():
    if time.monotonic() > end_s:
        sys.exit(4)
    time.sleep(0.05)
"""


def test_the_log_of_an_attempt_ends_as_the_next_one_begins(tmp_path: Path) -> None:
    (script := tmp_path / "once.py").write_text(FAILS_ONCE)
    env = {"PATH": short_torchrun.installed(tmp_path / "bin")}
    job = {"name": "once", "script": str(script), "env": env, "retries": {"requeue": 1}}
    profile = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    run = toolkit.submit(toolkit.JobSpec.model_validate(job), to=profile)
    shown = "\n".join(run.logs(follow=True, attempt=0))
    assert "attempt 0" in shown and "attempt 1" not in shown
    assert run.status().state is toolkit.RunState.RUNNING
    end(run)
    assert run.wait(300, progress=False).state is toolkit.RunState.SUCCEEDED


def end(run: toolkit.Run, status: int = 0) -> None:
    assert run.run_dir is not None
    draft = run.run_dir / "end.draft"
    draft.write_text(str(status))
    draft.rename(run.run_dir / "end")


def test_without_a_terminal_only_changed_lines_follow(run: toolkit.Run, until: Until) -> None:
    argv = [str(TOOLKIT), "status", "--watch", run.name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = []
        for line in process.stdout:
            shown.append(line)
            if sum("progress:" in each for each in shown) == 2:
                end(run)
        assert process.wait(300) == 0
    text = "".join(shown)
    assert text.count("uri: ") == 1
    assert re.findall(r"state: +(\w+)", text) == ["RUNNING", "SUCCEEDED"]
    assert re.search(r"progress: +step \d+, loss [\d.e-]+, [\d.]+ s per step\n", text), text
    assert "\x1b" not in text


@pytest.mark.parametrize(("status", "state"), [(0, "SUCCEEDED"), (3, "FAILED")])
def test_rich_draws_a_bar_and_leaves_the_end(
    status: int, state: str, tmp_path: Path, until: Until
) -> None:
    run = started(tmp_path, until, steps=10_000)
    with at_terminal([TOOLKIT, "status", "-w", run.name]) as terminal:
        shown = r"state:     RUNNING *\n(.*\n)*progress:  [━╸╺]+  \d+/10000 \(\d+%\) *\n +loss "
        until(lambda: re.search(shown, terminal.screen()), "the bar", seen=terminal.screen)
        assert "\x1b[36mRUNNING" in terminal.drawn
        end(run, status)
        assert terminal.status() == bool(status)
        before, other, drawn = terminal.drawn.partition(OTHER_SCREEN)
        assert (before, other) == ("", OTHER_SCREEN)
        left = drawn.rpartition(OWN_SCREEN)[2]
        assert "\x1b[?25h" in drawn, "the cursor is shown again"
        lines = SEQUENCE.sub("", left).splitlines()
        assert f"state:     {state}" in [line.rstrip() for line in lines]
        assert ("first failure: rank 0" in left) == bool(status)


def test_a_run_that_has_ended_is_shown_without_another_screen(run: toolkit.Run) -> None:
    end(run)
    run.wait(300, progress=False)
    with at_terminal([TOOLKIT, "status", "-w", run.name]) as terminal:
        assert terminal.status() == 0
        assert "SUCCEEDED" in terminal.drawn
        assert OTHER_SCREEN not in terminal.drawn


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_who_is_interrupted_leaves_the_terminal_as_it_was(
    number: signal.Signals, status: int, run: toolkit.Run, until: Until
) -> None:
    with at_terminal([TOOLKIT, "status", "-w", run.name]) as terminal:
        until(lambda: "progress:" in terminal.screen(), "it is shown", seen=terminal.screen)
        terminal.process.send_signal(number)
        assert terminal.status() == status
        left = terminal.drawn.rpartition(OWN_SCREEN)[2]
        assert left.count("\x1b[?25l") == 0 and "\x1b[?25h" in terminal.drawn
        assert "RUNNING" in left and left.endswith("\n")
        assert "Traceback" not in left
    end(run)


def test_who_is_stopped_leaves_the_terminal_to_the_shell(run: toolkit.Run, until: Until) -> None:
    with at_terminal([TOOLKIT, "status", "-w", run.name]) as terminal:
        until(lambda: "progress:" in terminal.screen(), "it is shown", seen=terminal.screen)
        terminal.process.send_signal(signal.SIGTSTP)
        until(lambda: terminal.read().endswith(OWN_SCREEN), "it has left", seen=terminal.read)
        stat = Path(f"/proc/{terminal.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        terminal.process.send_signal(signal.SIGCONT)
        until(lambda: terminal.read().count(OTHER_SCREEN) == 2, "it is back", seen=terminal.read)
        end(run)
        assert terminal.status() == 0


def test_a_dumb_terminal_gets_the_changed_lines(run: toolkit.Run, until: Until) -> None:
    with at_terminal([TOOLKIT, "status", "-w", run.name], TERM="dumb") as terminal:
        until(lambda: terminal.read().count("progress:") > 1, "it goes on", seen=terminal.read)
        end(run)
        assert terminal.status() == 0
        assert terminal.drawn.count("uri: ") == 1
        assert "\x1b" not in terminal.drawn


def test_several_runs_are_shown_until_all_have_ended(
    run: toolkit.Run, tmp_path: Path, until: Until
) -> None:
    other = started(tmp_path, until, name="other")
    argv = [str(TOOLKIT), "status", run.name, other.name]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"state: +(\w+)", shown) == ["RUNNING", "RUNNING"]
    assert "\n\nuri: " in shown
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True)
    assert [each["name"] for each in json.loads(done.stdout)] == [run.name, other.name]
    end(run)
    run.wait(300)
    with subprocess.Popen([*argv, "-w"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline(), process.stdout.readline()]
        assert [line.split()[1] for line in first] == ["SUCCEEDED", "RUNNING"]
        end(other)
        assert process.wait(300) == 0
        assert re.search(rf"{other.name} +SUCCEEDED", process.stdout.read())


def test_top_is_a_table_as_wide_as_the_terminal(tmp_path: Path, until: Until) -> None:
    run = started(tmp_path, until, name="known", steps=10_000)
    other = started(tmp_path, until, name="unknown")
    with at_terminal([TOOLKIT, "top"], NO_COLOR="1") as terminal:
        row = rf"RUN +STATE +PROGRESS\s*\n{run.name} +RUNNING  [━╸ ]+  \d+/10000 "
        until(lambda: re.search(row, terminal.screen()), "a table", seen=terminal.screen)
        row = rf"\n{other.name}  RUNNING  step \d+, loss "
        until(lambda: re.search(row, terminal.screen()), "no bar", seen=terminal.screen)
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.drawn), "NO_COLOR"
        terminal.resize(40, 24)
        row = rf"^{run.name}  RUNNING\s*\n  [━╸ ]+  \d+/10000 "
        until(lambda: re.search(row, terminal.screen()), "below each other", seen=terminal.screen)
        assert max(map(len, terminal.screen().splitlines())) == 40
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.status() == 0
        assert run.name in terminal.drawn.rpartition(OWN_SCREEN)[2]
    end(run)
    end(other)


def test_top_shows_the_runs_that_go_on_and_their_end(
    run: toolkit.Run, tmp_path: Path, until: Until
) -> None:
    ended = started(tmp_path, until, name="ended")
    end(ended)
    ended.wait(300)
    other = started(tmp_path, until, name="other")
    with at_terminal([TOOLKIT, "top"], columns=100, rows=24, TERM="dumb") as terminal:
        until(lambda: terminal.read().count("RUNNING    step ") > 3, "they run", seen=terminal.read)
        end(run)
        until(lambda: re.search(r"steps-\S+  SUCCEEDED", terminal.read()), "it has ended")
        assert terminal.process.poll() is None, "another run goes on"
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.status() == 0
        assert other.name in terminal.drawn
        assert ended.name not in terminal.drawn
    end(other)
    assert other.wait(300).state is toolkit.RunState.SUCCEEDED


def test_top_without_a_terminal_shows_the_runs_once(run: toolkit.Run) -> None:
    def top(*more: str) -> str:
        argv = [str(TOOLKIT), "top", *more]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    assert re.fullmatch(rf"{run.name}  RUNNING    step \d+, loss .*\n", top())
    assert top("--job", "another") == "you have no active runs\n"
    end(run)
    run.wait(300)
    assert top() == "you have no active runs\n"


def test_progress_is_in_the_json_of_a_running_run_alone(run: toolkit.Run) -> None:
    def status() -> dict[str, object]:
        argv = [str(TOOLKIT), "status", "--json", run.name]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        return dict(json.loads(done.stdout))

    progress = status()["progress"]
    assert isinstance(progress, dict)
    assert progress["step"] >= 1 and progress["steps_planned"] is None
    end(run)
    run.wait(300)
    assert status()["progress"] is None
    done = subprocess.run(
        [str(TOOLKIT), "status", "--json", "-w", run.name],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--json" in done.stderr


def test_who_waits_for_several_runs_sees_how_many_have_ended(
    run: toolkit.Run, tmp_path: Path, until: Until
) -> None:
    other = started(tmp_path, until, name="other")
    argv = [str(TOOLKIT), "wait", run.name, other.name]
    with at_terminal(argv) as terminal:

        def drawn() -> str:
            return SEQUENCE.sub("", terminal.read())

        until(lambda: "0 of 2 ended: 2 RUNNING" in drawn(), "both run", seen=drawn)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.status() == 130
        left = re.split(r"\r|\n|\x1b\[2K", terminal.drawn)[-1]
        assert SEQUENCE.sub("", left) == "", "no half of a line"
    with at_terminal(argv) as terminal:
        until(lambda: "0 of 2 ended: 2 RUNNING" in drawn(), "both run", seen=drawn)
        end(run)
        shown = "1 of 2 ended: 1 RUNNING, 1 SUCCEEDED"
        until(lambda: shown in drawn(), "one has ended", seen=drawn)
        assert re.search(rf"\r{run.name}: SUCCEEDED; run directory .*\r\n", drawn())
        end(other, 3)
        assert terminal.status() == 1
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("note: waiting for 2 runs\n")
    assert f"{other.name}: FAILED" in done.stderr
