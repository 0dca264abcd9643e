"""The cheat sheet that ends the course: one page with numbers computed when it is drawn.

    from vramlab_course.chapters import cheat_sheet
    figure = cheat_sheet.draw()      # A4 with 10 mm margins
    print(cheat_sheet.as_text())     # its numbers as text

`make figure` stores it in notebooks/figures as PDF and PNG.
"""

from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib.metadata import version

from vramlab.formulas.model_states import parameter_table
from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.interfaces.plot import style
from vramlab.planning.question import RANK, Question, usable_memory
from vramlab.planning.search import Search
from vramlab.planning.step_time import step_time
from vramlab.recipe.options import Quantization
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import CATEGORIES, GiB, text_table

NF4 = Quantization(
    "nf4",
    double=True,
    prepare=False,
)  # as `plan` advises: no cast of what stays in 16 bits
LADDER_MODEL = "llama-3.1-8b"
TOKENS = 1024
BATCH = 8
LADDER_CARD = "H200"
# "8 × RTX 4090" is split by `largest_model` into the number and the card's name.
CARDS = ("T4", "RTX 4070", "RTX 4090", "A100 40GB", "H100 SXM", "H200", "8 × RTX 4090")
# By size: if one fits, so do those before it.
MODELS = (
    "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "llama-3.2-3b", "qwen3-4b", "llama-3.1-8b",
    "qwen2.5-14b",
    "qwen2.5-32b", "llama-3.1-70b",
)  # fmt: skip
METHODS = ("full", "lora", "qlora")
SAID = {"bf16-true": "bf16", "fp16-true": "fp16"}  # of full training; else weights are fp32
# A share of the axes' width, to the left of them.
INDENT = -0.23  # tables begin where the bars' labels do
PAGE = (8.27, 11.69)  # inches
MARGIN = 10 / 25.4  # inches
HEAD = ("largest part of the peak", "what to do", "chapter")
MOVES = (
    (
        "activations, logits",
        "fused loss · smaller micro-batch, accumulated · sdpa · checkpointing",
        "03",
    ),
    ("optimizer states", "8-bit or paged AdamW · fused, not foreach · shards", "03, 04"),
    ("gradients", "train adapters only: LoRA · shards", "04, 05"),
    ("parameters", "16 bits · 4-bit base: QLoRA · shards, offload", "01, 04, 06"),
    ("reserved ≫ allocated", "equal shapes · expandable segments", "07"),
    ("time, not memory", "roofline: larger micro-batch, fewer launches, links", "07"),
)
RULES = (
    "peak  = weights + gradients + states + activations + temporaries at the highest moment, not "
    "what is left after the step",
    "fits  = upper end of the predicted process (segments + context) ≤ usable: the card's "
    "reported total (4070: estimated)",
    "batch = micro-batch × accumulation × GPUs: memory follows the first, learning the product",
    "time  = max(operations / (U · peak) + 3 · bytes written / (V · bandwidth), calls · τ); "
    "the optimizer once a step",
    "ranks = ZeRO 1: P + G + S / N · ZeRO 2: P + (G + S) / N · ZeRO 3: (P + G + S) / N + what is "
    "gathered; never activations",
)
LETTERS = (
    "U, V: parts of the card's peak rate and bandwidth that kernels reach · τ: seconds of the "
    "host for a call",
    "P, G, S: bytes of parameters, gradients, optimizer states · N: GPUs · r: the adapters' rank",
    "table 3: states may be 8-bit and paged; (mixed): fp32 weights; (bf16): all in bf16, which "
    "rounds small updates away",
)


def bytes_rows() -> list[tuple[str, dict[str, float]]]:
    """Bytes kept for each parameter, for each way to train LADDER_MODEL.

    They are those of weights, gradients and states.
    """
    rows = []
    eight_bits = 2 * (1 + 4 / 256)  # two states of a byte, and an fp32 scale for 256 of them
    for label, width, states in (
        ("fp32 or mixed, AdamW", 4, 8),
        ("mixed, 8-bit AdamW", 4, eight_bits),
        ("16 bits, AdamW", 2, 4),
        ("16 bits, 8-bit AdamW", 2, eight_bits),
    ):
        rows.append((label, {"parameters": width, "gradients": width, "optimizer_states": states}))
    for label, base in (("LoRA r = 16", None), ("QLoRA r = 16", NF4)):
        recipe = Recipe(LADDER_MODEL, precision="bf16-true", lora=RANK, quantization=base)
        n = recipe.shape.num_parameters
        table = parameter_table(recipe)
        rows.append((label, {
            # `blocks` are the storages of a weight, such as a 4-bit weight's codes and scales.
            "parameters": sum(row.count * sum(row.blocks) for row in table) / n,
            "gradients": sum(row.count * row.size for row in table if row.trained) / n,
            "optimizer_states": sum(row.count * sum(row.states) for row in table) / n,
        }))  # fmt: skip
    return rows


@cache
def ladder() -> tuple[tuple[str, Recipe], ...]:
    """Recipes of LADDER_MODEL, each with one more switch than the one before."""
    # Eager attention and fp32 first: what a program without any of the switches does.
    recipe = Recipe(LADDER_MODEL, BATCH, TOKENS, "fp32", attn_implementation="eager")
    rungs = [("fp32, attention written out", recipe)]
    for label, changes in (
        ("+ bf16 mixed", dict(precision="bf16-mixed")),
        ("+ sdpa", dict(attn_implementation="sdpa")),
        ("+ checkpointing", dict(gradient_checkpointing=True)),
        (f"+ micro-batch 1 × {BATCH}", dict(batch_size=1, gradient_accumulation_steps=BATCH)),
        ("+ 8-bit AdamW", dict(optim="adamw_bnb_8bit")),
        ("+ weights in bf16", dict(precision="bf16-true")),
        ("+ LoRA r = 16", dict(lora=RANK)),
        ("+ 4-bit base: QLoRA", dict(quantization=NF4)),
    ):
        recipe = recipe.replace(**changes)
        rungs.append((label, recipe))
    return tuple(rungs)


@cache
def ladder_rows() -> tuple[tuple[str, dict[str, int], float], ...]:
    """Each rung with its predicted peak by category in bytes, and its estimated time.

    The time is relative to the first rung's.
    """
    first = step_time(ladder()[0][1], LADDER_CARD).seconds
    rows = []
    for label, recipe in ladder():
        peak = predict(recipe, gpu=LADDER_CARD).peak
        split = {name: size for name, size in peak.items() if size}
        time = step_time(recipe, LADDER_CARD).seconds
        rows.append((label, split, time / first))
    return tuple(rows)


@cache
def largest_model(card: str, method: str) -> str:
    """The largest of MODELS that `method` trains on `card`, "–" if none.

    "8 × RTX 4090" is eight cards. Of full training it also says whether weights are fp32 ("mixed").
    """
    number, _, name = card.rpartition(" × ")
    gpus = int(number or 1)
    low = 0
    high = len(MODELS)
    said = "–"
    # A search by halves: nine models take at most four questions to the planner.
    while low < high:  # models below `low` fit, from `high` on they do not
        middle = (low + high) // 2
        question = Question(
            MODELS[middle],
            name,
            gpus,
            global_batch=8,
            seq_len=TOKENS,
            method=method,
            offload=False,
        )
        # Whether anything fits is asked and not what is best, which would rank the whole space.
        recipe = Search(question).any_fit()
        if recipe is None:
            high = middle
            continue
        low = middle + 1
        said = MODELS[middle]
        if method == "full":
            said += f" ({SAID.get(recipe.precision, 'mixed')})"
    return said


def matrix() -> list[tuple[str, ...]]:
    """A table of the largest model by card and method."""
    rows = [("card", "usable", *("full", "LoRA r = 16", "QLoRA r = 16"))]
    for card in CARDS:
        name = card.rpartition(" × ")[2]
        memory = usable_memory(find_gpu(name)) / GiB
        largest = [largest_model(card, method) for method in METHODS]
        rows.append((card, f"{memory:.1f} GiB", *largest))
    return rows


def as_text() -> str:
    """The numbers of the sheet as text tables."""
    kept = [("bytes a parameter, kept", "weights", "gradients", "states", "sum")]
    for label, parts in bytes_rows():
        numbers = [*parts.values(), sum(parts.values())]
        kept.append((label, *(f"{n:.2f}" for n in numbers)))
    climbed = [(f"{LADDER_MODEL}, batch {BATCH} × {TOKENS:,} tokens", "peak, GiB", "time, ×")]
    for label, split, time in ladder_rows():
        peak = sum(split.values()) / GiB
        climbed.append((label, f"{peak:.1f}", f"{time:.2f}"))
    titles = (
        "What a parameter keeps",
        "What each switch saves",
        f"Largest model that fits, {TOKENS:,} tokens, no offload",
        "What to do",
    )
    parts = (
        text_table(kept),
        text_table(climbed),
        text_table(matrix()),
        # Words read from the left, and text_table aligns to the right.
        text_table(_left([HEAD, *MOVES])),
    )
    chapters = zip(titles, parts, strict=True)
    text = "\n\n".join(f"{title}\n\n{part}" for title, part in chapters)
    return "\n".join([text, "", *RULES, *LETTERS])


def _left(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Align all columns to the left."""
    widths = _widths(rows)
    aligned = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned.append(tuple(cell.ljust(width) for cell, width in cells))
    return aligned


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Letters of the longest cell of each column."""
    columns = zip(*rows, strict=True)
    return [max(map(len, column)) for column in columns]


@style.styled()
def draw():
    """Draw the page, A4 upright."""
    import matplotlib.pyplot as plt

    figure = plt.figure(
        FigureClass=style.figure_class(),
        figsize=PAGE,
        dpi=style.DPI,
        layout="constrained",
    )
    x = MARGIN / PAGE[0]
    y = MARGIN / PAGE[1]
    # A little more than the margins is kept free for the heading above and the line of versions
    # below.
    figure.get_layout_engine().set(rect=(x, y + 0.02, 1 - 2 * x, 1 - 2 * y - 0.05))
    figure.heading = "Make it fit: GPU memory of training on one page"
    figure.text(
        x,
        1 - y,
        figure.heading,
        fontweight="bold",
        fontsize=15,
        va="top",
    )
    figure.text(x, y, _made(), fontsize=7, color="#444444")
    kept, climb, fits, moves, rules = figure.subplots(
        5,
        1,
        height_ratios=(2.1, 3.4, 2.3, 2.1, 2.0),
    )
    _stacks(kept, [(label, parts) for label, parts in bytes_rows()], "{:.2f} B", 1)
    _title(
        kept,
        f"1 · Bytes a parameter keeps, derived (weights, gradients, states; both LoRA: of "
        f"{LADDER_MODEL})",
    )
    _ladder(climb)
    heading = f"3 · Largest of {len(MODELS)} models that fits safely, predicted"
    _table(fits, matrix(), f"{heading} (global batch 8 × {TOKENS:,} tokens; no offload)")
    _table(moves, [HEAD, *MOVES], "4 · Does not fit? Look at the largest part")
    rules.set_axis_off()
    _title(rules, "5 · Five sentences, and their letters")
    text = "\n".join([*RULES, *LETTERS])
    rules.text(
        INDENT,
        0.95,
        text,
        fontsize=7.2,
        va="top",
        linespacing=1.8,
        transform=rules.transAxes,
    )
    return style.finish(
        figure,
        _summary(),
        "One page with five parts; the text beside it has all of its numbers.",
    )


def _ladder(climb) -> None:
    """Draw a model's peak under one switch after the other, with what some cards have."""
    rows = ladder_rows()
    after = [f" · time × {t:.2f}" for *_, t in rows]
    _stacks(
        climb,
        [(label, split) for label, split, _ in rows],
        "{:.1f} GiB",
        GiB,
        after,
    )
    _title(
        climb,
        f"2 · Peak of {LADDER_MODEL}, batch {BATCH} × {TOKENS:,} tokens: one switch after the "
        f"other, each kept",
        16,
    )
    climb.set_xlabel(
        f"GiB, predicted; time estimated for an {LADDER_CARD}; dashed: what a card has",
        fontsize=8,
    )
    # T4 and RTX 4090 are close to each other on this axis, so their names go to different sides.
    for name, side in (
        ("T4", "right"),
        ("RTX 4090", "left"),
        ("H100 SXM", "center"),
        ("H200", "center"),
    ):
        total = usable_memory(find_gpu(name)) / GiB
        climb.axvline(total, color=style.ALARM, linewidth=0.9, linestyle="--", zorder=0.5)
        climb.text(
            total,
            -0.6,
            name,
            color=style.ALARM,
            fontsize=7.5,
            ha=side,
            va="bottom",
            bbox=style.PATCH,
        )


def _made() -> str:
    """When the page was drawn, and with what."""
    versions = " · ".join(
        f"{name} {version(name)}" for name in ("vramlab", "torch", "transformers", "peft")
    )
    return (
        f"VRAM Lab, {date.today().isoformat()} · {versions} · all numbers are computed by the "
        f"course's package"
    )


def _title(ax, text: str, pad: int = 6) -> None:
    """Write a part's heading where its labels begin."""
    ax.set_title(text, loc="left", x=INDENT, fontweight="bold", fontsize=9, pad=pad)


def _summary() -> list[tuple[str, ...]]:
    """The table of the figure: the ladder."""
    rows = [
        (label, f"{sum(split.values()) / GiB:.1f}", f"{time:.2f}")
        for label, split, time in ladder_rows()
    ]
    return [("recipe", "peak, GiB", "time, ×"), *rows]


def _stacks(
    ax,
    rows: list[tuple[str, dict[str, float]]],
    form: str,
    unit: int,
    after: Sequence[str] = (),
) -> None:
    """Draw horizontal stacked bars with their sums, the first row on top."""
    splits = [split for _, split in rows]
    # The longest bar, in the unit of the axis.
    width = max(sum(split.values()) for split in splits) / unit
    names = []
    for name in CATEGORIES:
        largest = max(split.get(name, 0) for split in splits) / unit
        # What no reader could see would still take a place in the legend.
        if largest > 0.003 * width:
            names.append(name)
    looks = style.look(names)
    for i, (_, split) in enumerate(rows):
        left = 0.0
        for name in names:
            size = split.get(name, 0) / unit
            # One entry in the legend for a category, so only the first row's piece has its name.
            label = name.replace("_", " ") if i == 0 else None
            ax.barh(
                i,
                size,
                left=left,
                height=0.72,
                label=label,
                **looks[name],
            )
            left += size
        said = form.format(sum(split.values()) / unit)
        if after:
            said += after[i]
        ax.text(
            left + 0.01 * width,
            i,
            said,
            va="center",
            fontsize=8,
            bbox=style.PATCH,
        )
    ax.set_yticks(
        range(len(rows)),
        [label for label, _ in rows],
        fontsize=8,
    )
    # matplotlib counts rows from below.
    ax.invert_yaxis()
    # Room to the right of the longest bar for its words.
    ax.set_xlim(0, 1.3 * width)
    ax.tick_params(axis="x", labelsize=7.5)
    ax.legend(loc="lower right", fontsize=8)
    for bar in ax.containers:  # named here: the page has no legend of its own
        bar.set_label("_")


def _table(ax, rows: Sequence[tuple[str, ...]], title: str) -> None:
    """Draw a table of text."""
    ax.set_axis_off()
    _title(ax, title)
    widths = _widths(rows)
    shares = [width / sum(widths) for width in widths]
    drawn = ax.table(
        [list(row) for row in rows],
        colWidths=shares,
        cellLoc="left",
        bbox=(INDENT, 0, 1 - INDENT, 1),
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    for (row, _), cell in drawn.get_celld().items():
        cell.set_edgecolor("#CCCCCC")
        if row == 0:
            cell.set_text_props(fontweight="bold")
