"""Steps that are read out of what a rank prints."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.record_schemas import faults_of
from tests.support.watchdog import program
from toolkit.runs.goodput import goodput_of
from toolkit.runs.progress import progress_of
from toolkit.runs.run_directory import read_metrics

OURS = r"step (?P<step>\d+) loss (?P<loss>\S+)"


@pytest.fixture(scope="module")
def log_steps() -> ModuleType:
    return program("log_steps")


class Printing:
    """A run whose rank 0 prints what the test says; each start has a folder of its own."""

    def __init__(self, module: ModuleType, folder: Path, pattern: str, rank: str = "first") -> None:
        self.folder, self.starts = folder, 0
        self.reader = module.LogSteps(folder, pattern, rank)
        self.ranks: list[dict[str, Any]] = []

    def begin(self, *, restart: int = 0, world: int = 1, own: int = 0) -> None:
        """Begin a start of `world` ranks, of which this node has number `own`."""
        self.starts += 1
        self.logs = self.folder / f"logs/start-{self.starts}"
        self.logs.mkdir(parents=True)
        place = {"rank": own, "world": world, "pid": 100 + self.starts, "restart": restart}
        self.ranks = [{**place, "error_file": str(self.logs / "error.json")}]
        self.reader.look(self.ranks)

    def prints(self, text: str, to: str = "stdout") -> None:
        with (self.logs / f"{to}.log").open("a", newline="") as file:
            file.write(text)
        self.reader.look(self.ranks)

    def records(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Return what was recorded, without times."""
        assert faults_of(self.folder) == []
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        away = ("version", "time")
        return [{k: v for k, v in json.loads(one).items() if k not in away} for one in lines]

    def figures(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in one.items() if k not in ("attempt", "restart")}
            for one in self.records()
        ]


@pytest.mark.parametrize(
    ("pattern", "printed", "recorded"),
    [
        (OURS, "step 1 loss 2.5\nstep 2 loss nan\n", [
            {"step": 1, "loss": 2.5}, {"step": 2, "loss": None}
        ]),
        (  # as Megatron prints it
            r"iteration +(?P<step>\d+)/ *(?P<steps>\d+).* lm loss: (?P<loss>\S+)",
            " iteration     1,200/  500000 | consumed samples: 64 | lm loss: 1.083E+01 | x\n"
            .replace("1,200", "1200"),
            [{"step": 1200, "steps": 500000, "loss": 10.83}],
        ),
        (  # as tqdm and the Trainer of transformers print it: the loss has no step
            r"(?P<step>\d+)/(?P<steps>\d+) \[|'loss': '?(?P<loss>[\d.]+)|'lr': (?P<lr>[^,]+)",
            "  0%|          | 1/40 [00:00<00:10]\r  2%|▏         | 2/40 [00:01<00:09]\n"
            "{'loss': 0.693, 'lr': 4.5e-05, 'epoch': 0.1}\n",
            [
                {"step": 1, "steps": 40},
                {"step": 2, "steps": 40},
                {"step": 2, "loss": 0.693, "lr": 4.5e-05},
            ],
        ),
        (  # the same step in several lines; a figure of a step counts once
            r"step (?P<step>[\d,]+)|loss (?P<loss>\S+)|acc (?P<acc>\S+)",
            "step 1,000 loss 1\nstep 1,000 acc 0.5\nstep 1,000 loss 9 acc 9\n",
            [{"step": 1000, "loss": 1.0}, {"step": 1000, "acc": 0.5}],
        ),
        (r"step (?P<step>\S+)", "step one\nstep inf\nstep 1.5\nsteps\nno\n", []),
        (r"(?P<step>\d+)", "loss 3 of the first step is before it\n"[:5] + "\n7\n", [{"step": 7}]),
    ],
)  # fmt: skip
def test_what_scripts_print_becomes_records(
    log_steps: ModuleType, tmp_path: Path, pattern: str, printed: str, recorded: list[Any]
) -> None:
    run = Printing(log_steps, tmp_path, pattern)
    run.begin()
    run.prints(printed)
    assert run.figures() == recorded


def test_a_line_counts_when_it_has_ended(log_steps: ModuleType, tmp_path: Path) -> None:
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("step 1 lo")
    run.prints("ss 0.2")
    assert run.figures() == []
    run.prints("5\nstep 2 loss 0.1\nst")
    run.prints("step 3 loss 0\n", to="stderr")
    assert [one["step"] for one in run.figures()] == [1, 2, 3]
    assert run.figures()[0]["loss"] == 0.25


def test_long_lines_are_cut_and_much_output_is_read_in_parts(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("x" * (log_steps.MOST_BYTES + 10) + "step 1 loss 1\nstep 2 loss 2\n")
    run.prints("")
    assert [one["step"] for one in run.figures()] == [2]


def test_a_new_start_goes_on_and_status_goodput_and_curves_know_its_steps(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    run = Printing(log_steps, tmp_path, r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)")
    run.begin(world=2)
    run.prints("".join(f"step {n}/9 loss {9 - n}\n" for n in range(1, 6)))
    run.begin(restart=1, world=2)
    run.prints("".join(f"step {n}/9 loss {8 - n}\n" for n in range(4, 8)))
    assert [row["loss"] for row in read_metrics(tmp_path)] == [8, 7, 6, 4, 3, 2, 1]
    progress = progress_of(tmp_path)
    assert progress is not None
    assert (progress.step, progress.steps, progress.loss, progress.restart) == (7, 9, 1.0, 1)
    goodput = goodput_of(tmp_path)
    assert (goodput.steps, goodput.steps_again, goodput.starts, goodput.ranks) == (7, 2, 2, 2)
    assert [one["event"] for one in run.records("events")] == ["start", "ready"] * 2


def test_steps_may_begin_at_0_and_be_printed_now_and_then(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("step 0 loss 3\nstep 100 loss 2\nstep 101 loss 1\n")
    assert run.figures() == [
        {"step": 0, "loss": 3.0},
        {"step": 100, "loss": 2.0, "count": 100},
        {"step": 101, "loss": 1.0},
    ]
    assert [one["step"] for one in run.records("events")] == [0, 0]
    assert goodput_of(tmp_path).steps == 102


def test_a_step_that_goes_back_is_left_out_and_told_once(
    log_steps: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that counts within epochs: its second epoch is no new start of the ranks."""
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("step 8 loss 1\nstep 9 loss 1\nstep 1 loss 1\nstep 2 loss 1\nstep 10 loss 1\n")
    assert [one["step"] for one in run.figures()] == [8, 9, 10]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("watchdog: log_pattern: step 1 after step 9 is left out: ")


def test_a_script_that_writes_its_own_records_is_left_alone(
    log_steps: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 1, "time": 1, "attempt": 0, "restart": 0, "step": 1}\n')
    run.prints("step 1 loss 1\n")
    run.prints("step 2 loss 1\n")
    assert run.figures() == [{"step": 1}]
    assert "the script itself writes metrics.jsonl" in capsys.readouterr().err


def test_a_torn_line_of_an_earlier_attempt_does_not_swallow_a_record(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("step 1 loss 3\n")
    torn, record = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (torn, json.loads(record)["loss"]) == ('{"step": 1, "lo', 3.0)


@pytest.mark.parametrize(
    ("rank", "own", "steps"), [("last", 3, 1), ("last", 0, 0), ("first", 3, 0)]
)
def test_one_rank_is_read(
    log_steps: ModuleType, tmp_path: Path, rank: str, own: int, steps: int
) -> None:
    run = Printing(log_steps, tmp_path, OURS, rank)
    run.begin(world=4, own=own)
    if steps == 0:
        assert not run.reader.pid
        return
    run.prints("step 1 loss 1\n")
    assert len(run.figures()) == 1
