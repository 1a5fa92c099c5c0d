"""Launchers: from a plan to a run, one module per place."""

from toolkit.runs.registry import RunRecord
from toolkit.runs.run import Launcher, Run
from toolkit.runs.state import RunState, RunStatus

__all__ = ["Launcher", "Run", "RunRecord", "RunState", "RunStatus"]
