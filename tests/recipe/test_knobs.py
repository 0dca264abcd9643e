"""What is said of a knob, and who reads it: bytes, seconds, the plan and the calculator."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from settings import ROOT
from vramlab import Evaluation, Generation, Loop, LoRA, Quantization, Recipe, Rollouts, Sharding
from vramlab.planning.question import Question
from vramlab.recipe.knobs import knob, knobs, options
from vramlab_course.calculator import CONTROLS, LABELS

PACKAGE = ROOT / "helpers" / "vramlab"
PARTS = (Recipe, Rollouts, LoRA, Quantization, Sharding, Loop)
# What a side reads through properties of the recipe, of its parts and its shape counts as read.
WITH_PROPERTIES = ("fields", "recipe", "options", "sharding", "shapes", "peft_methods")
SIDES = {
    "bytes": ["formulas/*.py"],
    "seconds": ["planning/step_time.py", "planning/step_traffic.py"],
    "plan": [
        f"planning/{name}.py" for name in ("question", "search_space", "candidate", "changes")
    ],
}
IMAGES = "images image_size max_pixels video_frames video_size"
SAMPLING = "num_generations prompt_length max_completion_length num_iterations steps_per_generation"
VLLM = "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_enable_sleep_mode"
DRAWS = "temperature top_p top_k"
# The knobs that a side does not read, each with the reason. A new knob is read, or listed here.
UNREAD = {
    "bytes": {
        "predict refuses the recipe, and names simulate": f"freeze {IMAGES} {SAMPLING} {VLLM}",
        "through `recipe.lora_modules`, which lists the adapters": "target_modules "
        "target_parameters use_dora lora_bias",
        "a factor, which has no bytes": f"lora_alpha use_rslora {DRAWS}",
        "the order of a pipeline's passes: the recipe says what each rank holds": "schedule",
        "it moves what is reserved, which simulate follows": "empty_cache_steps",
    },
    "seconds": {
        "the estimate is of text, all of whose modules run": f"freeze {IMAGES}",
        "only the update is timed, not what is sampled": f"rollouts beta {SAMPLING} {VLLM} {DRAWS}",
        "products of matrices are the same": "lora_alpha lora_dropout use_rslora bias lora_bias "
        "target_parameters modules_to_save quant_type double experts skip_modules",
        "elementwise work, which its bytes in memory say": "use_liger_kernel dtype "
        "cut_cross_entropy "
        "label_smoothing_factor neftune_noise_alpha outputs_to_fp32",
        "adapters of other methods are far smaller than the base": "peft",
        "the optimizer's own name says what it reads and writes": "optim_args foreach",
        "when memory is freed, not what is computed": "use_reentrant "
        "zero_grad set_to_none keep_outputs "
        "use_cache optimizer_in_backward empty_cache_steps",
        "what is sent is the same": "rank wrap reshard_root memory_efficient_linear",
        "plan proposes no pipeline": "schedule micro_batches",
    },
    "plan": {
        "plan's checkpointing and fused heads are others": "use_reentrant cut_cross_entropy",
        "taken over as it is asked": "optim_args torch_compile "
        "precompute_ref_log_probs completion_lengths label_smoothing_factor neftune_noise_alpha",
        "all modules of a plan's model are trained": "freeze",
        "a factor, which has no bytes": f"{DRAWS} lora_dropout use_rslora",
        "adapters are PEFT's usual ones on all linear layers": "target_modules target_parameters "
        "bias modules_to_save lora_bias",
        "the rank that holds the most, and FSDP's usual units": "rank wrap",
        "plan proposes no pipeline": "schedule micro_batches",
        "the loop is the Trainer's own": "zero_grad set_to_none keep_outputs outputs_to_fp32 "
        "use_cache max_grad_norm foreach empty_cache_steps",
    },
}


def names_read(paths: list) -> set[str]:
    """Attributes that are read, and names of fields that stand as text."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def properties() -> Iterator[tuple[str, set[str]]]:
    """Methods of a recipe and its parts, each with the attributes that it reads."""
    for file in WITH_PROPERTIES:
        tree = ast.parse((PACKAGE / "recipe" / f"{file}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                inside = ast.walk(node)
                yield node.name, {one.attr for one in inside if isinstance(one, ast.Attribute)}


def read_by(side: str) -> set[str]:
    """Names that a side reads, by itself or through a property."""
    paths = [path for pattern in SIDES[side] for path in PACKAGE.glob(pattern)]
    names = names_read(paths)
    through = list(properties())
    before = 0
    while before != len(names):
        before = len(names)
        for name, reads in through:
            if name in names:
                names |= reads
    return names


@pytest.mark.parametrize("side", SIDES)
def test_a_side_reads_each_knob_or_says_why_not(side):
    read = read_by(side)
    unread = {name for part in PARTS for name in knobs(part) if name not in read}
    listed = {name for names in UNREAD[side].values() for name in names.split()}
    assert listed == unread


@pytest.mark.parametrize("part", [*PARTS, Question, Evaluation, Generation])
def test_help_is_one_sentence(part):
    for name, said in knobs(part).items():
        assert said.help[-1] in ".…" and "\n" not in said.help, f"{part.__name__}.{name}"


def test_a_knob_without_help_is_refused_in_a_sentence():
    @dataclass(frozen=True)
    class Part:
        size: int = knob(1)

    with pytest.raises(TypeError, match=r"Part\.size does not say what it is: give its knob"):
        knobs(Part)


def test_names_on_the_command_line_and_labels_are_one_knobs():
    said = [said for _, said in options(Recipe)]
    assert [name for name, n in Counter(one.option for one in said).items() if n > 1] == []
    labels = Counter(one.label for one in said if one.label)
    assert [name for name, n in labels.items() if n > 1] == []


def test_the_calculator_has_the_knobs_with_a_label():
    labelled = {said.option for _, said in options(Recipe) if said.label}
    assert labelled <= CONTROLS.keys() and labelled <= LABELS.keys()
