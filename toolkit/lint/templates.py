"""Templates: files with placeholders that another program fills in before use."""

import re

from toolkit.lint.rulebook import Rule
from toolkit.text.manifests import Stream, View

SCRIPT_TEMPLATE = Rule(
    id="script-template",
    finds="a script template: `{{ … }}`, `{% … %}` or `{NAME}` in an `#SBATCH` line, or a line "
    "that begins with `{% … %}`",
    reason="The values are known only after rendering; nothing else is checked.",
    fix="render it first, and check what comes out: RENDER … | toolkit check -",
)
MANIFEST_TEMPLATE = Rule(
    id="manifest-template",
    finds="a manifest template: `{{ … }}` of Helm and Jinja, or `$NAME` where Kubernetes expands "
    "nothing",
    reason="The values are known only after rendering; nothing else is checked.",
    fix="render it first, and check what comes out: helm template CHART | toolkit check -; or "
    "envsubst < FILE | toolkit check -",
)

_IN_DIRECTIVE = re.compile(
    r"^#SBATCH[ \t][^\n#]*?(\{\{|\{%|(?<![$\w])\{\w{1,60}\})|^[ \t]*\{%-?[ \t]*\w", re.MULTILINE
)
_IN_YAML = re.compile(r"^[ \t]*(?:- +)?(?:[\w./-]{1,200}: *)?[\"']?(\{\{|\{%)", re.MULTILINE)
_VARIABLE = re.compile(r"[^$]{0,200}(\$\{[A-Za-z_]\w*\}|\$[A-Z_][A-Z0-9_]*)(?!\w)[^$]{0,200}")
_EXPANDED = frozenset({"command", "args", "env", "data", "stringData", "binaryData", "annotations"})
"""Keys of values that may contain a `$` for a shell or a program."""


def script_template_line(text: str) -> int | None:
    """Return the line with the first placeholder of a script template; None for other scripts."""
    match = _IN_DIRECTIVE.search(text)
    return text.count("\n", 0, match.end()) + 1 if match else None


def yaml_template_line(text: str) -> int | None:
    """Return the line with the first placeholder of a YAML template; None for other texts."""
    match = _IN_YAML.search(text)
    return text.count("\n", 0, match.end()) + 1 if match else None


def unfilled(stream: Stream) -> list[View]:
    """Return the values with a variable that Kubernetes does not expand."""
    waiting = [manifest.view for manifest in reversed(stream.manifests)]
    unfilled_views = []
    while waiting:
        view = waiting.pop()
        if isinstance(view.value, str):
            if _VARIABLE.fullmatch(view.value):
                unfilled_views.append(view)
            continue
        below = [entry for key, entry in view.entries() if key not in _EXPANDED]
        waiting += reversed([*below, *view.items()])
    return unfilled_views
