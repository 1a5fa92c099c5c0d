"""The watchdog's programs, written to a folder of the attempt's ranks.

These are separate programs: the ranks' Python loads `site/sitecustomize.py`, and `start.sh`
starts the watchdog before it becomes torchrun.
"""

import os
import pkgutil

_PROGRAMS = ("watchdog.py", "stragglers.py")
_SITE = "sitecustomize.py"


def write_watchdog(
    folder: str,
    *,
    watches: bool,
    reads_steps: bool,
    children: bool,
    warm: bool = False,
    tells_trainer: bool = False,
) -> str:
    """Write the programs into a folder; return the path of `start.sh`.

    Args:
        folder: The target, a folder named `watchdog`.
        watches: Whether the watchdog runs, not only what prepares the ranks.
        reads_steps: Whether steps are read from the ranks' output (`log_pattern`).
        children: Whether child processes of a rank outlive a stop.
        warm: Whether ranks are forked from a process that has imported torch.
        tells_trainer: Whether the watchdog reports progress to Kubeflow Trainer.
    """
    os.makedirs(os.path.join(folder, "site"), exist_ok=True)
    names = ["start.sh", f"site/{_SITE}", "site/quick_imports.py"]
    if watches:
        names += [*_PROGRAMS, "site/rank_watch.py"]
        names += ["log_steps.py"] if reads_steps else []
        names += ["trainer_status.py"] if tells_trainer else []
    if children:
        names.append("site/rank_children.py")
    if warm:
        names += ["site/rank_proxy.py", "site/fork_server.py"]
    for name in names:
        source = pkgutil.get_data(__package__, "watchdog/" + name.rpartition("/")[2])
        assert source is not None
        with open(os.path.join(folder, name), "wb") as file:
            file.write(source)
    return os.path.join(folder, "start.sh")
