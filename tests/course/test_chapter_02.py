"""What chapter 02's picture calls the tensors that a layer keeps, against what autograd saves."""

import pytest
import torch
from vramlab_course.base_model import load_base_model
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


def test_the_highest_bar_of_each_group_is_orange():
    figure = figures_02.bars({"a": {"x": 3, "y": 1}, "b": {"x": 1, "y": 2}}, "a title", "about")
    orange = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert orange[0] == orange[3] != orange[1] == orange[2]
    assert "b: ; x: 1.0; y: 2.0." in figure.alt
