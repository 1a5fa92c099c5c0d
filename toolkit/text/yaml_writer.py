"""Writes values as YAML for people that every reader reads as the same value. Pure.

Words are plain if they are words to both YAML 1.1 and 1.2; everything else is JSON, which is YAML.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["json_quote", "yaml_block", "yaml_flow"]

WIDTH = 72
"""The longest mapping or list that stays on one line, in characters."""

# JSON is YAML except for characters that YAML reads as a line break or forbids.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./=-]*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])

_LINE = r"[!-~](?:[ -~]*[!-~])?"
_LINES = re.compile(rf"{_LINE}(?:\n+ *{_LINE})*\n")


def json_quote(value: object) -> str:
    r"""Return the value as JSON that every YAML reader reads as the same value.

    >>> print(json_quote({"a": ["no", "caf\u00e9"]}))
    {"a": ["no", "café"]}
    """
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def yaml_flow(value: object) -> str:
    """Return the value on one line.

    >>> print(yaml_flow({"name": "tmp", "x": ["--lr", "1e-3", "no", "a b", True, None]}))
    {name: tmp, x: [--lr, "1e-3", "no", "a b", true, null]}
    """
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else json_quote(value)
    if isinstance(value, Mapping):
        pairs = (f"{yaml_flow(key)}: {yaml_flow(of)}" for key, of in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(yaml_flow, value)) + "]"
    return json_quote(value)


def yaml_block(value: object, indent: int = 0) -> str:
    r"""Return the text that follows `key:` or `-`, on the same line or indented below it.

    >>> print("key:" + yaml_block({"small": [1, 2]}, 2))
    key: {small: [1, 2]}
    >>> print("key:" + yaml_block({"long": "x" * 60, "text": "if a\nthen b\n"}, 2))
    key:
      long: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
      text: |
        if a
        then b
    """
    pad = " " * indent
    if isinstance(value, str):
        if not _LINES.fullmatch(value):
            return " " + yaml_flow(value)
        lines = value[:-1].split("\n")
        return " |" + "".join(f"\n{pad}{line}" if line else "\n" for line in lines)
    if not isinstance(value, Mapping | Sequence) or not value:
        return " " + yaml_flow(value)
    text = yaml_flow(value)
    if len(text) <= WIDTH and not _holds_lines(value):
        return " " + text
    return "".join(f"\n{pad}{line}" for line in _entries(value, indent))


def _entries(value: Mapping[str, object] | Sequence[object], indent: int) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, of in value.items():
            yield f"{yaml_flow(key)}:{yaml_block(of, indent + 2)}"
        return
    for of in value:
        text = yaml_block(of, indent + 2)
        # A mapping or list of several lines begins beside its dash.
        yield "- " + text.lstrip("\n ") if text.startswith("\n") else "-" + text


def _holds_lines(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_lines, value.values()))
    if isinstance(value, str):
        return _LINES.fullmatch(value) is not None
    return isinstance(value, Sequence) and any(map(_holds_lines, value))
