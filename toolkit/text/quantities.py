"""Sizes and times as people, Slurm and Kubernetes write them.

Values in code are bytes and whole seconds; they are rounded up, because a job that requested 1.5 s
must not get 1 s.
"""

import math
import re
from fractions import Fraction
from typing import Any

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_KUBERNETES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = _BINARY | _DECIMAL | _KUBERNETES

_KUBERNETES_FACTORS: dict[str, int | Fraction] = {
    "": 1,
    **{f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", start=1)},
    **{unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)},
    **{unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", start=1)},
}

_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,19})?"
_MAX_BYTES, _MAX_SECONDS = 2**63 - 1, 2**31 - 1  # the maxima of Kubernetes and Slurm
_UNITS = rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?"
_CLOCK = r"(?:[0-9]{1,6}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]"

DURATION_PATTERN = rf"^(?=.)(?:{_UNITS}|{_CLOCK})$"
"""The pattern of a duration in the JSON Schema: `90s`, `1h30m`, `01:30:00`, `2-00:00:00`."""

SIZE_PATTERN = rf"^{_NUMBER} ?(?:{'|'.join(sorted(_BYTES, key=len, reverse=True))})$"
"""The pattern of a size in the JSON Schema: `64GiB`, `500MB`, `2Gi`."""

_KUBERNETES_QUANTITY = (
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))"
    r"([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?"
)


def parse_duration(text: str) -> int:
    """Return the seconds in a duration, rounded up.

    >>> parse_duration("90s"), parse_duration("1h30m"), parse_duration("1.5s")
    (90, 5400, 2)
    >>> parse_duration("01:30:00"), parse_duration("2-00:00:00")
    (5400, 172800)

    Raises:
        ValueError: the text is not a duration, or it is zero; the message shows how to write it.
    """
    if re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{text!r} has no unit; write {text}s, {text}m or {text}h")
    if re.fullmatch(r"[0-9]+:[0-9]+", text):
        raise ValueError(
            f"{text!r} is minutes:seconds to Slurm and hours:minutes to people; "
            "write it like 1h30m or 01:30:00"
        )
    if text and re.fullmatch(_UNITS, text):
        parts = re.findall(rf"({_NUMBER})([dhms])", text)
        seconds = math.ceil(sum(Fraction(number) * _SECONDS[unit] for number, unit in parts))
    elif re.fullmatch(_CLOCK, text):
        days, _, clock = text.rpartition("-")
        hours, minutes, rest = map(int, clock.split(":"))
        seconds = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest
    else:
        raise ValueError(f"{text!r} is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00")
    if seconds <= 0:
        raise ValueError(f"{text!r} is not longer than zero; write at least 1s")
    if seconds > _MAX_SECONDS:
        raise ValueError(f"{text!r} is longer than schedulers count; write at most 24855d")
    return seconds


def format_duration(seconds: int) -> str:
    """Return seconds as people write them, without rounding.

    >>> format_duration(1800), format_duration(5400), format_duration(90)
    ('30m', '1h30m', '1m30s')
    """
    parts = []
    for unit in "dhms":
        count, seconds = divmod(seconds, _SECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def rounded_duration(seconds: float) -> str:
    """Return a span of time in its two largest units; below a minute, in tenths of a second.

    >>> rounded_duration(3.44), rounded_duration(90), rounded_duration(7500)
    ('3.4 s', '1 min 30 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rounded_size(size_bytes: int) -> str:
    """Return a size for display.

    >>> rounded_size(1_300_000_000), rounded_size(2048)
    ('1.2 GiB', '2 KiB')
    """
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"


def parse_size(text: str) -> int:
    """Return the bytes in a size, rounded up.

    >>> parse_size("64GiB"), parse_size("1.5 KiB"), parse_size("500MB"), parse_size("2Gi")
    (68719476736, 1536, 500000000, 2147483648)

    Raises:
        ValueError: the text is not a size, or Slurm and Kubernetes read it differently.
    """
    if re.fullmatch(_NUMBER, text):
        raise ValueError(f"{text!r} has no unit; write it like {text}GiB or {text}MiB")
    if match := re.fullmatch(rf"({_NUMBER}) ?([kKMGT])", text):
        number, unit = match.groups()
        unit = unit.upper()
        raise ValueError(
            f"{text!r} is {number}{unit}iB to Slurm and {number}{unit}B to Kubernetes; "
            "write the one you mean"
        )
    match = re.fullmatch(rf"({_NUMBER}) ?([A-Za-z]+)", text)
    if match is None or match[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write it like 64GiB, 500MB or 2Gi")
    size = math.ceil(Fraction(match[1]) * _BYTES[match[2]])
    if size <= 0:
        raise ValueError(f"{text!r} is nothing; leave the key out instead")
    if size > _MAX_BYTES:
        raise ValueError(f"{text!r} is more than schedulers count; write less than 8388608TiB")
    return size


def format_size(size_bytes: int) -> str:
    """Return bytes in the shortest exact form that people write.

    >>> format_size(2 * 2**30), format_size(1500 * 2**20), format_size(500_000_000)
    ('2GiB', '1500MiB', '500MB')
    """
    exact = (
        f"{size_bytes // factor}{unit}"
        for unit, factor in (_BINARY | _DECIMAL).items()
        if size_bytes % factor == 0
    )
    return min(exact, key=len)


def slurm_time(seconds: int) -> str:
    """Return seconds as `--time` takes them: D-HH:MM:SS or HH:MM:SS.

    >>> slurm_time(1800), slurm_time(90000)
    ('00:30:00', '1-01:00:00')
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def slurm_megabytes(size_bytes: int) -> str:
    """Return bytes as `--mem` takes them; Slurm's M is MiB.

    >>> slurm_megabytes(2 * 2**30), slurm_megabytes(1)
    ('2048M', '1M')
    """
    return f"{-(-size_bytes // 2**20)}M"


def kubernetes_size(size_bytes: int) -> str:
    """Return bytes as a Kubernetes quantity, exactly and in canonical form.

    >>> kubernetes_size(2 * 2**30), kubernetes_size(500_000_000), kubernetes_size(1500)
    ('2Gi', '500M', '1500')
    """
    for unit in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        if size_bytes % (factor := _KUBERNETES_FACTORS[unit]) == 0:
            return f"{size_bytes // factor}{unit}"
    return kubernetes_count(size_bytes)


def kubernetes_count(count: int) -> str:
    """Return a whole number as a Kubernetes quantity in canonical form.

    Servers store canonical forms: another form, applied again, is a change, which a TrainJob
    refuses. Source: Kubernetes, apimachinery/pkg/api/resource.

    >>> kubernetes_count(96), kubernetes_count(2000)
    ('96', '2k')
    """
    for unit in "EPTGMk":
        if count and count % (factor := _KUBERNETES_FACTORS[unit]) == 0:
            return f"{count // factor}{unit}"
    return str(count)


def amount(value: Any) -> Fraction | None:
    """Return the amount in a Kubernetes quantity like `500m`, `64Gi` or `1e3`; else None.

    Source: Kubernetes, apimachinery/pkg/api/resource. A number is read from its digits.

    >>> amount("1.5Gi") == 1.5 * 2**30, amount("500m"), amount(2), amount("64GiB"), amount("2 Gi")
    (True, Fraction(1, 2), Fraction(2, 1), None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = re.fullmatch(_KUBERNETES_QUANTITY, str(value))
    if match is None:
        return None
    unit = match[2] or ""
    if unit[:1] in ("e", "E") and len(unit) > 1:
        return Fraction(match[1]) * Fraction(10) ** int(unit[1:])
    return Fraction(match[1]) * _KUBERNETES_FACTORS[unit]


def whole_number(text: str) -> int | None:
    """Return a text of 1 to 18 digits as a number; None for any other text.

    Python refuses to convert texts of more than 4300 digits, and such texts come from untrusted
    scripts, logs and answers.

    >>> whole_number("12"), whole_number("-1"), whole_number("9" * 5000)
    (12, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
