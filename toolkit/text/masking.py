"""Secrets in shown text: their values are replaced, in the forms in which programs print them.

Pure. A value that is no longer known, as the variable of yesterday's terminal, is recognised by a
mark: its length and two salted hashes. From the marks alone the value can only be guessed.
"""

import hashlib
import html
import json
import re
import shlex
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

__all__ = ["Mark", "Mask", "forms_of", "marks_of"]

SHORTEST = 6
"""The shortest value that is replaced; a shorter one would take half of a log with it."""

_ENCODED_FROM = 8
"""The same of what is left of a value in base64, whose ends depend on what stands beside it."""

_ROUNDS = 10_000
"""Of PBKDF2-HMAC-SHA-256: some milliseconds for each guess, and for each text that is looked at."""

_MOST_GUESSES = 500
"""Texts that are looked at so; what comes after them and begins like a secret is masked unseen."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The kept hash of a value."""

    name: str
    """The variable."""

    length: int
    """Characters of the value, in one of its forms."""

    salt: bytes
    """What the hashes begin with; the same for many marks."""

    start: int
    """16 bits of a hash of the first characters: one of 65,536 other texts has the same."""

    digest: bytes
    """A slow hash of the whole, 16 bytes."""


def forms_of(value: str) -> Iterator[str]:
    """Yield a value as programs print it: plain, escaped, in URLs, in base64 and in hexadecimal.

    >>> list(forms_of("s3cr3t"))[:3]
    ['s3cr3t', 'czNjcjN0', 'MzY3IzdA']
    """
    raw = value.encode("utf-8", "surrogateescape")
    yield value
    for escaped in (
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        shlex.quote(value),
        html.escape(value),
        quote(raw),
        quote(raw, safe=""),
        quote_plus(raw),
    ):
        if escaped != value:
            yield escaped
    for encode in (b64encode, urlsafe_b64encode):
        for before in range(3):  # bytes before it, which it shares its first characters with
            bits = 8 * (before + len(raw))
            text = encode(b"\0" * before + raw).decode()[-(-8 * before // 6) : bits // 6]
            if len(text) >= _ENCODED_FROM:
                yield text
    if len(raw) * 2 >= _ENCODED_FROM:
        yield raw.hex()
        yield raw.hex().upper()


def marks_of(name: str, value: str, salt: bytes) -> Iterator[Mark]:
    """Yield the marks of a variable's value, one for each form; none where it is too short."""
    for form in dict.fromkeys(forms_of(value)) if len(value) >= SHORTEST else ():
        yield Mark(
            name=name,
            length=len(form),
            salt=salt,
            start=_start(form[:SHORTEST], salt),
            digest=_digest(form, salt),
        )


class Mask:
    """Hides the values of secrets in texts."""

    def __init__(self, values: Iterable[tuple[str, str]], marks: Iterable[Mark] = ()) -> None:
        """Hide these values, by variable, and words with one of these marks."""
        forms = {
            form: name
            for name, value in values
            if len(value) >= SHORTEST
            for form in forms_of(value)
        }
        self._forms = sorted(forms.items(), key=lambda item: len(item[0]), reverse=True)
        self._marks: dict[bytes, dict[int, list[Mark]]] = {}
        for mark in sorted(marks, key=lambda mark: mark.length, reverse=True):
            self._marks.setdefault(mark.salt, {}).setdefault(mark.start, []).append(mark)
        self._starts: dict[tuple[bytes, str], int] = {}
        self._seen: dict[tuple[bytes, str], bytes] = {}

    def hide(self, text: str) -> str:
        """Return a text with `***NAME***` in place of every value.

        >>> Mask([("HF_TOKEN", "s3cr3t-x")]).hide("login with s3cr3t-x")
        'login with ***HF_TOKEN***'
        """
        for form, name in self._forms:
            if form in text:
                text = text.replace(form, f"***{name}***")
        for salt, starts in self._marks.items():
            text = self._hide_marked(text, salt, starts)
        return text

    def _hide_marked(self, text: str, salt: bytes, starts: dict[int, list[Mark]]) -> str:
        made: list[str] = []
        end = 0
        for at in _WORD.finditer(text):
            if at.start() < end:
                continue
            for mark in starts.get(self._start(text[at.start() : at.start() + SHORTEST], salt), ()):
                span = text[at.start() : at.start() + mark.length]
                if len(span) == mark.length and self._is(span, mark):
                    made += [text[end : at.start()], f"***{mark.name}***"]
                    end = at.start() + mark.length
                    break
        return "".join([*made, text[end:]])

    def _start(self, text: str, salt: bytes) -> int:
        key = salt, text
        if key not in self._starts:
            if len(self._starts) > 100_000:
                self._starts.clear()
            self._starts[key] = _start(text, salt)
        return self._starts[key]

    def _is(self, text: str, mark: Mark) -> bool:
        key = mark.salt, text
        if key not in self._seen:
            if len(self._seen) >= _MOST_GUESSES:
                return True
            self._seen[key] = _digest(text, mark.salt)
        return self._seen[key] == mark.digest


_WORD = re.compile(r"(?<![A-Za-z0-9])\S")
"""Where a value may begin: not within a word."""


def _start(text: str, salt: bytes) -> int:
    raw = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(raw, key=salt, digest_size=2).digest(), "big")


def _digest(text: str, salt: bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return hashlib.pbkdf2_hmac("sha256", raw, salt, _ROUNDS, dklen=16)
