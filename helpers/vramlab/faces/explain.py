"""What filled the card: an out-of-memory message, a memory snapshot or a recipe, explained in a few plain lines."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..formulas.predict import predict
from ..hardware.gpu import Gpu, find_gpu
from ..hardware.snapshot import read_snapshot
from ..planning.changes import cheapest
from ..recipe.recipe import Recipe
from ..report.data import data_path
from ..report.errors import RecipeError, VramLabError, needing
from ..report.report import TIERS, UNITS, Interval, Report, format_bytes, unit_for

# torch's, and those of a line for each size
WORDS = json.loads(data_path("out_of_memory.json").read_text(encoding="utf-8"))


class MessageError(VramLabError, ValueError):
    """Text that is no out-of-memory message."""


@dataclass
class Explanation:
    """Plain sentences, the bytes that they rest on by name, and notes on what they leave out."""

    lines: list[str]
    bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"note: {note}" for note in self.notes)])


@needing("explain")
def explain(what: Any, recipe: Recipe | None = None, gpu: str | Gpu | None = None, **granted: Any) -> Explanation:
    """Say in plain lines what filled, or would fill, a card, and the three cheapest changes where a recipe is known.

    Args:
        what: an exception or its text, the `Path` of a memory snapshot or of a script that trains, or a recipe.
        recipe: what ran when the message came.
        gpu: the card that it ran or is to run on.
        granted: `other_memory` and `expandable_segments`, as for `simulate`.
    Raises:
        MessageError, SnapshotError: `what` is no such message or snapshot.
    """
    card = find_gpu(gpu) if gpu else None
    if isinstance(what, Path) and what.suffix == ".py":
        from .script import recipe_of_script

        found, notes = recipe_of_script(what)
        explained = _of_recipe(found, card, {}, granted)
        explained.notes += notes
        return explained
    if isinstance(what, Path):
        return Explanation(str(read_snapshot(what)).split("\n"))
    if isinstance(what, Recipe):
        return _of_recipe(what, card, {}, granted)
    found = read_message(str(what))
    rest = _of_recipe(recipe, card, found, granted).lines if recipe else []
    return Explanation([*_of_message(found), *rest], found)


def read_message(text: str) -> dict[str, int]:
    """Return the bytes that the last out-of-memory message in `text` says, by the names in `WORDS`; `others`: what other
    processes hold, `context`: what this one holds outside of PyTorch, `lack`: what the request lacks.

    Sizes are as exact as the message: two digits of their unit. Raises MessageError.
    """
    text = " ".join(text.split())
    starts = [match.start() for match in re.finditer(WORDS["patterns"]["asked"], text, re.IGNORECASE)]
    if not starts:
        raise MessageError("this is no out-of-memory message: PyTorch's says 'Tried to allocate …' and what is free.")
    found = {}
    for name, pattern in WORDS["patterns"].items():
        if match := re.search(pattern, text[starts[-1] :], re.IGNORECASE):
            number, unit = match.groups()
            found[name] = int(float(number) * (UNITS | {"bytes": 1, "TiB": 1 << 40})[unit])
    held = found.get("allocated", 0) + found.get("unallocated", 0)
    if found.keys() >= {"process", "total", "free"}:
        found["context"] = max(found["process"] - held, 0)
        found["others"] = max(found["total"] - found["free"] - found["process"], 0)
    if "free" in found:
        most = found.get("allowed", held + found["free"]) - held
        found["lack"] = found["asked"] - max(min(found["free"], most), 0)
    return found


def _of_message(found: dict[str, int]) -> Iterator[str]:
    sizes = {name: format_bytes(n, unit_for(n), 2) for name, n in found.items()}
    yield ", ".join(words.format(sizes[name]) for name, words in WORDS["asked"].items() if name in found)
    yield from (f"{sizes[name]} held by {words}" for name, words in WORDS["holders"].items() if found.get(name))
    if "lack" not in found:
        return
    asked, lack, scattered = found["asked"], found["lack"], found.get("unallocated", 0)
    if found.get("others", 0) >= max(lack, found.get("total", 0) // 100) and found["free"] < asked:
        yield "another process is on the card: without it the request would have had room (nvidia-smi lists them)"
    if lack <= 0:
        yield "that much is free: another process held it then, or what is free is not in one piece"
    elif scattered < lack:
        missing = format_bytes(lack - scattered, unit_for(lack - scattered), 2)
        yield f"a real lack: at least {missing} are missing, even if what is unallocated were in one piece"
    elif scattered < 0.05 * (scattered + found.get("allocated", 0)):  # too little to cure
        yield f"a real lack: the tensors fill the card; of it all, only {sizes['unallocated']} are fragments"
    else:
        advice = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield f"fragmentation: {sizes['unallocated']} would do, but not in one piece; {advice}"


def _of_recipe(recipe: Recipe, card: Gpu | None, found: dict[str, int], granted: dict[str, Any]) -> Explanation:
    """Say what fills the recipe's peak, and what would make room for what it, or the request `found`, lacks."""
    witness = predict
    try:
        report = predict(recipe, gpu=card, **granted)
    except RecipeError:
        from ..simulation.simulate import simulate as witness

        report = witness(recipe, gpu=card, **granted)
    peak, lines = report.peak, [f"{report.source}: {recipe}", *parts(report)]
    needs = [found.get("lack", found.get("asked", 0))]
    if "allocated" in found:
        needs.append(peak.total - found["allocated"] - found.get("free", 0))
    if card:
        needs.append(int(report.process) - report.usable)
        has = format_bytes(report.usable)
        lines.append(f"{report.verdict}: {card.name} has {has}, the process needs {report.process}")
    need = max(needs)
    lack = f", {format_bytes(need, unit_for(need), 2)} being missing" if need > 0 else ""
    changes = cheapest(recipe, card, need, witness=witness) or ["none takes much off the peak"]
    lines += [f"the cheapest changes{lack}:", *(f"  {change}" for change in changes)]
    return Explanation(lines, {"peak": peak.total, **dict(peak.items())})


def parts(report: Report) -> list[str]:
    """Return what fills the peak: its categories, largest first, and the largest tensors."""
    peak, unit = report.peak, unit_for(report.peak.total)
    sizes = sorted(((n, name.replace("_", " ")) for name, n in peak.items() if n > 0.01 * peak.total), reverse=True)
    split = ", ".join(f"{name} {format_bytes(n, unit)}" for n, name in sizes)
    head = f"peak in {report.peak_phase}: {format_bytes(peak.total, unit)}; {split}"
    return [head, *(f"  {group}" for group in report.largest[:4])]


def assert_fits(what: Any, gpu: str | Gpu = "T4", tier: str = "likely", **given: Any) -> Report:
    """Raise AssertionError, which names the largest parts, unless the training step fits the card; return its report.

    Args:
        what: a recipe, a module, a mapping of what `simulate` takes, or a report; `given`: what else `simulate` takes,
            such as expandable_segments=True or other_memory.
        tier: "safe", "likely" or "tight": which end of the interval of what the process holds is within the card's memory.
    Raises:
        RecipeError, GpuError: an unknown tier or card, or something that cannot be simulated.
    """
    card = find_gpu(gpu)
    if tier not in TIERS:
        raise RecipeError("tier", tier, f"allowed are {', '.join(map(repr, TIERS))}")
    report = report_of(what, gpu=card, **given)
    needs = Interval.of(report.peak.total if report.process is None else report.process)
    usable = card.total if report.usable is None else report.usable
    over = getattr(needs, TIERS[tier]) - usable
    if report.status != "ok" or over > 0:
        has = format_bytes(usable)
        why = report.message or f"it needs {needs}, {card.name} has {has}: {format_bytes(over)} too much"
        raise AssertionError("\n".join([f"{report.title} does not fit {card.name} ({tier}): {why}", *parts(report)]))
    return report


@needing("assert_fits")
def report_of(what: Any, **given: Any) -> Report:
    """Return the report of `what`, as in `assert_fits`: simulated with what is `given`, unless it is one."""
    if isinstance(what, Report):
        return what
    from ..simulation.simulate import simulate

    if not isinstance(what, Mapping):
        what = {"model" if hasattr(what, "named_parameters") else "recipe": what}
    return simulate(**{**given, **what})
