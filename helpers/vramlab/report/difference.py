"""What differs between two reports, in sentences."""

from collections import Counter
from collections.abc import Iterator

from .byte_counts import TensorGroup, format_bytes, unit_for
from .report import Report

NOTED = 0.001  # of the largest change: what is less explains nothing


def cause_notes(a: Report, b: Report) -> Iterator[str]:
    """Say why each peak is where it is, unless the causes are the same."""
    if a.cause == b.cause:
        return
    for label, report in (("A", a), ("B", b)):
        if report.cause:
            yield f"why the peak of {label} is there: {report.why}"


def tensor_notes(a: Report, b: Report) -> Iterator[str]:
    """Say which tensors differ, the largest difference first.

    A compiled step's are Inductor's buffers, no two of which can be told apart.
    """
    compiled = [report for report in (a, b) if (report.recipe or {}).get("torch_compile")]
    if len(compiled) == 1:
        yield "a compiled step's tensors have no modules' names: compare them by category, above"
        yield from (note for note in compiled[0].notes if note.startswith("torch_compile: "))
        return
    groups: dict[tuple[str, ...], TensorGroup] = {}
    # Tensors of one kind are summed: a report groups them by shape.
    before = _sizes(a, groups)
    after = _sizes(b, groups)

    def smallest_change_last(key: tuple[str, ...]) -> int:
        return -abs(after[key] - before[key])

    ranked = sorted(groups, key=smallest_change_last)
    for key in ranked:
        old = before[key]
        new = after[key]
        if old == new or smallest_change_last(key) > NOTED * smallest_change_last(ranked[0]):
            continue
        kind = "changed"
        if not old or not new:
            kind = "gone" if old else "new"
            # What one report does not list may be smaller than all that it lists.
            listed = after if old else before
            if max(old, new) <= min(listed.values(), default=0):
                continue
        change = abs(new - old)
        sign = "+" if new > old else "−"
        yield f"{sign}{format_bytes(change, unit_for(change))} {kind}: {groups[key]}"


def _sizes(
    report: Report,
    groups: dict[tuple[str, ...], TensorGroup],
) -> Counter:
    """Return the bytes of a report's largest tensors by kind, and add these to `groups`."""
    sizes: Counter = Counter()
    for group in report.largest:
        key = (group.category, group.op, group.where, group.dtype)
        sizes[key] += group.size * group.count
        groups[key] = group  # the last one speaks for all of its kind
    return sizes


def library_notes(a: Report, b: Report) -> Iterator[str]:
    """Say which libraries, and other parts of the environment, differ."""
    old = a.environment
    new = b.environment
    # The day and what fits the card differ from run to run, and explain no byte.
    for name in sorted(old.keys() & new.keys() - {"date", "fits"}):
        if old[name] != new[name]:
            yield f"{name}: {old[name]} → {new[name]}"
