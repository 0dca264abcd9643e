"""Judge record files that readers sent, reports and facts.

It looks at their form, at physics, and at what `simulate` and other records say beside.

    python tests/tools/verify_record.py data/measurements/FILE.json … [--json]

Exit status: 0 accepted, 1 a finding (simulate says something else, tensor by tensor; or no step on
such a card was ever so fast: a person looks), 2 refused.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vramlab import (
    GiB,
    MiB,
    Recipe,
    RecipeError,
    RecordError,
    Report,
    diff,
    format_bytes,
    model_names,
    simulate,
    simulate_generation,
)
from vramlab.base.data import data_path
from vramlab.base.files import read_text
from vramlab.base.text import markdown
from vramlab.hardware.gpu import Gpu, GpuError, find_gpu
from vramlab.hardware.overhead import rules_of
from vramlab.interfaces.measure_and_record import card_of
from vramlab.measurement.facts import Fact
from vramlab.measurement.measure import operations
from vramlab.measurement.records import VERSIONS, load, read_records
from vramlab.measurement.share import CARD, content_name
from vramlab.planning.step_time import estimate
from vramlab.recipe.knobs import rebuild
from vramlab.report.report import environment

ACCEPTED = "accepted"
FINDING = "finding"
REFUSED = "refused"
TOLERANCE = 0.01  # of the allocated peak, and at least one of the allocator's small segments
LEAST = 2 * MiB
DRIVER_SHARE = (
    0.1  # of the table's memory that a driver may report more or less than the reading there
)
SIMULATED_FOR = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
)  # versions that move bytes
# Letters of our own notes and of PyTorch's messages: nothing of HTML, Markdown's links and code, or
# other people's names.
TEXT = re.compile(r"""[0-9A-Za-z ·×→−–…µΔ%()\[\],.:;=/_+*{}'"?#-]*""")
MOST_REPEATS = 1000
# of the clean pass's peak that the tracked one may hold more: 4 % at most among our records
TRACKED = 0.1
# Measured over estimated seconds, by what takes longest, below which a person looks: a sixth under
# the least of the 184 timed records of an H100 (0.65, 0.66, 0.49, 0.88; paged optimizers that page
# nothing, 0.31).
FASTEST = {
    "matmuls": 0.54,
    "attention": 0.54,
    "memory": 0.55,
    "launches": 0.41,
    "optimizer": 0.73,
    "host": 0.25,
    "links": 0.25,
}
ALIKE = 1.5  # times that the seconds of one recipe on two cards of a kind differ by
OTHERS = GiB  # of a card that other processes may hold when a run goes out of memory
MOST_OUTSIDE = (
    4 * GiB
)  # of a process outside torch's allocator; 1.79 GiB is the most that was published (`overhead.py`)
POWER = 1.2  # times its limit that a card may take between two controls of it
DIES = re.compile(
    r"CUDA out of memory\. Tried to allocate [0-9.]+ [KMG]iB\. GPU \d+ has a total capacity of "
    r"([0-9.]+ GiB)"
)


@dataclass
class Verdict:
    """What is said of one file, and why."""

    file: str
    outcome: str
    reasons: list[str] = field(default_factory=list)
    rows: list[tuple[str, int, int]] = field(
        default_factory=list
    )  # recipe, measured and simulated bytes allocated

    def __str__(self) -> str:
        lines = [f"{markdown(self.file)}: **{self.outcome}**", ""]
        if self.rows:
            lines += ["| recipe | measured | simulated | difference |", "|---|---|---|---|"]
            for title, measured, simulated in self.rows:
                off = f"{simulated / measured - 1:+.2%}"
                lines.append(
                    f"| {markdown(title)} | {format_bytes(measured)} | {format_bytes(simulated)} "
                    f"| {off} |"
                )
            lines.append("")
        return "\n".join([*lines, *(f"- {markdown(reason)}" for reason in self.reasons)])


def verify(path: Path) -> Verdict:
    """Judge one file. Nothing in it is executed; it is JSON of numbers and names."""
    try:
        text = read_text(path)
        records = read_records(path)
    except (OSError, RecordError) as error:
        return Verdict(path.name, REFUSED, [str(error)])
    reports = list(records.reports.values())
    facts = list(records.facts.values())
    wrong = (
        list(_form(path.name, text, [*reports, *facts]))
        if reports or facts
        else ["it holds no report"]
    )
    # Physics reads fields that the form has to have first.
    wrong = wrong or [f"{report.title}: {why}" for report in reports for why in _physics(report)]
    wrong = wrong or [f"{fact.title}: {why}" for fact in facts for why in _physics_of_fact(fact)]
    if wrong:
        return Verdict(path.name, REFUSED, wrong)
    verdict = Verdict(path.name, ACCEPTED)
    for report in reports:
        for told in filter(None, (_beside_simulated(report, verdict), _beside_times(report, path))):
            verdict.outcome = FINDING
            verdict.reasons.append(f"{report.title}: {told}")
    for fact in facts:
        if told := _fact_beside_simulated(fact, verdict):
            verdict.outcome = FINDING
            verdict.reasons.append(f"{fact.title}: {told}")
    here = environment()
    there = (*reports, *facts)[0].environment
    old, new = (
        {name: str(seen[name]).split("+")[0] for name in SIMULATED_FOR} for seen in (there, here)
    )
    others = [
        f"{name} {old[name]} ({new[name]} here)" for name in SIMULATED_FOR if old[name] != new[name]
    ]
    if others:
        pins = " ".join(f"{name}=={old[name]}" for name in SIMULATED_FOR if there[name])
        again = (
            f": install {pins} and ask again before it counts as one"
            if verdict.outcome == FINDING
            else ""
        )
        verdict.reasons.append(f"measured with other versions, {', '.join(others)}{again}")
    return verdict


def _form(name: str, text: str, entries: list[Report | Fact]) -> Iterator[str]:
    known = (*VERSIONS, *CARD, "date")
    for entry in entries:
        recipe = entry.asked.get("recipe") if isinstance(entry, Fact) else entry.recipe
        if recipe and recipe["model"] not in model_names():
            yield f"{entry.title}: its model is not of the catalogue"
        # Whatever else stands there could tell who sent it.
        if more := entry.environment.keys() - {*known}:
            yield f"the environment tells {', '.join(sorted(more))}, which no submission has"
        if missing := [key for key in known if key not in entry.environment]:
            yield f"the environment lacks {', '.join(missing)}: `vramlab share` writes them"
            return
        if nothing := [
            key
            for key in (*CARD, "date", "torch", "transformers")
            if entry.environment[key] is None
        ]:
            yield f"the environment says nothing of {', '.join(nothing)}"
            return
        yield from _texts(entry) if isinstance(entry, Report) else _letters(_words(entry.found))
    if len({tuple(entry.environment[key] for key in CARD) for entry in entries}) > 1:
        yield "one file holds records of one card, and this holds more"
    # The name holds a digest of the content.
    if name != content_name(entries[0].environment, text):
        yield "its name is not that of its content: it was changed after `vramlab share` wrote it"


def _words(found: dict[str, Any]) -> Iterator[str]:
    """Return the texts among what a fact found."""
    for value in found.values():
        each_of = value if isinstance(value, list) else [value]
        for each in each_of:
            if isinstance(each, str):
                yield each


def _letters(texts: Iterable[str]) -> Iterator[str]:
    """Say which texts have letters that measuring does not write."""
    for text in texts:
        if not TEXT.fullmatch(text):
            yield f"{text[:60]!r} has a character that no note or message of ours has"


def _texts(report: Report) -> Iterator[str]:
    """Say which texts are none that measuring writes."""
    try:
        title = str(rebuild(Recipe, "recipe", report.recipe))
    except RecipeError as error:
        yield f"its recipe cannot be: {error}"
        return
    # The title is shown on the site, so it must be nobody's own words.
    if report.title != title:
        yield f"its title is {report.title!r}, and its recipe's is {title!r}"
    groups = (
        text
        for group in report.largest
        for text in (group.category, group.dtype, group.op, group.where)
    )
    yield from _letters((report.message, report.target, *report.notes, *groups))


def _physics(report: Report) -> Iterator[str]:
    """Say what no GPU can have measured."""
    total = report.environment["total_memory"]
    card = card_of(report.environment)
    # A card with peak rates is in the table, so its memory is known.
    if card.peak and abs(total / (listed := find_gpu(card.name).total) - 1) > DRIVER_SHARE:
        yield f"{card.name} has {format_bytes(listed)}, and it says {format_bytes(total)}"
    if report.status != "ok":
        return
    sizes = {
        name: getattr(report, name) for name in ("requested", "allocated", "reserved", "process")
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    # Each figure holds the one before it: asked for, with rounding, with what is cached, with the
    # context.
    for (small, less), (large, more) in zip(known.items(), list(known.items())[1:], strict=False):
        if less > more:
            yield f"{small} {less:,} is more than {large} {more:,}"
    if not {"requested", "allocated", "reserved"} <= known.keys():
        yield "the allocator's peaks are missing"
        return
    if max(known.values()) >= total:
        yield f"it holds {max(known.values()):,} of {total:,} bytes, of which the driver keeps some"
    # Where NVML did not say the process, there is nothing to compare.
    if known.get("process", total) <= known["reserved"]:
        yield (
            f"its process {known['process']:,} has no room for CUDA's context beside "
            f"{known['reserved']:,} reserved"
        )
    # kMinBlockSize of PyTorch's CUDACachingAllocator, and kRoundLarge, of which its segments of 2
    # and 20 MiB are multiples.
    for name, unit in (("allocated", 512), ("reserved", 2 * MiB)):
        if known[name] % unit:
            yield (
                f"{name} {known[name]:,} is no multiple of {unit:,}, which the caching "
                f"allocator hands out"
            )
    if report.peak.total != report.allocated:
        yield (
            f"the categories add up to {report.peak.total:,}, and allocated is {report.allocated:,}"
        )
    yield from _moments(report)
    if report.speed is None:
        # Other programs ran at the same time: bytes are exact then, and seconds are not.
        if not any(note.startswith("time left out: ") for note in report.notes):
            yield "it has no time, and no note begins with 'time left out: ' and says why"
        return
    yield from _speed(report, card)


def _moments(report: Report) -> Iterator[str]:
    """Say which moment or tensors of the tracked pass are far above the peak.

    A compiled step is tracked as an eager one.
    """
    if report.recipe["torch_compile"]:
        return
    moments = {name: phase.peak.total for name, phase in report.phases.items()}
    moments |= {f"the end of {name}": phase.end.total for name, phase in report.phases.items()}
    moments |= {f"moment {moment.index}": moment.bytes.total for moment in report.timeline}
    moments["the largest tensors"] = sum(group.size * group.count for group in report.largest)
    for name, size in moments.items():
        if size > (1 + TRACKED) * report.allocated:
            yield f"{name}: {size:,} bytes are more than the peak, {report.allocated:,}"
    if report.peak_phase not in report.phases:
        yield f"its peak is in {report.peak_phase!r}, of which it says nothing"


def _speed(report: Report, card: Gpu) -> Iterator[str]:
    """Say how its times contradict each other, its tokens or the card."""
    speed = report.speed
    recipe = rebuild(Recipe, "recipe", report.recipe)
    # Of one time or two the median is known from the ends; of more it lies anywhere between.
    middle = {1: speed.high, 2: (speed.low + speed.high) / 2}.get(speed.repeats, speed.median)
    if not 1 <= speed.repeats <= MOST_REPEATS:
        yield (
            f"it was timed {speed.repeats:,} times, and measure does so 1 to {MOST_REPEATS:,} times"
        )
    elif abs(middle - speed.median) > 1e-6 * speed.median or (
        speed.repeats == 1 and speed.low < speed.high
    ):
        yield (
            f"{speed.low}, {speed.median} and {speed.high} are not the times of "
            f"{speed.repeats} steps"
        )
    if not 0 < speed.low <= speed.median <= speed.high:
        yield f"its seconds a step are {speed.low}, {speed.median} and {speed.high}"
    elif abs(speed.tokens_per_second * speed.median / recipe.tokens - 1) > 0.01:
        yield (
            f"{speed.tokens_per_second:,.0f} tokens/s are not {recipe.tokens:,} tokens in "
            f"{speed.median:.4g} s"
        )
    # A tenth more, as a card may run above the clock of its datasheet.
    elif (peak := card.flops(recipe.precision)) and operations(recipe) / speed.median > 1.1 * peak:
        yield (
            f"{operations(recipe) / speed.median / 1e12:,.0f} TFLOP/s are more than "
            f"{card.name} can do"
        )


def _physics_of_fact(fact: Fact) -> Iterator[str]:
    """Say what no GPU can have shown."""
    found = fact.found
    card = card_of(fact.environment)
    total = fact.environment["total_memory"]
    sizes = [found[name] for name in ("requested", "allocated", "reserved") if name in found]
    if fact.kind == "out_of_memory":
        yield from _death(fact, total)
    elif fact.outside is None:
        yield "neither NVML's process nor its memory in use is there, of which the rest is a part"
    elif not 0 < fact.outside <= MOST_OUTSIDE:
        yield f"{fact.outside:,} bytes outside the allocator are no context of CUDA"
    if sizes != sorted(sizes) or sizes[-1] >= total:
        yield f"{' ≤ '.join(f'{size:,}' for size in sizes)} ≤ {total:,} does not hold"
    if found["reserved"] % (2 * MiB) or found["allocated"] % 512:
        yield "its allocator hands out no such blocks"
    for name in ("used_before", "used_after", "smi_used", "process", "free"):
        if (found.get(name) or 0) > 1.02 * total:  # NVML's total has the driver's part too
            yield f"{name} {found[name]:,} is more than the card's {total:,}"
    if fact.kind == "steps":
        yield from _times(fact, card)
    if fact.kind == "loading" and found["kept"] > found["allocated"]:
        yield "it kept more than its peak"
    if fact.kind == "generation" and max(found["prefill"], found["decode"]) != found["allocated"]:
        yield "its peak is in neither part"


def _death(fact: Fact, total: int) -> Iterator[str]:
    found = fact.found
    said = DIES.match(found["message"])
    if not said or said[1] != f"{total / GiB:.2f} GiB" or found["total"] != total:
        yield f"PyTorch says nothing like {found['message'][:80]!r} of a card with {total:,} bytes"
    if not found["allocated"] <= found["peak_allocated"] <= found["peak_reserved"] < total:
        yield "its peaks are not between what was there before and the card"


def _times(fact: Fact, card: Gpu) -> Iterator[str]:
    found = fact.found
    recipe = rebuild(Recipe, "recipe", fact.asked["recipe"])
    if len(found["seconds"]) != fact.asked["repeats"]:
        yield f"{len(found['seconds'])} times are not those of {fact.asked['repeats']} steps"
    elif (peak := card.flops(recipe.precision)) and operations(recipe) / min(
        found["seconds"]
    ) > 1.1 * peak:
        yield f"a step in {min(found['seconds']):.4g} s is faster than {card.name} computes"
    limit = found["power_limit"]
    if limit and found["power"] and max(found["power"]) > POWER * limit:
        yield f"{max(found['power']):,.0f} W are more than its limit of {limit:,.0f} W"


def _fact_beside_simulated(fact: Fact, verdict: Verdict) -> str:
    """Add a row of both peaks of a fact that has one.

    Return how the simulated report differs, or "".
    """
    # A context has no recipe, and how a step is compiled is up to the sender's torch.
    if fact.kind == "context" or fact.asked["recipe"]["torch_compile"]:
        return ""
    recipe = rebuild(Recipe, "recipe", fact.asked["recipe"])
    if fact.kind == "out_of_memory":
        # The batch is doubled until it dies, and this is the one that did.
        recipe = recipe.replace(batch_size=fact.found["batch_size"])
    card = card_of(fact.environment)
    # cuBLAS's workspaces are those of the torch that measured.
    with rules_of(fact.environment["torch"]):
        if fact.kind == "generation":
            lengths = fact.asked["prompt"], fact.asked["new_tokens"]
            said = simulate_generation(recipe, *lengths, gpu=card)
        else:
            said = simulate(recipe, gpu=card)
    if fact.kind == "out_of_memory":
        held = said.process.high if said.process is not None else said.allocated
        if held < fact.found["total"] - OTHERS:
            return f"it ran out of memory, and simulate says at most {format_bytes(int(held))}"
        return ""
    simulated = said.loading.total if fact.kind == "loading" else said.allocated
    measured = fact.found["allocated"]
    verdict.rows.append((fact.title, measured, simulated))
    if abs(simulated - measured) <= max(TOLERANCE * measured, LEAST):
        return ""
    return f"simulate is off by {simulated / measured - 1:+.2%}"


def _beside_simulated(report: Report, verdict: Verdict) -> str:
    """Add a row of both peaks; return how the simulated report differs, or ""."""
    card = card_of(report.environment)
    if report.recipe["torch_compile"]:
        verdict.reasons.append(
            f"{report.title}: not compared, the Inductor of its own torch decides"
        )
        return ""
    try:
        with rules_of(report.environment["torch"]):
            said = simulate(rebuild(Recipe, "recipe", report.recipe), gpu=card)
    except RecipeError as error:
        return f"not simulated: {error}"
    if report.status == "oom":
        held = said.process.high if said.process is not None else said.allocated
        if held < card.total - OTHERS:
            return (
                f"it ran out of memory, and simulate says at most {format_bytes(int(held))} "
                f"of {format_bytes(card.total)}"
            )
        return ""
    verdict.rows.append((report.title, report.allocated, said.allocated))
    if abs(said.allocated - report.allocated) <= max(TOLERANCE * report.allocated, LEAST):
        return ""
    # The notes that begin with a sign are tensors that one of the two has more of.
    seen = [note for note in diff(report, said).notes if note[0] in "+−"][:6]
    return "; ".join([f"simulate is off by {said.allocated / report.allocated - 1:+.2%}", *seen])


_known = cache(load)


def _beside_times(report: Report, path: Path) -> str:
    """Return why its time is to be looked at, or "".

    A reason is that it is faster than any step was, or unlike that of the same recipe on another
    card of the kind.
    """
    recipe = rebuild(Recipe, "recipe", report.recipe)
    card = card_of(report.environment)
    if report.speed is None or recipe.torch_compile:
        return ""
    # What others sent of the same recipe and card is the nearest that there is to compare.
    for other in sorted(data_path("measurements").glob("*.json")):
        known = None if other.name == path.name else _known(other).get(recipe.key)
        if known and known.speed and known.environment["gpu"] == report.environment["gpu"]:
            ratio = report.speed.median / known.speed.median
            if not 1 / ALIKE <= ratio <= ALIKE:
                return f"a step takes {ratio:.2f} times as long as in {other.name}"
    try:
        parts = estimate(recipe, card)
    except (RecipeError, GpuError):  # a model or a card that has no estimate
        return ""
    # What takes longest decides how far under the estimate a step can be.
    most = max(parts, key=parts.get)
    ratio = report.speed.median / sum(parts.values())
    if ratio >= FASTEST[most]:
        return ""
    return (
        f"a step takes {ratio:.2f} times the estimate, and where {most} take longest none "
        f"took under {FASTEST[most]}"
    )


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("files", nargs="+", type=Path)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args(argv)
    verdicts = [verify(path) for path in asked.files]
    said: Any = [asdict(verdict) for verdict in verdicts]
    print(json.dumps(said, indent=1) if asked.json else "\n\n".join(map(str, verdicts)))
    # The worst of all files.
    return max([ACCEPTED, FINDING, REFUSED].index(verdict.outcome) for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
