"""What a script says, read off its syntax tree as a recipe."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError
from ..recipe.argument_classes import COMMON, CONFIGS, OWN, TRAINERS
from ..recipe.arguments import CLASSIFIED
from ..recipe.options import DTYPES, TRL
from ..recipe.recipe import Recipe
from ..recipe.shapes import read_shape
from .recipe_options import recipe_of_arguments
from .script_imports import account_for_imports
from .script_loading import AUTO, LoadingReader
from .script_names import WORDS
from .script_values import Unread

# A Trainer's class to the recipe's trainer
KINDS = {"Trainer": "transformers", "Seq2SeqTrainer": "transformers"} | {
    name: kind for kind, name in TRL.items()
}
COLLATORS = re.compile("|".join([*WORDS["collators"], "default_data_collator"]))
# The variable that sets the allocator, and its name before torch 2.10
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


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
    # ast and the reader recurse, so nesting ends at Python's own limit.
    except (RecursionError, Unread) as error:
        raise RecipeError("script", str(path), "it is nested too deeply to be read") from error


def sets_expandable_segments(what: str | Path) -> bool:
    """Return whether a script sets its allocator to expandable segments, as those of plan do.

    What is no script sets nothing.
    """
    path = Path(what)
    if path.suffix != ".py":
        return False
    # Without resolving names: the setting and the variable's name in one statement are telling
    # enough.
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
        if not isinstance(node, ast.Assign | ast.Call):
            continue
        texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        if "expandable_segments:True" in texts and not ALLOCATOR.isdisjoint(texts):
            return True
    return False


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
    # Liger's patch is of one family's classes and does nothing to another model.
    patched = fields.pop("liger_family", None)
    if patched not in (None, shape.family):
        notes.append(f"without Liger's kernels for {patched}: {model} is a {shape.family}")
        script.arguments.pop("use_liger_kernel")
    if fields.get("dtype") == AUTO:
        published = shape.published_dtype
        fields["dtype"] = published if published in DTYPES else "float32"
        if published not in DTYPES and not given.get("dtype"):
            notes.append(
                f"weights in float32, an assumption: the script leaves their dtype to {model}'s "
                f"configuration, which says none (--dtype)"
            )
    # A recipe says a task only where it is another than the model's own.
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
    # TRL's configurations have a length of their own with a default; a plain Trainer's data has any
    # length.
    if recipe.trainer == "transformers" and not said and not shape.image_tokens:
        notes.append(f"the tokens of a sample are not written in it: {recipe.seq_len} are taken")
    if recipe.rollouts and not given.get("prompt"):
        tokens = recipe.rollouts.prompt_length
        notes.append(f"the tokens of a prompt are not written in it: {tokens} are taken")
    return recipe, notes


class _Reader(LoadingReader):
    """Follows what the call of the Trainer is given to where it comes from."""

    def read(self) -> Script:
        # First, since an import such as unsloth changes what all later lines mean.
        account_for_imports(self.lines)
        call, name = self._trainer()
        self.lines.trainer = call
        self.lines.understood.add(call)
        self.fields["trainer"] = KINDS[name]
        # Positional arguments by the names that this class's signature gives them.
        words = self._words(call, WORDS["positions"][name].split())
        # Before the arguments: a sharding that is said here makes their own `fsdp` or `deepspeed`
        # known.
        self._unseen()
        kind = self._read_arguments(words.pop("args", None), name)
        self._load(words.pop("model", words.pop("model_init", None)))
        # transformers' Trainer has no `peft_config`.
        if KINDS[name] in TRL:
            self._adapt(words.pop("peft_config", None))
            self._quantize_named(words)
        for word, value in words.items():
            self._trainer_word(word, value)
        if self.fields["trainer"] == "transformers" and not self.fields.get("seq_len"):
            self._read_length()
        # Last, when all that the reader has followed counts as understood.
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
        # With two Trainers it is not known whose memory was meant.
        call, *others = calls
        if others:
            self.lines.refuse(others[0], "is a second Trainer")
        name = self.tree.name(call)
        whole = self.tree.dotted(call.func)
        if name in self.tree.classes:
            # A subclass counts as its base unless it overrides what runs in a step.
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
        # The class must come from transformers or TRL: another library's of this name may do
        # anything.
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
        # A program of plan checks itself by Recipe.from_training_arguments, which says what the
        # arguments cannot.
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
        # A Trainer without arguments makes its class's defaults.
        if call is None or (isinstance(call, ast.Constant) and call.value is None):
            return CONFIGS.get(KINDS[trainer], "TrainingArguments")
        kind = self.tree.name(call) if isinstance(call, ast.Call) else ""
        # A factory of the script's own may return anything.
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
        # Fields that move no memory may have values that cannot be read.
        quiet = {*CLASSIFIED["neutral"], *CLASSIFIED["neutral_in"].get(kind, ())}
        if self.fields.get("sharding"):
            quiet.update(engine)
        loading = self._loading_constants(call)
        if loading is not None:
            quiet.add("model_init_kwargs")
            self.arguments["model_init_kwargs"] = loading
        self.arguments |= self._values(call, COMMON | OWN[kind], quiet, ("output_dir",))
        return kind

    def _trainer_word(self, name: str, node: ast.expr) -> None:
        """Account for an argument of the Trainer beside its model and arguments."""
        # All expressions that the argument may come from; None for one that is not known.
        held = self.tree.sources(node)
        empty = (
            all(ast.unparse(one) in ("None", "(None, None)") for one in held if one is not None)
            and None not in held
        )
        if name == "callbacks" and self.lines.names.unread_callback(node):
            self._note(name, node)
        # Rewards computed by a function hold nothing on the card; a model that judges does.
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
        # TRL makes the same copy itself where none is given.
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
            # With adapters TRL needs no copy: the reference is the base without them.
            not self.fields.get("lora")
            and len(held) == 1
            and held[0] is not None
            # Equal dumps are equal source text, whatever its spacing.
            and ast.dump(held[0]) in loads
        )

    def _read_length(self) -> None:
        """Take the length that the tokenizer cuts samples to."""
        lengths = {}
        for call in self.tree.calls:
            # Tokenizers are called by variables that people call so, often inside a function that
            # gets it as argument.
            by_name = self.tree.name(call) in ("tokenizer", "tokenize")
            if self.tree.dead(call) or not (by_name or self.lines.kind(call.func) == "tokenizer"):
                continue
            for word in call.keywords:
                if word.arg == "max_length":
                    lengths[self._value(word.arg, word.value)] = word.value
        lengths.pop(None, None)
        # Two different lengths cut different columns, and which is a sample's is not known.
        if len(lengths) == 1:
            self.fields["seq_len"] = next(iter(lengths))
        several = lengths.values() if len(lengths) > 1 else ()
        for value in several:
            self._note("max_length", value, "of several")


def _loads_a_model(node: ast.expr | None) -> bool:
    """Whether rewards come from a model: of a name, or of one that is loaded."""
    parts = list(ast.walk(node)) if node is not None else []
    return any(
        # TRL loads a reward model from a text, its name.
        (isinstance(part, ast.Constant) and isinstance(part.value, str))
        or (isinstance(part, ast.Attribute) and part.attr == "from_pretrained")
        for part in parts
    )
