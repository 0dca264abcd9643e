"""The lines of a plan's text: figures of a choice, host memory, what its switches cost."""

import textwrap

from ..recipe.recipe import Recipe
from ..report.report import GiB
from .alternatives import Alternative
from .candidate import Choice
from .counted import HOSTS
from .plan_script import words

WIDTH = 80  # characters of a line in a terminal
NOTICEABLE = 1.005  # times as fast, where three digits differ


def figures_of(choice: Choice) -> tuple[str, ...]:
    """Return a choice's row of the table."""
    time = choice.time
    likely = ""
    ends = ""
    if time:
        likely = f"{time.tokens / time.seconds:,.0f}"
        # The longest time is the slowest rate.
        ends = f"{time.tokens / time.high:,.0f} – {time.tokens / time.low:,.0f}"
    return (
        choice.method,
        choice.tier,
        f"{choice.report.peak.total / GiB:.2f}",
        f"{choice.needs.value / GiB:.2f}",
        f"{choice.needs.high / GiB:.2f}",
        likely,
        ends,
        f"{choice.epoch / 3600:,.1f} h" if choice.epoch else "",
    )


def wrapped(line: str, indent: str = "    ") -> str:
    """Return the line in pieces of at most WIDTH characters, all but the first indented."""
    return textwrap.fill(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def host_memory_of(choice: Choice) -> str:
    """Return how much host memory the tier supposes, and where there is not so much."""
    smaller = []
    for name, size in HOSTS.items():
        if size * GiB < choice.host:
            smaller.append(f"{name} has {size:g}")
    rest = f" ({', '.join(smaller)})" if smaller else ""
    free = f"{choice.host / GiB:.1f} GiB of host memory free"
    return f"{choice.method}: {choice.tier} with {free}{rest}"


def costs_of(choice: Choice) -> str:
    """Return what leaving out each switch of a choice would add to its peak."""
    added = [f"{name} {n / GiB:+.2f}" for name, n in choice.without.items() if n >= 0]
    line = f"{choice.method} without: {', '.join(added)} GiB" if added else choice.method
    for name, size in choice.without.items():
        # Such as the format of a base that is offloaded: it saves the host's memory.
        if size < 0:
            line += f"; {name} takes {-size / GiB:.2f} GiB more on the card than it saves there"
    return line


def alternative_to(choice: Choice, other: Alternative) -> str:
    """Return an alternative's line, and by how sure a figure it is the faster, if it is."""
    line = f"{choice.method} {other}"
    if choice.time is None:
        return line
    if choice.epoch and other.epoch:
        gain = choice.epoch / other.epoch
    else:
        gain = other.tokens_per_second / choice.time.tokens_per_second
    # Between ways as fast as each other the search takes Liger's kernels before TRL's loss.
    is_within_error = NOTICEABLE < gain <= choice.time.seconds / choice.time.low
    return f"{line}; faster within the error of the estimate" if is_within_error else line


def short_words(recipe: Recipe) -> str:
    """Return the recipe without what the plan's first line says."""
    return words(recipe).replace(f"{recipe.seq_len} tokens · ", "", 1)
