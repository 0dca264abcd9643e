"""simulate and predict against runs on real GPUs that others published
(`data/published_runs.json`).

A part of them here, all of them in `benchmarks/published_runs.py`. Most are equal to a tenth of a
per cent; where a base was loaded in 4 bits, what the loading left in unsplit blocks differs from
run to run by up to 1.2 %.
"""

from pathlib import Path

import pytest
import transformers
from error_figure import scatter_error
from quick import params
from tiny_models import config
from torch.nn import functional as F
from transformers import masking_utils, modeling_utils
from transformers.loss import loss_utils
from transformers.models.qwen3_5 import modeling_qwen3_5
from typer.testing import CliRunner
from vramlab import LoRA, Quantization, Recipe, RecipeError, find_gpu, predict, simulate
from vramlab.interfaces.cli import app
from vramlab.planning.search_space import notes_on
from vramlab.planning.step_time import step_time
from vramlab.report.report import GiB
from vramlab.simulation.as_run import AS_RUN, as_it_ran, of_release, simulate_as_run
from vramlab_course.published import Run, json_of, runs

RUNS = runs()
STORED = json_of("published_results")["runs"]
SOME = RUNS[::5]
QUICK = [
    SOME[i] for i in (0, 12, 15)
]  # one in 4 bits; of the others a tenth of a per cent is asked
ROOT = Path(__file__).resolve().parents[2]


def name(run: Run) -> str:
    return f"{run.gpu}: {run.recipe}" + (f" · {run.as_run}" if run.as_run else "")


def stored(run: Run, witness: str, report) -> None:
    """The site shows these: `python benchmarks/published_runs.py --write` after a change."""
    assert STORED[RUNS.index(run)][witness] == pytest.approx(report.peak.total, rel=1e-3)


@pytest.mark.parametrize("run", params(SOME, QUICK), ids=name)
def test_simulated_peaks_are_the_published_ones(run):
    report = simulate_as_run(run.recipe, run.as_run, run.use_reentrant, gpu=run.gpu)
    assert abs(report.peak.total / run.allocated - 1) < (
        0.012 if run.recipe.quantization else 0.001
    )
    if run.reserved:
        assert report.reserved.low <= run.reserved <= report.reserved.high * 1.06
    stored(run, "simulated", report)
    needs = report.reserved
    said = STORED[RUNS.index(run)]["reserved"]  # `benchmarks/tiers.py` judges these
    assert said == pytest.approx([needs.low, needs.value, needs.high], rel=1e-3)


@pytest.mark.parametrize("run", [r for r in RUNS if not r.as_run], ids=lambda r: name(r))
def test_predicted_peaks_are_within_three_per_cent(run):
    report = predict(run.recipe, gpu=run.gpu)
    assert abs(report.peak.total / run.allocated - 1) < 0.03
    stored(run, "predicted", report)


def test_what_differed_is_told_apart():
    """Without the causal mask that the older library passed, the same run would be 3 % off."""
    run = next(r for r in RUNS if r.as_run == "transformers 4.57" and r.recipe.lora)
    plain = simulate(run.recipe, gpu=run.gpu)
    assert plain.peak.total < 0.98 * run.allocated and not plain.notes


# Peaks of real steps on a CPU (torch 2.13) under transformers 4.57.6, those of 4.56.2 are equal:
# (family, loop, checkpointing), bytes of the step and of the backward pass. With a cache ("plain",
# no checkpointing) there is no mask.
OLDER = {
    ("llama", "trainer", False): (7_506_560, 7_506_560),
    ("llama", "trainer", True): (7_093_368, 6_580_416),
    ("llama", "plain", False): (7_755_388, 7_755_388),
    ("qwen3", "trainer", False): (7_646_380, 7_646_380),
    ("gpt_neox", "plain", True): (7_017_476, 6_351_048),
}


@pytest.mark.parametrize(("case", "peaks"), OLDER.items(), ids=lambda value: str(value))
def test_an_older_transformers_as_it_ran_on_a_cpu(case, peaks):
    family, loop, checkpointing = case
    sizes = dict(batch_size=2, seq_len=48, num_layers=2)
    recipe = Recipe(config(family), **sizes, loop=loop, gradient_checkpointing=checkpointing)
    report = simulate_as_run(recipe, "transformers 4.57", use_reentrant=False, target="cpu")
    second_copy = (
        2 * recipe.shape.rotary_dim
    )  # of the rotary frequencies, which only transformers 5 has
    assert (
        tuple(n - second_copy for n in (report.peak.total, report.phases["backward"].peak.total))
        == peaks
    )
    assert [note for note in report.notes if "transformers 4.57" in note]


# The same with the checkpointing that a script gets which asks for none: (version, family,
# checkpointing), bytes of the step, of its forward and backward passes. Under 4.48.3 the loss
# copies the shifted logits; 5.12.0 and 5.16.0 solve by rows.
DELTA_NET = {
    "model_type": "qwen3_5_text",
    **{
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    },
    **{
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
BY_DEFAULT = {
    ("4.48.3", "llama", False): (7_528_176, 7_528_176, 7_519_424),
    ("4.48.3", "llama", True): (7_093_368, 6_008_816, 6_636_160),
    ("4.57.6", "llama", True): (7_093_368, 5_646_224, 6_622_336),
    ("4.57.6", "qwen3", True): (6_513_580, 5_091_772, 6_513_580),
    ("5.12.0", "delta", False): (7_482_284, 7_291_836, 7_482_284),
    ("5.12.0", "delta", True): (6_682_476, 2_860_996, 6_682_476),
}


@pytest.mark.parametrize(("case", "peaks"), BY_DEFAULT.items(), ids=lambda value: str(value))
def test_an_older_transformers_by_its_defaults_as_it_ran_on_a_cpu(case, peaks):
    release, family, checkpointing = case
    model = DELTA_NET if family == "delta" else config(family, num_hidden_layers=2)
    recipe = Recipe(
        model, batch_size=2, seq_len=48, loop="trainer", gradient_checkpointing=checkpointing
    )
    as_run = of_release(release)
    report = simulate_as_run(recipe, as_run, target="cpu")
    # of the rotary frequencies, which only transformers 5 has
    second_copy = 2 * recipe.shape.rotary_dim if release.startswith("4") else 0
    found = (report.peak, report.phases["forward"].peak, report.phases["backward"].peak)
    assert tuple(peak.total - second_copy for peak in found) == peaks
    assert ("re-entrant" in report.notes[0]) is (checkpointing and release.startswith("4"))
    plain = simulate(recipe, target="cpu").phases["backward"].peak
    assert found[2].total > plain.total
    if checkpointing and release.startswith("4"):
        lean = (
            simulate_as_run(recipe, as_run, use_reentrant=False, target="cpu")
            .phases["backward"]
            .peak
        )
        assert (
            found[2].total > lean.total
        )  # the recomputed layer's input has a copy, and a graph of its own


@pytest.mark.parametrize("release", ["4.52", "4.5", "4.480", "newest", "repeated keys"])
def test_a_release_that_nobody_compared_is_refused(release):
    with pytest.raises(
        RecipeError, match=r"known are 4\.48, 4\.56, 4\.57, 5\.12, .* and the installed "
    ):
        of_release(release)


def test_the_installed_release_is_simulated_as_it_is():
    assert of_release(transformers.__version__) is None
    answer = CliRunner().invoke(
        app, ["simulate", "gpt2", "--tokens", "8", "--transformers", "4.57"]
    )
    assert answer.exit_code == 2 and "not for causal-lm of gpt2" in " ".join(answer.output.split())
    words = ["simulate", "llama-3.2-1b", "--tokens", "8", "--num-layers", "1", "--transformers"]
    older, now = (
        CliRunner().invoke(app, [*words, release]).output
        for release in ("4.48.3", transformers.__version__)
    )
    assert (
        "as_run 'transformers 4.48': the loss copies" in " ".join(older.split())
        and "as_run" not in now
    )


@pytest.mark.parametrize(
    ("recipe", "as_run", "allowed"),
    [
        (
            Recipe(config("llama"), seq_len=8),
            "transformers 4.30",
            "'transformers 4.48', 'repeated keys', 'transformers",
        ),
        (Recipe(config("gpt2"), seq_len=8), "transformers 4.57", "gpt_neox, llama, mistral"),
        (
            Recipe(config("qwen3"), seq_len=8),
            "transformers 4.48",
            "mistral, phi, qwen2, not for causal-lm of qwen3",
        ),
        (
            Recipe(config("llama"), seq_len=8, attn_implementation="eager"),
            "transformers 4.48",
            "'sdpa', not for 'eager'",
        ),
        (
            Recipe(config("llama"), seq_len=8, trainer="sft"),
            "transformers 4.48",
            "leave trainer and Liger out",
        ),
        (Recipe(config("llama"), seq_len=8, loop="plain"), "transformers 4.48", "use_cache=False"),
        (
            Recipe(config("llama"), seq_len=8, task="sequence-classification"),
            "transformers 4.57",
            "causal-lm of",
        ),
        (
            Recipe(
                config("llama"),
                seq_len=8,
                precision="bf16-true",
                attn_implementation="flash_attention_2",
            ),
            "repeated keys",
            "'sdpa' and",
        ),
    ],
)
def test_what_is_not_known_of_older_versions_is_refused(recipe, as_run, allowed):
    with pytest.raises(RecipeError) as raised:
        simulate_as_run(recipe, as_run)
    assert (
        "as_run" in str(raised.value)
        and allowed in str(raised.value)
        and "\n" not in str(raised.value)
    )


def replaceable():
    """What a name in AS_RUN may replace."""
    of_modules = (
        F.scaled_dot_product_attention,
        masking_utils.find_packed_sequence_indices,
        modeling_utils.checkpoint,
    )
    return (
        *of_modules,
        loss_utils.LOSS_MAPPING["ForCausalLM"],
        modeling_qwen3_5.torch_chunk_gated_delta_rule,
    )


@pytest.mark.parametrize("kind", AS_RUN)
def test_nothing_stays_replaced(kind):
    before = replaceable()
    with pytest.raises(KeyError), as_it_ran(kind, reentrant=True):
        differing = [one is not other for one, other in zip(replaceable(), before, strict=True)]
        assert sum(differing) == (3 if kind == "transformers 4.48" else 2)
        raise KeyError
    assert replaceable() == before


def test_each_run_says_where_it_is_from():
    assert len(RUNS) >= 95 and {run.source for run in RUNS} == {
        "vramcalc",
        "fitcheck-llm",
        "can-i-finetune-this",
    }
    assert all(run.gpu in run.made_with and "transformers" in run.made_with for run in RUNS)


def test_the_page_says_how_many_runs_were_not_plain():
    scripts, older = (
        sum(run.as_run == kind for run in RUNS) for kind in ("repeated keys", "transformers 4.57")
    )
    text = " ".join((ROOT / "site/accuracy.md").read_text(encoding="utf-8").split())
    assert f"{scripts + older} of them did not run as the installed libraries" in text
    assert "called plainly" in text
    assert f"in {scripts} the script" in text and f"{older} ran under transformers 4.57" in text


@pytest.mark.parametrize(
    ("family", "prepare", "said"),
    [
        (
            "mixtral",
            True,
            "transformers 5 fuses experts in 3-D parameters, and prepare_model_for_kbit_training "
            "casts",
        ),
        ("mixtral", False, "transformers 5 fuses experts in 3-D parameters"),
        ("falcon", False, "Falcon's own linear class"),
        ("llama", True, None),
    ],
)
def test_weights_that_stay_unquantized_are_said(family, prepare, said):
    """transformers' loader swaps nn.Linear and nothing else; most of a mixture's weights are fused
    experts.
    """
    base = Quantization("nf4", prepare=prepare)
    recipe = Recipe(
        config(family),
        seq_len=8,
        num_layers=1,
        precision="bf16-true",
        quantization=base,
        lora=LoRA(),
    )
    for notes in (predict(recipe).notes, simulate(recipe).notes, notes_on(recipe, find_gpu("T4"))):
        found = [note for note in notes if "not quantized" in note]
        assert len(found) == bool(said) and all(said in note for note in found)
        assert not any(note.startswith("0.0 of") for note in found)


def test_errors_are_drawn_at_their_sizes_with_the_band(no_figure_stays):
    gib = 2**30
    figure = scatter_error(
        {"a": [(int(1.01 * gib), gib), (9 * gib, 10 * gib)], "b": [(3 * gib, 3 * gib)]}, band=0.03
    )
    above, below = figure.axes
    points = {line.get_label(): line for line in above.lines if line.get_gid() == "points"}
    assert list(points["a"].get_xdata()) == [1, 10] and list(
        points["a"].get_ydata()
    ) == pytest.approx([1.01, 9])
    errors = [list(line.get_ydata()) for line in below.lines if line.get_gid() == "points"]
    assert errors == [pytest.approx([1, -10]), [0]]
    assert below.patches[0].get_y() == -3 and below.patches[0].get_height() == 6
    assert above.get_title(loc="left") == "2 of 3 within ±3% · median 1.00% · worst 10.00%"
    assert figure.rows[1] == ("a: 1", "1.010", "1.000", "+1.00%")


def test_what_four_bits_cost_on_the_card_that_chapter_08_names():
    """Step times of runs with and without NF4: 13 pairs, 1.35 to 2 times as long; all bases
    prepared, all in fp16-true.
    """
    timed = [run for run in RUNS if run.seconds and not run.as_run]
    plain = {run.recipe: run for run in timed if not run.recipe.quantization}
    ratios, milder = [], 0
    for run in timed:
        other = plain.get(run.recipe.replace(quantization=None))
        if not run.recipe.quantization or other is None:
            continue
        assert run.recipe.quantization.prepare and run.recipe.precision == "fp16-true"
        estimates = [step_time(each.recipe, each.gpu).seconds for each in (run, other)]
        ratios.append(run.seconds / other.seconds)
        milder += estimates[0] / estimates[1] < ratios[-1]
    assert (len(ratios), round(min(ratios), 2), round(max(ratios), 2), milder) == (
        13,
        1.35,
        2.0,
        12,
    )


def test_one_shorter_text_gives_a_t4_the_kernel_that_shared_keys_lack():
    """With a mask transformers repeats the keys, and a kernel takes them."""
    run = Recipe("qwen3-0.6b", 4, 512, "fp16-mixed", "adamw_torch_fused")
    of_one_length, shorter = run, run.replace(lengths=(512, 512, 512, 500))
    peaks = [predict(recipe, gpu="T4").peak.total / GiB for recipe in (of_one_length, shorter)]
    assert peaks == pytest.approx([18.295, 15.947], abs=0.001)
