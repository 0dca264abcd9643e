"""Output heads and losses: where the vocabulary meets every token.

Logits are tokens × vocabulary. The cross entropy needs them in fp32, keeps their log-softmax in fp32, and on the way
back holds two more fp32 tensors of that size at once (the gradients of `nll_loss` and of `log_softmax`). With a
vocabulary of 128,256 that is half a megabyte a token for each of them.
"""

from math import prod

from .blocks import Tensor
from .forward import Model
from .ledger import SAME
from .operators import FP32, INT64


def logits_and_loss(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The head that the recipe trains: (what the model returns beside the loss, the loss)."""
    task = m.shape.task
    m.where = m.shape.head
    if m.facts.embedding == "model.embed.weight":
        return generic(m, x)
    if task == "sequence-classification" and m.shape.family != "bert":
        return score(m, x)
    if task in ("sequence-classification", "image-classification"):
        return classifier(m, x)
    if task == "masked-lm":
        x = m.activation(m.linear(x, "cls.predictions.transform.dense"), m.shape.activation)
        x = m.layer_norm(x, "cls.predictions.transform.LayerNorm")
    logits = project(m, x)
    cap = m.setting("final_logit_softcapping", None)
    if cap:
        logits = m.scale(logits, "div")
        logits = m.unary("tanh", logits, "result")
        logits = m.scale(logits)
    m.where = "loss"
    rows = m.to(logits, FP32) if task == "causal-lm" else logits  # T5 and BERT do without
    return logits, cross_entropy(m, rows.view(m.batch * m.tokens, m.shape.vocab_size))


def generic(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The head of an architecture nobody wrote out."""
    if "classification" in m.shape.task:
        x = m.slice(x, m.batch, m.shape.hidden_size)
    weight = m.parameters.get("head.weight") or m.parameters[m.facts.embedding]
    logits = m.product(x, weight)
    return logits, cross_entropy(m, m.to(logits, FP32))


def project(m: Model, x: Tensor) -> Tensor:
    """Onto the vocabulary, by the head's own matrix or by the embedding's."""
    s = m.shape
    if f"{s.head}.weight" in m.parameters:
        return m.linear(x, s.head)
    bias = m.parameters.get("cls.predictions.bias") if s.task == "masked-lm" else m.parameters.get(f"{s.head}.bias")
    if s.head in m.adapted:
        return m.linear(x, s.head)
    return m.product(x, m.parameters[m.facts.embedding], bias)


def cross_entropy(m: Model, logits: Tensor) -> Tensor:
    """log-softmax, in the logits' own dtype, and the mean of the labels' entries, which autocast takes in fp32."""
    rows = prod(logits.shape[:-1])
    labels = m.tensor("labels", (rows,), INT64)
    log = m.fp32(m.unary("log_softmax", logits, "result"))
    return m.op("nll_loss", [log], (), log.width, saves=[log, labels])


def score(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """A decoder's classifier: a score for every token, of which the last one's counts."""
    s = m.shape
    logits = m.linear(x, "score")
    pooled = m.op("index", [logits], (m.batch, s.num_labels), logits.width)
    return pooled, cross_entropy(m, pooled)


def classifier(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first token's hidden state, through a tanh layer (BERT), to the classes."""
    s = m.shape
    first = m.slice(x, m.batch, s.hidden_size)
    if s.family == "bert":
        first = m.unary("tanh", m.linear(first, "bert.pooler.dense"), "result")
        first = m.dropout(first, s.hidden_dropout)
    logits = m.linear(first, s.head)
    return logits, cross_entropy(m, logits)


def returned(m: Model, logits: Tensor) -> Tensor:
    """What the loop gets: accelerate copies half-precision outputs of an autocast forward pass to fp32."""
    if m.autocast and m.recipe.loop.outputs_to_fp32 and logits.width != FP32:
        return m.op("to", [logits], logits.shape, FP32, grads=(SAME,))
    return logits
