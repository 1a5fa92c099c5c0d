"""Random numbers of a step, as a function of the step."""

from __future__ import annotations

import torch


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device.

    Not `torch.manual_seed()`: it also tells backends that are not in use what to seed with should
    they ever be, and for each formats the call stack, at 0.1 ms per step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # All of them: `manual` and `dataparallel` use several.
        torch.cuda.manual_seed_all(seed)
