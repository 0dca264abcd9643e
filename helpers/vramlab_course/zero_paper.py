"""Model states by the ZeRO paper (Rajbhandari et al. 2020, section 3.1 and table 1).

Ψ parameters trained in mixed precision with Adam: 2Ψ bytes of fp16 weights, 2Ψ of fp16 gradients and KΨ of optimizer
states, K = 12 (fp32 weights, momentum, variance). On each of N ranks:

    stage 0 (DP)           (2 + 2 + K) Ψ
    stage 1 (P_os)         (2 + 2) Ψ + K Ψ / N
    stage 2 (P_os+g)       2 Ψ + (2 + K) Ψ / N
    stage 3 (P_os+g+p)     (2 + 2 + K) Ψ / N

Activations, buffers and gathered parameters are not included. The paper's GB are 10⁹ bytes.
"""

from vramlab.report.errors import RecipeError

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
WORLDS = (1, 4, 16, 64, 256, 1024)
WEIGHTS, GRADIENTS, STATES = 2, 2, 12


def model_states(parameters: float, world_size: int, stage: int) -> float:
    """Bytes of model states on one rank by the paper's formula.

    Raises RecipeError for a stage that is none of 0 to 3, or a world smaller than 1.
    """
    if stage not in (0, 1, 2, 3):
        raise RecipeError("stage", stage, "allowed are 0, 1, 2 and 3")
    if world_size < 1:
        raise RecipeError("world_size", world_size, "it must be a whole number of at least 1")
    shares = [world_size if stage >= least else 1 for least in (3, 2, 1)]
    return sum(parameters * size / n for size, n in zip((WEIGHTS, GRADIENTS, STATES), shares, strict=True))
