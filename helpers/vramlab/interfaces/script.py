"""What a script says, read off its syntax tree as a recipe."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError
from ..recipe import peft_methods
from ..recipe.argument_classes import COMMON, CONFIGS, OWN, TRAINERS
from ..recipe.arguments import CLASSIFIED, check_table
from ..recipe.families import TASKS
from ..recipe.options import DTYPES, TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import read_shape
from .recipe_options import recipe_of_arguments
from .script_imports import account_for_imports
from .script_lines import CASTS
from .script_names import WORDS
from .script_reading import CallReader
from .script_values import Unread

# A Trainer's class to the recipe's trainer
KINDS = {"Trainer": "transformers", "Seq2SeqTrainer": "transformers"} | {
    name: kind for kind, name in TRL.items()
}
HEADS = {task.auto_class.removeprefix("AutoModel"): name for name, task in TASKS.items()} | {
    "LMHeadModel": "causal-lm"
}
COLLATORS = re.compile("|".join([*WORDS["collators"], "default_data_collator"]))
ONE_CARD = (None, "cuda", "cuda:0", 0, {"": 0}, {"": "cuda"}, {"": "cuda:0"})  # of `device_map`


@dataclass
class Script:
    """What a script trains.

    `kind` is the class of its `arguments`, `fields` are the recipe's others, `notes` say which
    lines are left out.
    """

    model: str | None
    kind: str
    arguments: dict[str, Any]
    fields: dict[str, Any]
    notes: list[str]


def read_script(path: Path) -> Script:
    """Return what a script says. It is not executed, and constants are computed within bounds.

    Raises RecipeError for what is no Python file, for one without a Trainer that a recipe models,
    and where a line changes what is trained in a way that no recipe says, or more lines than a few
    are not understood.
    """
    try:
        return _Reader(path).read()
    except (RecursionError, Unread) as error:
        raise RecipeError("script", str(path), "it is nested too deeply to be read") from error


def recipe_of_script(
    path: Path,
    model: str = "",
    given: Mapping[str, Any] | None = None,
) -> tuple[Recipe, list[str]]:
    """Return the recipe of a script, and notes on what of the script it leaves out.

    It is of another `model` and with `given` options where they are said. Raises RecipeError as
    `read_script` does, and where no model is named.
    """
    script, given = read_script(path), given or {}
    model, fields, notes = model or script.model or "", dict(script.fields), list(script.notes)
    if not model:
        rest = (
            f"{path.name} does not say it in so many words: put it first, as in vramlab "
            f"explain MODEL {path.name}"
        )
        raise RecipeError("model", None, rest)
    shape = read_shape(model)
    patched = fields.pop("liger_family", None)
    if patched not in (None, shape.family):
        notes.append(f"without Liger's kernels for {patched}: {model} is a {shape.family}")
        script.arguments.pop("use_liger_kernel")
    if fields.get("task") == shape.task:
        fields.pop("task")
    recipe, foreign = recipe_of_arguments(model, given, script.arguments, script.kind, **fields)
    notes += [f"without {name}: {script.kind} has no field of that name" for name in foreign]
    said = (
        fields.get("seq_len")
        or fields.get("lengths")
        or given.get("seq_len")
        or given.get("lengths")
    )
    if recipe.trainer == "transformers" and not said and not shape.image_tokens:
        notes.append(f"the tokens of a sample are not written in it: {recipe.seq_len} are taken")
    if recipe.rollouts and not given.get("prompt"):
        tokens = recipe.rollouts.prompt_length
        notes.append(f"the tokens of a prompt are not written in it: {tokens} are taken")
    return recipe, notes


class _Reader(CallReader):
    """Follows what the call of the Trainer is given to where it comes from."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.fields = self.lines.fields
        self.arguments = self.lines.arguments
        self.model: str | None = None

    def read(self) -> Script:
        account_for_imports(self.lines)
        call, name = self._trainer()
        self.lines.trainer = call
        self.lines.understood.add(call)
        self.fields["trainer"] = KINDS[name]
        words = self._words(call, WORDS["positions"][name].split())
        self._unseen()
        kind = self._read_arguments(words.pop("args", None), name)
        self._load(words.pop("model", words.pop("model_init", None)))
        if KINDS[name] in TRL:
            self._adapt(words.pop("peft_config", None))
        for word, value in words.items():
            self._trainer_word(word, value)
        if self.fields["trainer"] == "transformers" and not self.fields.get("seq_len"):
            self._read_length()
        self.lines.account()
        return Script(self.model, kind, self.arguments, self.fields, self.lines.listed())

    def _trainer(self) -> tuple[ast.Call, str]:
        """Return the call that makes the Trainer, and the Trainer's class.

        Of the script's own it is the one that this is made from.
        """
        calls = [
            call
            for call in self.tree.calls
            if self.lines.is_trainer(call) and not self.tree.dead(call)
        ]
        if not calls:
            self.lines.refuse(None, f"none of {', '.join(KINDS)} is called in it")
        call, *others = calls
        if others:
            self.lines.refuse(others[0], "is a second Trainer")
        name = self.tree.name(call)
        whole = self.tree.dotted(call.func)
        if name in self.tree.classes:
            own = self.tree.classes[name]
            for line in own.body:
                is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
                says_nothing = isinstance(line, ast.Pass) or is_text
                if not says_nothing and getattr(line, "name", "") not in WORDS["trainer_overrides"]:
                    self.lines.refuse(
                        line,
                        f"replaces what {name} does in a step, which no recipe says",
                    )
            for other in own.bases[1:]:
                self.lines.refuse(
                    other,
                    f"is a second class that {name} is made from, which no recipe says",
                )
            whole = self.tree.dotted(own.bases[0]) or ast.unparse(own.bases[0])
            name = whole.rpartition(".")[2]
        if name not in KINDS or (whole.partition(".")[0] or "trl") not in (
            "transformers",
            "trl",
            name,
        ):
            self.lines.refuse(call, "is a trainer that no recipe models")
        return call, name

    def _unseen(self) -> None:
        """Take what a program of plan says beside the Trainer's arguments.

        Its own check of the memory.
        """
        call = next(
            (call for call in self.tree.calls if self.tree.name(call) == "from_training_arguments"),
            None,
        )
        words = {word.arg: word.value for word in call.keywords} if call else {}
        fields: dict[str, Any] = {}
        for name in ("precision", "seq_len", "lengths"):
            if name in words:
                fields[name] = self._value(name, words[name])
        if "sharding" in words:
            sharding = self._only(words["sharding"], "the sharding")
            fields["sharding"] = {
                word.arg: self._value(word.arg or "", word.value)
                for word in getattr(sharding, "keywords", [])
            }
        self.fields |= {name: value for name, value in fields.items() if value is not None}

    def _read_arguments(self, node: ast.expr | None, trainer: str) -> str:
        """Take the constants of the Trainer's arguments and return their class."""
        call = self._only(node, "the arguments") if node is not None else None
        if call is None or (isinstance(call, ast.Constant) and call.value is None):
            return CONFIGS.get(KINDS[trainer], "TrainingArguments")
        kind = self.tree.name(call) if isinstance(call, ast.Call) else ""
        if kind in self.tree.classes or kind not in OWN:
            self.lines.refuse(call, "makes the Trainer's arguments, and does not say them")
        assert isinstance(call, ast.Call)  # no other has such a name
        if kind not in TRAINERS:
            self.lines.refuse(call, "is of a trainer that no recipe models")
        engine = (
            "fsdp",
            "fsdp_config",
            "deepspeed",
        )  # in a file of its own, where the sharding is said
        quiet = {*CLASSIFIED["neutral"], *CLASSIFIED["neutral_in"].get(kind, ())}
        if self.fields.get("sharding"):
            quiet.update(engine)
        self.arguments |= self._values(call, COMMON | OWN[kind], quiet, ("output_dir",))
        return kind

    def _load(self, node: ast.expr | None) -> None:
        """Take what is said of the model that an expression gives, from the loading on."""
        call = self._only(node, "the model")
        if (
            isinstance(call, ast.Constant | ast.JoinedStr | ast.BinOp)
            and self.fields["trainer"] in TRL
        ):
            self.model = self._value("model", call, quiet=True)
            return
        if not isinstance(call, ast.Call):
            self.lines.refuse(node or self.lines.trainer, "does not say how the model is loaded")
        self.lines.understood.add(call)
        name = self.tree.name(call)
        method = isinstance(call.func, ast.Attribute) and not self.tree.dotted(call.func)
        if name == "get_peft_model":
            self._give_adapters(call)
        elif name == "prepare_model_for_kbit_training":
            self._prepare(call)
        elif name in ("from_pretrained", "from_config") and isinstance(call.func, ast.Attribute):
            self._read_loading(call, name)
        elif method and (name in CASTS or name in ("to", "cuda", "train", "eval")):
            self._load(getattr(call.func, "value", None))
            self.lines.cast(call, name)
        else:
            self.lines.refuse(call, "does not say how the model is loaded")

    def _give_adapters(self, call: ast.Call) -> None:
        words = self._words(call, ("model", "peft_config"))
        self._load(words.pop("model", None))
        self._adapt(words.pop("peft_config", None))
        cast = words.pop("autocast_adapter_dtype", None)
        if cast is not None and self.fields.get("lora") is not None:
            self.fields["lora"]["autocast_adapter_dtype"] = self._value(
                "autocast_adapter_dtype",
                cast,
            )
        for name, node in words.items():
            self._note(name, node)

    def _adapt(self, node: ast.expr | None) -> None:
        """Take the adapters of a LoraConfig, or of another of PEFT's configurations."""
        call = self._only(node, "the adapters") if node is not None else None
        if call is None or (isinstance(call, ast.Constant) and call.value is None):
            return
        name = self.tree.name(call) if isinstance(call, ast.Call) else ""
        method = "LORA" if name == "LoraConfig" else peft_methods.method_of(name)
        if not isinstance(call, ast.Call) or not method:
            self.lines.refuse(call, "is no configuration of PEFT's")
        quiet = {*peft_methods.NEUTRAL, *CLASSIFIED["neutral_in"].get(name, ())}
        quiet -= {"inference_mode", "runtime_config"}
        said = self._values(call, peft_methods.fields_of(method), quiet)
        check_table(said, CLASSIFIED["refused_in"]["PeftConfig"])
        try:
            self.fields |= peft_methods.fields_said(method, said)
        except RecipeError as error:
            self.lines.refuse(call, f"says adapters that no recipe has: {error.allowed}")

    def _prepare(self, call: ast.Call) -> None:
        """Take PEFT's preparation of a quantized base.

        It switches checkpointing on too, unless it is told not to.
        """
        words = self._words(
            call,
            ("model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
        )
        self._load(words.get("model"))
        if not self.fields.get("quantization"):
            self.lines.note(call)
            return
        self.fields["quantization"]["prepare"] = True
        asked = words.get("use_gradient_checkpointing")
        checkpoints = asked is None or self._value("use_gradient_checkpointing", asked)
        names = ("activation_checkpointing", "gradient_checkpointing")
        if checkpoints and not any(self.arguments.get(name) for name in names):
            self.lines.checkpoint(words.get("gradient_checkpointing_kwargs"))
            if "gradient_checkpointing_kwargs" not in words:
                self.lines.note(call, "whose checkpointing is reentrant or not as PyTorch decides")

    def _read_loading(self, call: ast.Call, method: str) -> None:
        """Take what `from_pretrained` or `from_config` says of the model."""
        made_by: ast.expr = getattr(call.func, "value", call.func)
        _, _, owner = (self.tree.dotted(made_by) or ast.unparse(made_by)).rpartition(".")
        liger = "AutoLigerKernel"
        head = re.search(r"(For[A-Z]\w+|LMHeadModel)$", owner)
        if not head or head[0] not in HEADS or re.search("Peft|Unsloth|AutoAWQ|AutoGPTQ", owner):
            self.lines.refuse(call, "loads a model in a way that no recipe says")
        if owner.startswith(liger):
            self.arguments["use_liger_kernel"] = True
        self.fields["task"] = HEADS[head[0]]
        words = self._words(
            call,
            ("pretrained_model_name_or_path" if method == "from_pretrained" else "config",),
        )
        for name, node in words.items():
            self._loading_word(name, node)

    def _loading_word(self, name: str, node: ast.expr) -> None:
        """Take one of the arguments with which a model is loaded, or note it."""
        quiet = name in WORDS["loading"] or name == "pretrained_model_name_or_path"
        if name == "quantization_config":
            self._quantize(node)
            return
        if name == "config":
            self._configure(node)
            return
        value = self._value(name, node, quiet)
        if name == "pretrained_model_name_or_path":
            self.model = value
        elif name in ("dtype", "torch_dtype") and value in DTYPES:
            self.fields["dtype"] = value
        elif name == "attn_implementation" and value is not None:
            self.fields[name] = value
        elif name == "num_hidden_layers" and value is not None:
            self.fields["num_layers"] = value
        elif name in ("load_in_8bit", "load_in_4bit") and value is not False:
            self.lines.refuse(
                node,
                f"asks for {name}, which a recipe reads in a BitsAndBytesConfig of 4 bits only",
            )
        elif not quiet and not self._is_usual(name, value):
            self._note(name, node)

    def _is_usual(self, name: str, value: Any) -> bool:
        """Whether an argument of loading has the value that recipes are modelled with."""
        labels = 1 if self.fields["trainer"] == "reward" else 2
        usual = {
            "device_map": ONE_CARD,
            "num_labels": (labels,),
            "load_in_8bit": (False,),
            "load_in_4bit": (False,),
        }
        return (
            value in usual.get(name, (None,))
            if not isinstance(value, bool)
            else value in usual.get(name, ())
        )

    def _configure(self, node: ast.expr) -> None:
        """Take the model's name and layers from the configuration that it is loaded with."""
        call = self._only(node, "the model's configuration")
        if not isinstance(call, ast.Call) or self.lines.kind(call) != "config":
            self.lines.refuse(node, "is a configuration that is not read")
        for name, value in self._words(call, ("pretrained_model_name_or_path",)).items():
            self._loading_word(name, value)

    def _quantize(self, node: ast.expr) -> None:
        """Take the 4 bits of a BitsAndBytesConfig."""
        call = self._only(node, "the quantization")
        if isinstance(call, ast.Constant) and call.value is None:
            return
        if not isinstance(call, ast.Call) or self.tree.name(call) != "BitsAndBytesConfig":
            self.lines.refuse(
                node,
                "stores weights in a way that no recipe says, but BitsAndBytesConfig's 4 bits",
            )
        own = "bnb_4bit_"
        refused = CLASSIFIED["refused_in"]["BitsAndBytesConfig"]
        names = {
            f"{own}quant_type",
            f"{own}use_double_quant",
            f"{own}compute_dtype",
            "load_in_4bit",
            *refused,
        }
        said = self._values(call, names, ("bnb_4bit_quant_storage",))
        check_table(said, refused)
        if said.get("load_in_4bit"):
            in_four_bits = {
                "quant_type": said.get(f"{own}quant_type", "fp4"),
                "double": said.get(f"{own}use_double_quant", False),
            }
            compute = said.get(f"{own}compute_dtype", "float32")
            self.fields["quantization"] = in_four_bits | {
                "compute_dtype": compute,
                "prepare": False,
            }

    def _trainer_word(self, name: str, node: ast.expr) -> None:
        """Account for an argument of the Trainer beside its model and arguments."""
        held = self.tree.sources(node)
        empty = (
            all(ast.unparse(one) in ("None", "(None, None)") for one in held if one is not None)
            and None not in held
        )
        if name == "callbacks" and self.lines.names.unread_callback(node):
            self._note(name, node)
        is_function = name == "reward_funcs" and not any(map(_loads_a_model, held))
        if empty or is_function or name in WORDS["trainer_arguments"]:
            return
        made = (
            self.tree.name(one) if isinstance(one, ast.Call) else getattr(one, "id", "")
            for one in held
        )
        if name == "data_collator" and all(map(COLLATORS.fullmatch, made)):
            for one in held:
                if one is not None:
                    self._collate(one)
        elif name == "ref_model" and self._is_the_model_again(held):
            self.lines.understood.update(one for one in held if one is not None)
        else:
            self._note(name, node)

    def _collate(self, call: ast.AST) -> None:
        """Take the multiple that a collator pads to."""
        keywords = call.keywords if isinstance(call, ast.Call) else ()
        for word in keywords:
            if word.arg == "pad_to_multiple_of":
                self.fields[word.arg] = self._value(word.arg, word.value)

    def _is_the_model_again(self, held: list[ast.expr | None]) -> bool:
        """Whether a reference is loaded as the model is, which is what TRL does without one."""
        known = (one for one in self.lines.understood if isinstance(one, ast.Call))
        loads = {ast.dump(one) for one in known if self.lines.kind(one) == "model"}
        return (
            not self.fields.get("lora")
            and len(held) == 1
            and held[0] is not None
            and ast.dump(held[0]) in loads
        )

    def _read_length(self) -> None:
        """Take the length that the tokenizer cuts samples to."""
        lengths = {}
        for call in self.tree.calls:
            by_name = self.tree.name(call) in ("tokenizer", "tokenize")
            if self.tree.dead(call) or not (by_name or self.lines.kind(call.func) == "tokenizer"):
                continue
            for word in call.keywords:
                if word.arg == "max_length":
                    lengths[self._value(word.arg, word.value)] = word.value
        lengths.pop(None, None)
        if len(lengths) == 1:
            self.fields["seq_len"] = next(iter(lengths))
        several = lengths.values() if len(lengths) > 1 else ()
        for value in several:
            self._note("max_length", value, "of several")


def _loads_a_model(node: ast.expr | None) -> bool:
    """Whether rewards come from a model: of a name, or of one that is loaded."""
    parts = list(ast.walk(node)) if node is not None else []
    return any(
        (isinstance(part, ast.Constant) and isinstance(part.value, str))
        or (isinstance(part, ast.Attribute) and part.attr == "from_pretrained")
        for part in parts
    )
