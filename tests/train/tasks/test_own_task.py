"""A task in a file of your own: the page that explains it is run, and mistakes are explained."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.train.conftest import Start
from tests.train.support.making import trainer_for
from train import tasks
from train.errors import UsageError
from train.failure.diagnose import describe, in_short, part_of

PAGE = ROOT / "docs/how-to/own-task.md"


@pytest.fixture(scope="module")
def page() -> list[str]:
    """The Python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path, page: list[str]) -> Path:
    """The page's task as a file, with what the page adds later."""
    path = tmp_path / "my_task.py"
    main, predictions, identity, shared = page
    path.write_text(f"{main}\n{predictions}\n{identity}\n\n{shared}")
    return path


@pytest.mark.slow
def test_the_page_runs_on_two_ranks_and_learns(start: Start, tmp_path: Path, file: Path) -> None:
    (command,) = re.findall(r"^\$ torchrun .* -m train (.*)$", PAGE.read_text(), re.MULTILINE)
    flags = command.split()
    assert flags[:2] == ["--task", f"{file.name}:Diabetes"]
    run = start.ranks(2, *flags, run_dir=tmp_path / flags[flags.index("--run-dir") + 1]).finish()
    # Always guessing the mean is off by 0.88.
    assert run.outcome()["metrics"]["test_mean_error"] < 0.65
    use = ["--task", flags[1], "--predict", "predictions.jsonl"]
    start.ranks(2, *use, run_dir=run.run_dir).finish()
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [
        ["index", "progress", "target", "advice"]
    ] * 100


@pytest.mark.slow
def test_the_page_is_cut_as_it_says(start: Start, tmp_path: Path, file: Path) -> None:
    common = ("--steps=5", "--global-batch=16", "--seed=1")
    task = f"--task={file.name}:Shared"
    alone = start.single(task, *common, run_dir=tmp_path / "alone").finish().losses()
    for cut in ("--tp=2", "--pp=2"):
        run = start.ranks(2, task, *common, cut, run_dir=tmp_path / cut).finish()
        assert run.losses() == pytest.approx(alone, rel=1e-5)


def test_a_loaded_task_can_be_used_like_one_of_ours(file: Path) -> None:
    task = tasks.load(f"{file}:Diabetes")
    assert task.name == f"{file}:Diabetes"
    assert task.identity() == {"train_samples": 342, "parameters": 385, "version": 2}
    # Found again by module and class, as a process that reads ahead must.
    assert type(pickle.loads(pickle.dumps(task))) is type(task)
    assert type(tasks.load(f"{file}:Diabetes")) is type(task)


def test_a_file_may_import_its_neighbours_and_hides_no_other_module(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_json.py").write_text("SIZE = 3\n")
    text = MINIMAL.replace("(4, 3)", "(4, neighbour_of_json.SIZE)")
    (tmp_path / "json.py").write_text(f"import neighbour_of_json\n{text}")
    assert isinstance(tasks.load(f"{tmp_path}/json.py:Mine").model(), torch.nn.Linear)
    assert Path(sys.modules["json"].__file__ or "").parent.name == "json"


MINIMAL = """
import torch
from dataclasses import dataclass
from train.data import Batch
from train.tasks import Classifier

@dataclass
class Settings:
    width: int = 3

class Mine(Classifier):
    def model(self):
        return torch.nn.Linear(*(4, 3))

    def train(self):
        return Batch(inputs=torch.zeros(5, 4), targets=torch.zeros(5))

    test = train
"""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("Mine", "x = = 1\n", r"cannot import {file}: {file}:1: SyntaxError: invalid syntax"),
        (
            "Mine",
            "import torch\nimport no_such_module\n",
            "cannot import {file}: {file}:2: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("Mien", MINIMAL, r"{file} has no class 'Mien'; did you mean 'Mine'\?"),
        ("Other", MINIMAL, r"{file} has no class 'Other'; there are Mine"),
        ("Mine", "x = 1\n", r"{file} has no class 'Mine'; it contains no task"),
        (
            "Settings",
            MINIMAL,
            r"{file}: Settings is not a task: write `class Settings\(Task\):` with "
            "`from train.tasks import Task`",
        ),
        (
            "Mine",
            MINIMAL.replace("def model", "def net").replace("test = train", ""),
            r"{file}: class Mine lacks model\(\), test\(\)",
        ),
        (
            "Mine",
            MINIMAL + "\n    def __init__(self):\n        self.x = int('x')\n",
            r"task '{file}:Mine': Mine\(\) failed: {file}:21: ValueError: invalid literal .*",
        ),
    ],
    ids=["syntax", "import", "typo", "other", "none", "no task", "lacks", "constructor"],
)
def test_a_mistake_in_the_file_is_explained(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        tasks.load(f"{path}:{name}")
    assert re.fullmatch(message.format(file=re.escape(str(path))), str(error.value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "digit",
            "unknown task 'digit'; did you mean 'digits'?; known are digits, fashion-mnist, "
            "shuttle, chars, and FILE.py:CLASS for your own",
        ),
        ("my_task.py", "task 'my_task.py' lacks the name of its class: FILE.py:CLASS"),
        (
            "here.py:my class",
            "task 'here.py:my class': 'my class' is not a class name: write FILE.py:CLASS",
        ),
        ("gone.py:Task", "task 'gone.py:Task': file {home}/gone.py does not exist"),
        ("my_task:Task", "unknown task 'my_task:Task'; known are digits, fashion-mnist, "
            "shuttle, chars, and FILE.py:CLASS for your own"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_right_is_refused_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "here.py").touch()
    monkeypatch.chdir(tmp_path)
    assert tasks.problem_of(name) == message.format(home=tmp_path)
    with pytest.raises(UsageError):
        tasks.load(name)
    assert [tasks.problem_of(known) for known in tasks.TASKS] == [None] * len(tasks.TASKS)


FAULTY = """
import torch
from torch import nn
from train.data import Batch
from train.tasks import Classifier

class Sound(Classifier):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def train(self):
        return Batch(inputs=torch.randn(24, 4), targets=torch.arange(24) % 3)

    test = train

class Model(Sound):
    def model(self):
        return nn.Linear(4, "three")

class Forward(Sound):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 3)))

class Loss(Sound):
    def loss(self, outputs, targets):
        return (outputs - targets).sum()

class Backward(Sound):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).detach()

class Score(Sound):
    def score(self, outputs, targets):
        return outputs @ targets

class Metrics(Sound):
    def metrics(self, score, count):
        return {"second": score[1].item()}

class Numbered:
    def __len__(self):
        return 24

    def __getitem__(self, number):
        if number == 17:
            raise ConnectionError("connection refused")
        return torch.zeros(4), number % 3

class Sample(Sound):
    def train(self):
        return Numbered()

class Ragged(Numbered):
    def __getitem__(self, number):
        return torch.zeros(4 if number < 20 else 5), number % 3

class Nested(Sound):
    def model(self):
        return First()

    def train(self):
        inputs = {"image": torch.randn(24, 4), "more": [torch.ones(24)]}
        return Batch(inputs=inputs, targets={"kind": torch.arange(24) % 3})

    def count(self, targets):
        return len(targets["kind"])

    test = train

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, inputs):
        return inputs["image"] @ self.weight

class Together(Sound):
    def train(self):
        return Ragged()
"""


def failure_of(file: Path, name: str, **chosen: object) -> tuple[BaseException, str]:
    """Run a task of that file, and return the result."""
    named, trainer = f"{file}:{name}", None
    try:
        trainer = trainer_for(0, 1, file.parent / "run", task=named, steps=3, **chosen)
        trainer.run()
    except Exception as error:
        return error, describe(error, tasks.load(named), trainer.progress if trainer else None)
    pytest.fail(f"{name} has not failed")


def line_of(text: str) -> int:
    return FAULTY.splitlines().index(text) + 1


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    return path


BATCH = "its batch has inputs [8, 4] float32 and targets [8] int64"


@pytest.mark.parametrize(
    ("name", "part", "moment", "given", "line"),
    [
        ("Model", "model()", "before the first step", "", '        return nn.Linear(4, "three")'),
        (
            "Forward",
            "the forward pass",
            "at step 1 of 3",
            f"layer '1.1' (Linear) was given input [8, 8] float32; {BATCH}; ",
            "",
        ),
        (
            "Nested",
            "the forward pass",
            "at step 1 of 3",
            "First was given inputs['image'] [8, 4] float32, inputs['more'][0] [8] float32; its "
            "batch has inputs['image'] [8, 4] float32, inputs['more'][0] [8] float32 and "
            "targets['kind'] [8] int64; ",
            '        return inputs["image"] @ self.weight',
        ),
        (
            "Loss",
            "loss()",
            "at step 1 of 3",
            f"it was given outputs [8, 3] float32, targets [8] int64; {BATCH}; ",
            "        return (outputs - targets).sum()",
        ),
        (
            "Backward",
            "the backward pass",
            "at step 1 of 3",
            f"{BATCH}; the loss does not depend on any parameter: look for detach(), item() or "
            "no_grad(); ",
            "",
        ),
        (
            "Score",
            "score()",
            "in the evaluation after step 3",
            f"it was given outputs [8, 3] float32, targets [8] int64; {BATCH}; ",
            "        return outputs @ targets",
        ),
        (
            "Metrics",
            "metrics()",
            "in the evaluation after step 3",
            "it was given score [1] float64; ",
            '        return {"second": score[1].item()}',
        ),
        (
            "Sample",
            "reading sample 17",
            "at step [123] of 3",
            "",
            '            raise ConnectionError("connection refused")',
        ),
        ("Together", "putting samples together", "at step [123] of 3", "", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_the_part_that_has_failed_is_named_with_what_it_was_given(
    faulty: Path, name: str, part: str, moment: str, given: str, line: str
) -> None:
    error, text = failure_of(faulty, name)
    where = f"{faulty}:{line_of(line)}" if line else str(faulty)
    head = re.escape(f"{part} of task '{faulty}:{name}' failed ") + moment
    assert re.fullmatch(head + re.escape(f"; {given}see {where}"), text), (text, error)


def test_a_sample_that_was_read_ahead_is_named_too(faulty: Path) -> None:
    error, text = failure_of(faulty, "Sample", workers=1)
    assert text.startswith(f"reading sample 17 of task '{faulty}:Sample' failed at step ")
    # No other rank has refused this connection.
    assert part_of(error).alone
    assert in_short(error) == "ConnectionError: connection refused"


def test_a_failure_in_the_file_ends_with_a_line_after_its_traceback(
    start: Start, tmp_path: Path, faulty: Path
) -> None:
    run = start.single("--task=faulty.py:Loss", "--global-batch=8", run_dir=tmp_path / "run")
    *trace, error, last = run.finish(1).output().splitlines()
    assert "Traceback (most recent call last):" in trace
    assert "    return (outputs - targets).sum()" in trace
    assert error.startswith("RuntimeError: The size of tensor a (3) must match")
    assert last.startswith("train: loss() of task 'faulty.py:Loss' failed at step 1 of 30; it was ")
    assert run.outcome()["status"] == "fatal"
    assert run.outcome()["reason"] == f"{error}; {last.removeprefix('train: ')}"


@pytest.mark.slow
def test_ranks_that_fail_alike_show_one_traceback(start: Start, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    flags = ("--task=faulty.py:Forward", "--global-batch=8")
    line = "the forward pass of task 'faulty.py:Forward' failed before the first step; "
    by_torchrun = start.ranks(2, *flags, run_dir=tmp_path / "a").finish(1).output()
    spawned = start.single(*flags, "--spawn=2", run_dir=tmp_path / "b").finish(1).output()
    for output in by_torchrun, spawned:
        assert output.count("train/session.py") == 1, output
        assert len(re.findall(rf"^train: rank [01]: {line}", output, re.MULTILINE)) == 1, output
    # Once more at the end of torchrun's report.
    assert by_torchrun.count(line) == 2, by_torchrun


@pytest.mark.slow
def test_a_task_that_leaves_is_no_finished_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        MINIMAL + "\n    def loss(self, outputs, targets):\n        raise SystemExit(0)\n"
    )
    run = start.single("--task=mine.py:Mine", "--steps=3", run_dir=tmp_path / "run").finish(1)
    assert "train: loss() of task 'mine.py:Mine' failed at step 1 of 3; " in run.output()
    assert run.outcome()["reason"].startswith("SystemExit: 0; loss() ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "torch.nn.Linear(*(4, 3))",
            "5",
            "task 'mine.py:Mine': model() gave int, which is not a torch.nn.Module",
        ),
        (
            "torch.zeros(5))",
            "torch.zeros(4))",
            "task 'mine.py:Mine': its data hold 5 samples of inputs, but 4 of targets: give one of "
            "each for every sample",
        ),
        (
            "return Batch(inputs=torch.zeros(5, 4), targets=torch.zeros(5))",
            "return 5",
            "the task's data is of type int, which has no numbered samples: give a Batch, or a "
            "Dataset with __len__() and __getitem__()",
        ),
        (
            "    test = train",
            "    def test(self):\n        return [(torch.zeros(4), {'kind': 'a'})]",
            "task 'mine.py:Mine': targets['kind'][0] of its data is of type str; inputs and "
            "targets are tensors, or dicts, lists, tuples and NamedTuples of tensors: make a "
            "tensor of it, or leave it out",
        ),
        (
            "    test = train",
            "    test = train\n    def loss(self, outputs, targets):\n        return 1.0",
            "task 'mine.py:Mine': loss() gave float; it must be a tensor of one number, the sum "
            'over the items of the batch (reduction="sum")',
        ),
        (
            "torch.nn.Linear(*(4, 3))",
            "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LazyLinear(3))",
            "task 'mine.py:Mine': layer '1' of its model is a LazyLinear without shape: sharding, "
            "checkpoints and the optimizer need one; give the layer its sizes, or pass a sample "
            "through the model in model()",
        ),
        (
            "return Batch(inputs=torch.zeros(5, 4), targets=torch.zeros(5))",
            "base = torch.utils.data.IterableDataset\n"
            "        has = {'__iter__': lambda self: iter(()), '__len__': lambda self: 5}\n"
            "        return type('Stream', (base,), has)()",
            "the task's data is of type Stream, which has no numbered samples: give a Batch, or a "
            "Dataset with __len__() and __getitem__()",
        ),
        (
            "    test = train",
            "    test = train\n    def count(self, targets):\n        return targets.mean() + 0.5",
            "task 'mine.py:Mine': count() gave tensor(0.5000); it must be the number of items of "
            "the batch that loss() sums over",
        ),
        (
            "    test = train",
            "    test = train\n    def metrics(self, score, count):\n        return 3.0\n"
            "    def loss(self, outputs, targets):\n        return outputs.sum()\n"
            "    def score(self, outputs, targets):\n        return outputs.sum(0)",
            "task 'mine.py:Mine': metrics() gave 3.0; it must be a dict of numbers by name",
        ),
    ],
    ids=["model", "targets", "data", "test", "loss", "lazy", "stream", "count", "metrics"],
)
def test_what_a_method_may_not_give_is_refused_by_name(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in MINIMAL
    path = tmp_path / "mine.py"
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(UsageError) as error:
        trainer_for(0, 1, tmp_path / "run", task=f"{path}:Mine", steps=3).run()
    assert str(error.value) == message.replace("mine.py", str(path))
