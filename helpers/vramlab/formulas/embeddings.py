"""A model's way in: embedded tokens with their positions, or an image's patches."""

from ..recipe.recipe import Recipe
from .graph import FULL, Tensor
from .norms import Norms
from .numerics import INT64, Rows
from .operators import Operators
from .tensor_sizes import FP32, HALF

PROJECTION = "model.decoder.project_in"  # OPT's, from a narrower embedding
BERT_NORM = "bert.embeddings.LayerNorm"


class Embeddings:
    """The embeddings of `recipe`'s model: the modules `names`, that of words first."""

    def __init__(
        self,
        operators: Operators,
        norms: Norms,
        recipe: Recipe,
        rows: Rows,
        names: list[str],
    ):
        self.operators = operators
        self.norms = norms
        self.recipe = recipe
        self.shape = recipe.shape
        self.rows = rows
        self.names = names

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Return the first layer's input, and what a decoder names until it returns."""
        if self.shape.image_tokens:
            return self._image(), None
        return self._tokens()

    def _tokens(self) -> tuple[Tensor, Tensor | None]:
        """Embed tokens, times a factor (Gemma), plus learned positions (GPT-2, OPT, BERT)."""
        m = self.operators
        layout = self.shape.known_layout
        words, *others = self.names
        # Ids are inputs of the step, and counted there.
        ids = Tensor(None, (self.rows.batch, self.rows.tokens), INT64)
        x = m.embedding(ids, words)
        self._require_gradient(x)
        # A decoder keeps the name `inputs_embeds`; with a gradient the first layer is no exception.
        named = x if layout.causal and not x.needs else None
        if layout.scaled_embedding:
            x = m.scale(x)
        if f"{PROJECTION}.weight" in m.parameters:
            x = m.linear(x, PROJECTION)
        for name in sorted(others, reverse=True):  # BERT's token types come before its positions
            numbers = self._numbers(name)
            x = m.add(x, m.embedding(numbers, name))
        if f"{BERT_NORM}.weight" in m.parameters:
            x = self.norms.layer_norm(x, BERT_NORM)
        return m.dropout(x, self.shape.embedding_dropout), named

    def _numbers(self, name: str) -> Tensor:
        """Return the token types or positions that the embedding `name` looks up."""
        types = "type" in name
        batch = self.rows.batch
        if self.shape.known_layout.shared_positions and not types:
            batch = 1
        shape = (batch, self.rows.tokens)
        # Token types are zeros that the model has in a buffer.
        block = None if types else self.operators.ledger.block("positions", shape, INT64)
        return Tensor(block, shape, INT64)

    def _image(self) -> Tensor:
        """Embed an image: patches by a convolution, the class token first, learned positions."""
        m = self.operators
        prefix = "vit.embeddings"
        hidden = self.shape.hidden_size
        batch = self.rows.batch
        tokens = self.rows.tokens
        width = HALF if self.recipe.precision.endswith("-true") else FP32
        # Pixels come in fp32 from the processor, or in the model's own half precision.
        features = self.shape.features
        assert features is not None  # of an image
        given = Tensor(None, (batch, *features[1]), width)
        pixels = m.to(given, m.numerics.hidden)
        image = m.cast(pixels)
        weight = m.cast(m.parameters[f"{prefix}.patch_embeddings.projection.weight"])
        bias = m.cast(m.parameters[f"{prefix}.patch_embeddings.projection.bias"])
        # All tokens but the class token are patches.
        patches = m.op(
            "convolution",
            [image, weight, bias],
            (batch, hidden, tokens - 1),
            image.width,
            saves=[image, weight],
        )
        self._require_gradient(patches)
        # One row serves all images as a view; its gradient is made for every image and then summed
        # over the batch.
        token: Tensor = m.parameters[f"{prefix}.cls_token"]
        shape = (batch, 1, hidden)
        token = m.op(
            "expand",
            [token],
            shape,
            token.width,
            view=token,
            grads=(FULL,),
        )
        # ViTEmbeddings gives each result the name of the one before, which is free then.
        x = m.cat([token, patches], (batch, tokens, hidden))
        del patches
        x = m.add(x, m.parameters[f"{prefix}.position_embeddings"])
        return m.dropout(x, self.shape.hidden_dropout)

    def _require_gradient(self, x: Tensor) -> None:
        """Make the embedding a leaf with LoRA and checkpointing (`enable_input_require_grads`)."""
        if self.recipe.lora and self.recipe.gradient_checkpointing and not x.needs:
            self.operators.ledger.require_gradient(x)
