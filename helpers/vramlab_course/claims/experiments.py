"""The generic experiments, which give facts for a claim's expression.

Each takes recipes, cards, names or runs from a claim.

Reports give facts by phase: "before.step.end.optimizer_states", "after.peak", "N" (bytes of the
weights), "parameters". An experiment raises RecordError, "Waits for …", where only a GPU can answer
and no record of one is there.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from vramlab.base.errors import RecordError
from vramlab.formulas.predict import predict
from vramlab.hardware.allocator import AllocatorError
from vramlab.hardware.contexts import context_on
from vramlab.hardware.gpu import find_gpu
from vramlab.hardware.links import pcie_bandwidth
from vramlab.hardware.overhead import cublas_workspace
from vramlab.measurement.records import find_record
from vramlab.planning.question import Question, usable_memory
from vramlab.planning.search import Search
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import CATEGORIES, GiB, Interval, MiB, Report, format_bytes
from vramlab.simulation.simulate import simulate

from vramlab_course.base_model import base_model_path
from vramlab_course.number_formats import FORMATS
from vramlab_course.topology import NVLINK, ROUNDS

from ..chapters import chapter_03, chapter_07
from .expressions import Facts, evaluate, stored
from .installed import installed
from .runs import attention, compiled, four_bits, labelled, loaded, sent, wrapped
from .trained import accumulated, learns, quantized, recorded, rounded_weights, trained

BASE = str(base_model_path("config.json"))  # "base" in a claim's recipe
CARD = "A100"  # of `changes`
LIMITS = ("max", "smallest", "smallest_normal", "epsilon")  # of a number format


# --- arithmetic


def arithmetic(
    about: str,
    values: Mapping[str, Any] = {},
    cards: Mapping[str, str] = {},
    recipe: Mapping[str, Any] | None = None,
) -> Facts:
    """Sums over number formats, cards, a recipe's sizes, and `values`.

    Cards are by their datasheets; `values` are numbers or expressions.
    """
    names: dict[str, Any] = {
        "GiB": GiB,
        "MiB": MiB,
        **{name: card_facts(card) for name, card in cards.items()},
    }
    # Formats by name, such as bf16.max.
    for f in FORMATS:
        names[f.name] = {limit: getattr(f, limit) for limit in LIMITS}
    if recipe:
        # A recipe's sizes without a prefix, as expressions of sums read best.
        names.update(shape_facts(make_recipe(recipe)))
    for name, value in values.items():
        if isinstance(value, str):
            # Each value may use those before it.
            value = evaluate(value, {**names, **_defined(names)})
        names[name] = value
    return Facts({**names, **_defined(names)}, "derived", about)


def _defined(names: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger's definitions that can be computed from `names`, in their order."""
    values: dict[str, Any] = {}
    for name, text in stored("definitions").items():
        # A definition over names that this claim does not have is left out.
        with suppress(ValueError):
            values[name] = evaluate(text, {**names, **values})
    return values


def card_facts(name: str) -> dict[str, Any]:
    """A card's figures; peak rates by format, 0 for none, and NVLink's in one direction."""
    card = find_gpu(name)
    # An entry has generation, number of links, and bytes a second of one of them.
    _, links, each = NVLINK.get(name, (0, 0, 0.0))
    rates = {}
    for precision in ("fp32", "tf32", "fp16", "bf16", "fp8"):
        rates[f"{precision}_rate"] = card.peak.get(precision, 0)
    return {
        **rates,
        "bf16": card.supports("bf16-mixed"),
        "link": each,
        "nvlink": links * each,
        "pcie": pcie_bandwidth(card.pcie) if card.pcie else 0,
        "tdp": card.tdp,
        "total": card.total,
        "usable": usable_memory(card),
        "workspace": cublas_workspace(card.compute_capability),
    }


def shape_facts(recipe: Recipe) -> dict[str, Any]:
    """A recipe's counts.

    They are parameters, sizes of the model, tokens of a micro-batch and the trained parameters of
    its adapters.
    """
    shape = recipe.shape
    # bitsandbytes leaves the head in 16 bits, so it is no part of the sum.
    head = f"{shape.head}.weight"
    linear = []
    for weight in shape.weights():
        if weight.kind == "linear" and weight.name != head:
            linear.append(weight.size)
    targets = shape.lora_targets(recipe.lora.target_modules) if recipe.lora else []
    return {
        **{name: size for name, size in vars(shape).items() if isinstance(size, int)},
        "parameters": shape.num_parameters,
        "linear": sum(linear),
        "linear_bytes_nf4": sum(_nf4(n) for n in linear),
        "tokens": recipe.batch_size * recipe.seq_len,
        "attn_implementation": recipe.attn_implementation,
        # An adapter is two matrices, rank × input and output × rank.
        "trained": sum(recipe.lora.r * (inside + out) for _, inside, out in targets),
    }


def _nf4(numbers: int) -> int:
    """Bytes of a matrix in NF4 with double quantization.

    They are codes; scales, and their scales in blocks of 256; their offset, 256 levels and the
    weights' 16 (bitsandbytes' `quantize_4bit`).
    """
    codes = -(-numbers // 2)
    scales = -(-numbers // 64)
    scales_of_scales = 4 * -(-scales // 256)
    offset = 4
    levels = 4 * 256 + 4 * 16
    return codes + scales + scales_of_scales + offset + levels


# --- reports


def reports(
    of: Mapping[str, Mapping[str, Any]],
    by: str = "predict",
    gpu: str | None = None,
    target: str = "cuda",
    common: Mapping[str, Any] = {},
) -> Facts:
    """Reports by name: records where one GPU has all, else by "predict" or "simulate".

    `common` are fields in each.
    """
    made = {name: make_recipe({**common, **changes}) for name, changes in of.items()}
    by_name = {name: recorded_report(recipe, gpu, target) for name, recipe in made.items()}
    cards = {report and report.environment["gpu"] for report in by_name.values()}
    # Records count only if one card has them all: two cards' figures do not compare.
    if None in cards or len(cards) > 1:
        by_name = {name: witness(recipe, by, gpu, target) for name, recipe in made.items()}
    names: dict[str, Any] = {
        "GiB": GiB,
        "MiB": MiB,
        "context": _ends(context_on()),
    }
    for name, report in by_name.items():
        names[name] = {**shape_facts(made[name]), **report_facts(report)}
    if gpu:
        names["card"] = card_facts(gpu)
    # The weakest witness names the whole comparison.
    weakest = min(
        (report.source for report in by_name.values()),
        key=("predicted", "simulated", "recorded").index,
    )
    if weakest == "recorded":
        weakest += f", {cards.pop().removeprefix('NVIDIA ')}"
    said = []
    for name, recipe in made.items():
        peak = by_name[name].peak.total
        said.append(f"{recipe}: {format_bytes(peak)}")
    # What is called "run" is meant where a definition names no report.
    known = {**names, **names.get("run", {})}
    return Facts({**names, **_defined(known)}, weakest, "; ".join(said))


def changes(changes: Mapping[str, Any], start: Mapping[str, Any] = {}, **how: Any) -> Facts:
    """The reports "before" and "after" a change to the usual recipe on an A100.

    That is gpt2, batch 8, 512 tokens.
    """
    return reports(
        {"before": start, "after": {**start, **changes}},
        gpu=CARD,
        common={"of": "usual"},
        **how,
    )


def speeds(changes: Mapping[str, Any], start: Mapping[str, Any] = {}) -> Facts:
    """`ratio`: how many times as long a token takes after the change, by records of a GPU.

    Raises RecordError.
    """
    made = [make_recipe({"of": "usual", **start, **more}) for more in ({}, changes)]
    try:
        records = [find_record(recipe) for recipe in made]
    except RecordError:
        # The recipe after the change says what is waited for.
        world = made[1].sharding.world_size if made[1].sharding else 1
        what = f"{world} GPUs" if world > 1 else "a GPU with CUDA"
        if any(recipe.precision.startswith(("tf32", "bf16")) for recipe in made):
            what += " of Ampere or newer"
        raise RecordError(f"Waits for {what}.") from None
    if not all(report.speed for report in records):
        raise RecordError("Waits for a record with a speed.")
    before, after = (report.speed.tokens_per_second for report in records)
    return Facts(
        # Tokens and not steps, since the change may be of the batch.
        {"ratio": before / after},
        "recorded",
        f"{made[1]} on {records[1].environment.get('gpu')}",
    )


def make_recipe(given: Mapping[str, Any]) -> Recipe:
    """The recipe of a claim: `of` names one of the ledger's; the model "base" is the course's."""
    fields = dict(given)
    name = fields.pop("of", None)
    if name is not None:
        fields = {**stored("recipes")[name], **fields}
    if fields["model"] == "base":
        fields["model"] = BASE
    return Recipe(**fields)


@cache
def recorded_report(recipe: Recipe, gpu: str | None = None, target: str = "cuda") -> Report | None:
    """A record of `recipe` (on `gpu`), or None."""
    with suppress(RecordError):
        report = find_record(recipe, gpu)
        if report.status == "ok" and report.target == target:
            return report
    return None


@cache
def witness(
    recipe: Recipe,
    by: str = "predict",
    gpu: str | None = None,
    target: str = "cuda",
) -> Report:
    """The prediction or simulation of `recipe`, each once."""
    if by == "simulate":
        return simulate(recipe, gpu=gpu, target=target)
    return predict(recipe, gpu=gpu)


def report_facts(report: Report) -> dict[str, Any]:
    """A report as nested names: phase, "peak" or "end", category or "total".

    `peak` is the whole run's in bytes.
    """
    facts: dict[str, Any] = {}
    for name, phase in report.phases.items():
        facts[name] = {
            "peak": _split(phase.peak),
            "end": _split(phase.end),
        }
    # Bytes of the weights once they are loaded, in which claims count.
    facts["N"] = facts["load"]["end"]["parameters"]
    facts.update(
        peak=report.peak.total,
        reserved=_ends(report.reserved),
        process=_ends(report.process),
    )
    return facts


def _split(of: Any) -> dict[str, int]:
    sizes = {category: getattr(of, category) for category in CATEGORIES}
    return {**sizes, "total": of.total}


def _ends(size: Any) -> dict[str, Any]:
    # A figure that is known is an interval whose ends are equal; None counts as nothing.
    if not isinstance(size, Interval):
        known = size or 0
        size = Interval(known, known, known)
    return {"low": size.low, "likely": size.value, "high": size.high}


# --- cards, searches and the allocator


@cache
def _search(asked: tuple) -> Recipe | None:
    return Search(Question(**dict(asked))).any_fit()


def searched(questions: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any] = {}) -> Facts:
    """Questions to the planner by name.

    Whether any recipe fits (`fits`), and its model's `parameters`.
    """
    names = {}
    said = []
    for name, question in questions.items():
        asked = {"offload": False, **common, **question}
        # Lists become tuples, so that the question can be a key of the cache.
        frozen = []
        for key in sorted(asked):
            value = asked[key]
            frozen.append((key, tuple(value) if isinstance(value, list) else value))
        recipe = _search(tuple(frozen))
        names[name] = {
            "fits": recipe is not None,
            "parameters": recipe.shape.num_parameters if recipe else 0,
        }
        said.append(f"{name}: {recipe or 'nothing fits'}")
    return Facts(names, "predicted", "; ".join(said))


def allocator(runs: Mapping[str, str], spare: float | None = None, endless: bool = False) -> Facts:
    """Chapter 07's lengths through the allocator's model, each run with a cure.

    They run on its card, on a card without end, or on one with room for `spare` more than is
    allocated at the peak. Facts are calls to CUDA, segments given back, and the overhead.
    """
    if endless:
        limit = None
    elif spare is None:
        limit = chapter_07.room()
    else:
        # The peak of allocated bytes, which no allocator changes.
        most = chapter_07.run("none", None, True).peak_allocated
        limit = int((1 + spare) * most)
    names = {}
    for name, cure in runs.items():
        expandable = cure.startswith("expandable")
        lengths = cure.removeprefix("expandable ")
        try:
            followed = chapter_07.run(lengths, limit, expandable)
        except AllocatorError:
            names[name] = {"fails": True, "gives_back": True}
            continue
        names[name] = {
            "fails": False,
            # Without the first entry: the first step is longer than that of the load.
            "gives_back": sum(followed.given_back[1:]) > 0,
            "later_calls": sum(followed.mallocs[1:]),
            # The first two steps are left out: they reserve what later ones find.
            "flat": len(set(followed.between[2:])) == 1,
            "overhead": followed.overhead,
        }
    card = "endless" if endless else format_bytes(limit)
    about = (
        f"{chapter_07.RECIPE}, {len(chapter_07.LENGTHS)} lengths, "
        f"{', '.join(runs.values())}, card: {card}"
    )
    return Facts(names, "simulated", about)


def emptied(spare: float | None = None, lengths: Sequence[int] = ()) -> Facts:
    """Runs with the cache left alone, and emptied before each backward pass.

    The Trainer does the latter. `fails`: whether they do on a card with room for `spare` more than
    is allocated at the peak. `lengths`: chapter 03's in another order.
    """
    order = tuple(lengths)
    usual = chapter_03.replayed(lengths=order)
    limit = int((1 + spare) * usual.peak_allocated) if spare is not None else None
    names: dict[str, Any] = {}
    for name, when in (("left", ""), ("emptied", "before backward")):
        try:
            run = chapter_03.replayed(when, limit, order)
            sizes = {
                "allocated": run.peak_allocated,
                "reserved": run.peak_reserved,
                "between": max(run.between),
            }
            names[name] = {**sizes, "fails": False}
        except AllocatorError:
            names[name] = {"fails": True}
    return Facts(
        names,
        "simulated",
        f"gpt2, {len(order or chapter_03.LENGTHS)} lengths, "
        f"{format_bytes(limit or usual.peak_reserved)}",
    )


def two_ranks(
    ways: Mapping[str, Mapping[str, Any]] = {},
    wrappings: Mapping[str, str] = {},
) -> Facts:
    """What one of two real ranks sends in a step of the base model, phase by phase.

    Bytes are in units of its parameters (Ψ). Of a hundred linear layers wrapped in FSDP units it is
    what is gathered at a time.
    """
    names: dict[str, Any] = {}
    for name, given in ways.items():
        names[name] = sent(make_recipe({"of": "small", **given}))
    for name, wrapping in wrappings.items():
        names[name] = wrapped(wrapping)
    names["paper"] = {
        # Relative to DDP's, so that the model's size cancels.
        f"stage{n}": ROUNDS[f"ZeRO-{n}"] / ROUNDS["DDP"]
        for n in (1, 2, 3)
    }
    if not ways and not wrappings:
        return Facts(names, "derived", "the ZeRO paper (Rajbhandari et al. 2020), section 7")
    return Facts(names, "measured", f"two ranks on a CPU: {', '.join([*ways, *wrappings])}")


HERE = (arithmetic, reports, changes, speeds, searched, allocator, emptied, two_ranks)
ELSEWHERE = (installed, recorded, trained, learns, rounded_weights, quantized, accumulated)
RUNS = (labelled, loaded, compiled, attention, four_bits)
EXPERIMENTS = {experiment.__name__: experiment for experiment in (*HERE, *ELSEWHERE, *RUNS)}
