"""The role `pod` with a clock that runs fast: `python -m tests.support.quick_pod pod …`.

Each look at other pods, and each try to reach the first one, adds a line to TRAIN_RUN_DIR/looks.
"""

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.supervisor import __main__ as command_line
from toolkit.supervisor import first_pod, pod

FASTER = 100

real_time, real_select = time.monotonic, select.select


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with Path(os.environ["TRAIN_RUN_DIR"], "looks").open("a") as file:
            file.write("\n")
        return function(*args)

    return call


def quick_select(read: Any, write: Any, failed: Any, limit_s: float) -> Any:
    return real_select(read, write, failed, limit_s / FASTER)


if __name__ == "__main__":
    vars(time)["monotonic"] = lambda: real_time() * FASTER
    vars(select)["select"] = quick_select
    for place, name in ((pod.PodStart, "_look"), (first_pod.FirstPod, "address")):
        setattr(place, name, counted(getattr(place, name)))
    sys.exit(command_line.main())
