"""Renders a launch plan as a script or manifest, by Jinja templates.

Pure: the same plan gives the same bytes. Templates only insert values. The scripts themselves, in
templates/, handle everything known only at run time (the nodes, how an attempt ended).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import __version__, launcher_plugins
from toolkit.rendering.environment import (
    our_environment,
    page_environment,
    path_quote,
    sbatch_quote,
    shell_quote,
    template_text,
)
from toolkit.rendering.payload import payload_of

if TYPE_CHECKING:
    from toolkit.planning.plans import LaunchPlan

__all__ = [
    "page_environment",
    "path_quote",
    "render",
    "sbatch_quote",
    "shell_quote",
    "template_text",
]


def render(plan: "LaunchPlan") -> str:
    """Return the script or manifest of a plan.

    Raises:
        RenderError: the format cannot represent a value, a template of the profile's
            `templates_dir` fails (with its line), or a patch does not apply.
    """
    if plan.profile.kind not in launcher_plugins.BUILT_IN:
        return launcher_plugins.plugin(plan.profile.kind).render(plan)
    text = "".join(_texts(plan))
    if not plan.patches:
        return text
    from toolkit.rendering.patches import patched

    return patched(text, plan.patches)


def _texts(plan: "LaunchPlan") -> Iterable[str]:
    if plan.profile.templates_dir is not None:
        from toolkit.rendering.templates_dir import render_with

        return render_with(Path(plan.profile.templates_dir), plan.objects)
    template = our_environment().get_template
    known = {"version": __version__, "supervisor": payload_of(plan)}
    return (template(one.template).render(known, plan=one) for one in plan.objects)
