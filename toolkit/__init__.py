"""One job file for PyTorch training: on this machine, on Slurm, and on Kubernetes.

>>> import toolkit
>>> job = toolkit.load("jobs/digits.yaml")
>>> print(toolkit.render(toolkit.plan(job, toolkit.load_profile("slurm"))).splitlines()[0])
#!/bin/bash

Names are imported when they are first used, so that `import toolkit` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checks import Finding, check
    from toolkit.discovery import discover
    from toolkit.drafts import draft, keep_draft
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
    from toolkit.executors import (
        DebugExecutor,
        KubernetesExecutor,
        LocalExecutor,
        SlurmExecutor,
        attach,
    )
    from toolkit.launchers.base import Launcher, Run, RunState, RunStatus
    from toolkit.launchers.failures import Failure
    from toolkit.planning import KubernetesPlan, LaunchPlan, LocalPlan, SlurmPlan, plan
    from toolkit.profile import (
        KubernetesProfile,
        LocalProfile,
        Profile,
        SlurmProfile,
        default_profile,
        load_profile,
    )
    from toolkit.rendering import render
    from toolkit.runs import ask_site, list_runs, open_run, resubmit, statuses, submit, wait
    from toolkit.schema import json_schema
    from toolkit.spec import JobSpec, load

__version__ = "0.1.0"

_HOME = {
    "DebugExecutor": "executors",
    "Failure": "launchers.failures",
    "Finding": "checks",
    "InputError": "errors",
    "JobSpec": "spec",
    "KubernetesExecutor": "executors",
    "KubernetesPlan": "planning",
    "KubernetesProfile": "profile",
    "LaunchPlan": "planning",
    "Launcher": "launchers.base",
    "LauncherError": "errors",
    "LocalExecutor": "executors",
    "LocalPlan": "planning",
    "LocalProfile": "profile",
    "PlanError": "errors",
    "Problem": "errors",
    "Profile": "profile",
    "ProfileError": "errors",
    "RenderError": "errors",
    "Run": "launchers.base",
    "RunLost": "errors",
    "RunNotFound": "errors",
    "RunState": "launchers.base",
    "RunStatus": "launchers.base",
    "SchedulerMissing": "errors",
    "SlurmExecutor": "executors",
    "SlurmPlan": "planning",
    "SlurmProfile": "profile",
    "SpecError": "errors",
    "ToolkitError": "errors",
    "ask_site": "runs",
    "attach": "executors",
    "check": "checks",
    "default_profile": "profile",
    "discover": "discovery",
    "draft": "drafts",
    "json_schema": "schema",
    "keep_draft": "drafts",
    "list_runs": "runs",
    "load": "spec",
    "load_profile": "profile",
    "open_run": "runs",
    "plan": "planning",
    "render": "rendering",
    "resubmit": "runs",
    "statuses": "runs",
    "submit": "runs",
    "wait": "runs",
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
