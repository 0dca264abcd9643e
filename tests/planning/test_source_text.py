"""No name that a plan is given becomes code of the program, the shell script or the terminal that
it is written to.
"""

import ast
import json
import shlex
import stat
import subprocess
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import config
from vramlab import LoRA, Quantization, Recipe, Sharding, plan
from vramlab.base.errors import RecipeError
from vramlab.planning.plan_script import scripts
from vramlab.planning.source_text import docstring, identifier, literal
from vramlab.recipe.knobs import unchecked

PLANNED = {
    "version": "1.0",
    "peak": "1 GiB",
    "source": "predicted",
    "process": "2 GiB",
    "tier": "safe",
}
PLANNED |= {"usable": "3 GiB", "packing": False, "expandable_segments": True}
PIECES = [
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    "\\\\",
    "\n",
    "\r",
    "\t",
    "\0",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{",
    "}",
]
PIECES += [
    "\ud83d",
    "\ude00",
    "\N{GRINNING FACE}",
    "\x1b[2J",
    "\u2028",
    "\u202e",
    "\x85",
    "%(prog)s",
    "%d",
    "$(id)",
]
PIECES += [
    "`id`",
    ";",
    "#",
    " ",
    "\nimport os\n",
    "LoraConfig(",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "-%}",
    "|safe",
    "é",
    "a",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(codec=None), max_size=12).map("".join)
EXPLOIT = 'x"""\nimport os\nos.mkdir("taken")\n"""'
WAYS = {
    "full": {},
    "lora": {"lora": LoRA(r=4)},
    "qlora": {
        "lora": LoRA(r=4),
        "quantization": Quantization(prepare=False),
        "precision": "bf16-mixed",
    },
    "sft": {
        "lora": LoRA(r=4, autocast_adapter_dtype=False),
        "trainer": "sft",
        "precision": "bf16-mixed",
    },
    "fsdp": {"sharding": Sharding(3, 2, "fsdp")},
    "deepspeed": {"sharding": Sharding(3, 16, "deepspeed"), "precision": "bf16-mixed"},
}


def program_files(way: str, name: str, regex: str, path: str, card: str) -> dict[str, str]:
    """The files of a program with these names wherever a plan takes names from others."""
    recipe = Recipe(config("llama") | {"_name_or_path": name}, 2, seq_len=16, **WAYS[way])
    if recipe.lora:
        named = {
            "target_modules": regex,
            "modules_to_save": (name, regex),
            "target_parameters": (regex,),
        }
        recipe = unchecked(recipe, lora=unchecked(recipe.lora, **named))
    return scripts(recipe, path, PLANNED | {"cards": card})


@cache
def usual_files(way: str) -> dict[str, str]:
    return program_files(way, "n", "r", "x.py", "c")


def shape_of(text: str) -> str:
    """The syntax tree without the values of its constants."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return ast.dump(tree)


def constants(text: str) -> list:
    return [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]


def check_names(way: str, name: str, regex: str, stem: str, card: str) -> None:
    path = "".join(char for char in stem if char.isprintable() and char not in "/") + "x.py"
    found, usual = program_files(way, name, regex, path, card), usual_files(way)
    assert len(found) == len(usual)
    for text in found.values():
        assert text.encode("utf-8")
    text = found[path]
    assert shape_of(text) == shape_of(usual["x.py"])
    if WAYS[way].get("lora"):
        assert constants(text).count(regex) >= 2 and name in constants(text)
    if beside := [file for file in found if file.endswith(".json")]:
        assert beside[0] in constants(text)
        assert json.loads(found[beside[0]])
    if sbatch := [file for file in found if file.endswith(".sbatch")]:
        lines = found[sbatch[0]].splitlines()
        assert len(lines) == len(usual["x.sbatch"].splitlines())
        assert shlex.split(lines[-1]) == [path, "$@"]
        assert shlex.split(lines[1].removeprefix("# "))[1] == path


NAMES = given(st.sampled_from(sorted(WAYS)), TEXTS, TEXTS, TEXTS, TEXTS)


@NAMES
@settings(max_examples=12)
@example("full", EXPLOIT, "", "train", "T4")
@example("qlora", "m", '.*(q|v)_proj"\\', "a b'$(id)", '"""\n')
def test_names_are_constants_of_the_program(way, name, regex, stem, card):
    check_names(way, name, regex, stem, card)


@pytest.mark.slow
@NAMES
@settings(max_examples=2000)
def test_two_thousand_names_are_constants_of_the_program(way, name, regex, stem, card):
    check_names(way, name, regex, stem, card)


@given(TEXTS)
def test_source_gives_the_text_back(text):
    assert ast.literal_eval(literal(text)) == text
    assert ast.literal_eval(docstring(text)) == text
    nested = {text: [text, (text,), None, True, 1.5, -2]}
    assert ast.literal_eval(literal(nested)) == nested


NO_LITERAL = {
    "nan": float("nan"),
    "inf": float("inf"),
    "object": object(),
    "set": {1},
    "module": ast,
}


@pytest.mark.parametrize("value", NO_LITERAL.values(), ids=NO_LITERAL)
def test_what_has_no_literal_is_refused(value):
    with pytest.raises(TypeError, match="no literal gives"):
        literal(value)


@pytest.mark.parametrize("text", ["", "a b", "a.b", "1a", "a\n", "é"])
def test_only_a_name_is_written_without_quotes(text):
    with pytest.raises(ValueError, match="is no name"):
        identifier(text)


def test_a_file_name_that_no_line_can_hold_is_refused():
    found = plan("gpt2", "T4", method="lora", seq_len=64, global_batch=1, confirm=False)
    with pytest.raises(RecipeError, match=r"'path' is .*line breaks"):
        found.write("a\nb.py")


def test_a_folders_name_is_printed_without_orders_to_the_terminal(tmp_path):
    folder = tmp_path / "\x1b]0;taken\x07\n\udcff"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("llama")))
    found = plan(str(folder), "T4", method="lora", seq_len=64, global_batch=1, confirm=False)
    assert all(char.isprintable() for line in str(found).split("\n") for char in line)
    (script,) = found.write(tmp_path / "train.py")
    assert str(folder) in constants(script.read_text(encoding="utf-8"))


def test_the_shell_starts_a_program_with_any_name(tmp_path):
    """Really run: `srun` and `scontrol` are ours, and write down what they were given."""
    path = "a b'; mkdir taken; $(mkdir taken) %j.py"
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": 'printf "%s\\0" "$@" > given', "scontrol": "echo host"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    (tmp_path / "job").write_text(
        program_files("deepspeed", "n", "r", path, "H100")[path[:-3] + ".sbatch"]
    )
    slurm = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "host",
        "SLURM_JOB_ID": "1",
    }
    subprocess.run(["bash", "job", "--seed", "1 2"], cwd=tmp_path, env=slurm, check=True)
    assert (tmp_path / "given").read_text().split("\0")[-4:-1] == [path, "--seed", "1 2"]
    assert not (tmp_path / "taken").exists()
