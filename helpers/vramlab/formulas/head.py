"""A model's way out: the output head and the loss."""

from math import prod

from ..recipe.liger import HEAD
from ..recipe.options import FUSED
from ..recipe.recipe import Recipe
from . import liger_kernels
from .engine_memory import TAIL, Engine
from .fused_head import log_probabilities
from .graph import CAST, Tensor
from .norms import Norms
from .numerics import INT64
from .operators import Operators
from .tensor_sizes import FP32

TRANSFORM = "cls.predictions.transform"  # BERT's, before its language model's head
POOLER = "bert.pooler.dense"


class Head:
    """The head of `recipe`'s model, and its loss."""

    def __init__(
        self,
        operators: Operators,
        norms: Norms,
        engine: Engine,
        recipe: Recipe,
    ):
        self.operators = operators
        self.norms = norms
        self.engine = engine
        self.recipe = recipe
        self.shape = recipe.shape

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (what the model returns besides the loss, the loss).

        The cross entropy needs logits in fp32 and saves their log-softmax; backward has two more
        such tensors at once.
        """
        m = self.operators
        shape = self.shape
        b, tokens, _ = x.shape
        m.ledger.where = shape.head
        if "classification" in shape.task:
            return self._classified(x)
        if shape.task == "masked-lm":
            x = m.activation(m.linear(x, f"{TRANSFORM}.dense"), shape.activation)
            x = self.norms.layer_norm(x, f"{TRANSFORM}.LayerNorm")
        # Fused heads take the hidden states, and make no logits that anyone sees.
        if self.recipe.trainer in FUSED:
            weight = self.engine.whole(m.parameters[f"{shape.head}.weight"])
            bias: Tensor | None = None
            if f"{shape.head}.bias" in m.parameters:
                bias = self.engine.whole(m.parameters[f"{shape.head}.bias"])
            loss = log_probabilities(m, x, weight, bias, self.recipe.labelled)
            loss = m.reduce(loss, (), "sum")
            self.engine.leave(TAIL)
            return loss, loss
        if HEAD in m.numerics.liger:
            loss = liger_kernels.head_loss(m, x, m.parameters[f"{shape.head}.weight"])
            return loss, loss
        logits = m.linear(x, shape.head)
        self.engine.leave(TAIL)
        if shape.settings.get("logits_scaling"):  # Granite
            logits = m.scale(logits, "div")
        # tanh(logits / cap) · cap: two copies of the logits that go, and one that is saved (Gemma
        # 2).
        if shape.settings.get("final_logit_softcapping"):
            logits = m.scale(m.unary("tanh", m.scale(logits, "div")))
        m.ledger.where = "loss"
        # BERT's loss takes the logits as they are.
        rows = m.to(logits, FP32) if shape.task == "causal-lm" else logits
        return logits, self._cross_entropy(rows.view(b * tokens, rows.shape[-1]))

    def _classified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, and their cross entropy or, of a reward model, the loss of pairs."""
        m = self.operators
        shape = self.shape
        b, _, hidden = x.shape
        if (
            not shape.known_layout.causal
        ):  # the first token's hidden state, in BERT through a tanh layer
            x = m.slice(x, (b, hidden))
            if f"{POOLER}.weight" in m.parameters:
                x = m.dropout(m.unary("tanh", m.linear(x, POOLER)), shape.hidden_dropout)
        logits = m.linear(x, shape.head)
        if shape.known_layout.causal:  # a score for every token, of which the last one's counts
            logits = m.op(
                "index",
                [logits],
                (b, shape.num_labels),
                logits.width,
            )
        if self.recipe.trainer == "reward":  # of the differences of pairs
            return logits, m.reduce(m.unary("log_sigmoid", logits), (), "mean")
        return logits, self._cross_entropy(logits)

    def _cross_entropy(self, logits: Tensor) -> Tensor:
        """Take log-softmax in the logits' dtype, and the labels' mean, in fp32 under autocast."""
        m = self.operators
        labels = m.ledger.tensor("labels", (prod(logits.shape[:-1]),), INT64)
        # `cross_entropy` is log_softmax and nll_loss. Both save the same log-softmax, and backward
        # makes a gradient as large for each of them.
        log = m.fp32(m.unary("log_softmax", logits))
        return m.op(
            "nll_loss",
            [log],
            (),
            log.width,
            saves=[log, labels],
        )

    def returned(self, logits: Tensor) -> Tensor:
        """Return the logits as the loop gets them.

        accelerate copies half-precision outputs of autocast to fp32.
        """
        m = self.operators
        copied = m.numerics.autocast and self.recipe.loop.outputs_to_fp32
        if copied and logits.width != FP32:
            return m.op(
                "to",
                [logits],
                logits.shape,
                FP32,
                grads=(CAST,),
            )
        return logits
