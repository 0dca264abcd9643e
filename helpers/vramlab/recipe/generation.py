"""What `generate` is asked for, and what it cannot give."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..base.errors import RecipeError
from ..base.versions import installed
from .knobs import Refusals, check, documented, knob, knobs, refuse
from .recipe import Recipe
from .shapes import read_shape

TASKS = ("causal-lm", "seq2seq-lm", "speech-seq2seq")
# Packages of the backends of a quantized cache; transformers has "fp8" itself.
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq", "fp8": "transformers"}
# Architectures without a cache that `generate` makes
# (`GenerationMixin._supports_default_dynamic_cache`).
OWN_CACHE = ("reformer", "minimax", "xlnet", "rwkv", "xlstm")
PRECISIONS = {"bfloat16": "bf16-true", "float16": "fp16-true"}
RESIDUAL = 128  # tokens that a quantized cache keeps as they are (`QuantizedLayer`)


@documented
@dataclass(frozen=True)
class Generation:
    """What `generate` does with a batch of prompts of one length.

    Names and defaults are those of `GenerationConfig` where it has them.
    """

    prompt: int = knob(
        512,
        help=(
            "Tokens of each prompt; of an encoder-decoder those that the encoder reads, of a "
            "speech model none."
        ),
        option=True,
    )
    new_tokens: int = knob(
        256,
        help="Tokens made for each prompt; none ends early.",
        option=True,
    )
    cache_implementation: str = knob(
        "dynamic",
        choices=("dynamic", "static", "quantized"),
        help="How keys and values are kept, as in GenerationConfig.",
        option="cache",
        shown="{} cache",
    )
    cache_backend: str = knob(
        "quanto",
        choices=tuple(PACKAGES),
        help="Of a quantized cache: the package that quantizes it, to 4 bits.",
        option=True,
        shown="by {}",
    )
    do_sample: bool = knob(
        False,
        help="Draw each token instead of taking the likeliest.",
        option=True,
        shown="sampled",
    )
    num_beams: int = knob(
        1,
        most=1024,
        help="Beams of each prompt.",
        option=True,
        shown="{} beams",
    )
    num_return_sequences: int = knob(
        1,
        most=1024,
        help="Answers to each prompt.",
        option=True,
        shown="{} answers each",
    )
    prefill_chunk_size: int | None = knob(
        None,
        help="Tokens of a prompt that are read at once; all when left out.",
        option=True,
        shown="prompts by {:,} tokens",
    )

    def __post_init__(self) -> None:
        check(self, "generation.")
        refuse(self, self._refusals(), "generation.")

    def _refusals(self) -> Refusals:
        package = PACKAGES[self.cache_backend]
        lacks = self.cache_implementation == "quantized" and not installed(package)
        allowed = (
            f"a quantized cache needs its package here: pip install {package}; 'fp8' needs none"
        )
        yield "cache_backend", lacks, allowed
        is_idle = self.cache_implementation != "quantized" and self.cache_backend != "quanto"
        allowed = f"the cache is {self.cache_implementation!r}, and only 'quantized' has a backend"
        yield "cache_backend", is_idle, allowed
        is_more = self.num_return_sequences > self.num_beams and not self.do_sample
        allowed = "without do_sample there are as many at most as num_beams"
        yield "num_return_sequences", is_more, allowed

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`, besides the prompts and the number of tokens."""
        arguments: dict[str, Any] = {"do_sample": self.do_sample, "use_cache": True}
        for name in ("num_beams", "num_return_sequences", "prefill_chunk_size"):
            if getattr(self, name) != getattr(type(self), name):
                arguments[name] = getattr(self, name)
        if self.cache_implementation != "dynamic":
            arguments["cache_implementation"] = self.cache_implementation
        if self.cache_implementation == "quantized":
            arguments["cache_config"] = {"backend": self.cache_backend}
        # a static cache would compile the decoding step on a GPU
        arguments["disable_compile"] = True
        return arguments

    @property
    def quantizes(self) -> bool:
        """Whether the cache is quantized."""
        return self.cache_implementation == "quantized"

    @property
    def period(self) -> int:
        """Decoding steps after which the cache has the same form again, but is longer."""
        has_residual = self.quantizes and self.cache_backend != "fp8"
        return RESIDUAL if has_residual else 1

    def title(self, recipe: Recipe) -> str:
        """Return one line that names everything a number depends on."""
        return " · ".join(self._words(recipe))

    def _words(self, recipe: Recipe) -> Iterator[str]:
        yield recipe.name
        yield f"batch {recipe.batch_size}"
        if recipe.shape.features:
            yield f"{self.new_tokens:,} new tokens"
        else:
            yield f"{self.prompt:,} tokens and {self.new_tokens:,} new ones"
        said = knobs(Recipe)
        for name in ("num_layers", "precision", "attn_implementation", "lora", "quantization"):
            value = getattr(recipe, name)
            words = said[name].words(value) if value else ""
            if words:
                yield words
        for name, knob_of in knobs(Generation).items():
            value = getattr(self, name)
            if name not in ("prompt", "new_tokens") and value != knob_of.default:
                yield knob_of.words(value)

    def check_model(self, recipe: Recipe) -> None:
        """Raise RecipeError where the model cannot generate so, or is not simulated so."""
        shape = recipe.shape
        if shape.task not in TASKS or shape.family in OWN_CACHE:
            allowed = "it keeps no keys and values of tokens for `generate`: name a model for "
            allowed += " or ".join(TASKS)
            raise RecipeError("model", recipe.name, allowed)
        if recipe.sharding:
            raise RecipeError("sharding", recipe.sharding, "generation is simulated on one device")
        if recipe.precision.endswith("-mixed"):
            form = recipe.precision.partition("-")[0]
            allowed = f"`generate` does not autocast: take '{form}-true', or fp32"
            raise RecipeError("precision", recipe.precision, allowed)
        longest = shape.max_positions
        is_read_apart = shape.task != "causal-lm"
        prompt = 0 if shape.features else self.prompt  # sound has a length of its own
        length = max(prompt, self.new_tokens)
        if not is_read_apart:
            # The last token is returned and never read, so it needs no position.
            length = self.prompt + self.new_tokens - 1
        if longest and length > longest:
            what = "prompt" if prompt > longest else "new_tokens"
            allowed = f"{recipe.name} has {longest} positions"
            if what == "new_tokens" and not is_read_apart:
                allowed += f", of which the prompt takes {self.prompt:,}"
            raise RecipeError(f"generation.{what}", getattr(self, what), allowed)


def as_generating(value: Any, **fields: Any) -> Recipe:
    """Return `value` if it is a recipe, else that of the model that it names, with `fields`.

    Without a precision it has that of its published weights, in which transformers loads them.
    """
    if isinstance(value, Recipe):
        return value
    if fields.get("precision") is None:
        fields["precision"] = PRECISIONS.get(str(read_shape(value).published_dtype), "fp32")
    return Recipe(value, **fields)
