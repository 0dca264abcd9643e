"""The comparison table: which figures it shows, against what, and what it refuses."""

import re

import pytest
from sample_reports import RECIPE, TITLE, TRAINED, measured, out_of_memory, report, split
from vramlab.report.compare import compare, diff
from vramlab.report.report import PHASES, Bytes, GiB, Interval


def three():
    return compare(measured(), report("predicted", 0.97), report())


def test_weakest_witness_first_and_differences_against_the_run():
    table = three()
    assert table.labels == ("predicted", "simulated", "measured")
    truth = measured().peak.total
    assert table.row("peak total").values[-1] == truth == split().total + 12_345_344
    change = split(0.97).total - truth
    assert table.differences("peak total") == {
        "predicted": (change, pytest.approx(change / truth, rel=1e-12)),
        "simulated": (-12_345_344, pytest.approx(-12_345_344 / truth, rel=1e-12)),
    }
    assert table.against == "measured" and table.differences("unexplained") == {}


def test_a_simulation_is_the_reference_where_nothing_was_run():
    assert compare(report("simulated"), report("predicted")).labels[-1] == "simulated"
    assert compare(report("recorded"), report("predicted")).labels[-1] == "recorded"


def test_every_used_category_and_every_phase_has_its_own_bytes():
    table, shown = three(), (report("predicted", 0.97), report(), measured())
    for name in TRAINED[:-1]:
        assert table.row(name.replace("_", " ")).values == tuple(
            getattr(r.peak, name) for r in shown
        )
    for phase in PHASES:
        name = phase.replace("_", " ")
        assert table.row(f"{name} peak").values == tuple(r.phases[phase].peak.total for r in shown)
        assert table.row(f"{name} end").values == tuple(r.phases[phase].end.total for r in shown)


def test_categories_and_unexplained_add_up_to_the_peak():
    rows = [
        row
        for row in three().rows
        if row.section == "at the peak" and row.name not in ("phase", "peak total")
    ]
    sums = tuple(sum(row.values[i] or 0 for row in rows) for i in range(3))
    assert sums == three().row("peak total").values


def test_an_unused_category_takes_no_line():
    table = compare(
        *(report(s, peak=Bytes(parameters=5, inputs=1)) for s in ("predicted", "simulated"))
    )
    names = [row.name for row in table.rows if row.section == "at the peak"]
    assert names == ["phase", "parameters", "inputs", "unexplained", "peak total"]


def test_only_a_run_has_something_unexplained():
    assert three().row("unexplained").values == (None, None, 12_345_344)
    assert compare(report(), measured(unexplained=0)).row("unexplained").values == (None, 0)


def test_equality_to_the_byte_looks_different_from_a_small_difference():
    peak = split()
    one_more = Bytes(**{**dict(peak.items()), "parameters": peak.parameters + 1})
    cells = {
        line.split()[0]: line.split()
        for line in str(compare(report(peak=one_more), measured())).splitlines()
    }
    assert cells["parameters"][-2:] == ["+0.000", "+0.00%"]
    assert cells["gradients"][-2:] == ["0", "0"]


def test_text_is_in_gib_and_names_the_recipe():
    text = str(three())
    assert text.splitlines()[0] == TITLE
    head = ["GiB", "predicted", "simulated", "measured", "Δ predicted", "Δ %", "Δ simulated", "Δ %"]
    assert re.split(r"\s{2,}", text.splitlines()[1]) == head
    line = next(line for line in text.splitlines() if line.strip().startswith("peak total"))
    assert line.split()[2:5] == ["13.270", "13.680", "13.691"]
    assert "% is" not in text and text == str(three())
    assert repr(three()) == text


def test_an_interval_shows_its_range_and_a_truth_outside_is_said():
    low = report("predicted", reserved=Interval(int(9 * GiB), int(10 * GiB), int(11 * GiB)))
    text = str(compare(low, measured()))
    assert "9.000–11.000" in text
    assert (
        "note: reserved: measured 14.513 GiB is above the interval of predicted, 9.000 GiB to "
        "11.000 GiB." in text
    )
    wide = report("predicted", reserved=Interval(int(9 * GiB), int(10 * GiB), int(15 * GiB)))
    assert "is above" not in str(compare(wide, measured()))
    assert (
        compare(low, measured()).differences("reserved")["predicted"][0]
        == 10 * GiB - measured().reserved
    )


def test_out_of_memory_is_a_line_of_text():
    table = compare(report("predicted"), report(), out_of_memory())
    assert table.labels == ("predicted", "simulated")
    assert table.failed == (
        "measured: out of memory: tried to allocate 2.00 GiB, of which 1.20 GiB were free",
    )
    assert table.failed[0] in str(table)
    alone = compare(out_of_memory())
    assert alone.rows == () and str(alone) == f"{TITLE}\n{table.failed[0]}"
    assert alone.against is None


def test_different_recipes_are_refused_by_name_of_the_field():
    other = report(recipe={**RECIPE, "batch_size": 8}, title=TITLE.replace("batch 4", "batch 8"))
    with pytest.raises(ValueError, match=r"differ in batch_size \(4 against 8\): diff compares"):
        compare(report(), other)
    table = diff(report(), other)
    assert table.labels == ("A", "B") and table.against == "A"
    assert table.title != TITLE and f"note: B is {other.title}." in str(table)


def test_a_record_older_than_a_field_still_counts_as_the_same_recipe():
    newer = report(recipe={**RECIPE, "torch_compile": False})
    assert compare(newer, report("recorded")).labels == ("simulated", "recorded")


def test_reports_without_a_recipe_are_told_apart_by_title():
    named = str(compare(report(recipe=None, title="a"), report(recipe=None, title="b")))
    assert "note: simulated 1 is a.\nnote: simulated 2 is b." in named
    mixed = compare(report(), report("measured", recipe=None, title="my loop"))
    assert "note: measured is my loop." in str(mixed)


def test_different_targets_are_said():
    text = str(compare(report("simulated"), measured(target="cpu")))
    assert "the targets differ (simulated is for cuda, measured is for cpu)" in text
    assert "targets differ" not in str(three())
    same_source = compare(report(), report(target="cpu"))
    assert same_source.labels == ("simulated (cuda)", "simulated (cpu)")


def test_peaks_in_different_phases_are_said():
    assert "predicted in forward, measured in step" in str(
        compare(report("predicted", peak_phase="forward"), measured())
    )


def test_many_times_more_is_not_said_in_per_cent():
    text = str(compare(report("predicted", peak=Bytes(inputs=5000)), report(peak=Bytes(inputs=40))))
    assert next(line for line in text.splitlines() if line.strip().startswith("inputs")).endswith(
        "×125"
    )


def test_labels_never_collide():
    assert compare(report(), report(), measured()).labels == (
        "simulated 1",
        "simulated 2",
        "measured",
    )


def test_a_difference_from_nothing_is_no_per_cent():
    table = compare(report("predicted", peak=Bytes(inputs=5)), report(peak=Bytes(buffers=5)))
    assert table.differences("inputs") == {"predicted": (5, float("inf"))}
    assert table.differences("unexplained") == {}
    assert "inf" not in str(table) and "–" in str(table)


@pytest.mark.parametrize("reports", [[], [[report()]]])
def test_bad_input_is_one_sentence(reports):
    with pytest.raises(ValueError, match="takes reports, one argument each") as caught:
        compare(*reports)
    assert "\n" not in str(caught.value)
