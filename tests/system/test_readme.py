"""The commands of the README, run."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

import toolkit
from tests.conftest import ROOT, TOOLKIT, Cluster
from toolkit.cli import cli, exit_status
from toolkit.errors import ToolkitError

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    """Return the command lines of the README that start with `program`, without comments."""
    lines = (line for kind, block in BLOCKS if not kind for line in block.split("\n"))
    found = (line.partition(" #")[0].strip() for line in lines)
    return [line for line in found if line.startswith(program)]


def block(start: str) -> str:
    return next(str(text) for _, text in BLOCKS if text.startswith(start))


def test_the_readme_shows_the_commands_that_matter() -> None:
    assert commands("make run") == ["make run"]
    assert commands("make test") == ["make test"]
    assert len(commands(".venv/bin/toolkit")) >= 4


@pytest.mark.parametrize(
    "line", sorted({*commands("make"), *re.findall(r"`(make [^`]*)`", README)})
)
def test_every_make_target_of_the_readme_exists(line: str) -> None:
    argv = ["make", "-n", *line.split()[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", commands(".venv/bin/toolkit"))
def test_every_toolkit_command_of_the_readme_is_understood(line: str) -> None:
    name, *argv = line.partition("|")[0].split()[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    with click.Context(command) as context:
        command.parse_args(context, argv)


def test_the_readme_job_file_is_the_main_job(tmp_path: Path) -> None:
    path = tmp_path / "readme.yaml"
    path.write_text(block("# yaml-language-server"))
    assert toolkit.load(path) == toolkit.load(ROOT / "jobs/digits.yaml")


def test_the_readme_shows_real_messages(tmp_path: Path) -> None:
    shown = block("$ toolkit check").split("\n", 1)[1]
    (tmp_path / "my.yaml").write_text(
        "name: mine\nmodule: train\n\nargs: [--resume, yes]\nresources: {nnode: 2, memory: 64G}\n"
    )
    done = subprocess.run(
        [TOOLKIT, "check", "my.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, shown)


@pytest.mark.slurm
def test_the_readme_python_runs(cluster: Cluster, tmp_path: Path) -> None:
    code = next(text for kind, text in BLOCKS if kind == "python").replace(
        '"resources.nnodes": 4', '"resources.nnodes": 2, "args.3": "1"'
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(run.run_dir)"],
        cwd=ROOT,
        env={**cluster.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state, *lines, run_dir = done.stdout.splitlines()
    assert state == "succeeded"
    assert lines[-1].startswith("[rank 0] done: step ")
    subprocess.run(["rm", "-r", run_dir], check=True)


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "slurm/sandbox/README.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_script_of_the_readme_is_the_one_that_is_rendered() -> None:
    shown = next(text for kind, text in BLOCKS if kind == "bash").splitlines()
    job = toolkit.load(ROOT / "jobs/digits.yaml")
    text = toolkit.render(toolkit.plan(job, toolkit.load_profile("slurm")))
    script = re.sub("(?m)^(# supervisor.pyz:) .*", r"\1 …", text).splitlines()
    places = [script.index(line) for line in shown if line != "# …"]
    assert places == sorted(places)
    assert f"prints a script of {len(script)} lines" in README.replace("\n", " ")


def test_every_page_is_named_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/index.md").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert pages - {"index.md"} <= listed


def test_the_job_of_the_readme_validates_for_editors() -> None:
    header = block("# yaml-language-server").split("\n", 1)[0]
    assert header == (ROOT / "jobs/digits.yaml").read_text().split("\n", 1)[0]
    assert yaml.safe_load(block("# yaml-language-server"))["name"] == "digits"


# ---- The pages for programs


AGENTS = (ROOT / "AGENTS.md").read_text()


def test_the_page_for_agents_lists_every_command() -> None:
    listed = re.findall(r"^\| `toolkit ([a-z]+)` \|", AGENTS, re.MULTILINE)
    assert listed == cli.list_commands(click.Context(cli))


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_the_page_for_agents_knows_which_commands_print_json(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = {word for parameter in command.params for word in parameter.opts}
    (line,) = re.findall(rf"^\| `toolkit {name}` \|.*", AGENTS, re.MULTILINE)
    assert ("`--json`" in line) == ("--json" in options)


def test_the_page_for_agents_has_the_exit_statuses_of_the_program() -> None:
    known = {exit_status.DONE, exit_status.FAILED, exit_status.UNUSABLE, exit_status.INTERRUPTED}
    listed = {int(word) for word in re.findall(r"^\| (\d+) \|", AGENTS, re.MULTILINE)}
    assert listed == known | {error.exit_status for error in ToolkitError.__subclasses__()}


def test_every_page_is_named_for_programs_with_links_that_lead_somewhere() -> None:
    texts = {path: (ROOT / path).read_text() for path in ("AGENTS.md", "llms.txt")}
    links = {path: set(re.findall(r"\]\(([^)#]+)\)", text)) for path, text in texts.items()}
    for path, targets in links.items():
        assert not [target for target in targets if not (ROOT / target).is_file()], path
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")}
    assert pages - {"docs/index.md"} <= links["llms.txt"]


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == toolkit.__version__


def test_the_changelog_has_the_headings_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    for version in versions[1:]:
        assert re.fullmatch(r"\[?\d+\.\d+\.\d+\]? - \d{4}-\d\d-\d\d", version), version
    kinds = {kind.partition(":")[0] for kind in re.findall(r"^### (.*)", text, re.MULTILINE)}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
