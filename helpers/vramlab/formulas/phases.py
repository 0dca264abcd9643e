"""The phases of a rank's steady step: what is held all the time, and what each phase adds."""

from functools import cached_property

from ..hardware.overhead import cublas_workspace, frees_workspaces
from ..recipe.recipe import Recipe
from ..report.report import CATEGORIES, Bytes, Cause, Phase
from . import model_states
from .account import Account
from .blocks import dtype_of, half_of
from .model_states import RankBytes, Sizes


class Phases:
    """The phases of a step, from what a rank holds and the account of a micro-batch."""

    def __init__(self, recipe: Recipe, account: Account, rank: RankBytes):
        self.recipe = recipe
        self.loop = recipe.loop
        self.account = account
        self.rank = rank

    def all(self) -> dict[str, Phase]:
        """Return each phase by its name, in order."""
        return {
            "load": self._load(),
            "forward": self._forward(),
            "backward": self._backward(),
            "step": self._step(),
            "between_steps": Phase(self._rest, self._rest),
        }

    def _load(self) -> Phase:
        """Return what is held before the first step."""
        # Adagrad makes its states when it is made itself, others in their first step.
        states = self._states if self.recipe.optim == "adagrad" else {}
        held = total(self.rank.always, self._model, states)
        return Phase(held, held)

    def _forward(self) -> Phase:
        """Return the forward pass, with outputs of the step before that the loop still names."""
        splits = self.account.phases
        kept = {}
        if self.loop.keep_outputs is True:
            kept = self._outputs
        before = self._existing
        # Then the last step's gradients are still there while the forward pass runs.
        if self.loop.zero_grad == "before_backward":
            before = self._left
        # Outputs of the step before go when the new ones have their name.
        peak = total(self._always, before, kept, splits.forward)
        end = total(self._always, self._existing, splits.forward_end)
        return Phase(peak, end, self._cause("forward"))

    def _backward(self) -> Phase:
        """Return the backward pass, whose highest moment may be its end."""
        splits = self.account.phases
        rank = self.rank
        end = splits.backward_end
        # The loop lets go of the outputs when backward is over.
        if self.loop.keep_outputs == "backward":
            end = {"gradients": end["gradients"]}
        highest = total(self._always, self._existing, splits.backward, rank.backward)
        peaks: list[tuple[Bytes, Cause | None]] = [(highest, self._cause("backward"))]
        # DeepSpeed reduces what is left in its buffers then.
        if rank.reducing:
            reducing = {"workspace": rank.reducing}
            reduced = Cause("backward", "reduce", "", rank.reducing, "workspace")
            peaks.append((total(self._always, self._existing, end, reducing), reduced))
        steps = self.recipe.gradient_accumulation_steps
        # Only the last micro-batch reduces; others hold all gradients whole.
        if self.account.engine.gathers_layers and steps > 1:
            unreduced = self.account.engine.unreduced(steps)
            assert unreduced is not None
            peaks.append((total(self._always, _without_gradients(end), unreduced), None))
        peak, cause = max(peaks, key=_total_of_first)
        if rank.backward_end:  # gradients are divided by then
            after = total(self._always, _without_gradients(end), rank.backward_end)
        else:
            after = total(self._always, self._existing, end)
        return Phase(peak, after, cause)

    def _step(self) -> Phase:
        """Return the optimizer's step."""
        outputs = {}
        if self.loop.keep_outputs in ("step", True):
            outputs = self._outputs
        temporaries = {"temporaries": self.rank.temporaries}
        peak = total(self._always, outputs, self._gradients, temporaries)
        cause = None
        if self.rank.temporaries:
            cause = Cause("step", self.recipe.optim, "", self.rank.temporaries, "temporaries")
        return Phase(peak, self._rest, cause)

    def _cause(self, phase: str) -> Cause | None:
        """Return what stands last before the peak of the account's forward or backward."""
        cause = self.account.cause(phase)
        if cause is None:
            return None
        direction, where, entry = cause
        dtype = dtype_of(entry.width, entry.op, half_of(self.recipe))
        return Cause(
            direction=direction,
            op=entry.op,
            where=where,
            size=entry.size,
            category=entry.category,
            shape=entry.shape,
            dtype=dtype,
        )

    @cached_property
    def _rest(self) -> Bytes:
        """Return what is held between steps."""
        outputs = {}
        if self.loop.keep_outputs is True:
            outputs = self._outputs
        gradients = self._gradients
        # Gradients that are zeroed in place, or later, stay between steps.
        if self.loop.zero_grad == "end" and self.loop.set_to_none:
            gradients = {}
        return total(self._always, outputs, gradients)

    @cached_property
    def _always(self) -> Sizes:
        """Return what is held in every phase of a steady step."""
        # cuBLAS has a workspace in forward's thread and one in backward's.
        workspaces = 0
        if not frees_workspaces():
            workspaces = 2 * cublas_workspace(self.account.ledger.chip.capability)
        handles = {"workspace": workspaces}
        return vars(
            total(
                self.rank.always,
                self._model,
                self._states,
                handles,
            )
        )

    @cached_property
    def _model(self) -> Sizes:
        """Return parameters, buffers and inputs, with a reference model's."""
        sizes = {
            "parameters": self.rank.parameters,
            "buffers": model_states.buffer_bytes(self.recipe.shape),
            "workspace": self.rank.fragmentation.get("parameters", 0),
        }
        if self.recipe.has_reference:
            sizes = {category: 2 * size for category, size in sizes.items()}
        # Both models read the same inputs.
        sizes["inputs"] = model_states.input_bytes(self.recipe)
        return sizes

    @cached_property
    def _states(self) -> Sizes:
        """Return the optimizer's states."""
        return {
            "optimizer_states": self.rank.optimizer_states,
            "workspace": self.rank.fragmentation.get("optimizer_states", 0),
        }

    @cached_property
    def _gradients(self) -> Sizes:
        """Return all gradients of a step."""
        if self.loop.optimizer_in_backward:
            return {}
        return {
            "gradients": self.rank.gradients,
            "workspace": self.rank.fragmentation.get("gradients", 0),
        }

    @cached_property
    def _left(self) -> Sizes:
        """Return the gradients that an earlier micro-batch left."""
        # An engine that divides gradients may keep others than the step reads.
        if self.rank.existing is None:
            return self._gradients
        return {"gradients": self.rank.existing}

    @cached_property
    def _existing(self) -> Sizes:
        """Return the gradients that are there all the time, and that new ones are added to."""
        account = self.account
        # Those of FSDP are whole, and in the account, unless they are zeroed in place.
        in_account = account.engine.gathers_layers and self.loop.set_to_none
        if account.gradients_exist and not in_account:
            return self._left
        return {}

    @cached_property
    def _outputs(self) -> Sizes:
        """Return what the model returned, as long as the loop names it."""
        return _without_gradients(self.account.phases.backward_end)


def _total_of_first(candidate: tuple[Bytes, Cause | None]) -> int:
    peak, _ = candidate
    return peak.total


def _without_gradients(split: Sizes) -> Sizes:
    return {category: size for category, size in split.items() if category != "gradients"}


def total(first: Sizes, *others: Sizes) -> Bytes:
    """Add up sizes by category."""
    split = dict.fromkeys(CATEGORIES, 0)
    split.update(first)
    for part in others:
        for category, size in part.items():
            if size:
                # Rests, times layers, may be freed more often than held.
                split[category] = max(split[category] + size, 0)
    result = object.__new__(Bytes)  # whose `__init__` takes longer than all that
    vars(result).update(split)
    return result
