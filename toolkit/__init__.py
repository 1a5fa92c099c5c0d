"""One job file for PyTorch training: on this machine, on Slurm, and on Kubernetes.

>>> import toolkit
>>> job = toolkit.load("jobs/digits.yaml")
>>> print(toolkit.render(toolkit.plan(job, toolkit.load_profile("slurm"))).splitlines()[0])
#!/bin/bash

Names are imported on first use, so that `import toolkit` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_NAMES = {
    "api": "ask_site list_runs open_run resubmit run statuses submit wait",
    "checks": "Finding check",
    "errors": (
        "InputError LauncherError NewerFormat PlanError Problem ProfileError RenderError RunLost "
        "RunNotFound SchedulerMissing SpecError ToolkitError"
    ),
    "functions": "DebugExecutor KubernetesExecutor LocalExecutor SlurmExecutor attach",
    "job.schema": "json_schema",
    "job.spec": "JobSpec load",
    "planning": "LaunchPlan plan",
    "planning.kubernetes": "KubernetesPlan",
    "planning.local": "LocalPlan",
    "planning.slurm": "SlurmPlan",
    "profile": "KubernetesProfile LocalProfile Profile SlurmProfile default_profile load_profile",
    "profile.detect": "discover",
    "profile.draft": "draft keep_draft",
    "profile.schema": "profile_schema",
    "project": "write_project",
    "rendering": "render",
    "rendering.payload": "carried_supervisor",
    "runs.evidence.failure": "Failure",
    "runs.views.goodput": "Goodput",
    "runs.views.report": "Report report",
    "runs.run": "Launcher Run",
    "runs.state": "RunState RunStatus",
}
"""The public names by defining module."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # the same names, for type checkers; a test compares them
    from toolkit.api import (
        ask_site as ask_site,
        list_runs as list_runs,
        open_run as open_run,
        resubmit as resubmit,
        run as run,
        statuses as statuses,
        submit as submit,
        wait as wait,
    )
    from toolkit.checks import Finding as Finding, check as check
    from toolkit.errors import (
        InputError as InputError,
        LauncherError as LauncherError,
        NewerFormat as NewerFormat,
        PlanError as PlanError,
        Problem as Problem,
        ProfileError as ProfileError,
        RenderError as RenderError,
        RunLost as RunLost,
        RunNotFound as RunNotFound,
        SchedulerMissing as SchedulerMissing,
        SpecError as SpecError,
        ToolkitError as ToolkitError,
    )
    from toolkit.functions import (
        DebugExecutor as DebugExecutor,
        KubernetesExecutor as KubernetesExecutor,
        LocalExecutor as LocalExecutor,
        SlurmExecutor as SlurmExecutor,
        attach as attach,
    )
    from toolkit.job.schema import json_schema as json_schema
    from toolkit.job.spec import JobSpec as JobSpec, load as load
    from toolkit.planning import LaunchPlan as LaunchPlan, plan as plan
    from toolkit.planning.kubernetes import KubernetesPlan as KubernetesPlan
    from toolkit.planning.local import LocalPlan as LocalPlan
    from toolkit.planning.slurm import SlurmPlan as SlurmPlan
    from toolkit.profile import (
        KubernetesProfile as KubernetesProfile,
        LocalProfile as LocalProfile,
        Profile as Profile,
        SlurmProfile as SlurmProfile,
        default_profile as default_profile,
        load_profile as load_profile,
    )
    from toolkit.profile.detect import discover as discover
    from toolkit.profile.draft import draft as draft, keep_draft as keep_draft
    from toolkit.profile.schema import profile_schema as profile_schema
    from toolkit.project import write_project as write_project
    from toolkit.rendering import render as render
    from toolkit.rendering.payload import carried_supervisor as carried_supervisor
    from toolkit.runs.evidence.failure import Failure as Failure
    from toolkit.runs.views.goodput import Goodput as Goodput
    from toolkit.runs.views.report import Report as Report, report as report
    from toolkit.runs.run import Launcher as Launcher, Run as Run
    from toolkit.runs.state import RunState as RunState, RunStatus as RunStatus


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"toolkit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
