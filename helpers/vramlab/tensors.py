"""Parameters and buffers of a shape: from its list where there is one, else read off the model on the meta device."""

from typing import TYPE_CHECKING

from .weights import LISTS, Unlisted, Weight

if TYPE_CHECKING:
    from .shapes import Shape


def list_weights(s: "Shape") -> tuple[Weight, ...]:
    """Every parameter of `s` in the order of `named_parameters()`, shared ones once."""
    try:
        if s.family in LISTS:
            return tuple(LISTS[s.family](s))
    except Unlisted:
        pass
    return tuple(Weight(*row) for row in _meta(s)[0])


def list_buffers(s: "Shape") -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Every buffer of `s`: name, shape and dtype, whether or not it is saved with the weights."""
    if s.family not in LISTS or _other_rotation(s):
        return _meta(s)[1]
    if s.family == "bert":
        names = ("position_ids", "token_type_ids")
        return tuple((f"bert.embeddings.{name}", (1, s.max_positions), "int64") for name in names)
    rows = [("model.embed_tokens.embed_scale", (), "float32")] if s.family in ("gemma", "gemma2") else []
    if s.rotary_dim:
        prefix = {"gpt_neox": "gpt_neox", "falcon": "transformer"}.get(s.family, "model")
        # one frequency per pair of channels, and a second copy that transformers keeps to undo dynamic scaling
        shape = ((s.rotary_dim + 1) // 2,)
        rows += [(f"{prefix}.rotary_emb.{name}", shape, "float32") for name in ("inv_freq", "original_inv_freq")]
    return tuple(rows)


def _other_rotation(s: "Shape") -> bool:
    """Whether the rotary embedding is of a type whose buffers may not be the two usual ones."""
    rope = s.config.get("rope_parameters") or s.config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")) not in ("default", "linear", "dynamic", "llama3", "yarn")


def _meta(s: "Shape") -> tuple[tuple, tuple]:
    from .meta import read_off

    return read_off(s)
