"""Reads how a script makes its model: loaded from what, in which bits, with which adapters."""

import ast
import re
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError
from ..recipe import peft_methods
from ..recipe.arguments import CLASSIFIED, check_table
from ..recipe.families import TASKS
from ..recipe.options import DTYPES, TRL
from .configuration_file import IN_INT8
from .script_lines import CASTS
from .script_names import WORDS
from .script_reading import CallReader

# By the end of a model's class, such as ForCausalLM; GPT-2's own class ends otherwise.
HEADS = {task.auto_class.removeprefix("AutoModel"): name for name, task in TASKS.items()} | {
    "LMHeadModel": "causal-lm"
}
AUTO = "auto"  # a dtype: that of the published configuration
DTYPE_WORDS = ("dtype", "torch_dtype")
ONE_CARD = (None, "cuda", "cuda:0", 0, {"": 0}, {"": "cuda"}, {"": "cuda:0"})  # of `device_map`


class LoadingReader(CallReader):
    """Follows a model to the call that loads it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.fields = self.lines.fields
        self.arguments = self.lines.arguments
        self.model: str | None = None
        # What TRL's trainers load a model with to whom a name is given.
        self.is_named = False
        self.named_bits: ast.expr | None = None

    def _load(self, node: ast.expr | None) -> None:
        """Take what is said of the model that an expression gives, from the loading on."""
        call = self._only(node, "the model")
        # TRL's trainers take a model's name and load it themselves.
        if (
            isinstance(call, ast.Constant | ast.JoinedStr | ast.BinOp)
            and self.fields["trainer"] in TRL
        ):
            self.model = self._value("model", call, quiet=True)
            self.is_named = True
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
        # model.half() and the like: the model is what the object before the dot gives.
        elif method and (name in CASTS or name in ("to", "cuda", "train", "eval")):
            self._load(getattr(call.func, "value", None))
            # After the loading, over whose dtype it has the last word.
            self.lines.cast(call, name)
        else:
            self.lines.refuse(call, "does not say how the model is loaded")

    def _give_adapters(self, call: ast.Call) -> None:
        words = self._words(call, ("model", "peft_config"))
        self._load(words.pop("model", None))
        self._adapt(words.pop("peft_config", None))
        # PEFT makes adapters of half-precision models fp32 unless this is False.
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
        # These two change what is trained or where it is computed, so a value that cannot be read
        # must be noted.
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
        # PEFT's preparation of a base that is not quantized changes other things, such as what is
        # frozen.
        if not self.fields.get("quantization"):
            self.lines.note(call)
            return
        self.fields["quantization"]["prepare"] = True
        asked = words.get("use_gradient_checkpointing")
        # `use_gradient_checkpointing` is True by default in PEFT's function.
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
        # Wrappers whose names end like a model's load it in ways of their own.
        if not head or head[0] not in HEADS or re.search("Peft|Unsloth|AutoAWQ|AutoGPTQ", owner):
            self.lines.refuse(call, "loads a model in a way that no recipe says")
        if owner.startswith(liger):
            self.arguments["use_liger_kernel"] = True
        self.fields["task"] = HEADS[head[0]]
        words = self._words(
            call,
            ("pretrained_model_name_or_path" if method == "from_pretrained" else "config",),
        )
        said = [words[name] for name in DTYPE_WORDS if name in words]
        # transformers 5 (modeling_utils.py) takes the configuration's dtype where none is said, and
        # `from_pretrained` for None and "auto" too.
        if not said or (
            method == "from_pretrained"
            and all(getattr(node, "value", node) in (None, AUTO) for node in said)
        ):
            self.fields["dtype"] = AUTO
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
        elif name in DTYPE_WORDS and value in DTYPES:
            self.fields["dtype"] = value
        elif name == "attn_implementation" and value is not None:
            self.fields[name] = value
        elif name == "num_hidden_layers" and value is not None:
            self.fields["num_layers"] = value
        elif name in ("load_in_8bit", "load_in_4bit") and value is not False:
            self.lines.refuse(
                node,
                f"asks for {name}, which a recipe reads in a BitsAndBytesConfig only",
            )
        elif not quiet and not self._is_usual(name, value):
            self._note(name, node)

    def _is_usual(self, name: str, value: Any) -> bool:
        """Whether an argument of loading has the value that recipes are modelled with."""
        # TRL's RewardTrainer trains one score, a classifier of transformers two classes unless told
        # otherwise.
        labels = 1 if self.fields["trainer"] == "reward" else 2
        usual = {
            "dtype": (None, AUTO),
            "torch_dtype": (None, AUTO),
            "device_map": ONE_CARD,
            "num_labels": (labels,),
            "load_in_8bit": (False,),
            "load_in_4bit": (False,),
        }
        # True and False are equal to 1 and 0 in Python, so a switch is not held against counts.
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

    def _loading_constants(self, call: ast.Call) -> dict[str, Any] | None:
        """Return the constants of `model_init_kwargs` where a quantization is among them.

        The quantization is no constant, and kept for `_quantize_named`.
        """
        words = {word.arg: word.value for word in call.keywords}
        held = self.tree.sources(words.get("model_init_kwargs"))
        whole = held[0] if len(held) == 1 else None
        if not isinstance(whole, ast.Dict) or self.tree.is_written(whole):
            return None
        keys: list[Any] = [getattr(key, "value", None) for key in whole.keys]
        said = dict(zip(keys, whole.values, strict=True))
        if "quantization_config" not in said:
            return None
        self.named_bits = said.pop("quantization_config")
        constants = {name: self._value(str(name), node) for name, node in said.items()}
        return {name: value for name, value in constants.items() if value is not None}

    def _quantize_named(self, words: dict[str, ast.expr]) -> None:
        """Take the quantization with which a trainer of TRL loads a model by its name.

        It stands in the trainer's call or in `model_init_kwargs`. A model that is already loaded
        stays as it is, with a warning of TRL's, so there it is noted.
        """
        given = words.pop("quantization_config", self.named_bits)
        if given is None:
            return
        if not self.is_named:
            self._note("quantization_config", given)
            return
        self._quantize(given)
        # TRL's `create_model_from_path` loads in fp32 unless it is told otherwise.
        if "dtype" not in (self.arguments.get("model_init_kwargs") or {}):
            self.fields["dtype"] = "float32"

    def _quantize(self, node: ast.expr) -> None:
        """Take the bits of a BitsAndBytesConfig."""
        call = self._only(node, "the quantization")
        if isinstance(call, ast.Constant) and call.value is None:
            return
        if not isinstance(call, ast.Call) or self.tree.name(call) != "BitsAndBytesConfig":
            self.lines.refuse(
                node,
                "stores weights in a way that no recipe says, but BitsAndBytesConfig's bits",
            )
        own = "bnb_4bit_"
        refused = CLASSIFIED["refused_in"]["BitsAndBytesConfig"]
        names = {
            f"{own}quant_type",
            f"{own}use_double_quant",
            f"{own}compute_dtype",
            "load_in_4bit",
            "load_in_8bit",
            *refused,
        }
        said = self._values(call, names, ("bnb_4bit_quant_storage",))
        check_table(said, refused)
        if said.get("load_in_8bit"):
            self.fields["quantization"] = dict(IN_INT8)
        elif said.get("load_in_4bit"):
            in_four_bits = {
                # transformers' own defaults: fp4, without double quantization, computing in
                # float32.
                "quant_type": said.get(f"{own}quant_type", "fp4"),
                "double": said.get(f"{own}use_double_quant", False),
            }
            compute = said.get(f"{own}compute_dtype", "float32")
            self.fields["quantization"] = in_four_bits | {
                "compute_dtype": compute,
                "prepare": False,
            }
