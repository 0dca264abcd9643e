"""A training step of diffusers' or finetrainers' scripts on fake tensors."""

from typing import Any

from ..base.errors import RecipeError, VramLabError, needing
from ..hardware.contexts import Room
from ..hardware.gpu import Gpu, find_gpu
from ..recipe.diffusion import Diffusion
from ..recipe.process_context import room_on
from ..report.report import Report
from ..tracking.history import History, to_report
from ..tracking.tracked import run_tracked
from ..training.diffusion import build_diffusion
from ..training.quiet import no_collection
from .fakes import fake_world
from .simulate import check_target, make_tracker
from .values import reason_at


@needing("simulate_diffusion")
@no_collection(before=False)
def simulate_diffusion(
    asked: Diffusion | str,
    target: str = "cuda",
    gpu: str | Gpu | None = None,
    *,
    steps: int = 2,
    other_memory: int = 0,
    expandable_segments: bool = False,
    **fields: Any,
) -> Report:
    """Return where every byte of a diffusion model's training step would be.

    The phases are those of `simulate`, and "encode" before each forward: VAE, text encoders where
    they are resident, and noise.

    Args:
        asked: a `Diffusion`, or a model's name with `fields` of one.
        target, gpu, steps, other_memory, expandable_segments: as for `simulate`.
    Raises:
        RecipeError: what the model does not take, or what does not run on fake tensors.
    """
    check_target(target)
    if isinstance(asked, str):
        asked = Diffusion(asked, **fields)
    card = find_gpu(gpu) if gpu else None
    room = room_on(None, card, other_memory, expandable_segments)
    history = trace_diffusion(asked, target, card, steps, room)
    library = asked.record.get("library", "diffusers")
    notes = [f"the step is that of {library}' {asked.script['script']}", *history.notes]
    if card and (why := card.why_not(asked.precision)):
        notes.append(why)
    return to_report(history, "simulated", None, target, title=str(asked), notes=notes)


def trace_diffusion(
    asked: Diffusion,
    target: str = "cuda",
    card: Gpu | None = None,
    steps: int = 2,
    room: Room | None = None,
) -> History:
    """Return the history of every storage over `steps` optimizer steps."""
    # Libraries are loaded before `fake_world`, which replaces some functions of them.
    import diffusers  # noqa: F401

    if asked.use_8bit_adam:
        import bitsandbytes  # noqa: F401
    with fake_world(target, card) as (_, kernels):
        try:
            training = build_diffusion(asked, "cpu", target)
            tracker = make_tracker(training, card, kernels)
            run_tracked(training, tracker, steps, target)
        except VramLabError:
            raise
        # diffusers' classes have their own ways to refuse a configuration
        except Exception as error:
            rest = f"its step fails on fake tensors: {type(error).__name__}: {reason_at(error)}"
            raise RecipeError("model", asked.model, rest) from error
    return History(tracker.log, tracker.marks, target == "cuda", room, tracker.notes)
