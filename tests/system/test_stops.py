"""Scripts of others that are stopped: what they save, with the workers of a DataLoader."""

import re
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.conftest import ROOT, Cluster, Until
from tests.support.slurm_site import Site, failure

SCRIPT = ROOT / "tests/support/loader_training.py"
FRAMEWORKS = ROOT / ".cache/frameworks"
HOW_TO = ROOT / "docs/how-to"


def job(context: str, steps: int = 1_000_000, **more: Any) -> toolkit.JobSpec:
    """Return a job of two ranks with two workers each."""
    return toolkit.JobSpec.model_validate(
        {
            "name": "loaded",
            "script": str(SCRIPT),
            "args": [context, str(steps)],
            "resources": {"nproc_per_node": 2},
            "env": {"OMP_NUM_THREADS": "1"},
            "stop": {"grace": "60s"},
            **more,
        }
    )


def is_training(run: toolkit.Run) -> bool:
    """Whether both ranks have made steps."""
    try:
        return "\n".join(run.logs()).count("step 5\n") >= 2
    except toolkit.LauncherError:
        return False


def saved(run: toolkit.Run) -> int:
    """Return the step of the checkpoint."""
    path = Path(str(run.run_dir), "saved")
    assert path.exists(), failure(run)  # type: ignore[arg-type]
    return int(path.read_text())


@pytest.mark.parametrize(
    ("context", "start"),
    [
        ("fork", "cold"),
        ("forkserver", "cold"),
        ("spawn", "warm"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("spawn", "cold"), ("fork", "warm"), ("forkserver", "warm"))
        ),
    ],
)
def test_a_cancelled_run_here_has_its_checkpoint(
    context: str, start: str, tmp_path: Path, until: Until
) -> None:
    here = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    run = toolkit.submit(job(context, start=start), to=here)
    until(lambda: is_training(run), "both ranks train")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    assert saved(run) > 0
    said = "\n".join(run.logs())
    assert "is killed by signal" not in said
    assert "starts cold" not in said


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("how", "retries", "start"),
    [
        ("scancel", {}, "warm"),  # Slurm signals the fork server, too
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("toolkit cancel", {}, "cold"),
                ("scancel", {}, "cold"),
                ("time limit", {}, "cold"),
                ("time limit", {}, "warm"),
                ("toolkit cancel", {"requeue": 1}, "cold"),
                ("scancel", {"requeue": 1}, "cold"),
                ("time limit", {"requeue": 1}, "cold"),
            )
        ),
    ],
)
def test_a_job_of_slurm_that_is_stopped_has_its_checkpoint(
    how: str, retries: dict[str, int], start: str, cluster: Cluster, site: Site, until: Until
) -> None:
    # The warning comes stop.grace + 30 s before the end, so at the next look of Slurm (30 s).
    timed = {"stop": {"grace": "3m"}, "time_limit": "10m"}
    more: dict[str, Any] = timed if how == "time limit" else {}
    more["resources"] = {"nnodes": 2}
    loaded = job("fork", retries=retries, start=start, **more)
    run = site.launcher.submit(toolkit.plan(loaded, site.profile))
    until(lambda: is_training(run), "both ranks train")
    if how == "toolkit cancel":
        run.cancel()
    elif how == "scancel":
        cluster.slurm("scancel", run.job_id)
    else:
        cluster.end_in(200, run.job_id)
    until(Path(str(run.run_dir), "saved").exists, "rank 0 has saved")
    assert saved(run) > 0
    if retries and how == "time limit":
        until(lambda: "resumed at step" in "\n".join(run.logs()), "it goes on from there")
        run.cancel()
    run.wait(300)
    assert "is killed by signal" not in "\n".join(run.logs(attempt=0))


RAISES = """
import os, pathlib, signal, time
def save(*_):
    if os.environ["RANK"] == "1":
        raise OSError("no space for the checkpoint")
    time.sleep(1)
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(os.environ["TRAIN_RUN_DIR"], "rank-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("place", "requeue"), [("here", 0), pytest.param("slurm", 1, marks=pytest.mark.slurm)]
)
def test_an_exception_during_a_stop_is_named(
    place: str, requeue: int, request: pytest.FixtureRequest, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    content = {"name": "raises", "script": str(tmp_path / "raises.py"), "resources": {"nnodes": 2}}
    raises = toolkit.JobSpec.model_validate({**content, "retries": {"requeue": requeue}})
    if place == "here":
        here = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
        run = toolkit.submit(raises, to=here)
    else:
        site: Site = request.getfixturevalue("site")
        run = site.launcher.submit(toolkit.plan(raises, site.profile))
    folder = Path(str(run.run_dir))
    until(lambda: all((folder / f"rank-{n}").exists() for n in (0, 1)), "both ranks run")
    run.cancel()
    status = run.wait(300)
    assert status.state is toolkit.RunState.CANCELLED
    words = "meanwhile a rank has raised OSError: no space for the checkpoint; not "
    assert words in status.reason
    failed = run.failure()
    assert failed is not None
    assert failed.node in ("node-1", "node2")
    assert failed.message == "OSError: no space for the checkpoint"


# ---- The pages for scripts of your own, with and without a framework


def recipe(page: str) -> str:
    """Return the script of a page, as it stands there: its last block of Python."""
    text = (HOW_TO / f"{page}.md").read_text()
    return str(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[-1])


BEGINS = """
import glob, os
def trains(step):  # notes the first step of each start, and kills its rank when it is told to
    path = os.environ["TRAIN_RUN_DIR"] + "/trains-" + os.environ["RANK"]
    if "start" not in globals():
        globals()["start"] = len(glob.glob(path + "-?"))
        with open(path + ".draft", "w") as file:
            file.write(str(step))
        os.rename(path + ".draft", f"{path}-{start}")
    if os.path.exists(path + "-dies"):
        os.remove(path + "-dies")
        os.kill(os.getpid(), 9)
"""

LIGHTNING = """
import os, signal, time, torch
from torch.utils.data import DataLoader, Dataset
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

class Samples(Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor([float(index % 7)])

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        trains(self.global_step)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

model = Model()
data = DataLoader(Samples(), batch_size=4, num_workers=2)
"""

ACCELERATE = """
import glob, os, signal, sys, time, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1000000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor([float(index % 7)])

class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]

def train_one_step():
    global batches
    batches = globals().get("batches") or iter(loader)
    loss = model(next(batches)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    progress.step += 1
    trains(progress.step)

progress, steps = Progress(), 1000000
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(Samples(), batch_size=4, num_workers=2)
"""

TRANSFORMERS = """
import os, signal, sys, time, torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Samples(Dataset):
    def __len__(self):
        return 1000000
    def __getitem__(self, index):
        time.sleep(0.02)
        return {"x": torch.tensor([float(index % 7)])}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x):
        trains(trainer.state.global_step)
        return {"loss": self.layer(x).square().mean()}

model, data = Model(), Samples()
"""

FRAMEWORK_PAGES = {
    "migrate-from-lightning": (LIGHTNING, "checkpoints/last.ckpt"),
    "migrate-from-accelerate": (ACCELERATE, "checkpoints/checkpoint_0"),
    "migrate-from-transformers": (TRANSFORMERS, "checkpoints/checkpoint-*"),
}


def job_of(page: str, folder: Path, start: str = "cold", **more: Any) -> toolkit.JobSpec:
    """Return a job that runs the script of a page for as long as it is let."""
    script = recipe(page)
    if page == "own-script":
        took = "optimizer.step()\n"
        assert script.count(took) == 1 and "\nEPOCHS = 20\n" in script
        script = script.replace("\nEPOCHS = 20\n", "\nEPOCHS = 1_000_000\n")
        script = BEGINS + script.replace(took, f"{took}            trains(1000 * epoch + step)\n")
    else:
        if not FRAMEWORKS.exists():
            pytest.fail("needs .cache/frameworks, which tests/frameworks.sh makes")
        script = BEGINS + FRAMEWORK_PAGES[page][0] + script
    (folder / "train.py").write_text(script)
    content = {"name": "page", "script": str(folder / "train.py"), "resources": {"nnodes": 2}}
    content["start"] = start
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FRAMEWORKS), "ACCELERATE_USE_CPU": "true"}
    content |= {"env": env, "stop": {"grace": "60s"}, "retries": {"in_job": 1, "requeue": 1}}
    return toolkit.JobSpec.model_validate({**content, **more})


@pytest.mark.parametrize(
    ("page", "start"),
    [
        ("migrate-from-lightning", "warm"),
        ("migrate-from-accelerate", "cold"),
        ("migrate-from-transformers", "warm"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("migrate-from-lightning", "cold"),
                ("migrate-from-accelerate", "warm"),
                ("migrate-from-transformers", "cold"),
            )
        ),
    ],
)
def test_the_script_of_a_page_saves_when_it_is_stopped(
    page: str, start: str, tmp_path: Path, until: Until
) -> None:
    here = toolkit.LocalProfile(name="here", runs_dir=str(tmp_path / "runs"))
    two_ranks = {"nproc_per_node": 2}
    run = toolkit.submit(job_of(page, tmp_path, start, resources=two_ranks), to=here)
    folder = Path(str(run.run_dir))
    until(lambda: all((folder / f"trains-{n}-0").exists() for n in (0, 1)), "both ranks train")
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    said = "\n".join(run.logs())
    assert [*folder.glob(FRAMEWORK_PAGES[page][1])], said
    assert "is killed by signal" not in said
    assert "starts cold" not in said


@pytest.mark.slurm
@pytest.mark.parametrize(
    "page",
    ["own-script", *(pytest.param(page, marks=pytest.mark.slow) for page in FRAMEWORK_PAGES)],
)
def test_the_script_of_a_page_goes_on_where_it_was_preempted_and_killed(
    page: str, cluster: Cluster, site: Site, tmp_path: Path, until: Until
) -> None:
    site.profile = site.profile.model_copy(update={"partition": "low"})
    run = site.launcher.submit(toolkit.plan(job_of(page, tmp_path), site.profile))

    folder = Path(str(run.run_dir))

    def first_step(start: int) -> int:
        paths = [folder / f"trains-{rank}-{start}" for rank in (0, 1)]
        until(lambda: all(p.exists() for p in paths), f"both train: {start}", seen=site.story)
        return int(paths[0].read_text())

    first = first_step(0)
    high = ("--parsable", "--partition=high", "--nodes=4", "--exclusive")
    cluster.slurm("sbatch", *high, "--output=/dev/null", "--wrap=sleep 1")
    preempted = first_step(1)
    (folder / "trains-1-dies").touch()
    killed = first_step(2)
    run.cancel()
    assert run.wait(300).state is toolkit.RunState.CANCELLED
    assert first < preempted <= killed, failure(run)
    assert "is killed by signal" not in "\n".join(run.logs())
