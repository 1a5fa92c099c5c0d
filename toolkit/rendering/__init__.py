"""From a launch plan to the script or manifest, by Jinja templates. Pure."""

from toolkit.rendering.environment import (
    page_environment,
    path_quote,
    render,
    sbatch_quote,
    shell_quote,
)

__all__ = ["page_environment", "path_quote", "render", "sbatch_quote", "shell_quote"]
