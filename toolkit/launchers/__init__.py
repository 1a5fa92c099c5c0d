"""Launchers: from a plan to a run, one module per place."""

from toolkit.launchers.base import Launcher, Run, RunState, RunStatus
from toolkit.launchers.registry import RunRecord

__all__ = ["Launcher", "Run", "RunRecord", "RunState", "RunStatus"]
