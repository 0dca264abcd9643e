"""The share of the card that a vLLM takes which samples beside the trainer.

It takes the share whole: what its weights leave of it is KV cache. A cache that holds every
completion that is asked for at once is large enough; with a smaller one they are sampled in turns.
"""

import dataclasses
import math
from collections.abc import Iterator

from ..hardware.gpu import usable_memory
from ..report.report import format_bytes
from ..simulation.colocated import cache_of_one, colocated, completions_at_once, least_share
from .candidate import confirm
from .question import Question
from .search import Search

STEP = 0.01  # of a card


def search_of(question: Question) -> Search:
    """Return the search of `question`, in which vLLM has the largest share that is of use and fits.

    Of use is a cache for all completions that are asked for at once. Where the recipe that takes
    least does not fit beside that, which is simulated, the share is smaller by what it lacks.
    """
    if not question.finds_share:
        return Search(question)
    least = least_share(question.plain, question.gpu, completions=1)
    share = least_share(question.plain, question.gpu)
    search = Search(_asked_with(question, min(share, 1.0)))
    lightest = search.lightest()
    if lightest is None:
        return search
    over = lightest.bound(question.tiers[-1]) - question.usable
    if over > 0:  # by a bound, which takes no simulation
        search = Search(_asked_with(question, max(least, _less(search.question, over))))
        lightest = search.lightest()
        assert lightest  # the same recipes, with another share
        if lightest.bound(question.tiers[-1]) > question.usable:
            return search
    confirm([lightest])
    if lightest.simulated is None or lightest.fits(question.tiers[0]):
        return search
    for tier in question.tiers:
        less = _less(search.question, max(0, lightest.over(tier)))
        if less >= least:
            return Search(_asked_with(question, less))
    return Search(_asked_with(question, least))


def may_fit_asleep(question: Question) -> bool:
    """Tell whether the lightest recipe's weights have room beside a vLLM that samples."""
    asked = with_least_share(question) if question.finds_share else question
    lightest = Search(asked).lightest()
    vllm = colocated(asked.plain, asked.gpu)
    if vllm is None or lightest is None or lightest.report is None:
        return False
    weights = lightest.report.phases["load"].end.parameters
    return weights + vllm.awake.low <= question.usable


def asleep(question: Question) -> Question:
    """Return `question` with a vLLM that gives its memory back while the model trains."""
    # A share is refused that has no room for the weights.
    said = with_least_share(question) if question.finds_share else question
    assert said.rollouts  # it has a vLLM on the card
    rollouts = dataclasses.replace(said.rollouts, vllm_enable_sleep_mode=True)
    asked = dataclasses.replace(question, rollouts=rollouts)
    asked.finds_share = question.finds_share
    asked.sleeps_to_fit = True
    return asked


def with_least_share(question: Question) -> Question:
    """Return a question that finds its share with that of a cache for one completion."""
    return _asked_with(question, least_share(question.plain, question.gpu, completions=1))


def _less(question: Question, over: float) -> float:
    """Return the share of `question` less `over` bytes, in whole steps."""
    steps = math.ceil(over / usable_memory(question.gpu) / STEP)
    return _share_of(question) - steps * STEP


def _share_of(question: Question) -> float:
    assert question.rollouts  # it has a vLLM on the card
    return question.rollouts.vllm_gpu_memory_utilization


def _asked_with(question: Question, share: float) -> Question:
    """Return `question` with a share of at least as much, as its author might have said it."""
    assert question.rollouts  # it has a vLLM on the card
    # A float's last digit is no reason for a whole step.
    share = min(1.0, round(math.ceil(share / STEP - 1e-6) * STEP, 2))
    rollouts = dataclasses.replace(question.rollouts, vllm_gpu_memory_utilization=share)
    asked = dataclasses.replace(question, rollouts=rollouts)
    asked.finds_share = True
    asked.sleeps_to_fit = question.sleeps_to_fit
    return asked


def about_share(question: Question) -> Iterator[str]:
    """Say what vLLM's share of the card is, and how many completions its cache holds."""
    vllm = colocated(question.plain, question.gpu)
    if vllm is None:
        return
    assert question.rollouts  # it has a vLLM on the card
    asked = completions_at_once(question.plain)
    held = vllm.cache // cache_of_one(question.plain)
    weights = format_bytes(vllm.weights, digits=2)
    cache = format_bytes(vllm.cache, digits=2)
    share = f"--vllm-gpu-memory-utilization {question.rollouts.vllm_gpu_memory_utilization:g}"
    holds = f"all {asked} completions of a step" if held >= asked else f"{held} of {asked}"
    found = f"{share} (found):" if question.finds_share else f"{share}:"
    text = f"{found} weights of {weights} and a KV cache of {cache}, which holds {holds}"
    if held < asked:
        text += " completions of a step, so they are sampled in turns"
    sleep = "--vllm-enable-sleep-mode gives both back while the model trains"
    if question.sleeps_to_fit:
        text += f"; {sleep} (found: awake nothing fits)"
    elif not vllm.sleeps:
        text += f"; {sleep}"
    yield text
