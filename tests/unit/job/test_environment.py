"""What starts a run gets none of the variables of a job or rank that submits it."""

from pathlib import Path

import pytest

from toolkit.job.environment import without_outer_job
from toolkit.slurm import commands
from toolkit.slurm.login.ssh import SshConnection

JOB, RANK = {"SLURM_JOB_ID": "17"}, {"TORCHELASTIC_RUN_ID": "17-0"}


@pytest.mark.parametrize(
    ("names", "outside", "in_job", "in_rank", "local"),
    [
        ("PATH HOME LANG SSH_AUTH_SOCK OMP_NUM_THREADS NCCL_DEBUG TRAIN_DATA", 1, 1, 1, 1),
        ("SLURM_CONF SLURM_CONF_SERVER SLURM_JWT SLURM_SACK_KEY SLURM_ROOT", 1, 1, 1, 1),
        ("SBATCH_ACCOUNT SBATCH_PARTITION SBATCH_QOS SBATCH_RESERVATION", 1, 1, 1, 1),
        ("SBATCH_CONSTRAINT SBATCH_CLUSTERS SBATCH_EXCLUSIVE SBATCH_TIMELIMIT", 1, 1, 1, 1),
        ("SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU SBATCH_MEM_PER_NODE SBATCH_HINT", 0, 0, 0, 1),
        ("SBATCH_CPU_BIND SBATCH_CPU_BIND_LIST SBATCH_DISTRIBUTION SBATCH_EXPORT", 0, 0, 0, 1),
        ("SBATCH_NTASKS_PER_NODE SBATCH_GPUS_PER_NODE SBATCH_WAIT SBATCH_SIGNAL", 0, 0, 0, 1),
        ("SLURM_JOB_NODELIST SLURM_MEM_PER_CPU SLURM_CPU_BIND SLURM_PROCID", 0, 0, 0, 1),
        ("SLURM_RESTART_COUNT SLURM_TIME_FORMAT SLURM_CLUSTERS SLURM_CONF_X", 0, 0, 0, 1),
        ("SLURMD_NODENAME SRUN_DEBUG SRUN_CPUS_PER_TASK", 0, 0, 0, 1),
        ("SQUEUE_PARTITION SACCT_FORMAT SINFO_FORMAT SCANCEL_STATE SCONTROL_ALL", 0, 0, 0, 1),
        ("CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES", 1, 0, 1, 1),
        ("RANK LOCAL_RANK WORLD_SIZE GROUP_RANK ROLE_NAME MASTER_ADDR MASTER_PORT", 0, 0, 0, 0),
        ("PET_NNODES PET_STANDALONE TORCHELASTIC_RESTART_COUNT", 0, 0, 0, 0),
        ("TRAIN_RUN_DIR TRAIN_ATTEMPT TRAIN_JOINS TRAIN_WATCHDOG TRAIN_MEETING", 0, 0, 0, 0),
        ("PMI_RANK PMI2_RANK PMIX_RANK PMIX_NAMESPACE OMPI_COMM_WORLD_RANK", 0, 0, 0, 0),
        ("PMIX_MCA_gds OMPI_MCA_btl I_MPI_PMI_LIBRARY", 1, 1, 1, 1),
        ("WANDB_RUN_ID WANDB_RESUME WANDB_NAME WANDB_SERVICE", 1, 1, 0, 1),
        ("WANDB_API_KEY WANDB_PROJECT", 1, 1, 1, 1),
    ],
)
def test_the_users_variables_stay(
    names: str, outside: int, in_job: int, in_rank: int, local: int
) -> None:
    given = dict.fromkeys(names.split(), "x")

    def stays(environ: dict[str, str]) -> set[str]:
        return set(environ) & set(given)

    assert stays(without_outer_job(given)) == (set(given) if outside else set())
    assert stays(without_outer_job(given | JOB)) == (set(given) if in_job else set())
    assert stays(without_outer_job(given | RANK)) == (set(given) if in_rank else set())
    assert stays(without_outer_job(given | JOB, local=True)) == (set(given) if local else set())


def test_the_hook_of_another_run_is_no_longer_imported() -> None:
    path = "/r/logs/attempt-0/watchdog/site:/home/me/lib:/r/logs/attempt-0/watchdog/site:"
    assert without_outer_job(RANK | {"PYTHONPATH": path}) == {"PYTHONPATH": "/home/me/lib:"}
    assert without_outer_job({"PYTHONPATH": path}) == {"PYTHONPATH": path}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, first in PATH, of programs that print their environment."""
    for name in ("sbatch", "scancel", "squeue", "ssh", "rsync"):
        (tmp_path / name).write_text("#!/bin/sh\nenv\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SLURM_MEM_PER_CPU", "RANK", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    return tmp_path


def test_programs_of_slurm_and_ssh_get_it(programs: Path) -> None:
    printed = [commands.run_command([name]).stdout for name in ("sbatch", "scancel", "squeue")]
    # What ssh and rsync print is no answer: their errors do not matter here.
    ssh = SshConnection("somewhere")
    printed += [ssh._run([name], limit_s=30).stdout for name in ("ssh", "rsync")]
    for text in printed:
        assert "SLURM_CONF=7" in text
        assert "SLURM_MEM_PER_CPU" not in text
        assert ("SLURM_TIME_FORMAT" in text) == (text is printed[2]), "sbatch passes it to the job"
        assert "\nRANK=" not in f"\n{text}"
