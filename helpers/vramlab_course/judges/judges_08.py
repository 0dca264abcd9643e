"""What chapter 08's checks hold answers against: points that no other beats, and a peak."""

from collections.abc import Sequence

from vramlab import Recipe, predict, simulate


def front(points: Sequence[tuple]) -> list[tuple]:
    """The points that no other beats: none takes as little memory and is as fast."""
    unbeaten = []
    for point in set(points):
        memory, speed, *_ = point
        others = set(points) - {point}
        if not any(other[0] <= memory and other[1] >= speed for other in others):
            unbeaten.append(point)
    return unbeaten


def foretold(recipe: Recipe, gpu: str | None) -> int:
    """The peak of a recipe's tensors in bytes, on a card or without one on a CPU."""
    if gpu:
        return predict(recipe, gpu=gpu).peak.total
    # On a CPU the written program leaves these kernels out.
    recipe = recipe.replace(use_liger_kernel=False)
    return simulate(recipe, target="cpu", full=True).peak.total
