"""From a job and a profile to a launch plan; pure."""

from toolkit.planning.planner import plan
from toolkit.planning.plans import KubernetesPlan, LaunchPlan, LocalPlan, SlurmPlan
from toolkit.planning.slurm import array_of

__all__ = ["KubernetesPlan", "LaunchPlan", "LocalPlan", "SlurmPlan", "array_of", "plan"]
