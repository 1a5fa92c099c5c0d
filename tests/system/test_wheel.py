"""What a stranger has: the wheel in an empty environment, no checkout, four commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from tests.conftest import ROOT, Cluster, Until
from tests.support.once import made_once
from tests.support.processes import with_environment

CONSTRAINTS = ROOT / "constraints.txt"


README = (ROOT / "README.md").read_text()


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment, and a user who has nothing else."""

    folder: Path
    home: Path

    @property
    def environ(self) -> dict[str, str]:
        found = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": found, "HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def __call__(
        self, *argv: str | Path, cwd: Path, status: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment, and see its exit status."""
        program = [self.folder / "bin" / argv[0], *argv[1:]]
        done = subprocess.run(
            program, cwd=cwd, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, f"{argv}: {done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def house(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and what it needs, so that pip and uv ask no index."""

    def fetch(folder: Path) -> None:
        pip(sys.executable, "download", "-c", CONSTRAINTS, "--dest", folder, wheel)

    return made_once(tmp_path_factory, "house", fetch)


def pip(python: str | Path, *argv: str | Path) -> None:
    quiet = ["-qq", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", argv[0], *quiet, *argv[1:]], check=True)


@pytest.fixture(scope="module")
def by_pip(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    def install(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        local = ("--no-index", "--find-links", house)
        pip(folder / "bin/python", "install", "--no-compile", *local, "torch-deploy-toolkit")

    folder = made_once(tmp_path_factory, "by-pip", install)
    return Environment(folder=folder, home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def by_uv(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    def install(folder: Path) -> None:
        uv = str(Path(sys.executable).with_name("uv"))
        argv = [uv, "venv", "-q", "--python", sys.executable, str(folder)]
        subprocess.run(argv, check=True)
        local = ["--offline", "--no-index", "--find-links", str(house)]
        argv = [uv, "pip", "install", "-q", "--python", str(folder / "bin/python"), *local]
        subprocess.run([*argv, "torch-deploy-toolkit"], check=True)

    folder = made_once(tmp_path_factory, "by-uv", install)
    return Environment(folder=folder, home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def torch_environment(by_uv: Environment) -> Environment:
    """The wheel in an environment that has torch, and no `train` but that of the wheel.

    It is lent what this environment has, except the checkout: Python does not read the `.pth` files
    of a folder that one of them names.
    """
    (site,) = by_uv.folder.glob("lib/python*/site-packages")
    python, torchrun = by_uv.folder / "bin/python", by_uv.folder / "bin/torchrun"
    texts = {
        site / "lent.pth": f"{Path(numpy.__file__).parents[1]}\n",
        torchrun: f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
    }
    for path, text in texts.items():  # another process may use them already
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(path)
    return by_uv


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def only_run(project: Path) -> Path | None:
    return next(iter(project.glob("runs/*")), None)


def output_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("logs/*/node-*.log")))


# ---- Four commands


@pytest.mark.parametrize("installed", [pytest.param("by_pip", marks=pytest.mark.slow), "by_uv"])
def test_an_empty_environment_renders_a_new_project_for_both_schedulers(
    installed: str, request: pytest.FixtureRequest, empty: Path
) -> None:
    stranger: Environment = request.getfixturevalue(installed)
    stranger("toolkit", "new", "my-model", cwd=empty)
    project = empty / "my-model"
    script = stranger("toolkit", "render", "job.yaml", "--to", "slurm", cwd=project).stdout
    assert script.startswith("#!/bin/bash\n# Job my-model ")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    manifest = stranger("toolkit", "render", "job.yaml", "--to", "k8s", cwd=project).stdout
    assert "\nkind: Job\n" in manifest
    for name in ("toolkit", "toolkit_train", "train"):
        code = f"import {name}; print({name}.__file__)"
        place = stranger("python", "-c", code, cwd=empty).stdout
        assert place.startswith(str(stranger.folder))


def test_the_start_of_the_readme_can_be_pasted_and_prints_what_is_shown(
    torch_environment: Environment, empty: Path
) -> None:
    (start,) = re.findall(r"^```bash\n(cat .*?)^```$", README, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["bash", "-ec", start],
        cwd=empty,
        env=torch_environment.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    names = re.compile(r"first-[0-9]{4}-[0-9]{6}-[a-z0-9]{4}|(?<=loss )[0-9.]+")
    assert names.sub("…", done.stdout.replace(str(empty), "/home/me/first")) == names.sub(
        "…", shown
    )
    script = (empty / "job.sh").read_text()
    assert script.startswith("#!/bin/bash\n# Job first ")
    subprocess.run(["bash", "-n", empty / "job.sh"], check=True)


def test_a_new_project_trains_and_survives_the_kill_of_a_rank(
    torch_environment: Environment, empty: Path, until: Until
) -> None:
    stranger, project = torch_environment, empty / "my-model"
    stranger("toolkit", "new", "my-model", cwd=empty)
    toolkit = stranger.folder / "bin/toolkit"
    process = subprocess.Popen(
        [toolkit, "run", "job.yaml", "--set", "args=[--epochs, '30']"],
        cwd=project,
        env=stranger.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until(lambda: (run := only_run(project)) and (run / "checkpoint.pt").is_file(), "a checkpoint")
    run = only_run(project)
    assert run is not None
    ranks = [
        pid
        for pid in with_environment(f"TRAIN_RUN_DIR={run}")
        if b"train.py" in (words := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
        and b"torch.distributed.run" not in words
    ]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+) step", output_of(run))]
    assert sorted(set(epochs)) == list(range(1, 31))
    assert len(epochs) <= 31, "the restart resumed; one epoch may have lacked its checkpoint"
    for site, first in (("slurm", "#!/bin/bash"), ("k8s", "# Job my-model")):
        text = stranger("toolkit", "render", "job.yaml", "--to", site, cwd=project).stdout
        assert text.startswith(first)
    status = stranger("toolkit", "status", run.name, cwd=empty).stdout
    assert "SUCCEEDED" in status


def test_our_own_example_trains_without_a_checkout(
    torch_environment: Environment, empty: Path
) -> None:
    stranger = torch_environment
    stranger("toolkit", "new", "numbers", "--example", "digits", cwd=empty)
    one = "resources={nnodes: 1, nproc_per_node: 1, cpus_per_node: 1}"
    argv = ["job.yaml", "--set", one, "--set", "args=[--task, digits, --epochs, '1']"]
    wrong = ["check", "job.yaml", "--set", "args=[--epoch, '1']"]
    refused = stranger("toolkit", *wrong, cwd=empty / "numbers", status=1)
    assert "[train-arguments] args: unknown flag '--epoch'" in refused.stdout
    done = stranger("toolkit", "run", *argv, cwd=empty / "numbers")
    assert "SUCCEEDED" in done.stderr + done.stdout
    run = only_run(empty / "numbers")
    assert run is not None
    assert json.loads((run / "outcome.json").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("example", [(), ("--example", "digits")])
def test_a_project_trains_on_slurm_with_the_wheel_on_the_nodes(
    example: tuple[str, ...], cluster: Cluster, torch_environment: Environment, empty: Path
) -> None:
    stranger, project = torch_environment, empty / "my-model"
    stranger("toolkit", "new", "my-model", *example, cwd=empty)
    (project / ".venv").symlink_to(stranger.folder)  # as the profile says
    path = f"{stranger.folder / 'bin'}{os.pathsep}{cluster.environ['PATH']}"
    toolkit = str(stranger.folder / "bin/toolkit")
    argv = [toolkit, "submit", "job.yaml", "--to", "slurm", "--follow"]
    environ = {**cluster.environ, **stranger.environ, "PATH": path}
    done = subprocess.run(
        argv, cwd=project, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Two names for one training program


def modules(environment: Environment, folder: Path, *names: str) -> list[str]:
    """Return the files of the modules that `python -m NAME` would run in a folder."""
    code = (
        "import importlib.util, sys; sys.path[0] = sys.argv[1]; "
        "print(*(importlib.util.find_spec(name).origin for name in sys.argv[2:]), sep='\\n')"
    )
    done = environment("python", "-c", code, folder, *names, cwd=folder)
    return done.stdout.splitlines()


NAMES = ("train", "toolkit_train")
PROGRAM = {
    "a module": "train.py",
    "a package": "train/__main__.py",
    "a folder without __init__.py": "train/__main__.py",
}


@pytest.mark.parametrize("kind", PROGRAM)
def test_a_train_of_ones_own_is_found_first_and_hides_nothing(
    kind: str, torch_environment: Environment, empty: Path
) -> None:
    program = empty / PROGRAM[kind]
    program.parent.mkdir(exist_ok=True)
    program.write_text("print('mine')\n")
    if kind == "a package":
        (empty / "train/__init__.py").touch()
    assert torch_environment("python", "-m", "train", cwd=empty).stdout == "mine\n"
    shown = torch_environment("python", "-m", "toolkit_train", "--help", cwd=empty).stdout
    assert shown.startswith("usage: torchrun ")


def test_a_folder_of_data_called_train_hides_nothing(
    torch_environment: Environment, empty: Path
) -> None:
    (empty / "train").mkdir()
    (empty / "train/0001.png").touch()
    shown = torch_environment("python", "-m", "train", "--help", cwd=empty).stdout
    assert shown.startswith("usage: torchrun ")
    # What a task of one's own imports.
    names = ["train.tasks", "train.layers", "train.data.order"]
    ours = [f"toolkit_{name}" for name in names]
    found = modules(torch_environment, empty, *names, *ours)
    assert found[:3] == found[3:]


def test_an_entry_of_the_path_that_cannot_be_looked_at_hides_nothing() -> None:
    """Such as the folder of another user: here one with a name that is too long, also for root."""
    code = (
        f"import sys; sys.path[:0] = ['x' * 5000, {str(ROOT / 'distribution')!r}]; "
        "import train; print(*train.__path__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout.split()[-1]) == ("", str(ROOT))


def test_an_installed_train_of_another_package_is_found_first(
    torch_environment: Environment, empty: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "venv"
    shutil.copytree(torch_environment.folder, copy, symlinks=True)
    (site,) = copy.glob("lib/python*/site-packages")
    (site / "train.py").write_text("print('theirs')\n")
    stranger = Environment(folder=copy, home=tmp_path)
    assert stranger("python", "-m", "train", cwd=empty).stdout == "theirs\n"


def write_task(folder: Path, name: str) -> list[str]:
    """Write a task that imports the training code under a name; return the options that run it."""
    (folder / "mine.py").write_text(
        f"import torch\nfrom {name}.data.order import Batch\n"
        f"from {name}.tasks import Classifier\n"
        "class Mine(Classifier):\n"
        "    def model(self):\n        return torch.nn.Linear(2, 2)\n"
        "    def train(self):\n"
        "        return Batch(inputs=torch.zeros(8, 2), targets=torch.zeros(8).long())\n"
        "    test = train\n"
    )
    return ["--task", "mine.py:Mine", "--steps", "1", "--global-batch", "8", "--run-dir", "run"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_task_of_ones_own_imports_the_name_that_runs(
    name: str, torch_environment: Environment, empty: Path
) -> None:
    torch_environment("python", "-m", name, *write_task(empty, name), cwd=empty)
    assert json.loads((empty / "run/outcome.json").read_text())["status"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "imported"), [NAMES, NAMES[::-1]])
def test_a_task_that_imports_the_other_name_is_refused_with_the_line_to_write(
    runs: str, imported: str, torch_environment: Environment, empty: Path
) -> None:
    argv = write_task(empty, imported)
    done = torch_environment("python", "-m", runs, *argv, cwd=empty, status=2)
    assert done.stderr.splitlines()[-1].endswith(
        f"mine.py: Mine is not a task: write `class Mine(Task):` with "
        f"`from {runs}.tasks import Task`"
    )


@pytest.mark.slow
def test_a_run_goes_on_under_the_other_name_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()
    (tmp_path / "names/toolkit_train").symlink_to(ROOT / "train")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path / 'names'}:{ROOT}", "OMP_NUM_THREADS": "1"}

    def train(name: str, run_dir: Path) -> bytes:
        argv = ["--steps", "12", "--checkpoint-every", "4", "--keep-checkpoints", "9"]
        export = ["--export", str(run_dir.with_suffix(".safetensors")), "--run-dir", str(run_dir)]
        subprocess.run([sys.executable, "-m", name, *argv, *export], env=environ, check=True)
        return run_dir.with_suffix(".safetensors").read_bytes()

    def back_to(run_dir: Path, step: int, copy: Path) -> Path:
        shutil.copytree(run_dir, copy)
        (copy / "outcome.json").unlink()
        for path in copy.glob("checkpoints/attempt-*/step-*"):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        return copy

    whole = train("train", tmp_path / "whole")
    second = back_to(tmp_path / "whole", 4, tmp_path / "second")
    assert train("toolkit_train", second) == whole
    third = back_to(second, 8, tmp_path / "third")
    assert train("train", third) == whole
    for run_dir, step in ((second, 4), (third, 8)):
        events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        assert [e["step"] for e in events if e["event"] == "resume"][-1] == step


# ---- All of it


INSTALL_PAGE = ROOT / "docs/how-to/install.md"


@pytest.mark.slow
def test_the_commands_of_the_install_page_work_in_an_empty_container(
    house: Path, tmp_path: Path
) -> None:
    """A minimal Debian with Python and pip, without a network; here lie the wheels."""
    if shutil.which("podman") is None:
        pytest.skip("needs podman; CI has it")
    commands = INSTALL_PAGE.read_text().split("```\n")[1]
    assert len(commands.splitlines()) == 4
    (suite,) = re.findall("(?m)^VERSION_CODENAME=(.*)$", Path("/etc/os-release").read_text())
    base = f"localhost/debian-python:{suite}"  # of train/build-image, as are the wheels
    (training,) = (path for path in (ROOT / ".cache/image").iterdir() if path.is_dir())
    script = (
        "set -eu\ncd\npython3 -m venv --without-pip venv && . venv/bin/activate\n"
        "python3 $(echo /training/pip-*.whl)/pip install --quiet --no-index /training/pip-*.whl\n"
        "export PIP_NO_INDEX=1 PIP_FIND_LINKS='/house /training'\n"
        f"{commands}toolkit render job.yaml --to k8s\n"
    )
    argv = ["podman", "--runtime=runc", "run", "--rm", "-i", "--network=none"]
    # podman's own limits are higher than a machine allows that is a container itself.
    argv += ["--ulimit=nofile=4096:4096", "--ulimit=nproc=8192:8192"]
    argv += [f"--volume={house}:/house:ro", f"--volume={training}:/training:ro", base, "sh", "-s"]
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SUCCEEDED" in done.stdout + done.stderr
    assert "\n#SBATCH --nodes=" in done.stdout
    assert "\nkind: Job\n" in done.stdout


@pytest.mark.slow
def test_pip_installs_all_that_training_needs(
    house: Path, wheel: Path, tmp_path: Path, empty: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip(python, "install", "-c", CONSTRAINTS, f"torch-deploy-toolkit[train] @ {wheel.as_uri()}")
    stranger = Environment(folder=tmp_path / "venv", home=tmp_path)
    stranger("toolkit", "new", "my-model", cwd=empty)
    stranger("toolkit", "run", "job.yaml", cwd=empty / "my-model")
    stranger("toolkit", "new", "numbers", "--example", "digits", cwd=empty)
    stranger("toolkit", "run", "job.yaml", cwd=empty / "numbers")


def newer_pythons() -> list[Path]:
    """Return one interpreter of each newer version on PATH, or installed beside this one."""
    found: dict[int, Path] = {}
    path = map(Path, os.environ["PATH"].split(os.pathsep))
    for folder in (*path, *sorted(Path(sys.base_prefix).parent.glob("*/bin"))):
        for program in folder.glob("python3.[0-9][0-9]"):
            # A version manager has scripts of these names, also where it would start none.
            if program.read_bytes()[:4] == b"\x7fELF":
                found.setdefault(int(program.suffix[1:]), program)
    return [found[minor] for minor in sorted(found) if minor > sys.version_info.minor]


@pytest.mark.slow
@pytest.mark.parametrize(
    "python", newer_pythons() or [None], ids=lambda python: python.name if python else "none"
)
def test_newer_versions_of_python_render_a_new_project(
    python: Path | None, wheel: Path, tmp_path: Path, empty: Path
) -> None:
    if python is None:
        pytest.skip("there is no newer Python here")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip(tmp_path / "venv/bin/python", "install", "-c", CONSTRAINTS, wheel)
    stranger = Environment(folder=tmp_path / "venv", home=tmp_path)
    stranger("toolkit", "new", "my-model", cwd=empty)
    for site in ("slurm", "k8s"):
        stranger("toolkit", "check", "job.yaml", "--to", site, cwd=empty / "my-model")
        stranger("toolkit", "render", "job.yaml", "--to", site, cwd=empty / "my-model")


def test_every_import_within_train_is_relative() -> None:
    absolute: list[str] = []
    for path in sorted((ROOT / "train").rglob("*.py")):
        lines = re.findall(r"^\s*(?:from|import) train\b.*", path.read_text(), re.MULTILINE)
        absolute += [f"{path}: {line}" for line in lines]
    assert absolute == []
