"""Label and field selectors, as queries write them."""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["is_selected", "labels_match", "selector_matches"]

_TERM = re.compile(
    r"\s*(?:(?P<absent>!)\s*(?P<a>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s+(?P<word>in|notin)\s*\((?P<set>[^)]*)\)"
    r"|(?P<k>[\w./-]+)\s*(?P<op>==|=|!=)\s*(?P<value>[\w./-]*)"
    r"|(?P<there>[\w./-]+))\s*(?:,|$)"
)


def is_selected(thing: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Whether an object matches a query.

    Raises:
        ValueError: the query cannot be read.
    """
    labels = thing["metadata"].get("labels") or {}
    return labels_match(labels, query.get("labelSelector", "")) and _fields_match(
        thing, query.get("fieldSelector", "")
    )


def labels_match(labels: Mapping[str, str], text: str) -> bool:
    """Whether labels match a selector like `a=b,c in (d,e),!f`."""
    at = 0
    while at < len(text):
        if (term := _TERM.match(text, at)) is None:
            raise ValueError(f"unable to parse requirement: {text[at:]!r}")
        at = term.end()
        if not _holds(labels, term):
            return False
    return True


def _holds(labels: Mapping[str, str], term: re.Match[str]) -> bool:
    if term["absent"]:
        return term["a"] not in labels
    if term["word"]:
        among = labels.get(term["key"]) in [one.strip() for one in term["set"].split(",")]
        return among if term["word"] == "in" else not among
    if term["op"]:
        same = labels.get(term["k"]) == term["value"]
        return same if term["op"] != "!=" else not same
    return term["there"] in labels


def _fields_match(thing: Mapping[str, Any], text: str) -> bool:
    for term in filter(None, text.split(",")):
        path, operator, value = re.split(r"(!=|==|=)", term, maxsplit=1)
        found: Any = thing
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if (str(found if found is not None else "") == value) == (operator == "!="):
            return False
    return True


def selector_matches(labels: Mapping[str, str], selector: Mapping[str, Any]) -> bool:
    """Whether labels match a selector in the form of manifests."""
    if any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
        return False
    for term in selector.get("matchExpressions") or ():
        value, values = labels.get(term["key"]), term.get("values", ())
        holds = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[term["operator"]]
        if not holds:
            return False
    return True
