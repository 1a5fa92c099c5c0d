"""A task in a file of your own: the page that explains it is run, and mistakes are explained."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.train.conftest import Start
from train import tasks
from train.errors import UsageError

PAGE = ROOT / "docs/how-to/own-task.md"


@pytest.fixture(scope="module")
def page() -> list[str]:
    """The Python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path, page: list[str]) -> Path:
    """The page's task as a file, with what the page adds later."""
    path = tmp_path / "my_task.py"
    main, identity, shared = page
    path.write_text(f"{main}\n{identity}\n\n{shared}")
    return path


def test_the_page_runs_on_two_ranks_and_learns(start: Start, tmp_path: Path, file: Path) -> None:
    (command,) = re.findall(r"^\$ torchrun .* -m train (.*)$", PAGE.read_text(), re.MULTILINE)
    flags = command.split()
    assert flags[:2] == ["--task", f"{file.name}:Diabetes"]
    run = start.ranks(2, *flags, run_dir=tmp_path / flags[flags.index("--run-dir") + 1]).finish()
    # Always guessing the mean is off by 0.88.
    assert run.outcome()["metrics"]["test_mean_error"] < 0.65


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
        ("Mine", "x = 1\n", r"{file} has no class 'Mine'; it has no task at all"),
        (
            "Settings",
            MINIMAL,
            r"{file}: Settings is no task: write `class Settings\(Task\):` with "
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
            "task 'here.py:my class': 'my class' is no name of a class: FILE.py:CLASS",
        ),
        ("gone.py:Task", "task 'gone.py:Task': there is no file {home}/gone.py"),
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
