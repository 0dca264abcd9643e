"""Chapter 02: the tensors that a layer keeps, against what autograd saves, and the page's rows."""

import pytest
import torch
from vramlab import GiB, Recipe
from vramlab_course.base_model import load_base_model
from vramlab_course.chapters.chapter_02 import given, parts
from vramlab_course.figures import figures_02

pytestmark = pytest.mark.usefixtures("no_figure_stays")


@pytest.fixture
def saved():
    """(dtype, shape) of each storage that a layer in bf16 saves, its weights left out."""
    model = load_base_model("bfloat16")
    layer = model.model.layers[0]
    x = torch.randn(2, 16, 256, dtype=torch.bfloat16, requires_grad=True) * 1
    tables = model.model.rotary_emb(x, torch.arange(16)[None])
    known = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), *tables)}
    found = {}

    def pack(tensor):
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, position_embeddings=tables)
    return [tensor for address, tensor in found.items() if address not in known]


def test_each_tensor_has_its_name_and_only_those_called_so_are_fp32(saved):
    kept = [(part, what) for part, names in figures_02.KEPT.items() for what in names]
    assert len(saved) == len(kept)
    for tensor, (part, what) in zip(saved, kept, strict=True):
        wide = 704 if part == "feed-forward" else 256
        if what == "one number, fp32":
            wide = 1
        if what == "a number a head, fp32":
            wide = 4
        assert tensor.numel() == 2 * 16 * wide, (part, what)
        assert (tensor.dtype == torch.float32) == what.endswith("fp32"), (part, what)


def test_the_figure_shows_each_size():
    figure = figures_02.layer(range(100, 117), "a title", "about")
    assert figure.rows[1:3] == [("norm 1: together 406", ""), ("its input, fp32", "100")]
    assert figure.rows[-1] == ("SiLU × up", "116")
    with pytest.raises(StopIteration):
        figures_02.layer(range(16), "a title", "about")


def test_a_bar_is_a_stack_of_its_sizes():
    groups = {"a": {"x": (3, 1)}, "b": {"y": (0, 2)}}
    figure = figures_02.bars(groups, "a title", "about", ("below", "above"))
    below, above = figure.axes[0].patches[:2]
    assert (below.get_x(), below.get_width(), above.get_x(), above.get_width()) == (0, 3, 3, 1)
    assert "b: ; y: 2.0." in figure.alt


def recipe_1b(**options):
    return Recipe("llama-3.2-1b", 4, 1024, "bf16-mixed", "adamw_torch").replace(**options)


def test_fp32_weights_add_copies_to_the_page():
    plain, mixed = (given(recipe_1b(dtype=d), lambda s, e: 7) for d in ("bfloat16", None))
    assert plain.copies == 0
    assert mixed.copies == plain.weights == mixed.weights / 2 == mixed.gradients / 2
    layers, width = 16, 2048
    assert mixed.layers - plain.layers == layers * 10 * width
    kept = given(recipe_1b(gradient_checkpointing=True), lambda s, e: 7)
    assert kept.layers == layers * 4 * width


def test_accumulation_holds_gradients_at_the_loss_too():
    once, twice = (given(recipe_1b(gradient_accumulation_steps=n), lambda s, e: 7) for n in (1, 2))
    assert (once.held, twice.held) == (0, twice.gradients)


def test_the_parts_of_a_moment_are_what_it_adds():
    recipe = recipe_1b(dtype="bfloat16")
    page = given(recipe, lambda s, e: 7)
    added = [page.tokens * (page.layers + 5), 0, page.gradients + 6, 2 * page.gradients]
    found = parts(recipe, lambda s, e: 7, 3 * GiB, added)
    assert [*found] == ["1 loss", "3 end of backward", "4 update"]
    assert found["1 loss"] == (3, 4096 * page.layers / GiB, 4096 * 5 / GiB)
    assert found["4 update"] == (3, page.gradients / GiB, page.gradients / GiB)
