"""Tag figures that differ from run to run, so that the comparison of outputs leaves them out.

All other output is compared. What a chapter claims about a tagged figure is an `assert` in the same
cell. The description of the machine has a tag of its own, see `doctor.environment_stamp`.
"""

MARKER = "live: "


def live(*values: object, sep: str = " ") -> None:
    """Print `values` as `print` does, each line tagged as a figure of this run.

    Such are a time, a rate, a resident set.
    """
    print(tagged(sep.join(map(str, values))))


def tagged(text: str) -> str:
    """Return `text` with each line tagged."""
    return "\n".join(MARKER + line for line in text.split("\n"))
