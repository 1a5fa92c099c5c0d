"""Sizes and times: nothing is lost, nothing is rounded down, and unclear values are refused."""

import doctest
import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from tests.fakes.kubernetes.quantities import with_canonical_quantities
from toolkit.rendering import environment
from toolkit.text import answers, quantities, yaml_reader
from toolkit.text.quantities import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    kubernetes_size,
    parse_duration,
    parse_size,
    slurm_megabytes,
    slurm_time,
)

SECONDS = st.integers(1, 2**31 - 1)
BYTES = st.integers(1, 2**63 - 1) | st.builds(
    lambda count, unit: count * unit,
    st.integers(1, 2**20),
    st.sampled_from([2**10, 2**20, 2**30, 2**40, 10**3, 10**6, 10**9, 10**12]),
)
UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
NUMBERS = st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,5})?", fullmatch=True)


@pytest.mark.parametrize(
    "module", [quantities, environment, yaml_reader, answers], ids=lambda m: m.__name__
)
def test_examples_in_docstrings_are_true(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]  # a module of ours
    assert (found.failed, found.attempted > 0) == (0, True)


@given(SECONDS)
def test_a_time_shown_is_read_as_the_same_time(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
    assert re.fullmatch(DURATION_PATTERN, format_duration(seconds))


@given(SECONDS)
def test_slurms_own_spelling_of_a_time_is_read(seconds: int) -> None:
    written = slurm_time(seconds)
    assert re.fullmatch(r"([1-9][0-9]*-)?([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]", written)
    assert parse_duration(written) == seconds


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_a_time_is_the_sum_of_its_parts_rounded_up(numbers: tuple[str, str, str, str]) -> None:
    exact = sum(
        Fraction(number) * unit for number, unit in zip(numbers, (86400, 3600, 60, 1), strict=True)
    )
    written = "{}d{}h{}m{}s".format(*numbers)
    if exact <= 0:
        with pytest.raises(ValueError, match="is not longer than zero; write at least 1s"):
            parse_duration(written)
    elif exact <= 2**31 - 1:
        assert parse_duration(written) == math.ceil(exact)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("0.1s", 1),
        ("1.5s", 2),
        ("0.5h", 1800),
        ("0.3m", 18),
        ("1d", 86400),
        ("1d1s", 86401),
        ("1h30m", 5400),
        ("4:00:00", 14400),
        ("100:00:00", 360000),
        ("00:00:01", 1),
        ("1-00:00:00", 86400),
        ("24855d", 2147472000),
    ],
)
def test_times_are_what_people_mean(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("4 h", "'4 h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        (" 4h", "' 4h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("4h\n", "'4h\\n' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("4H", "'4H' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("30m4h", "'30m4h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("-4h", "'-4h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        (".5h", "'.5h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("1e3s", "'1e3s' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("٣h", "'٣h' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("1:60:00", "'1:60:00' is not a time; write it like 90s, 30m, 4h, 1h30m or 01:30:00"),
        ("90", "'90' has no unit; write 90s, 90m or 90h"),
        (
            "4:30",
            "'4:30' is minutes:seconds to Slurm and hours:minutes to people; "
            "write it like 1h30m or 01:30:00",
        ),
        ("0s", "'0s' is not longer than zero; write at least 1s"),
        ("0.0h", "'0.0h' is not longer than zero; write at least 1s"),
        ("0-00:00:00", "'0-00:00:00' is not longer than zero; write at least 1s"),
        ("24856d", "'24856d' is longer than schedulers count; write at most 24855d"),
    ],
)
def test_what_is_no_time_says_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(text)
    assert str(caught.value) == reason


@given(BYTES)
def test_a_size_shown_is_read_as_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert re.fullmatch(SIZE_PATTERN, format_size(size))


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (1, "1B"),
        (1023, "1023B"),
        (1000, "1kB"),
        (1024, "1KiB"),
        (1536, "1536B"),
        (1500 * 2**20, "1500MiB"),
        (2000 * 2**30, "2000GiB"),
        (1024 * 2**30, "1TiB"),
        (64 * 10**9, "64GB"),
        (512 * 10**6, "512MB"),
    ],
)
def test_sizes_are_shown_as_people_write_them(size: int, shown: str) -> None:
    assert format_size(size) == shown


@given(NUMBERS, st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_rounded_up_to_whole_bytes(number: str, unit: str, space: str) -> None:
    exact = Fraction(number) * UNITS[unit]
    if exact == 0:
        with pytest.raises(ValueError, match="is nothing; leave the key out instead"):
            parse_size(number + space + unit)
    else:
        assert parse_size(number + space + unit) == math.ceil(exact)
        assert re.fullmatch(SIZE_PATTERN, number + space + unit)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("GiB", "'GiB' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64gib", "'64gib' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64Gb", "'64Gb' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64  GiB", "'64  GiB' is not a size; write it like 64GiB, 500MB or 2Gi"),
        (" 64GiB", "' 64GiB' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64GiB\n", "'64GiB\\n' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("-1GiB", "'-1GiB' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("1e9B", "'1e9B' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("1PiB", "'1PiB' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64", "'64' has no unit; write it like 64GiB or 64MiB"),
        ("6.4", "'6.4' has no unit; write it like 6.4GiB or 6.4MiB"),
        ("64G", "'64G' is 64GiB to Slurm and 64GB to Kubernetes; write the one you mean"),
        ("64 m", "'64 m' is not a size; write it like 64GiB, 500MB or 2Gi"),
        ("64k", "'64k' is 64KiB to Slurm and 64KB to Kubernetes; write the one you mean"),
        ("0GiB", "'0GiB' is nothing; leave the key out instead"),
        (
            "8388608TiB",
            "'8388608TiB' is more than schedulers count; write less than 8388608TiB",
        ),
    ],
)
def test_what_is_no_size_says_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == reason


@pytest.mark.parametrize("parse", [parse_duration, parse_size])
@pytest.mark.parametrize("unit", ["", "h", "GiB", ":00:00"])
def test_numbers_without_end_are_refused(parse: object, unit: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match=r"(is not a|has no unit)"):
        parse("9" * 5000 + unit)


@given(BYTES)
def test_slurm_never_gets_less_memory_than_asked(size: int) -> None:
    written = slurm_megabytes(size)
    assert re.fullmatch("[0-9]+M", written)
    assert 0 <= int(written[:-1]) * 2**20 - size < 2**20


@given(BYTES)
def test_kubernetes_gets_exactly_the_memory_asked_in_the_form_that_servers_store(size: int) -> None:
    written = kubernetes_size(size)
    assert parse_quantity(written) == size
    assert with_canonical_quantities({"limits": {"memory": written}})["limits"]["memory"] == written
