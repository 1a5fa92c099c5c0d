"""From a launch plan to the script or manifest, by Jinja templates. Pure."""

from toolkit.rendering.environment import page_environment, path_quote, sbatch_quote, shell_quote
from toolkit.rendering.renderer import render

__all__ = ["page_environment", "path_quote", "render", "sbatch_quote", "shell_quote"]
