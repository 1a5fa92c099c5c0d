"""The curves of a run, and that few points are enough to see them."""

import json
from array import array
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.runs.records.run_directory import PLACE, read_metrics
from toolkit.runs.views.curves import Curve, curves_and_starts


def curve(values: list[float]) -> Curve:
    steps = range(1, len(values) + 1)
    return Curve(array("q", steps), array("d", [10.0 * s for s in steps]), array("d", values))


@given(
    values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400),
    most=st.integers(4, 60),
)
def test_a_thinned_curve_has_points_of_its_own_and_its_extremes(
    values: list[float], most: int
) -> None:
    whole, thin = curve(values), curve(values).thinned(most)
    assert len(thin.steps) == len(thin.times) == len(thin.values) <= max(most, 4)
    assert list(thin.steps) == sorted(set(thin.steps))
    for step, when, value in zip(thin.steps, thin.times, thin.values, strict=True):
        assert (whole.times[step - 1], whole.values[step - 1]) == (when, value)
    assert (min(thin.values), max(thin.values)) == (min(values), max(values))
    assert (thin.values[0], thin.values[-1]) == (values[0], values[-1])
    assert thin == whole or len(values) > most


records = st.fixed_dictionaries(
    {"step": st.integers(0, 12), "time": st.floats(0, 1e9)},
    optional={
        "attempt": st.integers(0, 2),
        "restart": st.integers(0, 2),
        "loss": st.one_of(st.floats(-10, 10), st.none()),
        "epoch": st.integers(0, 3),
        "accuracy": st.floats(0, 1),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(records, max_size=30))
def test_curves_have_what_the_table_of_metrics_has(
    rows: list[dict[str, object]], tmp_path: Path
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(tmp_path):
        for key, value in row.items():
            if key not in PLACE and value is not None:
                expected.setdefault(key, []).append((row["step"], value))
    found = {
        name: list(zip(curve.steps, curve.values, strict=True))
        for name, curve in curves_and_starts(tmp_path)[0].items()
    }
    assert found == expected


def test_what_is_no_figure_makes_no_curve(tmp_path: Path) -> None:
    rows = [
        '{"step": 1, "time": 5, "loss": 1, "note": "x", "flag": true, "list": [1], "a\\u001b": 2}',
        '{"step": 2, "time": "late", "loss": 2}',
        '{"step": 3, "time": 7, "loss": NaN}',
        "[]",
        '{"step": 4, "time": 8, "loss": 1e999}',
        '{"torn":',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    assert {name: list(curve.values) for name, curve in curves_and_starts(tmp_path)[0].items()} == {
        "loss": [1.0],
        "a\\x1b": [2.0],
    }


def test_a_thousand_names_make_no_thousand_curves(tmp_path: Path) -> None:
    row = {"step": 1, "time": 5, **{f"figure-{number}": 1.0 for number in range(1000)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert len(curves_and_starts(tmp_path)[0]) == 24


def test_without_metrics_there_is_no_curve(tmp_path: Path) -> None:
    assert curves_and_starts(tmp_path) == ({}, [])
    (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
    assert curves_and_starts(tmp_path) == ({}, [])
