"""The pages for those who come with a script, from another tool, or with an error message."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import toolkit
from tests.conftest import ROOT
from toolkit.cli import cli
from toolkit.profile import load_profile
from toolkit.runs.evidence.failure import Failure, headline
from toolkit.slurm.status import in_words
from toolkit.supervisor.evidence.echoes import is_echo
from toolkit.supervisor.evidence.rank_end import judge

HOW_TO = ROOT / "docs/how-to"
MIGRATIONS = {page.stem: page.read_text() for page in sorted(HOW_TO.glob("migrate-from-*.md"))}
ERRORS = {page.stem: page.read_text() for page in sorted(HOW_TO.glob("errors/*.md"))}
SCRIPTS = {"own-script": (HOW_TO / "own-script.md").read_text(), **MIGRATIONS}
PAGES = SCRIPTS | ERRORS


def blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of a page that are fenced as a language; '' for none."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in fences if language == kind]


def is_profile(block: str) -> bool:
    return block.startswith("kind:")


def job_files() -> Iterator[tuple[str, str, str | None]]:
    """Yield each job file with its page, and the profile of the same page if there is one."""
    for name, text in SCRIPTS.items():
        files = blocks(text, "yaml")
        profile = next(filter(is_profile, files), None)
        for job in files:
            if not is_profile(job):
                yield name, job, profile


def commands() -> list[str]:
    """Return the command lines of the pages that start with `toolkit`."""
    lines = [
        line for text in PAGES.values() for block in blocks(text, "") for line in block.split("\n")
    ]
    lines += [words for text in PAGES.values() for words in re.findall(r"`(toolkit [^`]+)`", text)]
    plain = {" ".join(re.split(r" [#|]", line)[0].split()) for line in lines}
    return sorted(line for line in plain if line.startswith("toolkit "))


# ---- From another tool


def test_there_is_a_page_for_each_tool() -> None:
    tools = {name.removeprefix("migrate-from-") for name in MIGRATIONS}
    assert tools == {
        "accelerate",
        "kubeflow",
        "lightning",
        "sbatch",
        "submitit",
        "torchx",
        "transformers",
    }
    for name, text in MIGRATIONS.items():
        for part in ("\n| theirs | ours |\n", "\n**What changes for ", "\n**What is missing.**"):
            assert part in text, (name, part)


@pytest.mark.parametrize(("page", "job", "profile"), list(job_files()))
def test_a_job_file_of_a_page_is_right(
    tmp_path: Path, page: str, job: str, profile: str | None
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job)
    loaded = toolkit.load(path)
    site = "k8s" if loaded.image else "slurm"
    if profile:
        (site_file := tmp_path / "gpu.yaml").write_text(profile)
        site = str(site_file)
    assert toolkit.check(path, to=[site]) == []
    assert toolkit.render(toolkit.plan(loaded, load_profile(site)))


def test_the_log_pattern_of_the_page_finds_what_its_script_prints() -> None:
    text = SCRIPTS["own-script"]
    (printed,) = re.findall(r'print\(f"(epoch .*?)"', text)
    line = re.sub(r"\{.*?\}", "7", printed)
    pattern = toolkit.JobSpec.model_validate(yaml.safe_load(blocks(text, "yaml")[-1])).log_pattern
    found = re.search(str(pattern), line)
    assert found and found.groupdict() == dict.fromkeys(("epoch", "step", "steps", "loss"), "7")


def test_the_page_shows_what_is_found_in_its_script(tmp_path: Path) -> None:
    text = MIGRATIONS["migrate-from-sbatch"]
    (script,) = blocks(text, "bash")
    (tmp_path / "gpt.sbatch").write_text(script)
    found = [f"{finding}\n" for finding in toolkit.check(tmp_path / "gpt.sbatch")]
    assert "".join(found).replace(f"{tmp_path}/", "") == blocks(text, "")[0]


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{name}-{number}")
        for name, text in MIGRATIONS.items()
        for number, block in enumerate(blocks(text, "python"))
    ],
)
def test_the_python_of_a_page_compiles(block: str) -> None:
    compile(block, "page", "exec")


@pytest.mark.parametrize(
    ("page", "program"),
    [("submitit", "import submitit\nimport toolkit"), ("kubeflow", "import toolkit")],
)
def test_our_executors_take_the_parameters_of_the_page(
    page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours,) = (
        block
        for block in blocks(MIGRATIONS[f"migrate-from-{page}"], "python")
        if block.startswith(program)
    )
    (tmp_path / "slurm/profiles").mkdir(parents=True)
    (tmp_path / "slurm/profiles/gpu.yaml").write_text("kind: slurm\nmodules: [cuda/12.8]\n")
    (tmp_path / "k8s/profiles").mkdir(parents=True)
    (tmp_path / "k8s/profiles/k8s.yaml").write_text("kind: kubernetes\nruns_claim: runs\n")
    monkeypatch.chdir(tmp_path)
    body = ast.parse(ours).body
    submits = next(
        n
        for n, line in enumerate(body)
        if "submit(" in (s := ast.unparse(line)) or "map_array(" in s
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module(body[:submits], []), "page", "exec"), names)
    assert (names["executor"].parameters["nnodes"], names["executor"].parameters["time_limit"]) == (
        2,
        "28800s",
    )


# ---- Commands and links


def test_the_pages_have_commands() -> None:
    assert len(commands()) > 20


@pytest.mark.parametrize("line", commands())
def test_every_toolkit_command_of_the_pages_is_understood(line: str) -> None:
    name, *argv = line.split()[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    if argv:  # without arguments, the page only names the command
        with click.Context(command) as context:
            command.parse_args(context, argv)


def test_the_rules_that_the_pages_name_exist() -> None:
    rules = set(
        re.findall(r'<a id="([a-z-]+)"></a>', (ROOT / "docs/reference/rules.md").read_text())
    )
    for name, text in PAGES.items():
        linked = re.findall(r"\[`([a-z-]+)`\]\([^)]*rules\.md#([a-z-]+)\)", text)
        assert {rule for rule, _ in linked} <= rules, name
        assert all(rule == anchor for rule, anchor in linked), name


# ---- Errors


def test_each_error_has_its_meaning_and_a_way_out() -> None:
    sections = [part for text in ERRORS.values() for part in text.split("\n## ")[1:]]
    assert len(sections) >= 30
    for section in sections:
        heading = section.partition("\n")[0]
        assert all(f"- **{part}:**" in section for part in ("Means", "Here")), heading
        assert "- **Do:**" in section, heading


@pytest.mark.parametrize(
    ("message", "echo"),
    [
        (
            "The client socket has timed out after 60000ms while trying to connect to (n1, 29500).",
            True,
        ),
        (
            "torch.distributed.DistNetworkError: … port: 29500, … EADDRINUSE",
            False,
        ),
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error", True),
        (
            "NCCL error in: NCCLUtils.hpp:268, unhandled system error\nncclSystemError",
            True,
        ),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", True),
        ("Connection closed by peer", True),
        ("Connection reset by peer", True),
        ("NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", False),
        ("RuntimeError: Expected to have finished reduction in the prior iteration", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error.", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("RuntimeError: No CUDA GPUs are available", False),
    ],
)
def test_a_message_counts_as_the_pages_say(message: str, echo: bool) -> None:
    assert is_echo(message) is echo


def test_the_sentences_about_killed_ranks_are_those_of_the_toolkit() -> None:
    def shown(exitcode: int, stderr: list[str], *, out_of_memory: bool = False) -> str:
        verdict = judge(exitcode, error=None, stderr=stderr, out_of_memory=out_of_memory)
        assert verdict is not None
        failure = Failure(
            kind=verdict.kind, rank=1, node="node1", attempt=0, time=0.0, message=verdict.message
        )
        return headline(failure)

    memory, collectives = flat("memory"), flat("collectives")
    assert f"`{shown(-9, [])}`" in memory
    killed = shown(-9, [], out_of_memory=True).removeprefix(shown(-9, []))
    assert f"`{killed}`" in memory
    echo = shown(-6, ["Watchdog caught collective operation timeout"]).replace(
        "rank 1 on", "rank 0 on", 1
    )
    assert f"`{echo.rpartition(': ')[0]}: …`" in collectives


@pytest.mark.parametrize("reason", ["BadConstraints", "InvalidAccount", "PartitionConfig"])
def test_the_reasons_of_slurm_are_those_that_status_shows(reason: str) -> None:
    assert f"`{in_words(reason)}`" in flat("slurm")


def flat(page: str) -> str:
    """Return the text of a page on errors without its line breaks."""
    return re.sub(r"\s+", " ", ERRORS[page])


# ---- From Python

PYTHON_SCRIPT = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1.0)
given = parser.parse_args()
with open(os.environ["TRAIN_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    for step in range(given.epochs):
        file.write(json.dumps({"version": 1, "step": step, "loss": given.lr}) + "\\n")
        print("step", step)
"""


def test_the_python_of_its_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PYTHON_SCRIPT)
    (tmp_path / "job.yaml").write_text("name: mine\nscript: train.py\n")
    code = "".join(blocks((HOW_TO / "python.md").read_text(), "python"))
    code += "print(len(rows), rows['loss'].max(), lines, restarts, len(newest), longer.args)\n"
    code += "print(wider.resources.nnodes, script.splitlines()[0])\n"
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "succeeded"
    assert re.match(r"failed fatal: rank 0 on node-0: .*unrecognized arguments: --no-such", said[1])
    assert re.match(r"0 node-0 .*unrecognized arguments: --no-such-flag", said[2])
    assert [line.split()[1] for line in said[3:5]] == ["succeeded", "succeeded"]
    lines = [f"[rank 0] step {step}" for step in (0, 1)]
    assert said[5] == f"2 1.0 {lines} [] 3 ('--epochs', '3')"
    assert said[6] == "2 #!/bin/bash"
    assert (tmp_path / "run.html").stat().st_size > 10_000
