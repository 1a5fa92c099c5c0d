"""The shape of the project: imports, packages, public names."""

import ast
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from graphlib import TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path

import grimp
import pytest
from packaging.specifiers import SpecifierSet

import toolkit
from tests.conftest import ROOT

HEAVY = {"torch", "kubernetes", "submitit", "rich"}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_imports_keep_to_the_contracts_of_pyproject() -> None:
    argv = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", ["toolkit", "train"])
def test_no_imports_form_a_circle_late_ones_included(package: str) -> None:
    graph = grimp.build_graph(package, exclude_type_checking_imports=True)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the modules


@pytest.mark.parametrize(
    "code",
    [
        "import toolkit",
        "import toolkit; toolkit.render(toolkit.plan(toolkit.load('jobs/digits.yaml'), "
        "toolkit.load_profile('k8s')))",
        "import toolkit.kubernetes, toolkit.slurm, toolkit.local.launcher",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    check = f"import sys; {code}; print({HEAVY!r} & set(sys.modules) or 'light')"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "light\n"


def test_the_pinned_versions_run_on_the_oldest_python_that_is_promised() -> None:
    """Debian 12 has 3.11.2, where a version that needs 3.11.5 cannot be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    needs = {d.metadata["Name"]: d.metadata["Requires-Python"] or "" for d in distributions()}
    assert {name for name in needs if oldest not in SpecifierSet(needs[name])} == set()


def test_the_public_names_are_sorted_and_all_there() -> None:
    assert toolkit.__all__ == sorted(toolkit.__all__)
    for name in toolkit.__all__:
        assert getattr(toolkit, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = toolkit.nonsense


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse((ROOT / "toolkit/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(f"toolkit.{home}", name, name) for name, home in toolkit._HOMES.items()}


def tracked(*folders: str) -> list[str]:
    """Return the files of a commit below some folders, and those that will be in the next one."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_wheel_holds_what_the_readme_shows_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    programs = {"train/Containerfile", "train/build-image", "train/.dockerignore"}
    expected = [
        *tracked("toolkit"),
        *(f"toolkit/{name}" for name in tracked("templates")),
        *(f"toolkit/data/{name}" for name in tracked("jobs", "k8s/base")),
        *(f"toolkit_{name}" for name in set(tracked("train")) - programs),
        "toolkit_train/alias/train/__init__.py",
        "toolkit_train.pth",
    ]
    assert sorted(names) == sorted(expected)


def test_both_packages_of_the_wheel_are_typed(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"toolkit/py.typed", "toolkit_train/py.typed"} <= set(names)


def test_the_wheel_is_the_same_bytes_wherever_and_whenever_it_is_built(
    built: Path, tmp_path: Path
) -> None:
    for name in tracked():
        copy = tmp_path / "elsewhere" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
        copy.chmod(0o600 | (ROOT / name).stat().st_mode & 0o100)
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    environ = {"PATH": os.environ["PATH"], "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    subprocess.run([*argv, "elsewhere"], cwd=tmp_path, env=environ, check=True, capture_output=True)
    (first,), (second,) = built.glob("*.whl"), tmp_path.glob("*.whl")
    assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())


def test_the_sdist_holds_what_a_stranger_needs_to_go_on(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    code = ("toolkit", "templates", "train", "distribution", "tests", "jobs", "slurm", "k8s")
    own = (*code, "docs", "website")
    pages = ("README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CITATION.cff", "AGENTS.md")
    build = ("Makefile", "constraints.txt", "hatch_build.py", "pyproject.toml")
    assert set(tracked(*own, *pages, *build)) <= names


def test_an_installed_wheel_renders_what_the_checkout_renders(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    argv = ["install", "-qq", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *argv], check=True)
    profile = tmp_path / "k8s.yaml"
    profile.write_text((ROOT / "k8s/profiles/k8s.yaml").read_text() + "supervisor: installed\n")
    code = (
        "import sys, toolkit, toolkit.cli; print(toolkit.__file__, file=sys.stderr); "
        "toolkit.cli.main()"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "render",
            ROOT / "jobs/digits.yaml",
            "--to",
            profile,
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"{tmp_path}/site/toolkit/__init__.py\n"
    assert done.stdout == (ROOT / "k8s/examples/digits.yaml").read_text()


TEXTS = {"read_text", "write_text", "open", "fdopen", "TextIOWrapper", "NamedTemporaryFile"}
# Their open() opens no text.
OTHERS = {
    "untrusted",  # UTF-8 by itself
    "connection",
    "self",
    "server",
    "_pacing",
    "gzip",
    "lzma",
    "os",
    "launchers",
    "launcher_for",
}


def _of(call: ast.Call) -> str:
    """What a method is called on: the last name of it."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    while isinstance(value, ast.Subscript | ast.Call):
        value = value.value if isinstance(value, ast.Subscript) else value.func
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def _is_named_open(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id == "open"


@pytest.mark.parametrize("room", ["toolkit", "train"])
def test_every_text_is_read_and_written_as_utf_8(room: str) -> None:
    wrong = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            # `read_text(path)` is the documents' own.
            name = getattr(node.func, "attr", "open" if _is_named_open(node.func) else "")
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            binary = any(word in ("rb", "wb", "ab", "xb", "ab+", "rb+") for word in words)
            given = {keyword.arg for keyword in node.keywords}
            texts = (name in TEXTS and not binary and _of(node) not in OTHERS) or (
                name in ("run", "Popen", "check_output") and "text" in given
            )
            if texts and "encoding" not in given:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []
