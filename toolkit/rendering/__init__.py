"""From a launch plan to the script or manifest, by Jinja templates.

Pure: the same plan gives the same bytes. Templates place values. What is known only while a job
runs (its nodes, how an attempt ended) is decided by the scripts themselves: templates/.
"""

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
        RenderError: a value that the format cannot hold, a template of the profile's
            `templates_dir` that does not work, with its line, or a patch that does not apply.
    """
    if plan.profile.kind not in launcher_plugins.BUILT_IN:
        return launcher_plugins.plugin(plan.profile.kind).render(plan)
    text = "".join(map(_filled, plan.objects))
    if not plan.patches:
        return text
    from toolkit.rendering.patches import patched

    return patched(text, plan.patches)


def _filled(plan: "LaunchPlan") -> str:
    values = {"plan": plan, "version": __version__}
    if plan.profile.templates_dir is None:
        return our_environment().get_template(plan.template).render(values)
    from toolkit.rendering.templates_dir import render_with

    return render_with(Path(plan.profile.templates_dir), plan, values)
