"""The sizes of one model with one head, as its configuration gives them."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

IMAGE_SIDE = 224  # pixels, where a configuration does not say
COLOURS = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model with one head, all counts."""

    name: str  # short, for people
    family: str  # the configuration's `model_type`
    task: str  # which head is trained
    hub_id: str | None  # where the published weights are; None outside the catalogue
    config_json: str = field(repr=False)  # the configuration, at this depth and for this head
    head: str  # module name of the head
    num_layers: int  # blocks, of the encoder where there is a decoder too
    num_decoder_layers: int  # 0 unless the model is an encoder–decoder
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values, which groups of query heads share
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None  # the longest sequence; None if the architecture sets no limit
    num_labels: int  # classes of a classification head
    tied: bool  # one matrix serves as embedding and output head
    activation: str
    norm: str  # "layernorm" or "rmsnorm"; either "in fp32" casts back after its weight
    rotary_dim: int  # channels of a head that are rotated; 0 without rotary positions
    sliding_window: int | None  # how far back a token sees (Gemma 2: in every second layer)
    hidden_dropout: float  # probabilities while training
    attention_dropout: float
    embedding_dropout: float
    num_experts: int
    experts_per_token: int
    image_tokens: int  # patches of an image and the class token; 0 for text
    # the kernel that transformers takes by itself: "eager" for an architecture without sdpa
    attention: str
    # where the architecture was taken from, if not from that name
    shares: str = field(default="", compare=False)

    def __hash__(self) -> int:
        # a text's hash is kept, that of thirty fields is not
        return hash(self.config_json)

    @property
    def features(self) -> tuple[str, tuple[int, ...]] | None:
        """Name and sizes of what one sample is to a model that sees or hears.

        It is None where a sample is tokens.
        """
        said = self.settings
        if self.task == "speech-seq2seq":
            # a convolution halves the frames
            frames = 2 * said["max_source_positions"]
            return "input_features", (said["num_mel_bins"], frames)
        if not self.image_tokens:
            return None
        side = said.get("image_size", IMAGE_SIDE)
        return "pixel_values", (said.get("num_channels", COLOURS), side, side)

    @property
    def config(self) -> dict[str, Any]:
        """What `transformers.AutoConfig.for_model(**config)` takes.

        It is a fresh copy, for transformers writes into it.
        """
        return json.loads(self.config_json)

    @property
    def published_dtype(self) -> str | None:
        """The dtype that the configuration says of its published weights, in torch's name.

        As transformers reads it: `torch_dtype`, the name before transformers 4.56, counts where
        `dtype` says nothing. Some models say it of their language model alone, as Qwen3-VL does.
        """
        for part in (self.settings, self.settings.get("text_config") or {}):
            said = part.get("dtype") or part.get("torch_dtype")
            if said:
                return str(said).removeprefix("torch.")
        return None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`config`, parsed once; not to be written to."""
        return self.config
