"""Proof before training that a strategy trains the user's model like one process."""

from .proving import Verdict, prove

__all__ = ["Verdict", "prove"]
