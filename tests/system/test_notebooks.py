"""The notebooks run on the real cluster, and are committed with their output."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.conftest import ROOT, Cluster
from tests.fakes.kubernetes import FakeKubernetes
from tests.support.costs import others_slow


def read(path: Path) -> nbformat.NotebookNode:
    found: nbformat.NotebookNode = nbformat.reads(  # type: ignore[no-untyped-call]
        path.read_text(), as_version=4
    )
    return found


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return of each code cell which kinds of output it has."""
    return [
        sorted({output.get("name") or output.output_type for output in cell.outputs})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture
def clusters(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Make the cluster of a notebook the one that is found."""
    if request.node.callspec.params["path"].stem == "kubernetes":
        with FakeKubernetes(auto_run=True) as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
            yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    for name in ("PATH", "SANDBOX_DIR", "SLURM_CONF"):
        if name in cluster.environ:
            monkeypatch.setenv(name, cluster.environ[name])
    yield


@pytest.fixture
def patience() -> Iterator[Config]:
    """Wait long for a kernel, and meet it at named sockets: a port may be another's by then."""
    limits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), 600)
    with tempfile.TemporaryDirectory(prefix="nb", dir="/tmp") as folder:  # names must be short
        place = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        yield Config({"KernelManager": place, "NotebookClient": limits})


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    "path", others_slow(NOTEBOOKS, ROOT / "notebooks/quickstart.ipynb"), ids=lambda path: path.stem
)
def test_a_notebook_runs_and_shows_what_is_committed(path: Path, patience: Config) -> None:
    notebook = read(path)
    folder = {"metadata": {"path": str(path.parent)}}
    # A cell that fails raises CellExecutionError, with its traceback.
    NotebookClient(notebook, resources=folder, config=patience).execute()
    assert shown(notebook) == shown(read(path))


@pytest.mark.slow
def test_the_quickstart_runs_without_slurm_and_without_a_checkout(
    tmp_path: Path, patience: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    notebook = read(ROOT / "notebooks/quickstart.ipynb")
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, resources=folder, config=patience).execute()
    *_, submitted, called = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert submitted.outputs[-1].text.startswith("Nothing is submitted: ")
    assert called.outputs[-1].text == "No function is sent.\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran_from_top_to_bottom(path: Path) -> None:
    cells = [c for c in read(path).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    text = path.read_text()
    assert '"output_type": "error"' not in text
    for place in (
        "/root/",
        "/home/",
        "/tmp/",
        "/work/",
    ):  # names of the machine are not committed
        assert place not in text
