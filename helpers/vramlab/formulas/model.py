"""A recipe's model from top to bottom: embeddings, layers, head and loss, as in transformers 5.23.

Each part is in a module of its own (`embeddings`, `layer`, `head`). All compute with `operators`,
which enter what they do in the `ledger`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..base.errors import RecipeError
from ..recipe.families import Stack, family_of
from ..recipe.recipe import Recipe
from .attention import AttentionKernels
from .calls import NESTED_BACKWARD, NESTED_FORWARD
from .embeddings import Embeddings
from .engine_memory import EMBEDDING, ROOT, TAIL, Engine
from .feed_forward import FeedForward
from .graph import Leaf, Parameter, Tensor
from .head import Head
from .layer import Layer
from .ledger import Ledger
from .norms import Norms
from .numerics import BOOL, Numerics, Rows
from .operators import Operators
from .self_attention import SelfAttention, Table
from .tensor_sizes import FP32

SLIDING = "sliding_attention"  # the kind of layers that look back `sliding_window` tokens only


@dataclass(slots=True)
class Section:
    """The events of a layer that stands for `more` others, as it runs forward and backward.

    `calls`: of the host in both.
    """

    more: int
    begin: int
    calls: int
    end: int = 0
    top: int = 0
    bottom: int = 0


class Model:
    """The model of one micro-batch.

    Attributes:
        sections: of layers that stand for others.
        table: cos and sin of rotary positions for the layers that run; None without.
    """

    def __init__(
        self,
        recipe: Recipe,
        parameters: dict[str, Parameter],
        ledger: Ledger,
        engine: Engine,
    ):
        shape = recipe.shape
        rows = Rows.of(recipe)
        numerics = Numerics.of(recipe, parameters, ledger.chip)
        if numerics.nested:
            ledger.forward_calls = NESTED_FORWARD
            ledger.backward_calls = NESTED_BACKWARD
        operators = Operators(ledger, numerics, parameters)
        norms = Norms(operators, shape)
        kernels = AttentionKernels(operators, shape, rows)
        attention = SelfAttention(operators, norms, kernels, shape, _caches(recipe))
        feed_forward = FeedForward(operators, shape)

        self.recipe = recipe
        self.shape = shape
        self.layout = shape.known_layout
        self.rows = rows
        self.ledger = ledger
        self.engine = engine
        self.operators = operators
        self.norms = norms
        self.embeddings = Embeddings(operators, norms, recipe, rows, engine.embeddings)
        self.layer = Layer(operators, norms, attention, feed_forward, shape)
        self.head = Head(operators, norms, engine, recipe)
        self.sections: list[Section] = []
        self.table: Table | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Run the whole model; return (what it returns besides the loss, the loss)."""
        # In a list, so that no name here keeps the head's input alive.
        states = [self._hidden_states()]
        self.engine.before_head()
        return self.head.run(states.pop())

    def _hidden_states(self) -> Tensor:
        """Run everything before the output head."""
        engine = self.engine
        engine.before_forward()
        stacks = self.layout.stacks
        # What runs outside of layers is reported under the module that holds them, "model" of
        # "model.layers".
        backbone, _, _ = stacks[0].prefix.rpartition(".")
        self.ledger.where = backbone
        # FSDP's root unit gathers what is in no other unit, before anything runs.
        engine.enter(ROOT)
        engine.enter(EMBEDDING)
        x, named = self.embeddings.run()
        # Handed on in a list, so that no name here keeps a layer's input alive.
        states = [x]
        needs = x.needs
        del x
        engine.leave(EMBEDDING, needs)

        kinds = self.layout.kinds or (SLIDING,)
        # All layers of a kind share one mask.
        masks = {kind: self._mask(kind) for kind in dict.fromkeys(kinds)}
        tables = self._tables(list(masks))
        for stack, kind, start, count in self._runs(stacks, masks):
            self.table = tables.get(kind, tables.get(""))
            layer = partial(self._run_layer, stack.parts, masks[kind])
            states.append(self.stack(stack.prefix, count, layer, states, start))

        x = states.pop()
        self.ledger.where = backbone
        engine.enter(TAIL, x.needs)
        # The decoder's last norm is the last of the modules outside the layers.
        if not self.layout.post_norm:
            norms = [name for name, kind in self.layout.modules if kind == "norm"]
            x = self.norms.apply(x, norms[-1])
        # `inputs_embeds` is an argument of the backbone's `forward`, so it lives until that
        # returns.
        del named
        return x

    def _run_layer(
        self,
        parts: dict[str, str],
        mask: Tensor | None,
        name: str,
        x: Tensor,
    ) -> Tensor:
        """Run the layer `name` with the rotary table of now."""
        # The table is looked up when the layer runs: a recomputation takes the last one's.
        return self.layer.run(name, parts, x, mask, self.table)

    def _mask(self, kind: str) -> Tensor | None:
        """Make the attention mask of a kind of layers, if there is one.

        It has a number for each pair of tokens and sequence. sdpa needs one for padding, joined
        samples and a sliding window (`masking_utils._ignore_causal_mask_sdpa`).
        """
        kernel = self.operators.numerics.attention
        if kernel == "flash_attention_2":
            return None
        tokens = self.rows.tokens
        joined = self.rows.joined > 1 and not family_of(self.shape).own_mask
        apart = joined or bool(self.rows.padded)
        if not (self.layout.causal or apart):
            return None
        window = self.shape.sliding_window if kind == SLIDING else None
        windowed = window is not None and tokens >= window
        if kernel == "sdpa" and not apart and not windowed:
            return None
        shape = (self.rows.batch, 1, tokens, tokens)
        allowed = self.ledger.tensor("mask", shape, BOOL)
        if kernel == "sdpa":
            return allowed
        # `eager_mask` of transformers makes a bias of the model's dtype from the boolean mask,
        # which goes when it returns.
        return self.ledger.tensor("mask", shape, self.operators.numerics.hidden)

    def _tables(self, kinds: list[str]) -> dict[str, Table]:
        """Make the rotary tables: one for each kind of layers if they differ, or one under ""."""
        if not self.shape.rotary_dim:
            return {}
        if not self.layout.kinds_tables:
            kinds = [""]
        return {kind: self._table() for kind in kinds}

    def _table(self) -> Table:
        """Make cos and sin of every position in fp32, and cast them as the hidden states are."""
        dims = self.shape.rotary_dim
        if self.layout.halved_rotary:
            dims //= 2
        shape = (1, self.rows.tokens, dims)
        cos = self.ledger.tensor("cos", shape, FP32)
        sin = self.ledger.tensor("sin", shape, FP32)
        width = self.operators.numerics.hidden
        return self.operators.to(cos, width), self.operators.to(sin, width)

    def _runs(
        self,
        stacks: list[Stack],
        masks: dict[str, Tensor | None],
    ) -> list[tuple[Stack, str, int, int]]:
        """List (stack, kind, first number, count) of equal layers, one kind after the other.

        Raises RecipeError where layers differ and are sharded.
        """
        kinds = self.layout.kinds or tuple(masks)
        # Kinds with masks alike allocate alike, so one run of layers serves them all.
        masked = {mask is not None for mask in masks.values()}
        if len(stacks) > 1 or len(masked) == 1:
            runs = [(stack, kinds[0], stack.first, stack.count) for stack in stacks]
        else:
            # The first layer has its own kind; the last one's kind comes last.
            others = Counter(kinds[1:])
            last = others.pop(kinds[-1])
            runs = []
            start = 0
            for kind, count in [(kinds[0], 1), *others.items(), (kinds[-1], last)]:
                runs.append((stacks[0], kind, start, count))
                start += min(count, 2)  # `stack` writes out so many
        engine = self.recipe.group.engine
        if len(runs) > 1 and engine != "ddp":
            name = self.shape.name
            unlike = f"those of {name} differ here"
            allowed = f"the formulas shard equal layers, and {unlike}: ask simulate"
            raise RecipeError("sharding.engine", engine, allowed)
        return runs

    def stack(
        self,
        name: str,
        count: int,
        layer: Callable[[str, Tensor], Tensor],
        states: list[Tensor],
        start: int = 0,
    ) -> Tensor:
        """Run as few of `count` layers, from `start`, as say what all do.

        One stands for others; those that differ run too. The first differs where its input requires
        no gradient (LoRA). `states` has the input, freed with the layer.
        """
        ledger = self.ledger
        engine = self.engine
        checkpoints = self.recipe.gradient_checkpointing
        x = states.pop()
        if x.node in ledger.leaves:
            self._come_back(x)
        # The first layer's input may need no gradient; the second is like all that follow.
        typical = 1 if engine.gathers_layers or not x.needs else 0
        # With FSDP a typical layer has one before it and one after it, which prefetch.
        after = 2 if engine.gathers_layers else 1
        written = min(count, typical + after)

        def run(x: Tensor, name: str) -> Tensor:
            x = layer(name, x)
            ledger.layer_holds.clear()
            return x

        for number in range(written):
            inner = f"{name}.{start + number}"
            ledger.where = inner
            # Events from `begin` to `end` are one layer forward, from `top` to `bottom` the same
            # layer backward; the account multiplies both by `more`.
            section = Section(
                more=count - written,
                begin=len(ledger.events),
                calls=-ledger.calls,
            )
            # Backward runs nodes in reverse: this one comes when the layer is done.
            ledger.nodes.append(partial(self._note_bottom, section))
            engine.enter(inner, x.needs)
            # A recomputation calls this function with `x` alone, so the layer's name is bound in.
            inside = partial(run, name=inner)
            x = ledger.checkpoint(inside, x) if checkpoints else inside(x)
            engine.leave(inner)
            # This layer stands for those that are not run: the one before it differs in its input,
            # the one after it in what comes next.
            if number == min(typical, written - 1):
                section.end = len(ledger.events)
                section.calls += ledger.calls
                if section.more and checkpoints:  # the next layer's checkpoint holds it
                    assert x.block is not None
                    x.block.entry.category = "activations"
                self.sections.append(section)
                ledger.nodes.append(partial(self._note_top, section))
        return x

    def _note_bottom(self, section: Section) -> None:
        """Note where the backward pass of a layer ends."""
        section.bottom = len(self.ledger.events)
        section.calls += self.ledger.calls

    def _note_top(self, section: Section) -> None:
        """Note where the backward pass of a layer begins."""
        section.top = len(self.ledger.events)
        section.calls -= self.ledger.calls

    def _come_back(self, x: Tensor) -> None:
        """Let the first layer's input go with that layer, as others' do, and then come back."""
        # The first layer stands for others here, whose inputs go with them. The leaf would hold
        # this one for the whole step, and the account would multiply that.
        leaf = x.node
        assert isinstance(leaf, Leaf)
        shape = x.shape
        width = x.width

        def come_back() -> None:
            leaf.block = self.ledger.block("embedding", shape, width, "activations")

        # The graph holds it again when the layer's backward pass is over.
        leaf.block = None
        self.ledger.nodes.append(come_back)

    def take_caches(self) -> list[Tensor]:
        """Return the keys and values that the model returns, and let go of them."""
        attention = self.layer.attention
        caches = attention.caches or []
        attention.caches = None
        return caches


def _caches(recipe: Recipe) -> list[Tensor] | None:
    """Return an empty list for keys and values where the model caches them."""
    # transformers' decoders cache keys and values in training too unless told otherwise;
    # `GradientCheckpointingLayer` sets use_cache to False.
    caching = recipe.loop.use_cache
    if caching is None:
        caching = recipe.shape.settings.get("use_cache", True)
    if caching and not recipe.gradient_checkpointing and recipe.shape.known_layout.causal:
        return []
    return None
