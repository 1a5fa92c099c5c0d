"""What people write who know torchrun, and not the toolkit."""

from pathlib import Path

import pytest

import toolkit
from toolkit.planning.arguments import argument_problems


@pytest.mark.parametrize(
    "entry",
    [
        {"command": ("torchrun", "--nproc_per_node=2", "train.py")},
        {"command": ("/venv/bin/accelerate", "launch", "train.py")},
        {"command": ("python3", "-u", "-m", "torch.distributed.launch", "train.py")},
        {"module": "torch.distributed.run", "args": ("train.py",)},
    ],
)
def test_a_launcher_below_torchrun_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="would start in each rank of torchrun"):
        toolkit.JobSpec.model_validate({"name": "probe", **entry})


@pytest.mark.parametrize("command", [("accelerate", "env"), ("bash", "-c", "torchrun --help")])
def test_other_commands_are_fine(command: tuple[str, ...]) -> None:
    toolkit.JobSpec.model_validate({"name": "probe", "command": command})


def test_a_path_is_loaded_as_check_loads_it(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: A B\nscript: train.py\n")
    for path in (job, str(job)):
        with pytest.raises(toolkit.SpecError, match=r"job\.yaml:1: name: 'A B'"):
            toolkit.run(path)


def test_arguments_in_one_text_are_answered_with_the_list(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nscript: train.py\nargs: --lr 0.1 --note 'a b'\n")
    with pytest.raises(toolkit.SpecError) as caught:
        toolkit.load(job)
    assert str(caught.value).endswith('write a list: args: [--lr, "0.1"]')


@pytest.mark.parametrize("word", ["--lr 0.1", "-n 3"])
def test_an_option_with_its_value_is_told(word: str) -> None:
    job = toolkit.JobSpec(name="a", script="train.py", args=(word,))
    (problem,) = argument_problems(job)
    assert problem.rule == "option-with-its-value"
    assert word.split()[1] not in problem.message.partition(": ")[2], "it may be a secret"


@pytest.mark.parametrize("word", ["--note=a b", "a b", "-0.5 1", "--lr"])
def test_other_words_are_fine(word: str) -> None:
    job = toolkit.JobSpec(name="a", script="train.py", args=(word,))
    assert not list(argument_problems(job))
