"""The task of the runs of `benchmarks/recovery.py`: `counted`, which notes when it has imported."""

import json
import os
import time
from pathlib import Path

from tests.system.chaos.counted import Counted


class TimestampedTask(Counted):
    """Regression on noise; its ranks note when they begin to build it."""

    def __init__(self) -> None:
        """Note the time, of rank 0 alone."""
        super().__init__()
        if os.environ["RANK"] == "0":
            stamp = {"what": "imported", "step": 0, "time": time.time()}
            with Path(os.environ["COUNTED"], "stamps.jsonl").open("a") as file:
                file.write(json.dumps(stamp) + "\n")
