"""One job file for PyTorch training: on this machine, on Slurm, and on Kubernetes.

>>> import toolkit
>>> job = toolkit.load("jobs/digits.yaml")
>>> print(toolkit.render(toolkit.plan(job, toolkit.load_profile("slurm"))).splitlines()[0])
#!/bin/bash

Names are imported when they are first used, so that `import toolkit` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.version import __version__ as __version__

if TYPE_CHECKING:
    from toolkit.api import ask_site, list_runs, open_run, resubmit, run, statuses, submit, wait
    from toolkit.checks import Finding, check
    from toolkit.errors import (
        InputError,
        LauncherError,
        PlanError,
        Problem,
        ProfileError,
        RenderError,
        RunLost,
        RunNotFound,
        SchedulerMissing,
        SpecError,
        ToolkitError,
    )
    from toolkit.functions import (
        DebugExecutor,
        KubernetesExecutor,
        LocalExecutor,
        SlurmExecutor,
        attach,
    )
    from toolkit.job.schema import json_schema
    from toolkit.job.spec import JobSpec, load
    from toolkit.planning import LaunchPlan, plan
    from toolkit.planning.kubernetes import KubernetesPlan
    from toolkit.planning.local import LocalPlan
    from toolkit.planning.slurm import SlurmPlan
    from toolkit.profile import (
        KubernetesProfile,
        LocalProfile,
        Profile,
        SlurmProfile,
        default_profile,
        load_profile,
    )
    from toolkit.profile.detect import discover
    from toolkit.profile.draft import draft, keep_draft
    from toolkit.rendering import render
    from toolkit.runs.failure import Failure
    from toolkit.runs.run import Launcher, Run
    from toolkit.runs.state import RunState, RunStatus

_HOME = {
    "DebugExecutor": "functions",
    "Failure": "runs.failure",
    "Finding": "checks",
    "InputError": "errors",
    "JobSpec": "job.spec",
    "KubernetesExecutor": "functions",
    "KubernetesPlan": "planning.kubernetes",
    "KubernetesProfile": "profile",
    "LaunchPlan": "planning",
    "Launcher": "runs.run",
    "LauncherError": "errors",
    "LocalExecutor": "functions",
    "LocalPlan": "planning.local",
    "LocalProfile": "profile",
    "PlanError": "errors",
    "Problem": "errors",
    "Profile": "profile",
    "ProfileError": "errors",
    "RenderError": "errors",
    "Run": "runs.run",
    "RunLost": "errors",
    "RunNotFound": "errors",
    "RunState": "runs.state",
    "RunStatus": "runs.state",
    "SchedulerMissing": "errors",
    "SlurmExecutor": "functions",
    "SlurmPlan": "planning.slurm",
    "SlurmProfile": "profile",
    "SpecError": "errors",
    "ToolkitError": "errors",
    "ask_site": "api",
    "attach": "functions",
    "check": "checks",
    "default_profile": "profile",
    "discover": "profile.detect",
    "draft": "profile.draft",
    "json_schema": "job.schema",
    "keep_draft": "profile.draft",
    "list_runs": "api",
    "load": "job.spec",
    "load_profile": "profile",
    "open_run": "api",
    "plan": "planning",
    "render": "rendering",
    "resubmit": "api",
    "run": "api",
    "statuses": "api",
    "submit": "api",
    "wait": "api",
}

__all__ = [
    "DebugExecutor",
    "Failure",
    "Finding",
    "InputError",
    "JobSpec",
    "KubernetesExecutor",
    "KubernetesPlan",
    "KubernetesProfile",
    "LaunchPlan",
    "Launcher",
    "LauncherError",
    "LocalExecutor",
    "LocalPlan",
    "LocalProfile",
    "PlanError",
    "Problem",
    "Profile",
    "ProfileError",
    "RenderError",
    "Run",
    "RunLost",
    "RunNotFound",
    "RunState",
    "RunStatus",
    "SchedulerMissing",
    "SlurmExecutor",
    "SlurmPlan",
    "SlurmProfile",
    "SpecError",
    "ToolkitError",
    "ask_site",
    "attach",
    "check",
    "default_profile",
    "discover",
    "draft",
    "json_schema",
    "keep_draft",
    "list_runs",
    "load",
    "load_profile",
    "open_run",
    "plan",
    "render",
    "resubmit",
    "run",
    "statuses",
    "submit",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"toolkit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
