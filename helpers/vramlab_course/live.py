"""Figures that differ from one run to the next, tagged so that a comparison of outputs can leave them out.

Everything else a notebook prints is the same everywhere and is compared. Tagged lines are not, so what a chapter claims
about them is an `assert` in the same cell. The machine's description has its own tag, see `doctor.environment_stamp`.
"""

MARKER = "live: "


def live(*values: object, sep: str = " ") -> None:
    """Print `values` as `print` does, each line tagged as a figure of this very run: a time, a rate, a resident set."""
    lines = sep.join(map(str, values)).split("\n")
    print("\n".join(MARKER + line for line in lines))
