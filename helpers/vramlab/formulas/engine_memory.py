"""What an engine does around a model's forward and backward pass: little on one device or DDP.

`fsdp_memory.FsdpEngine` and `deepspeed_memory.DeepSpeedEngine` gather weights and reduce gradients
in the same places.
"""

from ..recipe.recipe import Recipe
from .graph import Parameter, Tensor
from .ledger import Ledger
from .step import single_temporaries

# Keys of `enter` and `leave` besides layers' names.
ROOT = ""  # the whole model
EMBEDDING = "embedding"  # the input embedding
TAIL = "tail"  # the last norm with the head
APART = "apart"  # a head that no module's unit gathers


class Engine:
    """The engine of the recipe `asked`, which computes as `recipe` does (`compute_recipe`).

    Attributes:
        gathers_layers: each layer gathers its own weights, and prefetches the next one's.
        other_gradients: bytes of gradients that no entry has.
        embeddings: names of the embedding modules, that of words first.
    """

    gathers_layers = False
    other_gradients = 0

    def __init__(
        self,
        ledger: Ledger,
        parameters: dict[str, Parameter],
        asked: Recipe,
        recipe: Recipe,
    ):
        self.ledger = ledger
        self.parameters = parameters
        self.asked = asked
        self.recipe = recipe
        modules = recipe.shape.known_layout.modules
        self.embeddings = [name for name, kind in modules if kind == "embedding"]

    def begin(self, gradients_exist: bool) -> None:
        """Begin the micro-batch; `gradients_exist`: new gradients are added to others."""
        if gradients_exist:
            for parameter in self.parameters.values():
                parameter.gradient = True

    def before_forward(self) -> None:
        """Prepare for the forward pass of the model."""

    def enter(self, key: str, needs: bool = False) -> None:
        """Begin the forward pass of `key` (a layer, ROOT, EMBEDDING or TAIL).

        `needs`: its input requires a gradient.
        """

    def leave(self, key: str, needs: bool = True) -> None:
        """End the forward pass of `key`; `needs`: its output requires a gradient."""

    def before_head(self) -> None:
        """Prepare for the output head."""

    def whole(self, weight: Parameter) -> Tensor:
        """Return a weight of the head as a function that nothing calls as a module gets it."""
        return weight

    def complete(self, parameter: Parameter) -> None:
        """Take a complete gradient: keep it, or update the weight with it at once."""
        if not self.recipe.loop.optimizer_in_backward:
            self.ledger.keep(parameter)
            return
        assert parameter.partial is not None
        parameter.partial.entry.category = "gradients"
        # The hook updates one weight while its gradient lives; the scratch has no name, so it is
        # freed before the gradient.
        temporaries = single_temporaries(self.recipe, parameter.shape, parameter.width)
        self.ledger.scratch(temporaries, "optimizer")
        parameter.partial = None

    def finish(self) -> None:
        """End the backward pass."""

    def unreduced(self, steps: int) -> dict[str, int] | None:
        """Return the end of a micro-batch that is not the last of `steps`, where it differs."""
        return None
