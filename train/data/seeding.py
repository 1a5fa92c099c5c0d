"""Random numbers of a step and of a sample, as a function of the step and of the sample."""

from __future__ import annotations

import random

import numpy as np
import torch

_WORD = (1 << 64) - 1


def mixed(seed: int, number: int) -> int:
    """Make a 64-bit seed of a seed and a number, so that neighbouring numbers share nothing.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), which is a bijection: no two numbers give the same seed.
    """
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device.

    Not `torch.manual_seed()`: it also tells backends that are not in use what to seed with should
    they ever be, and for each formats the call stack, at 0.1 ms per step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # All of them: `manual` and `dataparallel` use several.
        torch.cuda.manual_seed_all(seed)


def seed_sample(seed: int) -> None:
    """Seed, with 64 bits, what a Dataset may draw from: torch's generator, `random`, and numpy's.

    It takes 8 µs, half of it for `random`.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # Other bits: torch takes the lower 32, and makes the same numbers of them as numpy would.
    np.random.seed(seed >> 32)


class RandomDrawDetector:
    """Notices whether random numbers have been drawn meanwhile, from the generators of a sample.

    Of those of `random` and numpy it keeps copies in step, which is cheaper than to look at their
    states: these are thousands of bytes.
    """

    def __init__(self) -> None:
        """Make the copies; `start()` sets them."""
        self._random, self._numpy = random.Random(), np.random.RandomState()
        self._state = torch.default_generator.get_state()

    def start(self) -> None:
        """Begin to watch."""
        if random.random() != self._random.random():
            self._random.setstate(random.getstate())
        if np.random.random_sample() != self._numpy.random_sample():
            self._numpy.set_state(np.random.get_state())
        self._state = torch.default_generator.get_state()

    def drawn(self) -> bool:
        """Return whether random numbers were drawn since then."""
        return (
            random.random() != self._random.random()
            or np.random.random_sample() != self._numpy.random_sample()
            or not torch.equal(torch.default_generator.get_state(), self._state)
        )

    def put_back(self) -> None:
        """Restore the state of torch's generator, from which the model's dropout is drawn."""
        torch.default_generator.set_state(self._state)
