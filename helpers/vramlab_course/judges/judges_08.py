"""What chapter 08's checks hold answers against: a peak."""

from vramlab import Recipe, predict, simulate


def foretold(recipe: Recipe, gpu: str | None) -> int:
    """The peak of a recipe's tensors in bytes, on a card or without one on a CPU."""
    if gpu:
        return predict(recipe, gpu=gpu).peak.total
    # On a CPU the written program leaves these kernels out.
    recipe = recipe.replace(use_liger_kernel=False)
    return simulate(recipe, target="cpu", full=True).peak.total
