"""Replaces the values of secrets in shown text, in the forms in which programs print them. Pure.

A value that is no longer known, like a variable of yesterday's terminal, is recognised by a mark:
its length and two salted hashes. The marks alone do not reveal the value; it can only be guessed.
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
"""The shortest value to replace; a shorter one would occur in half of a log."""

_ENCODED_FROM = 8
"""The shortest base64 form to replace, without the ends, which depend on adjacent bytes."""

_ROUNDS = 10_000
"""Rounds of PBKDF2-HMAC-SHA-256: some milliseconds for each guess and for each word compared."""

_MOST_GUESSES = 500
"""How many words are compared; later ones that begin like a secret are masked unseen."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The kept hash of a value."""

    name: str
    """The variable."""

    length: int
    """Characters of the value, in one of its forms."""

    salt: bytes
    """The salt of both hashes; many marks share it."""

    start: int
    """A hash of the first characters, 16 bits: one in 65,536 other texts has the same."""

    digest: bytes
    """A slow hash of the whole value, 16 bytes."""


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
        for before in range(3):  # bytes before it, which share its first characters
            bits = 8 * (before + len(raw))
            text = encode(b"\0" * before + raw).decode()[-(-8 * before // 6) : bits // 6]
            if len(text) >= _ENCODED_FROM:
                yield text
    if len(raw) * 2 >= _ENCODED_FROM:
        yield raw.hex()
        yield raw.hex().upper()


def marks_of(name: str, value: str, salt: bytes) -> Iterator[Mark]:
    """Yield the marks of a variable's value, one for each form; none if it is too short."""
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
        """Hide these pairs of variable and value, and words with one of these marks."""
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
        for salt, by_start in self._marks.items():
            parts: list[str] = []
            end = 0
            for at in (match.start() for match in _WORD.finditer(text)):
                if at < end:
                    continue
                for mark in by_start.get(self._start(text[at : at + SHORTEST], salt), ()):
                    word = text[at : at + mark.length]
                    if len(word) == mark.length and self._has_mark(word, mark):
                        parts += [text[end:at], f"***{mark.name}***"]
                        end = at + mark.length
                        break
            text = "".join([*parts, text[end:]])
        return text

    def _start(self, text: str, salt: bytes) -> int:
        key = salt, text
        if key not in self._starts:
            if len(self._starts) > 100_000:
                self._starts.clear()
            self._starts[key] = _start(text, salt)
        return self._starts[key]

    def _has_mark(self, text: str, mark: Mark) -> bool:
        key = mark.salt, text
        if key not in self._seen:
            if len(self._seen) >= _MOST_GUESSES:
                return True
            self._seen[key] = _digest(text, mark.salt)
        return self._seen[key] == mark.digest


_WORD = re.compile(r"(?<![A-Za-z0-9])\S")
"""Where a value may begin: not inside a word."""


def _start(text: str, salt: bytes) -> int:
    raw = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(raw, key=salt, digest_size=2).digest(), "big")


def _digest(text: str, salt: bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return hashlib.pbkdf2_hmac("sha256", raw, salt, _ROUNDS, dklen=16)
