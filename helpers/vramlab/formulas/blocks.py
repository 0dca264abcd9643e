"""The blocks alive at a report's peak: the largest of them, and how many there are of each size."""

from collections import Counter, defaultdict
from functools import lru_cache

from ..recipe.recipe import Recipe
from ..recipe.shapes import Shape
from ..report.report import Bytes, TensorGroup
from . import model_states
from .account import Groups as LedgerGroups
from .model_states import Format
from .tensor_sizes import HALF

LISTED = 8  # of the largest tensors
DTYPES = {8: "int64", 4: "float32", 1: "uint8"}
# (bytes, category, shape, dtype, operator) to [how many, where, bytes of each block].
Groups = dict[tuple, list]


def half_of(recipe: Recipe) -> str:
    """Return the dtype of two bytes in which `recipe` computes."""
    return "float16" if recipe.precision.startswith("fp16") else "bfloat16"


def dtype_of(width: int, op: str, half: str) -> str:
    """Return the dtype of a block's numbers, of which the ledger knows the bytes alone."""
    if width == HALF:
        return half
    # Dropout's mask is the only bool that backward keeps.
    if width == 1 and op == "native_dropout":
        return "bool"
    return DTYPES[width]


def groups(recipe: Recipe, alive: LedgerGroups | None, peak: Bytes) -> Groups:
    """Group the blocks of a peak; `alive`: the ledger's, None outside forward and backward."""
    half = half_of(recipe)
    form = model_states.table_format(recipe)
    # In forward and backward the ledger has the gradients as blocks of its own; in other phases
    # they come from the table.
    held = _held(
        recipe.shape,
        form,
        half,
        recipe.has_reference,
        alive is None,
    )
    if alive is None:
        alive = {}
    # The cached groups serve other recipes, so they are copied.
    blocks = dict(held)
    for (size, category, shape, width, op), (count, where) in alive.items():
        dtype = dtype_of(width, op, half)
        blocks[size, category, shape, dtype, op] = [count, where, (size,)]
    if recipe.sharding:
        return _of_rank(blocks, peak)
    return blocks


# All recipes of a sweep over batches share them.
@lru_cache(maxsize=512)
def _held(
    shape: Shape,
    form: Format,
    half: str,
    copied: bool,
    gradients: bool,
) -> Groups:
    """Group the blocks of model states, with `gradients` or without; `copied`: of two models."""
    states: Groups = {}
    copies = 2 if copied else 1
    for row in model_states.cached_table(shape, form):
        dtype = half if row.width == HALF else "float32"
        stored = "uint8" if row.quantized else dtype
        about = ("parameters", row.shape, stored, "loaded")
        _add(
            states,
            about,
            row.blocks,
            row.name,
            row.count * copies,
        )
        if row.states:
            about = ("optimizer_states", row.shape, dtype, form.optim)
            _add(
                states,
                about,
                row.states,
                row.name,
                row.count,
            )
        if row.trained and gradients:
            about = ("gradients", row.shape, dtype, "backward")
            _add(
                states,
                about,
                (row.size,),
                row.name,
                row.count,
            )
    return states


def _add(
    groups: Groups,
    about: tuple,
    sizes: tuple[int, ...],
    where: str,
    count: int,
) -> None:
    """Add `count` tensors of the blocks `sizes` to the group of equal ones."""
    group = groups.setdefault((sum(sizes), *about), [0, where, sizes])
    group[0] += count


def _of_rank(whole: Groups, peak: Bytes) -> Groups:
    """Scale the whole model's blocks down to what the rank holds of their category."""
    totals: Counter[str] = Counter()
    for (size, category, *_), (count, *_) in whole.items():
        totals[category] += count * size
    scaled_groups: Groups = {}
    for (_, category, *about), (count, where, sizes) in whole.items():
        if totals[category] == 0:
            continue
        # The table has the whole model; what the rank holds is in the report.
        share = min(1.0, getattr(peak, category) / totals[category])
        if share:
            scaled = tuple(int(size * share) for size in sizes)
            _add(
                scaled_groups,
                (category, *about),
                scaled,
                where,
                count,
            )
    return scaled_groups


def largest(blocks: Groups) -> list[TensorGroup]:
    """List the groups that take the most bytes together."""

    def together(key: tuple) -> int:
        size, *_ = key
        count, *_ = blocks[key]
        return size * count

    listed = []
    for key in sorted(blocks, key=together, reverse=True)[:LISTED]:
        count, where, _ = blocks[key]
        size, category, shape, dtype, op = key
        listed.append(TensorGroup(size, category, shape, dtype, op, where, count))
    return listed


def counts(alive: Groups, peak: Bytes) -> dict[int, int]:
    """Count the blocks alive at the peak by size."""
    blocks: defaultdict[int, int] = defaultdict(int)
    held = 0
    for count, _, sizes in alive.values():
        for size in sizes:
            blocks[size] += count
            held += size * count
    rest = peak.total - held
    if rest > 0:
        # The optimizer step's temporaries, cuBLAS's workspaces, gradients of layers already done.
        blocks[rest] += 1
    return blocks
