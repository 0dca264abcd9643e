"""What a script says, read off its literals as a recipe; what the command line says of a Trainer's arguments."""

import ast
import operator
from pathlib import Path
from typing import Any

from ..recipe.arguments import CLASSIFIED, CONFIGS, check_table
from ..recipe.knobs import knobs
from ..recipe.options import LoRA
from ..report.errors import RecipeError
from .options import OPTIONS

ARGUMENTS = {"TrainingArguments": "transformers", "Seq2SeqTrainingArguments": "transformers"}
ARGUMENTS |= {config: trainer for trainer, config in CONFIGS.items()}
MODEL, DTYPES = "pretrained_model_name_or_path", ("dtype", "torch_dtype")
# What the command line says of a Trainer's argument that is no option.
WHY_NOT = dict.fromkeys(CLASSIFIED["neutral"], "what {} answers does not depend on it, so leave it out")
WHY_NOT |= {name: f"no recipe models it: {CLASSIFIED['reasons'][name]}" for name in CLASSIFIED["refused"]}
SAY = {name: f"--{o.replace('_', '-')}" for o, (_, knob) in OPTIONS.items() for name in knob.elsewhere}


def instead(error: Exception, command: str | None) -> str:
    """Return a sentence on the option that click's NoSuchOption names, "" unless a Trainer's arguments have it."""
    if not (option := getattr(error, "option_name", "")):
        return ""
    name, known = option.lstrip("-").replace("-", "_"), {o for each in error.ctx.command.params for o in each.opts}
    why = (command == "evaluate" and CLASSIFIED["evaluation"].get(name)) or WHY_NOT.get(name, "").format(command)
    why = f"say {SAY[name]}" if SAY.get(name) in known else why
    return f"There is no option {option}: {why}." if why and command else ""


OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


class _Script:
    """What the script's calls say. `unread`: (call, argument) whose value is no literal, nor a name or option with one."""

    def __init__(self, path: Path):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            raise RecipeError("script", str(path), f"it must be a Python file ({error})") from error
        self.known: dict[str, Any] = {}
        self.unread: list[tuple[str, str]] = []
        self.calls: dict[str, list[ast.Call]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                self.calls.setdefault(name, []).append(node)
                if name == "from_pretrained" and node.args:
                    node.keywords.insert(0, ast.keyword(MODEL, node.args[0]))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.known.setdefault(node.targets[0].id, node.value)
        for call in self.calls.get("add_argument", ()):  # asked.model is the default of --model
            default = next((word.value for word in call.keywords if word.arg == "default"), None)
            for name in call.args if default else ():
                self.known.setdefault("." + str(self.value(name)).lstrip("-").replace("-", "_"), default)

    def value(self, node: ast.AST, depth: int = 9) -> Any:
        """The node's value; raise ValueError where only running the script would tell."""
        name = node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            return node.attr
        if name in self.known and depth:
            return self.value(self.known[name], depth - 1)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Dict) and None not in node.keys:
            return {self.value(key): self.value(value) for key, value in zip(node.keys, node.values, strict=True)}
        if isinstance(node, ast.Tuple):
            return tuple(map(self.value, node.elts))
        return ast.literal_eval(node)

    def said(self, *names: str) -> dict[str, Any]:
        """The keywords of the calls of `names`, of the first that says each."""
        found: dict[str, Any] = {}
        for word in (word for name in names for call in self.calls.get(name, ()) for word in call.keywords):
            if word.arg:
                try:
                    found.setdefault(word.arg, self.value(word.value))
                except (ValueError, TypeError):
                    self.unread.append((names[0], word.arg))
        return found


def read_script(path: Path) -> tuple[str | None, dict[str, Any], dict[str, Any], str]:
    """Return (model, arguments, other fields of the recipe, a sentence on what could not be read or ""). Raises RecipeError
    for what is no Python file, or one that makes no arguments of a Trainer's."""
    script = _Script(path)
    kind = next((name for name in ARGUMENTS if name in script.calls), None)
    if kind is None:
        raise RecipeError("script", str(path), f"none of {', '.join(ARGUMENTS)} is called in it")
    arguments, loaded = script.said(kind), script.said("from_pretrained")
    config = script.said("LoraConfig")
    check_table(config, CLASSIFIED["refused_in"]["LoraConfig"])
    adapters = script.said("LoRA") or {name: value for name, value in config.items() if name in knobs(LoRA)}
    fields = {"lora": adapters or None, "quantization": _quantization(script)}
    fields |= {"sharding": script.said("Sharding") or None, "trainer": ARGUMENTS[kind]}
    fields["dtype"] = next((loaded[name] for name in DTYPES if loaded.get(name, "auto") != "auto"), None)
    fields["attn_implementation"], fields["num_layers"] = map(loaded.get, ("attn_implementation", "num_hidden_layers"))
    given = script.said("from_training_arguments")
    fields |= {name: given.get(name) for name in ("precision", "seq_len", "lengths")}
    if fields["trainer"] == "transformers" and not fields["seq_len"]:
        fields["seq_len"] = script.said("tokenizer", "tokenize").get("max_length")
    quiet = {*CLASSIFIED["neutral"], MODEL, "use_cpu", "fsdp_config", "deepspeed", "quantization_config", "task_type"}
    calls = (kind, "LoraConfig", "BitsAndBytesConfig", "from_pretrained")
    unread = [f"{call}({name}=…)" for call, name in dict.fromkeys(script.unread) if call in calls and name not in quiet]
    said = f"not read, since only running {path.name} would tell: {', '.join(unread)}" if unread else ""
    if fields["sharding"]:  # the configuration is in a file of its own
        arguments = {name: n for name, n in arguments.items() if name not in ("fsdp", "fsdp_config", "deepspeed")}
    return loaded.get(MODEL), arguments, {name: n for name, n in fields.items() if n is not None}, said


def _quantization(script: _Script) -> dict[str, Any] | None:
    if own := script.said("Quantization"):
        return own
    said = script.said("BitsAndBytesConfig")
    check_table(said, CLASSIFIED["refused_in"]["BitsAndBytesConfig"])
    if not said.get("load_in_4bit"):
        return None
    compute = said.get("bnb_4bit_compute_dtype", "float32")
    found = {"quant_type": said.get("bnb_4bit_quant_type", "fp4"), "compute_dtype": compute}
    found["double"] = said.get("bnb_4bit_use_double_quant", False)
    return found | {"prepare": "prepare_model_for_kbit_training" in script.calls}
