"""What takes long is said at once, with what is known by then."""

from vramlab import Recipe, predict
from vramlab.planning.work import tell_compiling, told_of_work
from vramlab.report.report import format_bytes


def test_a_compilation_is_announced_with_what_the_eager_step_takes():
    eager_recipe = Recipe("qwen3-0.6b")
    said = []
    with told_of_work(said.append):
        tell_compiling(eager_recipe)
        tell_compiling(eager_recipe.replace(torch_compile=True))
    (note,) = said
    eager = format_bytes(predict(eager_recipe).peak.total, digits=2)
    assert f"by formula {eager} of memory" in note


def test_a_model_that_no_formula_knows_has_no_figure_by_formula():
    said = []
    with told_of_work(said.append):
        tell_compiling(Recipe("mamba-codestral-7b", torch_compile=True))
    assert ["by formula" in note for note in said] == [False]
