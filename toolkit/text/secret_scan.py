"""Recognises secrets in files, arguments and variables. Pure.

A message never holds more than the first three characters of a secret.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "WAY_OUT",
    "conceal",
    "is_telling",
    "kind_of",
    "kinds_of_words",
    "leak_message",
    "leaks_of_document",
    "values_of",
]

SHOWN = 3
"""How many characters of a token may be shown: enough to recognise it."""

LINE_FROM = 16
"""The shortest line of a longer secret that is replaced on its own."""

WAY_OUT = (
    "a secret is never written down; name it under 'secrets' and export it where you submit, "
    "or give the file that holds it: secrets: {NAME: {file: ~/.secrets/name}}"
)

_SHAPES = {
    "a Hugging Face token": r"hf_[A-Za-z0-9]{16,}",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9_]{16,}|github_pat_[A-Za-z0-9_]{16,}",
    "a GitLab token": (
        r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[A-Za-z0-9_-]{16,}|GR1348941[A-Za-z0-9_-]{16,}"
    ),
    "an AWS access key": r"A(?:KIA|SIA|BIA|CCA|3T[A-Z0-9])[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}",
    # Words joined by '-' also begin with sk-: scikit's models do.
    "an API key": r"sk-(?:proj|svcacct|admin|ant|or|lf)-[A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9]{20,}"
    r"|sk-[A-Za-z0-9_-]{0,200}T3BlbkFJ[A-Za-z0-9]{16,}",
    "a key of a model's API": r"(?:gsk_|xai-|pplx-|nvapi-|r8_|dapi)[A-Za-z0-9_-]{20,}",
    "a Slack token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}",
    "a Slack or Discord webhook": (
        r"https://hooks\.slack\.com/services/[A-Za-z0-9/_-]{16,}"
        r"|https://discord(?:app)?\.com/api/webhooks/[0-9]{10,}/[A-Za-z0-9_-]{16,}"
    ),
    "an npm token": r"npm_[A-Za-z0-9]{16,}|//[a-z0-9./:-]{1,200}/:_authToken=[^\s$]{8,}",
    "a PyPI token": r"pypi-Ag[A-Za-z0-9_-]{16,}",
    "a Docker token": r"dckr_[op]at_[A-Za-z0-9_-]{16,}",
    "a SendGrid key": r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,}",
    "a Stripe key": r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "a Twilio key": r"(?:AC|SK)[0-9a-z]{32}(?![0-9A-Za-z])",
    "a Square secret": r"sq0csp-[A-Za-z0-9_\\-]{32,}",
    "a Mailchimp key": r"[0-9a-z]{32}-us[0-9]{1,2}(?![0-9A-Za-z])",
    "a Telegram token": r"[0-9]{8,10}:[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",
    "a Discord token": r"[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",
    "an Artifactory key": r"AK[Cc][A-Za-z0-9]{30,}|AP[0-9A-F][A-Za-z0-9]{60,}",
    "a Vault token": r"hv[sbr]\.[A-Za-z0-9_-]{20,}",
    "a Google OAuth token": r"ya29\.[A-Za-z0-9_-]{16,}|GOCSPX-[A-Za-z0-9_-]{16,}",
    "a key of Azure": r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/=]{16,}",
    "a bearer token": r"(?i:bearer)[ =:]+(?=[^\s]{0,200}[0-9])[A-Za-z0-9._~+/-]{16,}=*",
    # Bounded, because a text may begin like one at every character.
    "a JSON Web Token": r"eyJ[A-Za-z0-9_-]{8,500}\.eyJ[A-Za-z0-9_-]{8,5000}\.[A-Za-z0-9_-]{8,}",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----(?s:.*)",
}
_TOKEN = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES.values())})")

_HOLDS = re.compile(
    r"(TOKEN|SECRETS?|PASSW(OR)?D|PASSPHRASE|PASSCODE|APIKEY|CRED(ENTIAL)?S?)$"
    r"|^(API|SECRET|ACCESS|PRIVATE|AUTH|SIGNING|ENCRYPTION|STORAGE|ACCOUNT|MASTER|DEPLOY)_KEY$"
    r"|^(?!(BY|FORWARD|BACKWARD|FIRST|SECOND|LAST|SINGLE|MULTI|ONE|TWO|EACH|FULL|LOW|HIGH|BAND)_)"
    r"[A-Z0-9]+_(PASS|PWD)$"
)
"""Words of a name whose value is a secret."""

_DESCRIBES = re.compile(
    "FILE|PATH|DIR|FOLDER|NAME|IDS?|IDX|INDEX|URL|URI|TYPE|LEN|LENGTH|COUNT|LIMIT|SIZE|DIM|RATE|TTL"
    "|WEIGHT|LOSS|MODE|PER|NUM|MAX|MIN|DROPOUT|PARALLELISM|ENABLED|DISABLE|REQUIRED|EXPIRY|TIMEOUT"
    "|PAD|BOS|EOS|UNK|MASK|CLS|SEP|STOP|START|END|SPECIAL|IMAGE|NEXT|FIRST|LAST|PROVIDER|CLASS"
)
"""Words of a name that only describes a secret, or a token of a language model."""

_NAMES_OF_SECRETS = frozenset(
    {
        *("secret", "secrets", "image_pull_secrets"),
        *("secretName", "secretKeyRef", "secretRef", "imagePullSecrets"),
    }
)
"""Keys of job files, profiles and pods whose values are names of secrets."""

# Few values come as far as these: they are compiled when one does.
_SWITCH = r"(?i:true|false|yes|no|on|off|none|null|auto|default|[01])"
_NUMBER = r"[0-9]{1,7}(\.[0-9]+)?"
_REFERENCE = r"[~/$<\[{%]|\.{1,2}/|[a-z][a-z0-9+.-]*://(?![^/]*:[^/]*@)|(file|vault|env):"
"""The beginning of a path, a variable, a placeholder or a reference."""

_RANDOM = r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/=_.-]{16,}"
_HEX = r"[0-9a-f]{32,64}|[0-9A-F]{32,64}"

_WITH_PASSWORD = re.compile(
    r"(?i)((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://[^/\s:@]{0,200}):(?![$<{*])[^/\s@]{1,500}@"
)


def is_telling(name: str) -> bool:
    """Whether the value of a variable or option with this name is a secret.

    >>> [is_telling(n) for n in ("HF_TOKEN", "db-password", "OPENAI_API_KEY", "MY_SECRET_VALUE")]
    [True, True, True, True]
    >>> [is_telling(n) for n in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PAD_TOKEN", "TOKEN_FILE")]
    [False, False, False, False]
    """
    words = _words(name)
    pairs = [f"{one}_{two}" for one, two in itertools.pairwise(words)]
    if any(_DESCRIBES.fullmatch(word) for word in words):
        return False
    return any(_HOLDS.search(word) for word in (*words, *pairs))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^A-Z0-9]+", spaced.upper()) if word]


def kind_of(value: str, *, name: str = "") -> str | None:
    """Return what kind of secret a value looks like, in a variable or option called `name`.

    >>> kind_of("hf_" + "a1" * 17), kind_of("hunter2", name="DB_PASSWORD"), kind_of("hunter2")
    ('a Hugging Face token (hf_…)', 'a value for DB_PASSWORD', None)
    """
    for kind, shape in _SHAPES.items() if _TOKEN.search(value) else ():
        if match := re.search(f"(?<![A-Za-z0-9])(?:{shape})", value):
            return f"{kind} ({match[0][:SHOWN]}…)"
    if _WITH_PASSWORD.search(value):
        return "an address with its password"
    if _words(name)[-1:] in (["KEY"], ["TOKEN"]) and re.fullmatch(_HEX, value):
        return f"a value for {name}"
    other = not value.strip() or re.fullmatch(_SWITCH, value) or re.match(_REFERENCE, value)
    count = "TOKEN" in name.upper() and re.fullmatch(_NUMBER, value)
    return f"a value for {name}" if is_telling(name) and not other and not count else None


def leak_message(place: str, kind: str) -> str:
    """Return the problem of a value that is a secret, without the value."""
    return f"{place} holds what looks like {kind}; {WAY_OUT}"


def leaks_of_words(place: str, words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the problem of each argument that holds a secret."""
    for index, kind in kinds_of_words(words):
        yield index, leak_message(f"{place}[{index}]", kind)


def kinds_of_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the kind of secret of each argument that holds one.

    `--api-key VALUE`, `--api-key=VALUE` and `key.api_key=VALUE` count as names with values.
    """
    before = ""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[-\w.]+", name):
            name = name.lstrip("-").rpartition(".")[2]
        else:
            name, value = before, word
        # `--hub-token KIND` may be a choice, so a word must look random to be a token.
        random = "TOKEN" not in name.upper() or re.fullmatch(_RANDOM, value)
        if kind := kind_of(value, name=name if random else ""):
            yield index, kind
        before = word.lstrip("-") if word.startswith("--") and not equals else ""


def leaks_of_document(
    value: object, *, place: str = "", name: str = ""
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the problem of each string in a document that holds a secret.

    Args:
        value: The document: lists, mappings and strings, as JSON has them.
        place: The path of the document, for messages; empty for a whole file.
        name: The key of the document, if it is a single string.
    """
    if isinstance(value, str):
        if kind := kind_of(value, name=name):
            yield (), leak_message(place, kind)
    elif isinstance(value, list | tuple):
        if all(isinstance(one, str) for one in value):
            yield from (((at,), reason) for at, reason in leaks_of_words(place, list(value)))
            return
        for at, one in enumerate(value):
            for path, reason in leaks_of_document(one, place=f"{place}[{at}]"):
                yield (at, *path), reason
    elif isinstance(value, dict):
        # The value of a pod's variable, or of an operation in a JSON Patch, is named beside it.
        called = value.get("name") or str(value.get("path") or "").rpartition("/")[2]
        for key, one in value.items():
            if key not in _NAMES_OF_SECRETS:
                inner_name = str(called if key == "value" and called else key)
                inner_place = f"{place}.{key}" if place else key
                for path, reason in leaks_of_document(one, place=inner_place, name=inner_name):
                    yield (key, *path), reason


def conceal(text: str, hidden: Iterable[str] = ()) -> str:
    """Return a message without the tokens in it, and without the `hidden` texts.

    >>> conceal("must be a list, not 'ghp_0123456789abcdefghij'")
    "must be a list, not 'ghp***'"
    """
    for value in sorted(hidden, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text) if value else text
    text = _WITH_PASSWORD.sub(r"\1:***@", text)
    return _TOKEN.sub(lambda found: f"{found[0][:SHOWN]}***", text)


def values_of(variables: Mapping[str, str], names: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the names and values of the secrets among variables, the longest value first.

    A variable is a secret if it is listed in `names` or looks like one. The lines of a longer value
    are returned as well, as a log shows them.
    """
    pairs = []
    for name, value in variables.items():
        if name in names or kind_of(value, name=name):
            lines = [line for line in value.splitlines() if len(line) >= LINE_FROM]
            pairs += [(name, part) for part in (value, *lines) if part]
    return sorted(pairs, key=lambda entry: len(entry[1]), reverse=True)
