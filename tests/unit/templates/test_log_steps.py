"""Steps that are read out of what a rank prints."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.record_schemas import faults_of
from tests.support.watchdog import program
from toolkit.runs.evidence.progress import progress_of
from toolkit.runs.evidence.stacks import steps_left_out
from toolkit.runs.records.run_directory import read_metrics
from toolkit.runs.views.goodput import goodput_of

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
        began = str(self.starts)
        self.ranks = [{**place, "began": began, "error_file": str(self.logs / "error.json")}]
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
            r"(?P<step>\d+)/(?P<steps>\d+) \[|'loss': '?(?P<loss>[^',}]+)|'lr': (?P<lr>[^,]+)",
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
    assert (progress.step, progress.steps_planned, progress.loss, progress.restart) == (
        7,
        9,
        1.0,
        1,
    )
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
    goodput = goodput_of(tmp_path)
    assert (goodput.step, goodput.steps) == (101, 101)


EPOCH = r"Epoch (?P<epoch>\d+)"
BATCH = r"\[ *(?P<step>\d+)/ *(?P<steps>\d+)\]"


def epochs_of(line: str, *, epochs: int = 3, length: int = 4) -> str:
    """Return lines for steps 1 to `length` of each epoch from 1 on."""
    return "".join(
        line.format(epoch=epoch, step=step, length=length)
        for epoch in range(1, epochs + 1)
        for step in range(1, length + 1)
    )


@pytest.mark.parametrize(
    ("pattern", "printed", "steps", "in_all"),
    [
        pytest.param(
            EPOCH + " " + BATCH + r" loss (?P<loss>\S+)",
            epochs_of("Epoch {epoch} [{step}/{length}] loss 0.1\n"),
            list(range(1, 13)),
            None,
            id="epoch and step within it",
        ),
        pytest.param(
            r"Epoch \[(?P<epoch>\d+)/(?P<epochs>\d+)\] " + BATCH,
            epochs_of("Epoch [{epoch}/3] [{step}/{length}]\n"),
            list(range(1, 13)),
            12,
            id="with the number of epochs",
        ),
        pytest.param(
            r"epoch: (?P<epoch>\d+) step: (?P<step>\d+)",
            epochs_of("epoch: {epoch} step: {step}\n"),
            list(range(1, 13)),
            None,
            id="without the steps of an epoch",
        ),
        pytest.param(
            r"epoch: (?P<epoch>\d+) step: (?P<step>\d+)",
            "".join(f"epoch: {n // 3} step: {n % 3}\n" for n in range(9)),
            list(range(9)),
            None,
            id="both from 0",
        ),
        pytest.param(
            EPOCH + "|loss: (?P<loss>\\S+) " + BATCH,
            "".join(f"Epoch {e}\n---\nloss: 1 [100/938]\nloss: 1 [900/938]\n" for e in (1, 2)),
            [100, 900, 1038, 1838],
            None,
            id="epoch on a line of its own, each hundredth step",
        ),
        pytest.param(
            EPOCH + r" step (?P<step>\d+)/(?P<steps>\d+)",
            "".join(f"Epoch {1 + n // 5} step {n}/12\n" for n in range(1, 13)),
            list(range(1, 13)),
            12,
            id="steps of the run, with epochs",
        ),
        pytest.param(
            r"\| (?P<step>\d+)/(?P<steps>\d+) \[",
            "".join(f" 9%|# | {n}/4 [00:01]\r" for _ in range(3) for n in range(5)),
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
            None,
            id="a progress bar for each epoch",
        ),
        pytest.param(
            r"step (?P<step>\d+)",
            epochs_of("step {step}\n"),
            list(range(1, 13)),
            None,
            id="steps that fall back",
        ),
        pytest.param(
            r"step (?P<step>\d+)",
            "".join(f"step {step}\n" for step in range(1, 13)),
            list(range(1, 13)),
            None,
            id="steps of the run",
        ),
        pytest.param(
            r"(?P<step>\d+)/(?P<steps>\d+) \[|'loss': (?P<loss>[^,]+), 'epoch': (?P<epoch>[\d.]+)",
            "1/3 [\n{'loss': 0.5, 'epoch': 0.5}\n2/3 [\n{'loss': 0.4, 'epoch': 1.0}\n3/3 [\n",
            [1, 2, 3],
            3,
            id="epochs with fractions",
        ),
    ],
)
def test_steps_count_through_all_epochs(
    log_steps: ModuleType,
    tmp_path: Path,
    pattern: str,
    printed: str,
    steps: list[int],
    in_all: int | None,
) -> None:
    run = Printing(log_steps, tmp_path, pattern)
    run.begin()
    run.prints(printed)
    assert [row["step"] for row in read_metrics(tmp_path)] == steps
    progress = progress_of(tmp_path)
    assert progress is not None and (progress.step, progress.steps_planned) == (steps[-1], in_all)
    goodput = goodput_of(tmp_path)
    assert (goodput.step, goodput.steps, goodput.steps_again) == (steps[-1], steps[-1], 0)
    run.reader.finish()
    assert steps_left_out(tmp_path) is None


@pytest.mark.parametrize("is_same_attempt", [True, False])
def test_epochs_that_are_made_again_have_the_same_steps(
    log_steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same_attempt: bool
) -> None:
    pattern = EPOCH + " " + BATCH
    run = Printing(log_steps, tmp_path, pattern)
    run.begin()
    run.prints(epochs_of("Epoch {epoch} [{step}/{length}]\n"))
    if not is_same_attempt:
        monkeypatch.setenv("TRAIN_ATTEMPT", "1")
        run.reader = log_steps.LogSteps(tmp_path, pattern)
    run.begin(restart=int(is_same_attempt))
    run.prints("Epoch 3 [1/4]\nEpoch 3 [4/4]\nEpoch 4 [1/4]\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [*range(1, 10), 12, 13]
    goodput = goodput_of(tmp_path)
    assert (goodput.step, goodput.steps, goodput.steps_again) == (13, 13, 4)


def test_a_start_in_an_unknown_epoch_counts_from_the_first_and_says_so(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints(epochs_of("step {step} loss 1\n"))
    run.begin(restart=1)
    run.prints(epochs_of("step {step} loss 1\n", epochs=2))
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 9))
    why = steps_left_out(tmp_path)
    assert why is not None and why.startswith("in which epoch the ranks have started again is unkn")


@pytest.mark.parametrize(
    ("pattern", "printed", "steps", "lines"),
    [
        (OURS, "step 1 loss 1\nstep 9 loss 1\nstep 5 loss 1\nstep 6 loss 1\nstep 10 loss 1\n",
         [1, 9, 10], 2),
        (BATCH, "[1/9]\n[9/9]\ntest [1/2]\ntest [2/2]\n[1/9]\n", [1, 9, 10], 2),
        (EPOCH + " " + BATCH, "Epoch 1 [5/9]\nEpoch 1 [1/9]\n", [5], 1),
    ],
)  # fmt: skip
def test_lines_that_are_left_out_are_counted(
    log_steps: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pattern: str,
    printed: str,
    steps: list[int],
    lines: int,
) -> None:
    run = Printing(log_steps, tmp_path, pattern)
    run.begin()
    run.prints(printed)
    run.reader.finish()
    assert [one["step"] for one in run.figures()] == steps
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1
    why = steps_left_out(tmp_path)
    assert why is not None and why.startswith(f"{lines} line")


def test_two_outputs_of_a_rank_begin_an_epoch_once(log_steps: ModuleType, tmp_path: Path) -> None:
    run = Printing(log_steps, tmp_path, r"(?P<step>\d+)/(?P<steps>\d+)")
    run.begin()
    for _ in range(3):
        run.prints("1/4\n2/4\n3/4\n4/4\n", to="stderr")
        run.prints("1/4\n2/4\n3/4\n4/4\n")
    assert {one["step"] for one in run.figures()} == set(range(1, 13))
    assert steps_left_out(tmp_path) is None


def test_what_anybody_wrote_as_epochs_does_not_stop_the_reading(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "logs/attempt-0/watchdog"
    folder.mkdir(parents=True)
    row = {"epoch": "1", "before": -1, "length": [], "first": None}
    (folder / "steps.jsonl").write_text(f"{json.dumps(row)}\n7\nnull\n{{\n[[[\n\xff\n")
    run = Printing(log_steps, tmp_path, OURS)
    run.begin()
    run.prints("step 1 loss 1\n")
    assert [one["step"] for one in run.figures()] == [1]


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


def test_the_last_rank_of_an_earlier_start_is_not_read_again(
    log_steps: ModuleType, tmp_path: Path
) -> None:
    """A node with ranks 2 and 3 of 4 goes on alone with ranks 0 and 1: rank 3's file stays."""
    run = Printing(log_steps, tmp_path, OURS, rank="last")
    run.begin(world=4, own=3)
    run.prints("step 1 loss 2\n")
    before = run.ranks
    run.begin(world=2, own=1, restart=1)
    run.ranks = [*before, *run.ranks]
    for step in (2, 3, 4):
        run.prints(f"step {step} loss 1\n")
    assert [one["step"] for one in run.figures()] == [1, 2, 3, 4]
    assert sum(one["event"] == "start" for one in run.records("events")) == 2
