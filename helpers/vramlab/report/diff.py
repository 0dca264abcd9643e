"""`diff`: what came and went from one report to another, of two recipes, two commits or two environments."""

from collections import Counter
from dataclasses import dataclass

from .compare import Comparison, compare
from .report import Report, TensorGroup, format_bytes, unit_for


@dataclass(frozen=True)
class Difference:
    """Two reports side by side, and the tensors that changed.

    Attributes:
        comparison: all figures of both; differences are B − A.
        tensors: (bytes at A's peak, bytes at B's peak, the tensors), the largest change first; of those listed in
            `Report.largest` of either, by category, operator, module and dtype. None where one is not listed.
        notes: what else differs: libraries of the two environments.
    """

    comparison: Comparison
    tensors: tuple[tuple[int | None, int | None, TensorGroup], ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes that the peak grew by, from A to B."""
        before, after = self.comparison.row("peak total").values
        return after - before

    def to_dict(self) -> dict:
        rows = {row.name: row.values for row in self.comparison.rows if all(type(n) is int for n in row.values)}
        tensors = [{"a": a, "b": b, "tensor": str(group)} for a, b, group in self.tensors]
        return {"peak": self.peak, "rows": rows, "tensors": tensors, "notes": [*self.comparison.notes, *self.notes]}

    def __str__(self) -> str:
        lines = [str(self.comparison)]
        for a, b, group in self.tensors:
            change = (b or 0) - (a or 0)
            kind = "new" if a is None else "gone" if b is None else "changed"
            lines.append(
                f"{'+' if change > 0 else '−'}{format_bytes(abs(change), unit_for(abs(change)))} {kind}: {group}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def diff(a: Report, b: Report) -> Difference:
    """Return what came and went from report `a` to report `b`. Raises ValueError for a report without figures."""
    sizes, groups = [], {}
    for report in (a, b):
        if report.status != "ok":
            raise ValueError(f"a report without figures cannot be compared ({report.title}: {report.status}).")
        sizes.append(Counter())
        for group in report.largest:
            key = group.category, group.op, group.where, group.dtype
            sizes[-1][key], groups[key] = sizes[-1][key] + group.size * group.count, group
    tensors = []
    for key, group in groups.items():
        old, new = (known.get(key) for known in sizes)
        other = sizes[old is not None].values()  # what one report does not list may be smaller than all that it lists
        if old != new and (None not in (old, new) or max(old or 0, new or 0) > min(other, default=0)):
            tensors.append((old, new, group))
    tensors.sort(key=lambda row: -abs((row[1] or 0) - (row[0] or 0)))
    old, new = a.environment, b.environment
    unlike = sorted(name for name in old.keys() & new.keys() - {"date", "fits"} if old[name] != new[name])
    notes = tuple(f"{name}: {old[name]} → {new[name]}" for name in unlike)
    return Difference(compare(a, b, labels=("A", "B"), same_recipe=False, against="A"), tuple(tensors), notes)
