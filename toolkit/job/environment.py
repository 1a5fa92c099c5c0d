"""The environment of what starts a run, and of Slurm's commands.

In an allocation, a job's step or a rank, the environment describes that job. sbatch passes it on:
srun would read SLURM_MEM_PER_CPU or SLURM_CPU_BIND as options of the new job, torchrun every PET_*.
Other variables, such as SQUEUE_STATES, change what Slurm's commands print.
"""

import os
import re
from collections.abc import Mapping

from toolkit.job.types import RESERVED_NAMES

_OF_CLUSTER = re.compile("SLURM_(CONF|CONF_SERVER|JWT|SACK_KEY|SACK_JWKS|HOME|ROOT|DIR|PREFIX)")
"""Location of the cluster and its programs, and the user's identity: not part of a job."""

_OF_JOB = re.compile(
    "(SLURM|SLURMD|SRUN)_.*"
    # Variables that override the script's options in sbatch; not those for account or nodes.
    "|SBATCH_((CPU|MEM|GPU|TRES)_BIND.*|MEM_PER_.*|CPUS_PER_.*|NTASKS.*|GPUS.*|GPU_FREQ|GRES"
    "|TRES_PER_TASK|DISTRIBUTION|HINT|CORE_SPEC|THREAD_SPEC|THREADS_PER_CORE|OVERCOMMIT|NO_KILL"
    "|ARRAY_INX|EXPORT|GET_USER_ENV|OPEN_MODE|SIGNAL|WAIT)"
    # Settings for a user's own listings would hide jobs.
    "|(SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL)_.*"
)

_OF_PROCESS = re.compile("PMI2?_.*|PMIX_(?!MCA_).*|OMPI_COMM_WORLD_.*|TRAIN_MEETING")
"""Beside the reserved names: a process's place among those that srun or mpirun has started."""

_OF_RANK = re.compile("WANDB_(RUN_ID|RESUME|NAME|RUN_GROUP|SERVICE)")
"""Set in each rank, by our own hook or wandb. Elsewhere they are the user's."""

_TIME_FORMAT = "SLURM_TIME_FORMAT"
"""Makes Slurm's commands print times in seconds since 1970: their default format has no offset, and
the cluster may be in another time zone. sbatch would pass it to the job."""

_DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")


def without_outer_job(
    environ: Mapping[str, str] = os.environ, *, local: bool = False
) -> dict[str, str]:
    """Return the environment without what a job, its step or a rank has set.

    Args:
        environ: The environment of this process.
        local: The run starts on this machine, in the outer job's allocation: it keeps the
            allocation's variables and its GPUs.
    """
    in_rank = "TORCHELASTIC_RUN_ID" in environ
    in_job = not local and "SLURM_JOB_ID" in environ

    def stays(name: str) -> bool:
        if _OF_PROCESS.fullmatch(name) or (in_rank and _OF_RANK.fullmatch(name)):
            return False
        if name.startswith("SLURM_"):
            return local or bool(_OF_CLUSTER.fullmatch(name))
        if RESERVED_NAMES.fullmatch(name) or (in_job and name in _DEVICES):
            return False
        return local or not _OF_JOB.fullmatch(name)

    kept = {name: value for name, value in environ.items() if stays(name)}
    if in_rank and "PYTHONPATH" in kept:
        # start.sh has put the folder of its hook there.
        folders = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(
            folder for folder in folders if not folder.endswith("/watchdog/site")
        )
    return kept


def of_slurm_command(*, asks: bool) -> dict[str, str]:
    """Return the environment of a command of Slurm, so that no variable changes its answer.

    Args:
        asks: Whether the command changes nothing.
    """
    return without_outer_job() | ({_TIME_FORMAT: "%s"} if asks else {})


def of_slurm_command_in_bash(*, asks: bool) -> str:
    """Return lines of bash that make this environment on a login node."""
    lines = [
        f"_ours='^({_OF_JOB.pattern})$' _of_cluster='^{_OF_CLUSTER.pattern}$'",
        'for _name in "${!S@}"; do',
        '  [[ ! $_name =~ $_ours || $_name =~ $_of_cluster ]] || unset "$_name"',
        "done",
    ]
    return "\n".join([*lines, *([f"export {_TIME_FORMAT}=%s"] if asks else [])])
