"""What reports are called beside each other, and which of them can stand beside each other at all."""

from collections.abc import Sequence

from .report import Report

UNITS = ("GiB", "MiB", "KiB", "B")


def column_labels(
    reports: Sequence[Report], labels: Sequence[str] | None = None, same_recipe: bool = True
) -> list[str]:
    """A short name for each report, different from the others, in the order given. Raises ValueError as `compare`."""
    check(reports, same_recipe)
    return labels_of(reports, labels)


def failure(report: Report) -> str:
    """One line for a report without figures: "out of memory: …"."""
    kind = "out of memory" if report.status == "oom" else report.status
    return f"{kind}: {' '.join(report.message.split())}" if report.message else kind


def check(reports: Sequence[Report], same_recipe: bool, unit: str = "GiB") -> str:
    """What tells the reports' recipes apart, "" when nothing does; refuses what cannot be compared."""
    if not reports:
        raise ValueError("compare needs at least one report, for example compare(predict(recipe), simulate(recipe)).")
    for report in reports:
        if not isinstance(report, Report):
            raise ValueError(f"compare takes reports, one argument each, not {type(report).__name__}.")
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}, but allowed are {', '.join(UNITS)}.")
    apart = apart_in(reports)
    if apart and same_recipe:
        raise ValueError(f"these reports differ in {apart}: pass same_recipe=False to compare them anyway.")
    return apart


def labels_of(reports: Sequence[Report], given: Sequence[str] | None) -> list[str]:
    """A short name for each report, different from the others."""
    if given is not None:
        if len(given) != len(reports) or len(set(given)) != len(given):
            raise ValueError(f"labels must be {len(reports)} different names, one per report, not {list(given)!r}.")
        return [str(label) for label in given]
    names = [r.source for r in reports]
    if len({r.title for r in reports}) > 1:
        split = [r.title.split(" · ") for r in reports]
        shared = set(split[0]).intersection(*split[1:])
        own = [", ".join(part for part in parts if part not in shared) or "baseline" for parts in split]
        names = own if len(set(names)) == 1 else [f"{name} {mine}" for name, mine in zip(names, own, strict=True)]
    if len(set(names)) < len(names) and len({r.target for r in reports}) > 1:
        names = [f"{name} ({r.target})" for name, r in zip(names, reports, strict=True)]
    if len(set(names)) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} {names[: i + 1].count(name)}" if name in twice else name for i, name in enumerate(names)]
    return names


def apart_in(reports: Sequence[Report]) -> str:
    """What tells the reports' recipes apart, in words; "" when nothing does. Fields that only one of them knows are not
    held against it: a record may be older than a field."""
    recipes = [r.recipe for r in reports if r.recipe is not None]
    for recipe in recipes[1:]:
        fields = [name for name in recipes[0] if name in recipe and recipe[name] != recipes[0][name]]
        if fields:
            pairs = [(name, f"{recipes[0][name]!r} against {recipe[name]!r}") for name in fields]
            return " and ".join(f"{name} ({shown})" if len(shown) < 80 else name for name, shown in pairs)
    titles = dict.fromkeys(r.title for r in reports)
    return "title (" + " against ".join(map(repr, titles)) + ")" if not recipes and len(titles) > 1 else ""
