"""Which sample is read when, by which rank, and the processes that read it."""

from .order import Batch

__all__ = ["Batch"]
