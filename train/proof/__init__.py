"""Proof before training: a strategy trains the user's own model as one process does."""

from .proving import Verdict, prove

__all__ = ["Verdict", "prove"]
