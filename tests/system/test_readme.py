"""The commands of the README, run."""

import re
from pathlib import Path

import click
import pytest
import yaml

import toolkit
from tests.conftest import ROOT
from tests.support import golden
from toolkit.cli import cli, exit_status
from toolkit.errors import ToolkitError

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    """Return the command lines of the README that start with `program`, without comments."""
    lines = (line for kind, block in BLOCKS if not kind for line in block.split("\n"))
    found = (line.partition(" #")[0].strip() for line in lines)
    return [line for line in found if line.startswith(program)]


def test_the_readme_shows_the_commands_that_matter() -> None:
    assert commands("make") == ["make run", "make quick", "make test"]
    assert len(commands("toolkit")) >= 6


def test_the_readme_is_short_but_for_the_script() -> None:
    script = next(text for kind, text in BLOCKS if kind == "bash" and text.startswith("#!"))
    assert len(README.splitlines()) - len(script.splitlines()) <= 120


def test_every_make_target_of_the_pages_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    workflow = re.findall(r"make (\w+)\n", (ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow == ["quick", "test"]
    named = re.findall(r"`make ([a-z-]+)", README + contributing)
    assert {*named, *(line.split()[1] for line in commands("make"))} <= {*targets}


@pytest.mark.parametrize("line", commands("toolkit"))
def test_every_toolkit_command_of_the_readme_is_understood(line: str) -> None:
    name, *argv = line.partition("|")[0].split()[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    with click.Context(command) as context:
        command.parse_args(context, argv)


def test_the_readme_names_the_version_and_the_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert f"\nVersion {toolkit.__version__}, " in README
    assert commands("pip install")[-1] == f"pip install {wheel.name}"
    assert wheel.name in (ROOT / "docs/how-to/install.md").read_text()


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "slurm/sandbox/README.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_script_of_the_readme_is_the_one_that_is_rendered() -> None:
    assert golden.with_its_script(README) == README


def test_every_page_is_named_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/index.md").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert pages - {"index.md"} <= listed


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
