"""A report survives JSON, refuses what is none in one sentence, and is shown in a unit that fits
its size.
"""

import dataclasses
import json

import hypothesis.strategies as st
import pytest
import sample_reports
from hypothesis import given
from vramlab import Report, ReportError, compare
from vramlab.report.report import Bytes, GiB, Interval, KiB, MiB, Phase, unit_for


@pytest.mark.parametrize(
    "make", [sample_reports.report, sample_reports.measured, sample_reports.out_of_memory]
)
def test_json_gives_the_report_back(make):
    assert Report.from_dict(make().to_dict()) == Report.from_json(make().to_json()) == make()


NO_REPORTS = [
    "",
    "[",
    "[" * 100_000,
    "5",
    "null",
    "[]",
    '"{}"',
    "{}",
    '{"source": "measured"}',
    b"\xff",
]


@pytest.mark.parametrize("text", NO_REPORTS, ids=range(len(NO_REPORTS)))
def test_what_is_no_report_is_a_sentence(text):
    with pytest.raises(ReportError) as caught:
        Report.from_json(text)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def paths(value, path=()):
    """The places in a document."""
    yield path
    for name, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from paths(inner, (*path, name))


WHOLE = json.loads(sample_reports.measured().to_json())
PLACES = [path for path in paths(WHOLE) if path and path[0] not in ("recipe", "environment")]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@given(st.sampled_from(PLACES), VALUES)
def test_a_report_with_any_value_anywhere_is_one_or_a_sentence(path, value):
    """And what is taken can be shown and written again."""
    document = json.loads(json.dumps(WHOLE))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    try:
        found = Report.from_dict(document)
    except ReportError as error:
        assert "\n" not in str(error)
        return
    assert str(found) and str(
        compare(found, sample_reports.report(title=found.title, recipe=found.recipe))
    )
    assert Report.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("size", "unit"),
    [(0, "KiB"), (5, "KiB"), (MiB - 1, "KiB"), (MiB, "MiB"), (GiB - 1, "MiB"), (GiB, "GiB")],
)
def test_the_unit_is_that_of_the_largest_size(size, unit):
    assert unit_for(size) == unit


def test_a_report_says_in_one_line_why_the_peak_is_there():
    report = sample_reports.report(cause=sample_reports.CAUSE)
    assert "why there: " not in str(sample_reports.report())
    (line,) = (line for line in str(report).splitlines() if line.startswith("why there: "))
    assert line == (
        "why there: backward of lm_head: _log_softmax_backward_data makes the gradient of the "
        "logits, 128.000 MiB of temporaries, float32 [1024×32768], beside 587.776 MiB of "
        "temporaries by _foreach_sqrt"
    )
    assert line in report._repr_html_()
    # what is smaller does not decide, and what is always there is no cause
    large = dataclasses.replace(sample_reports.CAUSE, size=GiB)
    assert " beside " not in dataclasses.replace(report, cause=large).why
    # a library's scratch may be more than what came last
    gathered = dataclasses.replace(report.peak, workspace=sample_reports.CAUSE.size)
    why = dataclasses.replace(report, peak=gathered).why
    assert why.endswith("by _foreach_sqrt and 128.000 MiB of workspace")


def test_a_small_report_is_shown_in_small_units():
    peak = Bytes(parameters=40 * KiB, activations=3 * KiB)
    phases = {"forward": Phase(peak, peak)}
    process = Interval(300 * MiB, 400 * MiB, 500 * MiB)
    report = Report("predicted", None, "tiny", "cuda", phases, peak, "forward", process=process)
    assert str(report).splitlines() == [
        "predicted (cuda), KiB: tiny",
        "phase peak  parameters  activations   total",
        "──────────  ──────────  ───────────  ──────",
        "forward ←       40.000        3.000  43.000",
        "peak 43.000 KiB in forward",
        "process 400.000 MiB (300.000 MiB to 500.000 MiB)",
    ]
    table = str(compare(report, report))
    assert "KiB" in table and "43.000" in table and " 0.000" not in table
    large = sample_reports.report()
    assert ", GiB: " in str(large) and str(compare(large)).splitlines()[1].startswith("GiB ")
