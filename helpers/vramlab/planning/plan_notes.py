"""What to know about a question that `plan` has answered: one sentence each."""

import dataclasses
from collections.abc import Iterator, Sequence

from ..hardware.gpu import cards_of, is_also
from ..recipe import rollouts
from ..recipe.families import family_of
from ..recipe.knobs import unchecked
from ..recipe.options import REPEATED
from ..recipe.recipe import Recipe
from ..report.report import GiB, format_bytes
from .candidate import Candidate, Choice, confirm, epoch_of, is_as_fast
from .counted import counted_as
from .plan_lines import short_words
from .question import METHODS, Question
from .step_walk import walk
from .vllm_share import about_share

BY_DEFAULT = "without expandable segments (no PYTORCH_ALLOC_CONF=expandable_segments:True)"
LEAST_SAVED = 0.9  # packing is worth naming where an epoch takes at most so much of its time


def notes_on_question(
    question: Question,
    choices: list[Choice],
) -> Iterator[str]:
    """Yield what to know about the question itself."""
    yield from _as_fast(choices)
    if question.plain.rollouts:
        yield "tokens/s are of training alone: what sampling the completions takes is not in them"
        yield from about_share(question)
        yield from rollouts.notes(question.plain.rollouts)
    yield from _about_the_card(question)
    yield from _about_kernels(question, [choice.recipe for choice in choices])
    if question.packing and any(choice.recipe.trainer == "transformers" for choice in choices):
        joined = "the samples of a row attend to those before them, as in transformers' run_clm.py"
        yield f"packing: {joined}; SFTTrainer's keeps them apart (--trainer sft)"
    for choice in choices:
        if choice.recipe.packing:
            yield f"{choice.method} packed: {_about_packing(question, choice.recipe)}"
        if question.methods == ("lora",) and choice.recipe.group.offload:
            yield "--method qlora, whose base takes a quarter, may fit without offloading"
    if question.lengths:
        yield _about_lengths(question, question.lengths)
        if choices and question.plain.trainer in ("transformers", "sft"):
            faster = _packed(choices[0], question)
            if faster:
                yield faster


def with_reference_first(lacking: Candidate, confirmed: bool) -> Iterator[str]:
    """Yield what a recipe that does not fit takes without its reference model, if it fits then.

    TRL's trainers ask the reference before training and drop it (`precompute_ref_log_probs`).
    """
    if not lacking.recipe.has_reference:
        return
    recipe = unchecked(lacking.recipe, precompute_ref_log_probs=True)
    changed = Candidate(lacking.question, recipe, lacking.family)
    if confirmed:
        confirm([changed])
    tier = next(filter(changed.fits, lacking.question.tiers), "")
    if tier:
        needs = f"{tier}, at most {changed.choice(tier).needs.high / GiB:.2f} GiB"
        asked = "precompute_ref_log_probs=True, for a pass over all data before training"
        yield f"{changed.method} with {asked}: {needs}: {short_words(recipe)}"


def _as_fast(choices: Sequence[Choice]) -> Iterator[str]:
    """Say which choices are as fast as the fastest, within the error of an estimate."""
    if not choices:
        return
    fastest = min(choices, key=lambda choice: choice.seconds)
    alike = [choice.method for choice in choices if is_as_fast(choice, fastest)]
    if len(alike) > 1:
        methods = " and ".join(alike)
        # `best_first` puts what holds less on the host before what is simpler.
        is_simplest = alike[0] == min(alike, key=METHODS.index)
        first = "the simpler first" if is_simplest else "what takes less of the host's memory first"
        yield f"{methods}: about as fast, within the error of the estimate; {first}"


def _about_the_card(question: Question) -> Iterator[str]:
    """Yield what is taken for granted of a card that is not named or not known well."""
    name = question.gpu.name
    if question.assumed:
        alike = [card.name for card in cards_of(question.memory or 0)]
        rest = "the table's least with so much memory"
        if name in alike and (question.memory or 0) % GiB:
            others = [other for other in alike if other != name]
            rest = "likely, by its size"
            if others:
                rest = f"which reports so much, as {', '.join(others)}"
        yield f"no card is named: speed and kernels are {name}'s, {rest}"
    more = ", ".join(is_also(question.said_gpu)) if question.said_gpu else ""
    if more:
        yield f"{question.said_gpu} is taken as {name}; there is also {more}"
    if not (question.memory or question.gpu.total_known):
        usable = format_bytes(question.usable, digits=2)
        rest = f"{usable} is the least part of its box that any card reports"
        yield f"what {name} reports is not known: {rest}"


def _about_kernels(
    question: Question,
    recipes: list[Recipe],
) -> Iterator[str]:
    """Yield why an answer has a kernel of attention that one would not expect."""
    name = question.gpu.name
    for recipe in recipes:
        # Other models have no sdpa.
        if recipe.attn_implementation == "eager" and recipe.shape.attention != "eager":
            # Padded rows need a mask, which some of sdpa's kernels do not take.
            # Not checked: only which kernel it would get is asked.
            by_sdpa = unchecked(counted_as(recipe), attn_implementation="sdpa")
            if not walk(by_sdpa, question.gpu.chip).fused:
                rest = f"has no fused kernel for this model on {name}"
                yield f"eager: for rows of one length sdpa {rest}"
                break
    if any(recipe.attn_implementation == REPEATED for recipe in recipes):
        rest = f"or {name} has no fused kernel for shared keys"
        yield f"{REPEATED}: repeat_shared_keys() of vramlab, {rest}"


def _about_lengths(
    question: Question,
    lengths: tuple[int, ...],
) -> str:
    """Return what the data set's lengths are, and how many samples are cut or divided."""
    longest = question.plain.seq_len
    cut = sum(length > longest for length in lengths)
    rest = f"; {cut:,} are cut to {longest:,}" if cut else ""
    if cut and question.packing and question.plain.trainer == "transformers":
        rest = f"; {cut:,} are longer than a row and go on in the next"
    middle = lengths[len(lengths) // 2]
    tokens = f"{lengths[0]:,} to {lengths[-1]:,} tokens, median {middle:,}"
    return f"data: {len(lengths):,} samples of {tokens}{rest}"


def _about_packing(question: Question, recipe: Recipe) -> str:
    """Return what keeps the samples of a row apart, and how many a step has."""
    if recipe.attn_implementation == "flash_attention_2":
        apart = "FlashAttention keeps the samples of a row apart"
    elif family_of(recipe.shape).own_mask:
        apart = "another training: the samples of a row attend to those before them"
    else:
        apart = (
            "a mask of tokens × tokens keeps the samples of a row apart (TRL names "
            "FlashAttention alone)"
        )
    if not question.lengths:
        return apart
    per_row = len(question.lengths) / question.data.packed_rows
    rows = recipe.batch_size * recipe.gradient_accumulation_steps * question.gpus
    return f"{apart}, {per_row:.1f} on average, {rows * per_row:,.0f} in a step"


def _packed(choice: Choice, question: Question) -> str:
    """Return how much faster an epoch of `choice` would be with packed rows.

    That is "" where padding is less than a tenth of the rows.
    """
    if question.packing or choice.recipe.packing or choice.epoch is None:
        return ""
    # Joined rows and packed ones exclude each other; only SFTTrainer packs by itself.
    recipe = unchecked(
        choice.recipe,
        padding_free=False,
        packing=choice.recipe.trainer == "sft",
    )
    packing = dataclasses.replace(question, packing=True)
    assert choice.time  # of a model that formulas know
    # By the parts of its present step, whose rows are as wide.
    seconds = epoch_of(packing, recipe, choice.time.parts)
    if seconds is None or seconds > LEAST_SAVED * choice.epoch:
        return ""
    times = f"{choice.epoch / seconds:.1f} times as fast"
    return f"packing (--packing) would make an epoch of {choice.method} {times}"
