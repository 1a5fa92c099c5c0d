"""The shape of the project: who imports whom, what is packed, what is public."""

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import toolkit
from tests.conftest import ROOT

ORDER = [
    "errors",
    "untrusted",
    "secrecy",
    "masking",
    "quantities",
    "documents",
    "validation",
    "yaml_writing",
    "fields",
    "sbatch_options",
    "kubernetes_options",
    "rules",
    "bash",
    "batch_scripts",
    "manifests",
    "sweeps",
    "dependencies",
    "spec",
    "schema",
    "profile",
    "discovery",
    "drafts",
    "containers",
    "pods",
    "feasibility",
    "planning",
    "patching",
    "rendering",
    "launchers",
    "runs",
    "executors",
    "checks",
    "summaries",
    "cli",
    "__main__",
]
"""A module imports only what stands to its left."""

HEAVY = {"torch", "kubernetes", "submitit"}


def imports(path: Path, *, late: bool = True) -> set[str]:
    """Return the modules that a file imports; without `late`, those at import time alone."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("toolkit"), ids=lambda p: str(p.relative_to(ROOT)))
def test_left_never_imports_right(path: Path) -> None:
    room = path.relative_to(ROOT / "toolkit").parts[0].removesuffix(".py")
    if room == "__init__":
        return  # it only says where names live
    allowed = ORDER[: ORDER.index(room) + 1]
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("toolkit.")}
    assert rooms <= {*allowed, "__version__"}


def test_every_room_has_its_place_in_the_order() -> None:
    rooms = {path.stem for path in (ROOT / "toolkit").iterdir()}
    assert rooms - {"py", "__init__", "__pycache__"} == set(ORDER)


def test_toolkit_and_train_do_not_know_each_other() -> None:
    worker = ROOT / "toolkit/executors/worker.py"  # is copied into run directories, and runs there
    for path in python_files("toolkit"):
        late = path != worker
        assert not {n.split(".")[0] for n in imports(path, late=late)} & {"torch", "train"}, path
    assert not {name.split(".")[0] for name in imports(worker)} & {"toolkit", "train"}
    for path in python_files("train"):
        assert "toolkit" not in {name.split(".")[0] for name in imports(path)}, path


def test_kubernetes_is_imported_only_inside_its_launcher() -> None:
    for path in python_files("toolkit"):
        names = {name.split(".")[0] for name in imports(path)}
        if "kubernetes" in names:
            assert "toolkit/launchers/k8s/" in path.as_posix()
            assert "kubernetes" not in {n.split(".")[0] for n in imports(path, late=False)}


def test_submitit_is_imported_only_by_the_executors() -> None:
    for path in python_files("toolkit"):
        if "submitit" in {name.split(".")[0] for name in imports(path)}:
            assert path.parent.name == "executors"


@pytest.mark.parametrize(
    "code",
    [
        "import toolkit",
        "import toolkit; toolkit.render(toolkit.plan(toolkit.load('jobs/digits.yaml'), "
        "toolkit.load_profile('k8s')))",
        "import toolkit.launchers.k8s, toolkit.launchers.slurm, toolkit.launchers.local",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    check = f"import sys; {code}; print({HEAVY!r} & set(sys.modules) or 'light')"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "light\n"


def test_the_public_names_are_sorted_and_all_there() -> None:
    assert toolkit.__all__ == sorted(toolkit.__all__)
    for name in toolkit.__all__:
        assert getattr(toolkit, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = toolkit.nonsense


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(argv, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_toolkit_and_its_templates_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {str(path.relative_to(ROOT)) for path in python_files("toolkit")}
    templates = {f"toolkit/{path.relative_to(ROOT)}" for path in (ROOT / "templates").rglob("*.*")}
    assert templates
    assert names == package | templates | {"toolkit/py.typed"}


def test_the_sdist_holds_what_a_stranger_needs_to_go_on(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("toolkit", "templates", "train", "tests", "jobs", "slurm", "k8s", "docs"):
        tracked = subprocess.run(
            ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        assert {name for name in tracked if name} <= names, folder
    assert {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"} <= names


def test_an_installed_wheel_renders_what_the_checkout_renders(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    argv = ["install", "-qq", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *argv], check=True)
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
            ROOT / "k8s/profiles/k8s.yaml",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"{tmp_path}/site/toolkit/__init__.py\n"
    assert done.stdout == (ROOT / "k8s/examples/digits.yaml").read_text()


def test_every_python_file_of_the_product_is_a_small_room() -> None:
    for folder, most in (("toolkit", 400), ("train", 400)):
        for path in python_files(folder):
            assert len(path.read_text().splitlines()) <= most, path


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
