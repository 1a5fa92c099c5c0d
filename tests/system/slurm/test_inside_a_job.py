"""What is submitted in a job, from a step or a rank, runs as if it came from a login shell."""

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import toolkit
from tests.conftest import TOOLKIT, Until
from tests.support.slurm_site import Site

pytestmark = pytest.mark.slurm

STEP_OF_24_11 = {
    "CUDA_VISIBLE_DEVICES": "3",
    "GPU_DEVICE_ORDINAL": "3",
    "SLURMD_NODENAME": "node1",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_GPU": "2",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x00000040",
    "SLURM_CPU_BIND_LIST": "0x00000040",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_VERBOSE": "quiet",
    "SLURM_CPU_FREQ_REQ": "Performance",
    "SLURM_DISTRIBUTION": "cyclic:block",
    "SLURM_DIST_PLANESIZE": "2",
    "SLURM_GPUS": "8",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "8",
    "SLURM_GPUS_PER_TASK": "8",
    "SLURM_GPU_BIND": "closest",
    "SLURM_GPU_FREQ": "medium",
    "SLURM_GTIDS": "0",
    "SLURM_HET_SIZE": "2",
    "SLURM_HINT": "nomultithread",
    "SLURM_JOBID": "17",
    "SLURM_JOB_CPUS_PER_NODE": "4",
    "SLURM_JOB_GPUS": "3",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "elsewhere1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    "SLURM_LOCALID": "0",
    "SLURM_MEM_BIND": "quiet,local",
    "SLURM_MEM_BIND_LIST": "",
    "SLURM_MEM_BIND_TYPE": "local",
    "SLURM_MEM_BIND_VERBOSE": "quiet",
    "SLURM_MEM_PER_CPU": "64",
    "SLURM_MEM_PER_GPU": "1024",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "elsewhere1",
    "SLURM_NPROCS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_NTASKS_PER_CORE": "1",
    "SLURM_NTASKS_PER_GPU": "2",
    "SLURM_NTASKS_PER_NODE": "16",
    "SLURM_NTASKS_PER_SOCKET": "16",
    "SLURM_OVERCOMMIT": "1",
    "SLURM_PRIO_PROCESS": "0",
    "SLURM_PROCID": "3",
    "SLURM_PROFILE": "task",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_SRUN_COMM_HOST": "192.0.2.1",
    "SLURM_SRUN_COMM_PORT": "44629",
    "SLURM_STEPID": "5",
    "SLURM_STEP_GPUS": "3",
    "SLURM_STEP_ID": "5",
    "SLURM_STEP_LAUNCHER_PORT": "44629",
    "SLURM_STEP_NODELIST": "elsewhere1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "16",
    "SLURM_SUBMIT_DIR": "/home/somebody",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_TASKS_PER_NODE": "16",
    "SLURM_TASK_PID": "4711",
    "SLURM_THREADS_PER_CORE": "1",
    "SLURM_TOPOLOGY_ADDR": "elsewhere1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    "SLURM_TRES_BIND": "gres/gpu:closest",
    "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=8",
    "SLURM_UMASK": "0022",
    "SRUN_CPUS_PER_TASK": "4",
    "SRUN_DEBUG": "3",
}
"""What sbatch(1), salloc(1) and srun(1) of Slurm 24.11 say that a step's environment holds."""

RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "3"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "4"),
    "MASTER_ADDR": "elsewhere1",
    "MASTER_PORT": "29500",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "7",
    "PET_STANDALONE": "1",
    "PMIX_RANK": "3",
    "PMI_RANK": "3",
    "SQUEUE_PARTITION": "nobodys",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "17-0",
    "TRAIN_ATTEMPT": "4",
    "TRAIN_JOINS": "yes",
    "TRAIN_RANK_PIDS": "1 2",
    "TRAIN_RUN_DIR": "/scratch/runs/other",
    "TRAIN_WATCHDOG": "/tmp/watchdog.other",
    "WANDB_RESUME": "allow",
    "WANDB_RUN_ID": "other-1128-101112-abcd",
}
"""What torchrun, the rank's hook and mpirun add."""

SBATCH = {
    "SBATCH_CPU_BIND": "quiet,mask_cpu:0x00000040",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_HINT": "nomultithread",
    "SBATCH_MEM_PER_CPU": "64",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_WAIT": "1",
}
"""Options of sbatch that would replace the script's own."""

OF_A_JOB = re.compile(
    "(SLURM|SRUN|SBATCH|PMI|PMIX|PET|TORCHELASTIC|TRAIN|WANDB|MASTER|SQUEUE)_.*|.*(RANK|WORLD_SIZE)"
    "|.*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|PYTHONPATH"
)

OF_EACH_RUN = re.compile(
    ".*_(JOB_?ID|TASK_PID|COMM_PORT|LAUNCHER_PORT|RUN_DIR|ATTEMPT_BEGAN|LOG_DIR|WATCHDOG)"
    "|SLURM_JOB_(START|END)_TIME|SLURM_SUBMIT_(HOST|DIR)|.*_PACK_GROUP_0|SRUN_DEBUG|PYTHONPATH"
)
"""What differs between two runs of a login shell, or describes where sbatch was called."""

TORCHRUN = '#!/bin/sh\nenv -0 >"$TRAIN_RUN_DIR/seen"\n'

OPTIONS = "--mem-per-cpu=100 --gres=gpu:1 --nodes=1 --ntasks=1"
STEP = "srun --export=ALL --cpu-bind=none --hint=nomultithread --distribution=cyclic --gpus=1"


class Home:
    """A user's folder: a job, a profile whose torchrun writes down its environment, a script."""

    def __init__(self, site: Site, folder: Path, until: Until) -> None:
        self.site, self.folder, self.until = site, folder, until
        self.ended: set[Path] = set()
        (folder / "venv/bin").mkdir(parents=True)
        (folder / "venv/bin/activate").write_text(f"PATH={folder}/venv/bin:$PATH\n")
        (folder / "venv/bin/torchrun").write_text(TORCHRUN)
        (folder / "venv/bin/torchrun").chmod(0o755)
        job = {"name": "inner", "command": ["true"], "resources": {"memory": "256MiB"}}
        profile = {
            "name": "home",
            "kind": "slurm",
            "runs_dir": str(folder / "runs"),
            "venv": str(folder / "venv"),
            "sbatch": {"nodelist": "node1"},  # its name is in what is compared
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        (folder / "profile.yaml").write_text(json.dumps(profile))
        plan = toolkit.plan(
            toolkit.load(folder / "job.yaml"), toolkit.load_profile(str(folder / "profile.yaml"))
        )
        (folder / "inner.sbatch").write_text(toolkit.render(plan))

    def command(self, how: str) -> str:
        if how == "toolkit":
            return f"{TOOLKIT} submit {self.folder}/job.yaml --to {self.folder}/profile.yaml"
        return f"sbatch --output=%x-%j.out {self.folder}/inner.sbatch"

    def submit(self, how: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Run the job and return what its torchrun got."""
        self.call(["bash", "-c", self.command(how)], environ or {})
        return self.environment()

    def submit_from_step(self, how: str) -> dict[str, str]:
        inner = shlex.quote(self.command(how))
        (self.folder / "outer.sbatch").write_text(
            f"#!/bin/bash\nset -e\n{STEP} env {shlex.join(words(RANK))} bash -c {inner}\n"
        )
        self.call(["sbatch", *OPTIONS.split(), "outer.sbatch"], {})
        return self.environment()

    def call(self, argv: list[str], environ: Mapping[str, str]) -> None:
        done = subprocess.run(
            argv,
            env={**self.site.cluster.environ, **environ},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        """Wait for the end of the run, which is to succeed."""

        def ends() -> set[Path]:
            return set(self.folder.glob("runs/**/logs/attempt-*/exit_status")) - self.ended

        def outputs() -> str:
            return "\n".join(path.read_text() for path in self.folder.glob("**/*.out"))

        self.until(ends, "the run ends", seen=outputs)
        (end,) = ends()
        self.ended.add(end)
        assert end.read_text() == "0\n", outputs()
        text = (end.parents[2] / "seen").read_text()
        seen = dict(line.split("=", 1) for line in text.split("\0") if line)
        return {
            name: "" if OF_EACH_RUN.fullmatch(name) else value
            for name, value in sorted(seen.items())
            if OF_A_JOB.fullmatch(name)
        }


def words(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


@pytest.fixture
def home(site: Site, tmp_path: Path, until: Until) -> Home:
    return Home(site, tmp_path, until)


@pytest.mark.parametrize("how", ["toolkit", "sbatch"])
def test_a_job_submitted_from_a_step_is_that_of_a_login_shell(home: Home, how: str) -> None:
    assert home.submit_from_step(how) == home.submit(how)


@pytest.mark.parametrize("how", ["toolkit", "sbatch"])
def test_no_variable_of_a_newer_slurm_reaches_a_job(home: Home, how: str) -> None:
    given = {**STEP_OF_24_11, **RANK} | (SBATCH if how == "toolkit" else {})
    # The user's own stay.
    own = {"SBATCH_PARTITION": "main", "OWN": "kept"}
    assert home.submit(how, given | own) == home.submit(how, own)
