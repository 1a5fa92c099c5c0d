"""The supervisor as one file, which manifests carry."""

import ast
import base64
import bz2
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT
from tests.support.rendered import manifest
from toolkit.rendering import payload
from toolkit.supervisor import packed

CARRIED = manifest({}, {"supervisor": "carried"}, "Job")


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(CARRIED)
    return path


def cli(*argv: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "toolkit", *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_same_sources_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dates and rights of the files, and the order in which a folder lists them."""
    copied = tmp_path / "toolkit/supervisor"
    shutil.copytree(ROOT / "toolkit/supervisor", copied, copy_function=shutil.copy)
    for path in copied.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    first = payload.archive("kubernetes")
    monkeypatch.setattr(payload, "__file__", str(tmp_path / "toolkit/rendering/payload.py"))
    assert payload.archive("kubernetes") == first


@pytest.mark.parametrize(
    ("kind", "role"), [(kind, role) for kind, roles in payload.ROLES.items() for role in roles]
)
def test_it_runs_alone(kind: str, role: str, tmp_path: Path) -> None:
    """Without the toolkit, site-packages, or a folder that it could write to."""
    program = tmp_path / payload.FILE
    program.write_bytes(payload.archive(kind))
    program.chmod(0o444)
    words = [sys.executable, "-ISs", str(program), role]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, f"usage: supervisor {role}" in done.stderr) == (2, True), done.stderr
    table = {name: text for name, text in sources(kind).items() if name != payload.MAIN}
    importer: Any = packed.Sources(str(program), table)
    loaded = {name for name in table if name.endswith(".py")}
    assert {f"supervisor/{role}.py", "supervisor/watchdog_files.py"} <= loaded
    for path in loaded:
        name = path[:-3].replace("/", ".").replace(".__init__", "")
        assert importer.find_spec(name).origin == str(program / path)
    assert importer.find_spec("supervisor.other") is None
    with pytest.raises(OSError, match=r"other\.py is not in the archive"):
        importer.get_data(str(program / "other.py"))


def test_a_traceback_shows_the_lines_of_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"carried/__init__.py": "", "carried/fails.py": "def fail():\n    return [][1]\n"}
    monkeypatch.setattr(sys, "meta_path", [packed.Sources("/x.pyz", text), *sys.meta_path])
    with pytest.raises(IndexError) as raised:
        importlib.import_module("carried.fails").fail()
    shown = "".join(traceback.format_exception(raised.value))
    assert 'File "/x.pyz/carried/fails.py", line 2, in fail\n    return [][1]\n' in shown
    monkeypatch.delitem(sys.modules, "carried.fails")
    monkeypatch.delitem(sys.modules, "carried")


def test_a_python_without_bz2_is_named(tmp_path: Path) -> None:
    program = tmp_path / payload.FILE
    program.write_bytes(payload.archive("local"))
    code = (
        f"import runpy, sys; sys.modules['bz2'] = None; "
        f"runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert done.stderr.startswith("supervisor: this host's python3 was built without")


def test_the_program_that_keeps_local_runs_is_not_carried() -> None:
    for kind in payload.ROLES:
        assert "supervisor/keeper.py" not in sources(kind)


def sources(kind: str) -> dict[str, str]:
    """Unpack an archive as anybody would, without the toolkit."""
    with zipfile.ZipFile(io.BytesIO(payload.archive(kind))) as archive:
        main, table = (archive.read(name) for name in archive.namelist())
    files = bz2.decompress(table).decode().split("\0")
    return {payload.MAIN: main.decode(), **dict(file.split("\n", 1) for file in files)}


@pytest.mark.parametrize(("kind", "most"), [("slurm", 68), ("kubernetes", 54), ("local", 49)])
def test_a_script_carries_some_kilobytes(kind: str, most: int) -> None:
    assert len(payload.payload(kind, frozenset()).base64) <= most * 1000


@pytest.mark.parametrize(
    ("keys", "program"),
    [
        ({"log_pattern": "step (?P<step>[0-9]+)"}, "watchdog/log_steps.py"),
        ({"start": "warm"}, "watchdog/rank_proxy.py"),
        ({"start": "warm"}, "watchdog/fork_server.py"),
    ],
)
def test_what_few_jobs_need_is_carried_for_them(
    keys: dict[str, str], program: str, tmp_path: Path
) -> None:
    for site in (toolkit.SlurmProfile(name="s"), toolkit.KubernetesProfile(name="k")):
        for given in ({}, keys):
            job = {"name": "x", "script": "x.py", "image": "i:1", **given}
            plan = toolkit.plan(toolkit.JobSpec.model_validate(job), site)
            (script := tmp_path / "script").write_text(toolkit.render(plan))
            carried = toolkit.carried_supervisor(script)
            assert (f"supervisor/{program}" in carried.sources) == bool(given)
            assert carried.is_ours


def statements(source: str) -> str:
    """Return what Python reads of a source, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [
                one
                for one in body
                if not isinstance(one, ast.Pass)
                and not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree)


def test_its_sources_are_those_of_the_repository_without_comments() -> None:
    """Line by line, so that tracebacks name the lines of the repository."""
    for name, bare in sources("slurm").items():
        if name.endswith(".py"):
            own = "supervisor/packed.py" if name == payload.MAIN else name
            source = (ROOT / "toolkit" / own).read_text()
            assert statements(bare) == statements(source), name
            for before, after in zip(source.splitlines(), bare.splitlines(), strict=True):
                assert before.startswith(after) or after.strip() == "pass", name
            comments = [
                t
                for t in tokenize.generate_tokens(io.StringIO(bare).readline)
                if t.type == tokenize.COMMENT
            ]
            assert (ast.get_docstring(ast.parse(bare)), comments) == (None, []), name


def test_its_sources_can_be_read_and_compared(rendered: Path, tmp_path: Path) -> None:
    done = cli("supervisor", rendered, "--unpack", tmp_path / "sources")
    assert (done.returncode, done.stderr) == (0, "")
    unpacked = {path.name for path in (tmp_path / "sources/supervisor").glob("*.py")}
    assert {"__main__.py", "pod.py", "policy.py"} <= unpacked
    assert not {"batch.py", "local.py"} & unpacked, "what pods do not need"
    assert "that of this version" in done.stdout
    ours = re.search(r"supervisor.pyz: (\S+)", CARRIED)[1]  # type: ignore[index]
    table = {name: text for name, text in sources("kubernetes").items() if name != payload.MAIN}
    other = archive_of({**table, "supervisor/added.py": ""})
    rendered.write_text(CARRIED.replace(ours, base64.b64encode(other).decode()))
    done = cli("supervisor", rendered)
    assert (done.returncode, "not that of this version" in done.stdout) == (1, True)


def archive_of(table: dict[str, str], *, cut: int | None = None, more: str = "") -> bytes:
    """Make an archive as ours are, or one that is not quite."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(payload.MAIN, "#" * 1000)
        archive.writestr(
            payload.TABLE, bz2.compress("\0".join(map("\n".join, table.items())).encode())[:cut]
        )
        if more:
            archive.writestr(more, "")
    return content.getvalue()


STRANGE = {
    "not written by this toolkit: it contains '../escaped.py'": archive_of({"../escaped.py": ""}),
    "not written by this toolkit: it contains '/etc/x.py'": archive_of({"/etc/x.py": ""}),
    "not written by this toolkit: it contains 'supervisor/a.pyc'": archive_of(
        {"supervisor/a.pyc": ""}
    ),
    "not written by this toolkit: it contains '__main__.py', '.*', 'x.py'": archive_of(
        {"supervisor/a.py": ""}, more="x.py"
    ),
    "not written by this toolkit: it contains ''": archive_of({}),
    "it is cut short, or unpacks": archive_of({"supervisor/a.py": ""}, cut=-10),
    "unpacks to more than 4,194,304 bytes": archive_of({"supervisor/a.py": "0" * (5 << 20)}),
    "carries no supervisor": b"",
}


@pytest.mark.parametrize("said", STRANGE)
def test_what_is_not_ours_is_refused(said: str, tmp_path: Path) -> None:
    text = f"kind: Job\nx: {base64.b64encode(STRANGE[said]).decode()}\n"
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(toolkit.InputError, match=said):
        toolkit.carried_supervisor(tmp_path / "t.yaml")


def test_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(payload.MAIN, b"\0" * (payload.MOST_BYTES + 1))
        archive.writestr(payload.TABLE, b"")
    (tmp_path / "t.yaml").write_text(f"x: {base64.b64encode(path.read_bytes()).decode()}\n")
    with pytest.raises(toolkit.InputError, match="unpacks to more than"):
        toolkit.carried_supervisor(tmp_path / "t.yaml")


def test_people_see_a_comment_in_its_place() -> None:
    text = payload.folded(CARRIED)
    assert max(map(len, text.splitlines())) < 200
    assert "  # supervisor.pyz: " in text
    assert payload.folded(text) == text


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_plain_text_ends_with_the_sources(kind: str) -> None:
    begin = "spec:" if kind == "kubernetes" else "#!/bin/bash"
    text = f"{begin}\n# supervisor.pyz: {payload.payload(kind, frozenset()).base64}\n"
    lines = payload.plain(text).splitlines()
    assert lines[:2] == [begin, "# supervisor.pyz: the sources are below"]
    assert all(line.startswith("#") for line in lines[1:]), "no part of it runs"
    source = (ROOT / "toolkit/supervisor/policy.py").read_text().splitlines()
    first = lines.index("# ==== supervisor/policy.py") + 1
    assert f"# {source[-1]}" == lines[first + len(source) - 1]
