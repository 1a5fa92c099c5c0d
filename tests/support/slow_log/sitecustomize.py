"""A log on a slow disk: torchrun takes, for the line on a failed rank, until a signal comes.

Python imports this module at its start where PYTHONPATH names this folder.
"""

import logging
import os
import time
from pathlib import Path


class SlowLog(logging.Handler):
    """Waits as a write does, and treats errors as `logging` tells handlers to."""

    def emit(self, record: logging.LogRecord) -> None:
        if "failed (exitcode:" not in record.getMessage():
            return
        (Path(os.environ["TRAIN_RUN_DIR"]) / f"writing-{os.getpid()}").touch()
        try:
            time.sleep(1000)
        except Exception:  # torchrun's signal handler raises one
            self.handleError(record)


logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(SlowLog())
