"""The rule about secrets that stand in a script."""

from collections.abc import Iterator

from toolkit.lint.scripts.interpreter import QUIET
from toolkit.lint.scripts.registry import Fault, rule
from toolkit.lint.scripts.script import BatchScript
from toolkit.text import secret_scan

__all__: list[str] = []


@rule(
    "secret-literal",
    finds="a token, key or password in the script",
    reason="Whoever may read the script has it, `scontrol show job` and the accounting keep it, "
    "and the repository remembers it for ever.",
    fix="read it from a file that only you may read: export NAME=$(<~/.secrets/name); and change "
    "what has been written down",
)
def _secrets(script: BatchScript) -> Iterator[Fault]:
    lines: dict[int, str] = {}
    for number, row in enumerate(script.text.splitlines(), start=1):
        if kind := secret_scan.kind_of(row):
            lines.setdefault(number, kind)
    for setting in script.walk.settings:
        if kind := secret_scan.kind_of(setting.value.text, name=setting.name):
            lines.setdefault(setting.line, kind)
    for call in script.walk.calls:
        if call.name in QUIET:
            continue
        for index, kind in secret_scan.kinds_of_words([a.text for a in call.arguments]):
            lines.setdefault(call.arguments[index].line_at(0), kind)
    exports = [script.options.get("export"), *(s.options.get("export") for s in script.walk.steps)]
    for option in exports:
        for item in option.value.text.split(",") if option and option.value else ():
            name, _, value = item.partition("=")
            if option is not None and (kind := secret_scan.kind_of(value, name=name)):
                lines.setdefault(option.line, kind)
    for line, kind in sorted(lines.items()):
        yield Fault(line=line, what=f"what looks like {kind} stands in the script")
