"""The supervisor as one file, which manifests carry."""

import ast
import base64
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT
from tests.support.rendered import manifest
from toolkit.rendering import payload

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
    code = f"import supervisor.__main__, supervisor.{role}, supervisor.watchdog_files"
    for argv in (["-c", f"import sys; sys.path[:0] = [{str(program)!r}]; {code}"], [str(program)]):
        words = [sys.executable, "-ISs", *argv]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == (0 if argv[0] == "-c" else 2), done.stderr
    assert "usage: supervisor" in done.stderr


def test_the_program_that_keeps_local_runs_is_not_carried() -> None:
    for kind in payload.ROLES:
        with zipfile.ZipFile(io.BytesIO(payload.archive(kind))) as archive:
            assert "supervisor/keeper.py" not in archive.namelist()


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
    with zipfile.ZipFile(io.BytesIO(payload.archive("slurm"))) as archive:
        for name in archive.namelist():
            if name.startswith("supervisor/") and name.endswith(".py"):
                bare = archive.read(name).decode()
                source = (ROOT / "toolkit" / name).read_text()
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
    packed = base64.b64decode(re.search(r"supervisor.pyz: (\S+)", CARRIED)[1])  # type: ignore[index]
    changed = tmp_path / "changed.pyz"
    changed.write_bytes(packed)
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("supervisor/added.py", "")
    other = base64.b64encode(changed.read_bytes()).decode()
    rendered.write_text(CARRIED.replace(base64.b64encode(packed).decode(), other))
    done = cli("supervisor", rendered)
    assert (done.returncode, "not that of this version" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [("../escaped.py", "none of ours"), ("/etc/x.py", "none of ours"), (None, "carries no")],
)
def test_what_is_not_ours_is_refused(name: str | None, said: str, tmp_path: Path) -> None:
    text = "kind: Job\n"
    if name:
        path = tmp_path / "strange.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, os.urandom(2000))
        text += f"x: {base64.b64encode(path.read_bytes()).decode()}\n"
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(toolkit.InputError, match=said):
        toolkit.carried_supervisor(tmp_path / "t.yaml")


def test_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("supervisor/a.py", b"\0" * (payload.MOST_BYTES + 1))
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
    text = f"{begin}\n# supervisor.pyz: {payload.PAYLOADS[kind].base64}\n"
    lines = payload.plain(text).splitlines()
    assert lines[:2] == [begin, "# supervisor.pyz: the sources are below"]
    assert all(line.startswith("#") for line in lines[1:]), "no part of it runs"
    source = (ROOT / "toolkit/supervisor/policy.py").read_text().splitlines()
    first = lines.index("# ==== supervisor/policy.py") + 1
    assert f"# {source[-1]}" == lines[first + len(source) - 1]
