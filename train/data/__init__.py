"""The order of samples, their division among ranks, and the processes that read them."""

from .order import Batch

__all__ = ["Batch"]
