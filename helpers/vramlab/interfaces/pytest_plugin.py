"""A pytest plug-in: `@pytest.mark.fits("T4")`, and budgets of bytes kept like snapshots.

A marked test returns a recipe.

The fixture `memory_budget` takes what `assert_fits` takes, and fails where the peak is above that
in `<test file>.budgets.json`; `--update-memory-budgets` writes that file.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from ..base.files import write_atomically

UPDATE = "--update-memory-budgets"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the budgets."""
    parser.getgroup("vramlab").addoption(
        UPDATE,
        action="store_true",
        help="Write the budgets of memory_budget.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `fits`, so that --strict-markers takes it."""
    config.addinivalue_line(
        "markers",
        "fits(gpu, tier, **given): vramlab.assert_fits of what the test returns",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `fits`, and hold what it returns against the card."""
    marker = pyfuncitem.get_closest_marker("fits")
    if marker is None:
        # None leaves the test to pytest's own way of calling it.
        return None
    from .explain import assert_fits

    # As pytest does: a test gets the fixtures that its signature names and no other.
    asked = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in asked if name in pyfuncitem.funcargs}
    returned = pyfuncitem.obj(**arguments)
    if returned is None:
        pytest.fail(
            "a test marked fits returns what is held against the card, and this one returns "
            "nothing: return Recipe(…), or a module's dict(model=…, batch=…, optimizer=…)",
            pytrace=False,
        )
    why = ""
    try:
        assert_fits(returned, *marker.args, **marker.kwargs)
    except AssertionError as error:
        why = str(error)
    # Its sentences say all, once; the frames would be this plug-in's.
    if why:
        pytest.fail(why, pytrace=False)
    # pytest stops at the first hook that returns a value, so the test is not called a second time.
    return True


@pytest.fixture
def memory_budget(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function of what `assert_fits` takes.

    Its peak must not be above the budget that the file has for this test.
    """
    path = request.path.with_suffix(".budgets.json")
    # Without the path, so that the file can be moved together with its budgets.
    name = request.node.nodeid.partition("::")[2]

    def check(what: Any = None, **given: Any) -> None:
        # pytest then shows the test's line that called, and not this function's.
        __tracebackhide__ = True
        from .explain import report_of

        peak = report_of(what, **given).peak
        budgets = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if request.config.getoption(UPDATE):
            # Categories at 0 are left out; a later comparison takes a missing one for 0.
            budgets[name] = {"total": peak.total, **{part: n for part, n in peak.items() if n}}
            write_atomically(path, json.dumps(budgets, indent=1, sort_keys=True) + "\n")
            return
        if name not in budgets:
            pytest.fail(
                f"{path.name} has no memory budget for {name}: run pytest {UPDATE}, and commit it"
            )
        over = peak.total - budgets[name]["total"]
        # Only the peak is bound; the categories say where it grew.
        grown = (f"{part} {n - budgets[name].get(part, 0):+,} B" for part, n in peak.items())
        # A peak below its budget passes, and the budget stays until somebody updates it.
        if over > 0:
            changes = ", ".join(text for text in grown if " +0 " not in text)
            pytest.fail(f"the peak is {over:,} B above its budget: {changes}")

    return check
