"""The task of the toolkit's runs in `benchmarks/goodput.py`: `counted`, without its notes."""

import time

from tests.system.chaos.counted import Counted


class PacedTask(Counted):
    """Regression on noise; a step takes as long as the file `pace` says, and more."""

    def _note(self, numbers: list[int]) -> None:
        time.sleep(float(self.pace.read_text()))
