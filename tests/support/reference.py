"""The reference pages, written from docstrings of fields and from help texts."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tests.support import key_reference
from tests.support.command_reference import commands_page
from toolkit import profile
from toolkit.job import kubernetes_options, spec, sweep
from toolkit.job.types import FrozenModel
from toolkit.lint.check import (
    CLUSTER_RULES,
    JOB_RULES,
    MANIFEST_RULES,
    SCRIPT_RULES,
    SITE_RULES,
    TRAINING_RULES,
)
from toolkit.lint.rulebook import Rule
from toolkit.profile.base import Price, SiteProfile
from toolkit.profile.kubernetes import Toleration, Topology
from toolkit.text.quantities import format_duration
from train.cli import flags

JOB: dict[str, type[FrozenModel]] = {
    "": spec.JobSpec,
    "resources.": spec.Resources,
    "resources.nnodes.": spec.NodeRange,
    "stop.": spec.Stop,
    "retries.": spec.Retries,
    "notify.": spec.Notify,
    "mounts[].": spec.Mount,
    "secrets.NAME.": spec.Secret,
    "kubernetes.": kubernetes_options.KubernetesOptions,
    "kubernetes.patches[].": kubernetes_options.Patch,
    "sweep.": sweep.Sweep,
    "after[].": spec.Dependency,
}
PROFILES: dict[str, type[FrozenModel]] = {
    "every:": SiteProfile,
    "local:": profile.LocalProfile,
    "slurm:": profile.SlurmProfile,
    "kubernetes:": profile.KubernetesProfile,
    "every:node.": profile.NodeFacts,
    "every:price.": Price,
    "every:notify.": spec.Notify,
    "slurm:switches.": profile.Switches,
    "kubernetes:tolerations[].": Toleration,
    "kubernetes:topology.": Topology,
}
"""The models of a page, each by the keys that lead to it."""


def page(title: str, examples: str, models: dict[str, type[FrozenModel]]) -> str:
    """Return a page with a heading for each key."""
    on_page = tuple(models.values())
    parts = key_reference.sections(
        examples, models, lambda name, annotation: _kind(name, annotation, on_page), _default
    )
    return "\n\n".join([f"# {title}", key_reference.INTRODUCTION, *parts]) + "\n"


def _kind(name: str, annotation: Any, on_page: tuple[type[FrozenModel], ...]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(name, arguments[0], on_page)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(name, a, on_page) for a in arguments if a is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_kind(name, arguments[0], on_page)}"
    if origin is dict:
        return f"mapping to {_kind(name, arguments[1], on_page)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        page = "" if annotation in on_page else "job-file.md"
        return f"[{annotation.__name__}]({page}#{annotation.__name__.lower()})"
    if annotation is int:
        return "time" if name.endswith("_s") else "size" if name.endswith("_bytes") else "number"
    return {bool: "true or false", float: "number", str: "string", Any: "anything"}[annotation]


def _default(name: str, field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "required"
    if field.default in (None, (), {}, ""):
        return ""
    shown = format_duration(field.default) if name.endswith("_s") else field.default
    if isinstance(shown, tuple):
        return f"`[{', '.join(shown)}]`"
    return f"`{str(shown).lower() if isinstance(shown, bool) else shown}`"


def train_page() -> str:
    """Return the page of `python -m train`: a table for each section of its help."""
    parts = [
        "# The command line of `train`",
        "Written by `make golden` from the docstrings in `train/cli/config.py`, as is "
        "`python -m train --help`. How to choose among the strategies: "
        "[parallelism](../how-to/parallelism.md).",
        "A flag without a value is a switch; `--no-NAME` turns it off. The file of `--config` "
        "uses the same names, with `_` or `-`.",
        "`train` has no flag for parameter groups, other optimizers, custom learning-rate "
        "schedules, clipping by value, evaluation every N steps, the best checkpoint, early "
        "stopping, a `collate_fn` or a sampler: [what a task cannot choose]"
        "(../how-to/own-task.md#what-a-task-cannot-choose).",
    ]
    sections: dict[str, list[str]] = {}
    for field, text in flags.documented(inline=False):
        unset = field.default is None or field.default is False
        default = "" if unset else f"`{field.default}`"
        words = (
            [] if field.kind is str and field.choices else [field.takes.partition("|")[0].lower()]
        )
        takes = " ".join([*words, *(f"`{choice}`" for choice in field.choices)])
        row = f"| `{field.flag}` | {takes} | {default} | {text} |"
        sections.setdefault(field.section, []).append(row)
    sections["The command line itself"] = [
        f"| `{flag}` | {takes.lower()} | | {text} |"
        for flag, (takes, text) in {
            **flags.FILES,
            flags.HELP[0]: ("", flags.HELP[1]),
        }.items()
    ]
    for title, rows in sections.items():
        head = "| flag | what it takes | default | |\n|---|---|---|---|"
        parts += [f"## {title}", "\n".join([head, *rows])]
    return "\n\n".join(parts) + "\n"


def rules() -> str:
    """Return the page of `toolkit check`: a table for each kind of rule."""
    parts = [
        "# Rules",
        "Written by `make golden` from the rules themselves. How to use them, and what they do not "
        "see: [check](../how-to/check.md).",
    ]
    sections: dict[str, tuple[str, tuple[Rule, ...]]] = {
        "Batch scripts": ("`toolkit check FILE.sbatch`", SCRIPT_RULES),
        "Training scripts": ("`toolkit check FILE.py`", TRAINING_RULES),
        "Job files with a profile": ("`toolkit check JOB.yaml --to PROFILE`", JOB_RULES),
        "Kubernetes manifests": (
            "`toolkit check MANIFEST.yaml`, and what a job file becomes on Kubernetes",
            MANIFEST_RULES,
        ),
        "Sites": ("`--server`, for job files and, from site-account on, for scripts", SITE_RULES),
        "Clusters": ("`--server`, for manifests and job files", CLUSTER_RULES),
    }
    for title, (command, found) in sections.items():
        rows = [
            f'| <a id="{rule.id}"></a>`{rule.id}` | '
            + " | ".join(text.replace("|", "\\|") for text in (rule.finds, rule.reason, rule.fix))
            + " |"
            for rule in found
        ]
        head = "| id | what it finds | why | fix |\n|---|---|---|---|"
        parts += [f"## {title}", command, "\n".join([head, *rows])]
    return "\n\n".join(parts) + "\n"


PAGES = {
    "docs/reference/job-file.md": lambda: page("The job file", "job.yaml", JOB),
    "docs/reference/profiles.md": lambda: page("Profiles", "profiles.yaml", PROFILES),
    "docs/reference/rules.md": rules,
    "docs/reference/train.md": train_page,
    "docs/reference/commands.md": commands_page,
}
"""Reference page: what writes its content."""
