"""A recipe's whole model in the ledger: embeddings, stacks of layers, head and loss, as in transformers 5.23."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from types import SimpleNamespace

from ..hardware.gpu import Chip
from ..recipe.families import Stack
from ..recipe.liger import HEAD
from ..recipe.options import FUSED
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from . import liger
from .fused_head import log_probabilities
from .layer import Layer
from .ledger import CAST, FULL, Leaf, Parameter, Tensor
from .model_states import FP32, HALF
from .operators import BOOL, INT64
from .step import single_temporaries

# Keys of `enter` and `leave` besides layers' names: the whole model, the input embedding, the last norm with the head.
ROOT, EMBEDDING, TAIL = "", "embedding", "tail"


class Model(Layer):
    """The ledger of one micro-batch; engines for many ranks override its first methods."""

    gathers_layers = False  # each layer gathers its own weights, and prefetches the next one's
    other_gradients = 0  # bytes of gradients that no entry has
    inputs: Tensor | None = None  # a decoder's embedded tokens, named until it returns, where the first layer is apart

    def __init__(self, recipe: Recipe, parameters: dict[str, Parameter], chip: Chip):
        super().__init__(recipe, parameters, chip)
        # of layers that stand for `more` others: events that `begin` and `end` forward, and at `top` and `bottom` of backward
        self.sections: list[SimpleNamespace] = []
        self.rewritten = 0  # bytes that operators write over what is there, for which there is no event
        self.repeats: list[tuple[int, int, int]] = []  # (first event, last event, how many more are like these)
        self.leaves: list[Leaf] = []  # which the graph holds, and so the loss, as long as the loop keeps that
        self.embeddings = [name for name, kind in recipe.shape.layout.modules if kind == "embedding"]

    def shard(self, asked: Recipe, gradients_exist: bool) -> None:
        """Prepare for the engine of `asked`; enter gradients that exist, to which new ones are added."""
        if gradients_exist:
            for parameter in self.parameters.values():
                parameter.gradient = True

    def enter(self, key: str, needs: bool = False) -> None:
        """Begin the forward pass of `key` (a layer, ROOT, EMBEDDING or TAIL); `needs`: its input requires a gradient."""

    def leave(self, key: str) -> None:
        """End the forward pass of `key`."""

    def finish(self) -> None:
        """End the backward pass."""

    def complete(self, parameter: Parameter) -> None:
        if not self.recipe.loop.optimizer_in_backward:
            super().complete(parameter)
            return
        parameter.partial.entry.category = "gradients"
        self.scratch(single_temporaries(self.recipe, parameter.shape, parameter.width), "optimizer")
        parameter.partial = None

    def mask(self, kind: str = "sliding_attention") -> Tensor | None:
        """Make the attention mask of a kind of layers, if there is one: a number for each pair of tokens and sequence.

        sdpa needs one for padding, joined samples and a sliding window (`masking_utils._ignore_causal_mask_sdpa`).
        """
        n, window = self.tokens, self.shape.sliding_window if kind == "sliding_attention" else None
        joined = self.joined_samples > 1 and self.shape.family != "opt"  # which gives itself a mask of ones
        apart, kernel = joined or bool(self.padded), self.implementation
        without = kernel == "sdpa" and not apart and (window is None or n < window)
        if without or kernel == "flash_attention_2" or not (self.layout.causal or apart):
            return None
        seen = self.tensor("mask", (self.batch, 1, n, n), BOOL)
        return seen if kernel == "sdpa" else self.tensor("mask", (self.batch, 1, n, n), self.hidden_width)

    def stack(
        self, name: str, count: int, layer: Callable[[str, Tensor], Tensor], first: list[Tensor], start: int = 0
    ) -> Tensor:
        """Run as few of `count` layers, from `start`, as say what all do: one that stands for others, and those that differ.

        The first differs where its input requires no gradient (LoRA). `first` has the input, freed with the layer.
        """
        x = first.pop()
        if x.node in self.leaves:
            self._comes_back(x)
        typical = int(self.gathers_layers or not x.needs)
        written = min(count, typical + 1 + self.gathers_layers)

        def run(x: Tensor, name: str) -> Tensor:
            x = layer(name, x)
            self.layer_holds.clear()
            return x

        for i in range(written):
            inner = self.where = f"{name}.{start + i}"
            section = SimpleNamespace(more=count - written, begin=len(self.events), top=0, bottom=0)  # no backward yet
            self.nodes.append(lambda section=section: setattr(section, "bottom", len(self.events)))
            self.enter(inner, x.needs)
            x = self.checkpoint(partial(run, name=inner), x) if self.checkpoints else run(x, inner)
            self.leave(inner)
            if i == min(typical, written - 1):
                section.end = len(self.events)
                if section.more and self.checkpoints:  # the next layer's checkpoint holds it
                    x.block.entry.category = "activations"
                self.sections.append(section)
                self.nodes.append(lambda section=section: setattr(section, "top", len(self.events)))
        return x

    def _comes_back(self, x: Tensor) -> None:
        """The first layer's input goes with that layer, as others' do, so that it is like them; and then comes back."""
        leaf, shape, width = x.node, x.shape, x.width
        leaf.block = None
        self.nodes.append(lambda: setattr(leaf, "block", self.block("embedding", shape, width, "activations")))

    def hidden_states(self) -> Tensor:
        """Run everything before the output head."""
        s, stacks = self.shape, self.layout.stacks
        self.where = stacks[0].prefix
        self.enter(ROOT)
        self.enter(EMBEDDING)
        first = [self.embed_image() if s.image_tokens else self.embed()]
        self.leave(EMBEDDING)
        kinds = s.layout.kinds or ("sliding_attention",)
        masks = {kind: self.mask(kind) for kind in dict.fromkeys(kinds)}
        tables = {kind: self.rotary_table() for kind in (masks if s.layout.kinds_tables else [""]) if s.rotary_dim}
        for run, kind, start, count in self.runs(stacks, masks):
            self.table = tables.get(kind, tables.get(""))
            layer = partial(self.layer, run.parts, masks[kind])
            first.append(self.stack(run.prefix, count, layer, first, start))
        x = first.pop()
        self.where = stacks[0].prefix
        self.enter(TAIL, x.needs)
        if not s.layout.post_norm:
            x = self.norm(x, [name for name, kind in s.layout.modules if kind == "norm"][-1])
        self.inputs = None
        return x

    def rotary_table(self) -> tuple[Tensor, Tensor]:
        """Make cos and sin of every position, computed in fp32 and kept in the hidden states' dtype."""
        rows = (1, self.tokens, self.shape.rotary_dim // (2 if self.layout.halved_rotary else 1))
        cos, sin = self.tensor("cos", rows, FP32), self.tensor("sin", rows, FP32)
        return self.to(cos, self.hidden_width), self.to(sin, self.hidden_width)

    def runs(self, stacks: list[Stack], masks: dict[str, Tensor | None]) -> list[tuple[Stack, str, int, int]]:
        """List (stack, kind, first number, count) of equal layers; those with a mask are put together, and those without."""
        kinds = self.layout.kinds or tuple(masks)
        if len(stacks) > 1 or len({mask is None for mask in masks.values()}) == 1:
            found = [(stack, kinds[0], stack.first, stack.count) for stack in stacks]
        else:
            rest, found = Counter(kinds[1:]), []
            for kind, count in [(kinds[0], 1), *sorted(rest.items(), key=lambda row: row[0] == kinds[-1])]:
                found.append((stacks[0], kind, sum(min(row[-1], 2) for row in found), count))
        if len(found) > 1 and self.recipe.sharding and self.recipe.sharding.engine != "ddp":
            allowed = f"the formulas shard equal layers, and those of {self.shape.name} differ here: ask simulate"
            raise RecipeError("sharding.engine", self.recipe.sharding.engine, allowed)
        return found

    def first(self, x: Tensor) -> Tensor:
        """Make the embedding require a gradient with LoRA and checkpointing (`enable_input_require_grads`)."""
        if self.recipe.lora and self.checkpoints and not x.needs:
            x.needs, x.node = True, Leaf(x.block)
            self.leaves.append(x.node)
        return x

    def embed(self) -> Tensor:
        """Embed tokens, times a factor (Gemma), plus learned positions (GPT-2, OPT, BERT), with dropout."""
        s, b, n, (words, *others) = self.shape, self.batch, self.tokens, self.embeddings
        x = self.first(self.embedding(Tensor(None, (b, n), INT64), words))
        self.inputs = x if s.layout.causal and not x.needs else None
        if s.layout.scaled_embedding:
            x = self.scale(x)
        if "model.decoder.project_in.weight" in self.parameters:  # OPT
            x = self.linear(x, "model.decoder.project_in")
        for name in sorted(others, reverse=True):  # BERT's token types come before its positions
            shape = (1, n) if s.layout.shared_positions and "type" not in name else (b, n)
            block = None if "type" in name else self.block("positions", shape, INT64)
            x = self.add(x, self.embedding(Tensor(block, shape, INT64), name))
        if "bert.embeddings.LayerNorm.weight" in self.parameters:
            x = self.layer_norm(x, "bert.embeddings.LayerNorm")
        return self.dropout(x, s.embedding_dropout)

    def embed_image(self) -> Tensor:
        """Embed an image: patches by a convolution, the class token before them, learned positions."""
        s, b, n, prefix = self.shape, self.batch, self.tokens, "vit.embeddings"
        width = HALF if self.recipe.precision.endswith("-true") else FP32
        pixels = self.to(Tensor(None, (b, *s.features[1]), width), self.hidden_width)
        weight, bias = (self.parameters[f"{prefix}.patch_embeddings.projection.{part}"] for part in ("weight", "bias"))
        a, w, bias = self.cast(pixels), self.cast(weight), self.cast(bias)
        patches = self.first(self.op("convolution", [a, w, bias], (b, s.hidden_size, n - 1), a.width, saves=[a, w]))
        token = self.parameters[f"{prefix}.cls_token"]
        token = self.op("expand", [token], (b, 1, s.hidden_size), token.width, view=token, grads=(FULL,))
        x = self.cat([token, patches], b, n, s.hidden_size)
        return self.dropout(self.add(x, self.parameters[f"{prefix}.position_embeddings"]), s.hidden_dropout)

    def logits_and_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the recipe's head; return (what the model returns besides the loss, the loss).

        The cross entropy needs logits in fp32 and saves their log-softmax; backward has two more such tensors at once.
        """
        s, (b, n, _) = self.shape, x.shape
        self.where = s.head
        if "classification" in s.task:
            return self._classified(x)
        if s.task == "masked-lm":
            x = self.activation(self.linear(x, "cls.predictions.transform.dense"), s.activation)
            x = self.layer_norm(x, "cls.predictions.transform.LayerNorm")
        weight, bias = (self.parameters.get(f"{s.head}.{part}") for part in ("weight", "bias"))
        if self.recipe.trainer in FUSED:
            loss = self.reduce(log_probabilities(self, x, weight, bias), (), "sum")
            self.leave(TAIL)
            return loss, loss
        if HEAD in self.liger:
            return (liger.head_loss(self, x, weight),) * 2
        logits = self.linear(x, s.head)
        self.leave(TAIL)
        if self.setting("logits_scaling", None):  # Granite
            logits = self.scale(logits, "div")
        if self.setting("final_logit_softcapping", None):
            logits = self.scale(self.unary("tanh", self.scale(logits, "div")))
        self.where = "loss"
        rows = self.to(logits, FP32) if s.task == "causal-lm" else logits  # BERT does without
        return logits, self.cross_entropy(rows.view(b * n, rows.shape[-1]))

    def _classified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run a classifier's head: the scores, and their cross entropy or, of a reward model, the loss of pairs."""
        s, (b, _, h) = self.shape, x.shape
        if not s.layout.causal:  # the first token's hidden state, in BERT through a tanh layer
            x = self.slice(x, b, h)
            if "bert.pooler.dense.weight" in self.parameters:
                x = self.dropout(self.unary("tanh", self.linear(x, "bert.pooler.dense")), s.hidden_dropout)
        logits = self.linear(x, s.head)
        if s.layout.causal:  # a score for every token, of which the last one's counts
            logits = self.op("index", [logits], (b, s.num_labels), logits.width)
        if self.recipe.trainer == "reward":  # of the differences of pairs
            return logits, self.reduce(self.unary("log_sigmoid", logits), (), "mean")
        return logits, self.cross_entropy(logits)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Take log-softmax in the logits' dtype, and the mean of the labels' entries, in fp32 under autocast."""
        labels = self.tensor("labels", (prod(logits.shape[:-1]),), INT64)
        log = self.fp32(self.unary("log_softmax", logits))
        return self.op("nll_loss", [log], (), log.width, saves=[log, labels])

    def returned(self, logits: Tensor) -> Tensor:
        """Return the logits as the loop gets them: accelerate copies half-precision outputs of autocast to fp32."""
        if self.autocast and self.recipe.loop.outputs_to_fp32 and logits.width != FP32:
            return self.op("to", [logits], logits.shape, FP32, grads=(CAST,))
        return logits
