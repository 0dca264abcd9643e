"""`diff`: what came and went from one report to another, of two recipes, two commits or two environments."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from .compare import Comparison, compare
from .errors import ReportError
from .report import Report, format_bytes, unit_for


def diff(a: Report, b: Report) -> Comparison:
    """Return `compare` of two reports, differences being B − A, with notes of the tensors that came, went or changed and
    of libraries of other versions.

    Tensors are those that `Report.largest` lists, by category, operator, module and dtype. Raises ReportError for a report
    without figures.
    """
    for report in (a, b):
        if report.status != "ok":
            raise ReportError(f"a report without figures cannot be compared ({report.title}: {report.status}).")
    found = compare(a, b, labels=("A", "B"), same_recipe=False, against="A")
    old, new = a.environment, b.environment
    unlike = sorted(name for name in old.keys() & new.keys() - {"date", "fits"} if old[name] != new[name])
    libraries = (f"{name}: {old[name]} → {new[name]}" for name in unlike)
    return dataclasses.replace(found, notes=(*found.notes, *_tensors(a, b), *libraries))


def _tensors(a: Report, b: Report) -> Iterator[str]:
    """Say which tensors differ, the largest difference first."""
    sizes, groups, changes = (Counter(), Counter()), {}, []
    for report, known in zip((a, b), sizes, strict=True):
        for group in report.largest:
            key = group.category, group.op, group.where, group.dtype
            known[key], groups[key] = known[key] + group.size * group.count, group
    for key, group in groups.items():
        old, new = (known[key] for known in sizes)
        other = sizes[old > 0].values()  # what one report does not list may be smaller than all that it lists
        if old != new and ((old and new) or max(old, new) > min(other, default=0)):
            changes.append((new - old, "changed" if old and new else "new" if new else "gone", group))
    for change, kind, group in sorted(changes, key=lambda each: -abs(each[0])):
        size = format_bytes(abs(change), unit_for(abs(change)))
        yield f"{'+' if change > 0 else '−'}{size} {kind}: {group}"
