"""Every program that a plan can write: it compiles, names nothing that it does not define, and
stands on public names of other libraries.
"""

import ast
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from settings import ROOT
from vramlab import (
    GiB,
    LoRA,
    Quantization,
    Recipe,
    Rollouts,
    Sharding,
    find_gpu,
    predict,
    simulate,
    simulate_generation,
)
from vramlab.base.data import data_path
from vramlab.base.errors import RecipeError
from vramlab.planning import plan_script
from vramlab.planning.plan_script import PROGRAMS, scripts
from written_options import METHODS, PLANNED

OPTIONS: dict[str, dict[str, Any]] = {
    "trainer": {name: {"trainer": name} for name in PROGRAMS["trainers"]},
    "method": {name: {"precision": "bf16-mixed"} | fields for name, fields in METHODS.items()},
    "sharding": {
        "one card": {},
        "ddp": {"sharding": Sharding(0, 2, "ddp")},
        "fsdp": {"sharding": Sharding(3, 2, "fsdp")},
        "deepspeed": {"sharding": Sharding(3, 16, "deepspeed")},
    },
    "rows": {"padded": {}, "packed": {"packing": True}},
    "step": {
        "plain": {},
        "checkpointed": {"gradient_checkpointing": True},
        "liger": {"use_liger_kernel": True},
    },
    "attention": {"sdpa": {}, "repeated": {"attn_implementation": "sdpa_repeated"}},
}


def combinations() -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the names and the fields of each combination of options.

    What repeats keys is written the same beside any step, so one step has it.
    """
    for chosen in itertools.product(*(values.items() for values in OPTIONS.values())):
        step, attention = (name for name, _ in chosen[-2:])
        if attention == "repeated" and step != "checkpointed":
            continue
        fields: dict[str, Any] = {}
        for _, more in chosen:
            fields |= more
        yield tuple(name for name, _ in chosen), fields


def programs() -> dict[tuple[str, ...], str]:
    """The program of each combination that is a recipe; packing alternates the allocator's."""
    found = {}
    for names, fields in combinations():
        packs = fields.pop("packing", False)
        if fields["trainer"] == "sft":
            fields["packing"] = packs
        elif packs and fields["trainer"] != "transformers":
            continue
        if fields["trainer"] in ("grpo", "rloo"):
            fields["gradient_accumulation_steps"] = 8
        else:
            fields["seq_len"] = 64
        try:
            recipe = Recipe("llama-3.2-1b", 2, **fields)
            planned = PLANNED | {"packing": packs, "expandable_segments": not packs}
            found[names] = scripts(recipe, "train.py", planned)["train.py"]
        except RecipeError:  # no library trains so
            continue
    return found


@pytest.mark.parametrize("trainer", ["transformers", "sft"])
def test_a_mesh_is_written_and_rows_divide_into_its_pieces(trainer):
    sharding = Sharding(3, 4, cp_size=2)
    recipe = Recipe("llama-3.2-1b", 2, precision="bf16-mixed", sharding=sharding, trainer=trainer)
    planned = PLANNED | {"packing": False, "expandable_segments": False}
    text = scripts(recipe, "train.py", planned)["train.py"]
    sizes = '{"dp_replicate_size": 1, "cp_size": 2, "dp_shard_size": 2}'
    assert "\nfrom accelerate import ParallelismConfig\n" in text
    assert f"parallelism_config=ParallelismConfig(**{sizes})" in text
    assert "pad_to_multiple_of=4" in text and "needed = simulate(recipe)" in text
    copies = recipe.replace(sharding=Sharding(3, 4, dp_replicate_size=2))
    text = scripts(copies, "train.py", planned)["train.py"]
    assert "ParallelismConfig(**" in text and "needed = predict(recipe)" in text
    ulysses = recipe.replace(sharding=Sharding(3, 2, "deepspeed", sp_size=2))
    text = scripts(ulysses, "train.py", planned)["train.py"]
    says_positions = "data_collator=Positioned(tokenizer, pad_to_multiple_of=2)" in text
    assert says_positions is (trainer == "transformers")  # SFTTrainer's own collator does


@pytest.mark.parametrize("version", [None, "0.30.0"])
def test_a_vllm_that_is_not_here_is_of_the_versions_that_trl_works_with(version, monkeypatch):
    versions = {"trl": "1.16.0", "vllm": version}
    monkeypatch.setattr(plan_script, "installed", versions.get)
    rollouts = Rollouts(num_generations=2, use_vllm=True)
    fields = dict(precision="bf16-mixed", trainer="grpo", rollouts=rollouts)
    recipe = Recipe("llama-3.2-1b", 2, gradient_accumulation_steps=8, **fields)
    planned = PLANNED | {"packing": False, "expandable_segments": False}
    text = scripts(recipe, "train.py", planned)["train.py"]
    (line,) = (line for line in text.split("\n") if "pip install torch" in line)
    said = "trl==1.16.0 vllm==0.30.0" if version else "'trl[vllm]==1.16.0'"
    assert line.endswith(f"peft {said}") or line.endswith(f"datasets {said}")


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, ...], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_script, "installed", lambda name: "1.0")
        patch.setattr(plan_script, "repository", lambda: "https://example.org/vramlab")
        return programs()


def test_every_option_is_written(written):
    for place, values in enumerate(OPTIONS.values()):
        counts = Counter(names[place] for names in written)
        assert counts.keys() == values.keys()
    assert len(written) > 400


def test_a_quantized_base_is_loaded_so_again_and_in_16_bits_only_to_merge(written):
    """Whose size is Llama 3.2 1B's 1,235,814,400 numbers in two bytes each."""
    for names, program in written.items():
        to_use, _, to_merge = program.partition('print("\\nTo use it')[2].partition("To merge")
        is_quantized = "qlora" in names[1] or "int8" in names[1]
        assert ('quantization_config=program["QUANTIZATION"]' in to_use) is is_quantized
        assert ('dtype="auto"' in to_use) is not is_quantized
        assert ("over 2.3 GiB of the host's memory" in to_merge) is is_quantized
        assert "quantization_config" not in to_merge


def test_each_compiles_and_stands_on_public_names(written):
    for text in set(written.values()):
        tree = compile(text, "train.py", "exec", ast.PyCF_ONLY_AST)
        private = set()
        for node in ast.walk(tree):
            name = getattr(node, "attr", getattr(node, "name", None)) or ""
            module = getattr(node, "module", None) or ""
            private.update(part for part in f"{name}.{module}".split(".") if part.startswith("_"))
        assert private == set(), text


def test_each_needs_vramlab_only_where_it_asks_for_it(written):
    for text in written.values():
        assert "\nfrom vramlab" not in text and "\nimport vramlab" not in text
        assert "        from vramlab import " in text


def test_none_names_what_it_does_not_define(written, tmp_path):
    for number, text in enumerate(sorted(set(written.values()))):
        (tmp_path / f"{number}.py").write_text(text)
    words = ["check", "--quiet", "--isolated", "--select", "F", "--output-format", "concise"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[:2000]


def test_a_program_says_how_flash_attn_is_installed():
    """Its own build needs the torch that the first line installs (its README)."""
    fields = {"trainer": "sft", "packing": True, "precision": "bf16-mixed"}
    planned = PLANNED | {"packing": True, "expandable_segments": True}
    said = []
    for kernel in ("flash_attention_2", "sdpa"):
        recipe = Recipe("llama-3.2-1b", 2, 256, attn_implementation=kernel, **fields)
        [program] = scripts(recipe, "train.py", planned).values()
        said.append("    pip install flash-attn --no-build-isolation\n" in program)
    assert said == [True, False]


def test_what_a_recipe_leaves_whole_or_frozen_is_no_programs_default():
    planned = PLANNED | {"packing": False, "expandable_segments": False}
    base = Quantization("nf4", skip_modules="k_proj,lm_head")
    fields = {"precision": "bf16-mixed", "quantization": base, "lora": LoRA(r=4)}
    text = scripts(Recipe("llama-3.2-1b", 2, 64, **fields), "train.py", planned)["train.py"]
    assert '    llm_int8_skip_modules=["k_proj", "lm_head"],\n)' in text
    assert "needed = simulate(recipe)" in text, "which predict does not know"
    frozen = Recipe("llama-3.2-1b", 2, 64, freeze=("embed_tokens",))
    with pytest.raises(RecipeError, match="no part of it is frozen"):
        scripts(frozen, "train.py", planned)


RAN = json.loads(data_path("program_runs.json").read_text())


@pytest.mark.parametrize("run", RAN["runs"], ids=lambda run: run["recipe"]["model"])
def test_a_program_that_ran_on_a_card_took_what_was_said_of_it(run):
    """Within 1 % of the tensors that its own last lines told, on the card that it ran on."""
    said = simulate(Recipe(**run["recipe"]), gpu="H200", expandable_segments=True)
    assert abs(said.peak.total / GiB / run["peak_gib"] - 1) < 0.01
    assert run["peak_gib"] <= run["reserved_gib"] <= run["process_gib"] < RAN["held_to_gib"]


def test_a_run_that_died_on_a_card_was_said_to_die():
    """Chapter 00 shows its message, and says what was allocated then and what is predicted."""
    died = RAN["died"]
    assert " 119.80 GiB is allocated by PyTorch" in died["message"]
    peak = predict(Recipe(**died["recipe"]), gpu="H200").peak.total
    assert round(peak / GiB) == 260 and peak > find_gpu("H200").total


@pytest.mark.slow  # chapter 10 quotes it beside what it simulates
@pytest.mark.parametrize("run", RAN["generation"], ids=lambda run: run["recipe"]["model"])
def test_a_chat_that_ran_on_a_card_took_what_was_said_of_it(run):
    """Within 1 % of `torch.cuda.max_memory_allocated` after `model.generate`."""
    asked = {name: run[name] for name in ("prompt", "new_tokens", "prefill_chunk_size")}
    said = simulate_generation(Recipe(**run["recipe"]), gpu="H200", **asked)
    assert abs(said.peak.total / GiB / run["peak_gib"] - 1) < 0.01
