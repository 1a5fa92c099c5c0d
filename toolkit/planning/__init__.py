"""From a job and a profile to a launch plan; pure."""

from toolkit.planning.planner import plan
from toolkit.planning.plans import LaunchPlan

__all__ = ["LaunchPlan", "plan"]
