"""Models and types of fields in job files and profiles, each with its rule and its JSON Schema."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, Strict, model_validator
from pydantic_core import PydanticCustomError, core_schema

from toolkit.text.quantities import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from toolkit.text.yaml_reader import Ambiguous


def refuse_ambiguous(value: object) -> object:
    """Return a value; raise ValueError for a word that YAML readers take for different values."""
    if isinstance(value, Ambiguous):
        raise ValueError(value.reason)
    return value


def _refuse_unspeakable(value: str) -> str:
    if "\0" in value:
        raise ValueError(f"{value!r} holds a NUL byte, which no argument or variable can hold")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} holds half a surrogate pair, which is not text") from None
    return value


class Checked:
    """A check of one value, after the check of its type.

    It replaces pydantic's AfterValidator, which inspects the function's signature for each field:
    for the fields of job files and profiles, that took 3 ms.
    """

    _order: Callable[..., core_schema.CoreSchema] = core_schema.no_info_after_validator_function

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return type(self)._order(self._check, handler(source))


class Prepared(Checked):
    """A function that prepares or refuses a value before its type is checked."""

    _order = core_schema.no_info_before_validator_function


Text = Annotated[str, Prepared(refuse_ambiguous), Checked(_refuse_unspeakable)]
"""A string that every YAML reader takes for the same text, and that argv and variables can hold."""


def is_finite_number(value: object) -> bool:
    """Return whether a value is a number as programs take one: not true, infinite or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _number_as_text(value: object) -> object:
    return str(value) if is_finite_number(value) else refuse_ambiguous(value)


class FrozenModel(BaseModel):
    """The base of all models read from files: frozen, keyword-only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return contradictions among the keys of `given`, independent of other problems."""
        return []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := self.contradictions(dict(self)):
            raise ValueError("; ".join(problems))
        return self


RESERVED_NAMES = re.compile(
    "PET_.*|TORCHELASTIC_.*|TORCH_ELASTIC_WORKER_IDENTICAL|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE"
    "|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE"
    "|TRAIN_RUN_DIR|TRAIN_ATTEMPT(_BEGAN)?"
    "|TRAIN_ENDPOINT|TRAIN_JOINS|TRAIN_START|TRAIN_SUBMITTED_DIR|TRAIN_SUBMITTED_SHA256"
    "|TRAIN_WATCHDOG|TRAIN_RANK_PIDS|TRAIN_LOG_PATTERN|TRAIN_LOG_RANK"
    "|SLURM_.*"
)
"""Variables that torchrun, the scheduler or the toolkit sets, and a job may not."""

RUN_VALUE = re.compile(
    r"(?<!\$)\$(?:(TRAIN_RUN_DIR|TRAIN_ATTEMPT)(?![A-Za-z0-9_])|\{(TRAIN_RUN_DIR|TRAIN_ATTEMPT)\})"
)
"""Variables in a job's arguments that are known only when the job runs."""


class ArgumentWord(str):
    """A word of a job's `args`, in which the scripts replace each `RUN_VALUE`."""

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """Yield a literal text, and the name of the value that follows it, or None."""
        begin = 0
        for match in RUN_VALUE.finditer(self):
            yield self[begin : match.start()], match[1] or match[2]
            begin = match.end()
        yield self[begin:], None

    def doubled(self) -> "ArgumentWord":
        """Return the word with `$$` for each `$$`, as torchrun reads its arguments."""
        return ArgumentWord(self.replace("$$", "$$$$"))


IN_RUN_DIR = "$TRAIN_RUN_DIR/"
"""The prefix of a script in the run directory; the path is known only when the job runs."""


class _Quantity:
    """A whole number that files hold as a text with its unit."""

    def __init__(
        self, parse: Callable[[str], int], show: Callable[[int], str], pattern: str, *examples: str
    ) -> None:
        self._parse, self._show = parse, show
        self._json_schema = {"type": "string", "pattern": pattern, "examples": [*examples]}

    def _read(self, value: object) -> int:
        if isinstance(value, bool | float) or not isinstance(value, str | int):
            raise PydanticCustomError("quantity_type", "a string with a unit is wanted")
        # An integer has lost its unit; the parser's message lists the choices.
        return self._parse(str(value))

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        as_text = core_schema.plain_serializer_function_ser_schema(
            self._show, return_schema=core_schema.str_schema()
        )
        return core_schema.no_info_before_validator_function(
            self._read, handler(source), serialization=as_text
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self._json_schema)  # pydantic adds to it


Duration = Annotated[
    int,
    _Quantity(parse_duration, format_duration, DURATION_PATTERN, "90s", "30m", "1h30m", "01:30:00"),
]
"""Whole seconds, written like `30m`."""

NEVER = "never"


def _parse_limit(text: str) -> int:
    if text == NEVER:
        return 0
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{error}, or {NEVER!r}") from None


def _format_limit(seconds: int) -> str:
    return format_duration(seconds) if seconds else NEVER


Limit = Annotated[
    int,
    _Quantity(_parse_limit, _format_limit, f"{DURATION_PATTERN}|^{NEVER}$", "10m", "90s", NEVER),
]
"""Whole seconds, written like `30m`; `never` is 0 and means no limit."""

Size = Annotated[int, _Quantity(parse_size, format_size, SIZE_PATTERN, "64GiB", "500MB")]
"""Bytes, written like `64GiB`."""


def refusing(unfit: Callable[[str], object], reason: str) -> Checked:
    """Return the check that refuses a value if it is unfit; the message shows it and the reason."""

    def check(value: str) -> str:
        if unfit(value):
            raise ValueError(f"{value!r} {reason}")
        return value

    return Checked(check)


def matching(pattern: str, rule: str) -> Any:
    """Return the annotations of a string that must match; `rule` is the fix."""
    check = refusing(lambda value: not re.fullmatch(pattern, value), f"cannot be used; {rule}")
    return check, schema_extra(pattern=f"^(?:{pattern})$")


def schema_extra(**more: Any) -> Any:
    """Return the annotation that adds to a field's JSON Schema."""
    return Field(json_schema_extra=more)


Argument = Annotated[
    str,
    Prepared(_number_as_text),
    Checked(_refuse_unspeakable),
    schema_extra(type=["string", "number"]),
]
"""An argument of a program, which may be written as a number."""

ENV_NAME = "[A-Za-z_][A-Za-z0-9_]*"
EnvName = Annotated[
    Text,
    *matching(ENV_NAME, "use letters, digits and underscores, no digit first"),
    refusing(
        RESERVED_NAMES.fullmatch, "is set by torchrun, the scheduler or the toolkit; leave it out"
    ),
]
JobName = Annotated[
    Text,
    *matching(
        "[a-z]([-a-z0-9]{0,30}[a-z0-9])?",
        "use at most 32 of a-z, 0-9 and '-', a letter first and no '-' last "
        "(Kubernetes allows no other names, and adds to this one)",
    ),
]
ModuleName = Annotated[
    Text,
    *matching(
        r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*",
        "write it as after `python -m`, like train; a file goes under the key 'script'",
    ),
]
SecretName = Annotated[
    Text, *matching("[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "write a Kubernetes object name")
]
SecretKey = Annotated[Text, *matching("[-._a-zA-Z0-9]+", "use letters, digits, '-', '_' and '.'")]
SecretFile = Annotated[Text, *matching(r"(/|~/)[^\r\n]+", "write an absolute path, or ~/PATH")]
HomePath = Annotated[
    Text, *matching(r"(/|~/[^/]).*", "write /PATH, or ~/PATH for your home on the login node")
]
"""A folder on the login node."""

Via = Annotated[
    Text,
    *matching(
        "ssh ([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*",
        "write ssh HOST or ssh USER@HOST; put other ssh settings into ~/.ssh/config",
    ),
]
"""How the login node is reached."""

Webhook = Annotated[
    Text,
    *matching(
        "https?://[^\\s\"'\\\\]+|\\$[A-Za-z_][A-Za-z0-9_]*",
        "write https://…, or $NAME for the secret NAME of the job",
    ),
]
"""An address that takes notifications, or the variable that holds it."""

ShellLine = Annotated[
    Text, *matching(r"[^\x00-\x08\x0a-\x1f\x7f]*", "write one line of bash per item")
]

Image = Annotated[Text, *matching(r"\S+", "write it like registry/name:tag")]


def _log_pattern(value: str) -> str:
    example = r"write it like 'step (?P<step>\d+) .* loss (?P<loss>\S+)'"
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a valid Python regular expression: {error}") from None
    groups = pattern.groupindex.keys()
    if "step" not in groups:
        raise ValueError(f"{value!r} has no group named step; {example}")
    if taken := sorted(groups & {"version", "time", "attempt", "restart", "count"}):
        raise ValueError(f"the group name {taken[0]!r} is reserved in metrics.jsonl; rename it")
    return value


LogPattern = Annotated[Text, Checked(_log_pattern)]


def _not_an_option(value: str) -> str:
    if not value:
        raise ValueError("the program has no name; write its file")
    if value.startswith("-"):
        raise ValueError(f"{value!r} would be read as an option of torchrun; write ./{value}")
    return value


def program_first(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return `command` if its first word can be a program.

    Raises:
        ValueError: torchrun would read it as an option.
    """
    if command:
        _not_an_option(command[0])
    return command


_SERVER = r"(?:[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
_OBJECT = "[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
_SOURCE = (
    f"(?:claim|configmap|secret):{_OBJECT}|nfs:{_SERVER}:/.*"
    f"|empty:|empty:{SIZE_PATTERN.strip('^$')}"
)

MountSource = Annotated[
    Text,
    refusing(
        lambda value: not value.startswith("/") and not re.fullmatch(_SOURCE, value),
        "must be an absolute path; on Kubernetes also claim:NAME, configmap:NAME, secret:NAME, "
        "nfs:SERVER:/PATH, empty: or empty:10GiB",
    ),
    schema_extra(pattern=f"^(?:/|(?:{_SOURCE})$)"),
]
Program = Annotated[Text, Checked(_not_an_option), schema_extra(pattern="^[^-]")]
SupervisorPlace = Annotated[
    Text,
    *matching(
        r"carried|installed|/\S*[^\s/]",
        "write carried, installed, or the absolute path of the supervisor's file",
    ),
]
"""Where pods find the supervisor."""

SupervisorOrNone = Annotated[
    Text,
    *matching(
        r"carried|installed|none|/\S*[^\s/]",
        "write carried, installed, none, or the absolute path of the supervisor's file",
    ),
]
"""Where batch scripts find the supervisor, if they have one."""

AbsolutePath = Annotated[
    Text,
    refusing(
        lambda value: not value.startswith("/"),
        "must be an absolute path; it is the same on every node",
    ),
    schema_extra(pattern="^/"),
]
_PLACE = r"""[^~\s'"#][^\s'"#]*"""
ENVIRONMENT = rf"(conda|mamba|micromamba):{_PLACE}|pixi:{_PLACE}(#[A-Za-z0-9_.-]+)?"
Environment = Annotated[
    Text,
    *matching(
        ENVIRONMENT,
        "write conda:NAME, conda:/PATH, or the same with mamba or micromamba; or pixi:/PATH of a "
        "project, and pixi:/PATH#NAME for one of its environments; for uv, set venv to its .venv",
    ),
]
"""An environment that `python -m venv` did not create, and the tool that did."""

_EXPANDED = re.compile(r"~.*|.*\$\{?[A-Z_].*", re.DOTALL)
"""What a shell would expand: `~/runs`, `/scratch/$USER`."""

FolderPath = Annotated[
    Text,
    refusing(
        lambda value: not value or _EXPANDED.fullmatch(value) is not None,
        "is not expanded; write the whole path",
    ),
    schema_extra(pattern=r"^(?!~)(?!.*\$\{?[A-Z_])."),
]
Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
Flag = Annotated[bool, Strict()]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]
NaturalInt = Annotated[int, Strict(), Field(ge=0)]
Amount = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]

VERSION = 1
"""The version of job files and profiles that is read; see docs/reference/formats.md."""


def newer_than_known(version: int) -> str:
    """Return the reason why a file of a newer version is refused."""
    return f"{version} is newer than {VERSION}, which this toolkit reads; upgrade the toolkit"


def _known_version(value: int) -> int:
    if value > VERSION:
        raise ValueError(newer_than_known(value))
    if value < VERSION:
        raise ValueError(f"unknown version {value}; write {VERSION}, or leave the key out")
    return value


# Not written with a model: toolkits that do not know the key read what is stored.
FormatVersion = Annotated[
    int, Strict(), Checked(_known_version), Field(exclude=True, json_schema_extra={"const": 1})
]
"""The version of the file's format."""


def secrets_by_name(value: object) -> object:
    """Turn a list of names into a mapping without places.

    Raises:
        ValueError: an entry is not a name, or is listed twice.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, tuple | list):
        raise PydanticCustomError("secrets_type", "names are wanted")
    names = [item for item in value if isinstance(item, str)]
    problems = [f"expected a name, not {item!r}" for item in value if not isinstance(item, str)]
    problems += (name.reason for name in names if isinstance(name, Ambiguous))
    problems += (
        f"{name!r} is listed twice" for name in sorted(set(names)) if names.count(name) > 1
    )
    if problems:
        raise ValueError("; ".join(problems))
    return dict.fromkeys(names)
