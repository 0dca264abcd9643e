"""Every line of a script accounted for: it is in the recipe, known to move no memory of a step, or
listed.

What is known to move none is in `data/script_calls.json` (`script_names.py`).
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from ..recipe.argument_classes import OWN
from ..recipe.arguments import CLASSIFIED
from ..recipe.options import DTYPES
from ..report.errors import RecipeError
from ..report.text import one_line
from .script_names import WORDS, Names
from .script_tree import FUNCTIONS, SCOPES, Tree, Unread, start_of

TOKENIZERS = re.compile(r"\w*(Tokenizer|TokenizerFast|Processor|FeatureExtractor)")
BUILT_IN = (str, bytes, list, tuple, dict, set, frozenset, int, float, Path)
METHODS = {name for kind in BUILT_IN for name in dir(kind) if not name.startswith("__")}
CASTS = {"half": "float16", "float": "float32", "bfloat16": "bfloat16"}
CHECKPOINTING = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
CHANGING_MODELS = {*CASTS, *CHECKPOINTING, *WORDS["refused"], "to", "cuda", "cpu", "to_empty"}
HANDED_OVER = (
    "map",
    "filter",
    "set_transform",
    "with_transform",
    "from_generator",
    "sort",
    "starmap",
    "apply",
)
MOST_NOTES = 3
TAKING_FUNCTIONS = ("map", "filter", "sorted", "min", "max")  # built in ones
LITERALS = (
    ast.Constant,
    ast.JoinedStr,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.BinOp,
)
LITERALS += (ast.Compare, ast.UnaryOp, ast.Lambda, ast.Dict, ast.Set)


class Lines:
    """The lines of a script: what each expression stands for, which are understood, and notes on
    those that are not.
    """

    def __init__(self, tree: Tree):
        self.tree, self.names = tree, Names(tree)
        self.understood: set[ast.AST] = set()
        self.notes: dict[ast.AST, dict[str, int]] = {}  # by statement: texts and their lines
        self.kinds: dict[ast.AST | None, str] = {}
        self.arguments: dict[str, Any] = {}  # of the Trainer's
        self.fields: dict[str, Any] = {}  # of the recipe
        self.trainer: ast.Call | None = None
        self.of_data: set[ast.AST] = (
            set()
        )  # nodes of functions that prepare data or evaluate, which others call

    def text(self, node: ast.AST) -> str:
        """The source of a node in one short line that every terminal can show."""
        lines = ast.unparse(node).splitlines()
        whole = one_line(" ".join(lines[:1] if isinstance(node, ast.stmt) else lines))
        return textwrap.shorten(whole, 100, placeholder=" …")

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that a node is in."""
        while not isinstance(node, ast.stmt) and node in self.tree.parents:
            node = self.tree.parents[node]
        return node

    def note(self, node: ast.AST, why: str = "", text: str = "") -> None:
        """List what is not in the recipe: `text`, or the node itself where it stands in a longer
        statement.
        """
        statement = self.statement(node)
        compound = isinstance(statement, (*SCOPES, ast.If, ast.For, ast.While, ast.With, ast.Try))
        source = text or self.text(node if compound else statement)
        listed = self.notes.setdefault(statement, {})
        listed.setdefault(f"`{source}`{why and ', '}{why}", node.lineno)

    def refuse(self, node: ast.AST | None, why: str) -> NoReturn:
        """Raise RecipeError, which names the line and the command that runs the script."""
        where = f"line {node.lineno} (`{self.text(node)}`) " if node is not None else ""
        name = self.tree.path.name
        rest = (
            f"{where}{why}: vramlab run --gpu NAME -- python {name} runs it and says what it holds"
        )
        raise RecipeError("script", name, rest)

    def listed(self) -> list[str]:
        """The notes, in the script's order.

        Raises RecipeError where they are too many for an answer.
        """
        found = sorted(self.notes.items(), key=lambda pair: start_of(pair[0]))
        if len(found) > MOST_NOTES:
            first, _ = found[0]
            others = ", ".join(str(statement.lineno) for statement, _ in found[1:12])
            self.refuse(
                first, f"is one of {len(found)} lines that no recipe says, as are lines {others}"
            )
        return [f"without line {min(texts.values())}: {'; '.join(texts)}" for _, texts in found]

    def kind(self, node: ast.AST | None) -> str:
        """What an expression gives: "model", "trainer", "args", "tokenizer", "config", "data"; ""
        where unknown.
        """
        if node not in self.kinds:
            self.kinds[node] = ""
            found = {self._kind(one) for one in self.tree.sources(node)}
            self.kinds[node] = (
                "model" if "model" in found else found.pop() if len(found) == 1 else ""
            )
        return self.kinds[node]

    def _kind(self, node: ast.AST | None) -> str:
        if isinstance(node, ast.Call):
            return self._kind_of_call(node)
        if isinstance(node, ast.Attribute) and not self.tree.dotted(node):
            whole = self.kind(node.value)
            return {"trainer": {"model": "model", "args": "args"}.get(node.attr, "")}.get(
                whole, whole
            )
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.kind(node.value)
        if isinstance(node, ast.List | ast.Tuple | ast.BoolOp):
            parts = {self.kind(one) for one in getattr(node, "elts", getattr(node, "values", ()))}
            return "model" if "model" in parts else "data"
        if isinstance(node, LITERALS) or (
            node is not None and self.names.is_of_modules(self.tree.dotted(node))
        ):
            return "data"
        return "data" if isinstance(node, ast.Name) and node.id in self.tree.classes else ""

    def _kind_of_call(self, call: ast.Call) -> str:
        whole, name = self.tree.dotted(call.func), self.tree.name(call)
        if name in ("from_pretrained", "from_config") and isinstance(call.func, ast.Attribute):
            owner = self.tree.dotted(call.func.value) or ast.unparse(call.func.value)
            owner = owner.rpartition(".")[2]
            kinds = {"tokenizer": TOKENIZERS.fullmatch(owner), "config": owner.endswith("Config")}
            return next((kind for kind, found in kinds.items() if found), "model")
        if name in ("get_peft_model", "prepare_model_for_kbit_training"):
            return "model"
        if name in OWN:
            return "args"
        if self.is_trainer(call):
            return "trainer"
        given = "model" if any(self.kind(arg) == "model" for arg in call.args) else ""
        if name == "vars" and not whole:
            return self.kind(next(iter(call.args), None))
        if name in self.tree.classes and not whole:
            modules = any(
                self.text(base).endswith("Module") for base in self.tree.classes[name].bases
            )
            return "model" if modules else "data"
        if isinstance(call.func, ast.Attribute) and not whole:
            return self.kind(call.func.value)
        return given or ("data" if self.names.is_harmless_name(whole, name) else "")

    def is_trainer(self, call: ast.Call) -> bool:
        """Whether a call makes a Trainer, of a library's class or of the script's own."""
        name = self.tree.name(call)
        bases = self.tree.classes[name].bases if name in self.tree.classes else ()
        ends = [name, *(self.text(base) for base in bases)]
        return name not in self.tree.functions and any(one.endswith("Trainer") for one in ends)

    def account(self) -> None:
        """Note every line that is neither understood nor known to move nothing.

        Raises RecipeError as `refuse` does.
        """
        outside, self.of_data = self._outside()
        for node in self.tree.nodes:
            if node in outside or self.tree.dead(node) is True:
                continue
            if node in self.of_data and not self._touches_training(node):
                continue
            if isinstance(node, ast.Call) and node not in self.understood:
                self._account_for_call(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in getattr(node, "targets", None) or [node.target]:
                    self._account_for_target(target, node)
            elif isinstance(node, ast.Delete) and any(
                self._is_of_model(one) for one in node.targets
            ):
                self.note(node)
            elif isinstance(node, ast.Attribute):
                self._account_for_method_as_value(node)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._account_for_definition(node)

    def _is_of_model(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute | ast.Subscript) and self.kind(node.value) == "model"

    def _touches_training(self, node: ast.AST) -> bool:
        """Whether a node in a function that prepares data or evaluates is about the model, the
        Trainer or its arguments.
        """
        parts: list[ast.AST] = []
        if isinstance(node, ast.Call):
            parts = [node.func, *node.args, *(word.value for word in node.keywords)]
            if self.tree.name(node) in WORDS["refused"]:
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            parts = getattr(node, "targets", None) or [node.target]
        elif isinstance(node, ast.Delete):
            parts = node.targets
        elif isinstance(node, ast.Attribute):
            parts = [node]
        holders = [getattr(part, "value", part) for part in parts]
        is_switch = any(getattr(part, "attr", "") == "requires_grad" for part in parts)
        return is_switch or any(self.kind(one) in ("model", "trainer", "args") for one in holders)

    def _account_for_method_as_value(self, node: ast.Attribute) -> None:
        """Note a method that changes a model and is not called here but handed over, such as
        torch.nn.Module.half.
        """
        parent = self.tree.parents.get(node)
        if isinstance(node.ctx, ast.Store) or (
            isinstance(parent, ast.Call) and parent.func is node
        ):
            return
        of_torch = self.tree.dotted(node).startswith("torch.") and self.text(node.value).endswith(
            "Module"
        )
        if node.attr in CHANGING_MODELS and (of_torch or self.kind(node.value) == "model"):
            self.note(node)

    def _account_for_definition(
        self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) -> None:
        """Note what a class or function is made from and what it is wrapped in, where that is not
        read.
        """
        for decorator in node.decorator_list:
            if not self._is_known_decorator(decorator, node):
                self.note(decorator, "a decorator that is not read")
        bases = getattr(node, "bases", ())
        if any(self.text(base).endswith("Module") for base in bases):
            self.note(node, "a module of its own")
            return
        for base in [*bases, *(word.value for word in getattr(node, "keywords", ()))]:
            if not self.names.is_known_class(base):
                self.note(base, "a class that is not read")

    def _is_known_decorator(self, decorator: ast.expr, node: ast.AST) -> bool:
        """Whether a decorator is of a module that moves nothing, or the script's own, which is
        read, on what gives neither model nor Trainer."""
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        whole, name = self.tree.dotted(called), self.text(called).rpartition(".")[2]
        if whole or name in WORDS["builtins"]:
            return self.names.is_harmless_name(whole, name)
        if isinstance(called, ast.Attribute):
            return name in ("setter", "getter", "deleter")
        given = self.tree.returns(node) if isinstance(node, FUNCTIONS) else node.bases
        makes = any(self.kind(one) in ("model", "trainer", "args") for one in given)
        own = name in self.tree.functions or name in self.tree.classes
        return own and not makes and not any(self.text(one).endswith("Trainer") for one in given)

    def _outside(self) -> tuple[set[ast.AST], set[ast.AST]]:
        """Nodes that are no part of training: those after it, and those of functions that prepare
        data or evaluate.
        """
        after: set[ast.AST] = set()
        found: set[ast.AST] = set()
        for call in self.tree.calls:
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if method == "train" and self.kind(call.func.value) == "trainer":
                after.update(self._after(self.statement(call)))
            values = [
                word.value for word in call.keywords if word.arg in WORDS["trainer_arguments"]
            ]
            if method in HANDED_OVER and self.kind(call.func.value) != "model":
                values += [*call.args, *(word.value for word in call.keywords)]
                given = next(
                    (word.value for word in call.keywords if word.arg == "fn_kwargs"), None
                )
                if given is not None and any(self.kind(one) == "model" for one in ast.walk(given)):
                    self.note(call)
            for value in values:
                function = self.tree.functions.get(getattr(value, "id", ""), value)
                if isinstance(function, (*FUNCTIONS, ast.Lambda)):
                    found.update(ast.walk(function))
        return after, found

    def _after(self, statement: ast.AST) -> set[ast.AST]:
        """Nodes of the statements that follow in the same blocks, unless they train again."""
        found: set[ast.AST] = set()
        while isinstance(statement, ast.stmt) and not isinstance(statement, SCOPES):
            parent = self.tree.parents[statement]
            for _, block in ast.iter_fields(parent):
                if isinstance(block, list) and statement in block:
                    rest = block[block.index(statement) + 1 :]
                    found.update(node for one in rest for node in ast.walk(one))
            if not isinstance(parent, ast.With | ast.Try | ast.If):
                break
            statement = parent
        trains = (isinstance(node, ast.Call) and self.tree.name(node) == "train" for node in found)
        return set() if any(trains) else found

    def _account_for_call(self, call: ast.Call) -> None:
        name, whole = self.tree.name(call), self.tree.dotted(call.func)
        owner = call.func.value if isinstance(call.func, ast.Attribute) and not whole else None
        why = WORDS["refused"].get(name) or WORDS["refused"].get(
            whole.rpartition(".")[0].rpartition(".")[2]
        )
        if why:
            self.refuse(call, f"is not modelled, as {why}")
        if owner is not None:
            self._account_for_method(call, owner, name)
        elif name == "setattr" and len(call.args) == 3:
            attribute = ast.Attribute(
                call.args[0], getattr(call.args[1], "value", "?"), ast.Store()
            )
            self._account_for_target(attribute, call, call.args[2])
        elif re.fullmatch(r"apply_liger_kernel_to_\w+", name):
            self._take_liger(call, name)
        elif name == "set_float32_matmul_precision":
            self.arguments.setdefault(
                "tf32", getattr(call.args[0], "value", "") in ("high", "medium")
            )
        elif not self._is_known_call(call, whole, name):
            self.note(call)

    def _is_known_call(self, call: ast.Call, whole: str, name: str) -> bool:
        own = not whole and (name in self.tree.functions or name in self.tree.classes)
        if own or (
            isinstance(call.func, ast.Name) and self.kind(call.func) in ("tokenizer", "data")
        ):
            return True
        if self.kind(call) in ("tokenizer", "config", "args") and name not in ("copy", "deepcopy"):
            return True
        if (
            whole.startswith(("os.environ.", "os.putenv"))
            and name != "get"
            and not self._sets_known(call)
        ):
            return False
        if name.endswith("Callback"):
            return self.names.is_known_class(call.func)
        given = [*call.args, *(word.value for word in call.keywords)]
        with_model = any(self.kind(arg) == "model" for arg in given)
        if (
            not whole
            and name in TAKING_FUNCTIONS
            and with_model
            and not all(map(self._is_harmless_function, given))
        ):
            return False
        copies = (
            self.names.is_of_modules(whole) and with_model
        )  # such as copy.deepcopy and wandb.watch
        copies = copies and not whole.startswith("vramlab.")
        on_card = whole.startswith("torch.") and any(word.arg == "device" for word in call.keywords)
        return self.names.is_harmless_name(whole, name) and not copies and not on_card

    def _is_harmless_function(self, node: ast.expr) -> bool:
        """Whether an argument is no function, or one that is read or changes nothing of what it is
        given.
        """
        whole, name = self.tree.dotted(node), self.text(node).rpartition(".")[2]
        read = isinstance(node, ast.Lambda | ast.Constant) or (
            not whole and name in self.tree.functions
        )
        reads = name in WORDS["model_methods"] or self.names.is_harmless_name(whole, name)
        return (
            read
            or self.kind(node) == "model"
            or (isinstance(node, ast.Name | ast.Attribute) and reads)
        )

    def _sets_known(self, call: ast.Call) -> bool:
        """Whether a call sets environment variables that move nothing only."""
        first = call.args[0] if call.args else None
        said = first.keys if isinstance(first, ast.Dict) else call.args[:1]
        names = [getattr(key, "value", "") for key in said] + [
            word.arg or "" for word in call.keywords
        ]
        return all(str(name).startswith(tuple(WORDS["environment"])) for name in names)

    def _account_for_method(self, call: ast.Call, owner: ast.expr, name: str) -> None:
        """A method of a model, a Trainer, its arguments, a tokenizer, data, or of something
        unknown.
        """
        kind, certain = self.kind(owner), self.tree.dead(call) is False and call not in self.of_data
        if kind == "model" and certain and name in CHECKPOINTING:
            self.checkpoint(
                next((word.value for word in call.keywords), None) or next(iter(call.args), None)
            )
        elif kind == "model" and certain and (name in CASTS or name in ("to", "cuda")):
            self.cast(call, name)
        elif kind == "args" and name == "__setattr__":
            self.note(call)
        elif kind == "tokenizer" or (kind == "data" and name not in ("to", "cuda")):
            return
        else:
            known = {
                "model": "model_methods",
                "trainer": "trainer_methods",
                "args": "arguments_methods",
            }
            names = WORDS[known[kind]] if kind in known else METHODS.union(WORDS["calls"])
            if name not in names or (
                name == "add_callback" and any(map(self.names.unread_callback, call.args))
            ):
                self.note(call)

    def checkpoint(self, options: ast.expr | None) -> None:
        """Take over that a model checkpoints its layers, with `options` such as use_reentrant."""
        names = ("activation_checkpointing", "gradient_checkpointing")
        name = next((one for one in names if one in self.arguments), names[1])
        self.arguments[name] = True
        if options is not None:
            try:
                self.arguments.setdefault(f"{name}_kwargs", self.tree.value(options))
            except Unread:
                self.note(options)

    def cast(self, call: ast.Call, name: str) -> None:
        """Take over the dtype that a model is cast to, where all of it is trained."""
        dtype = CASTS.get(name)
        for node in [*call.args, *(word.value for word in call.keywords)] if name == "to" else ():
            try:
                value = self.tree.value(node)
            except Unread:
                value = "a device" if re.search("device|rank|cuda", ast.unparse(node)) else None
            dtype = value if value in DTYPES else dtype
            if value is None:
                self.note(call)
        if dtype is None:
            return
        if self.fields.get("lora") or self.fields.get("quantization"):
            self.note(call, "a cast of adapters or of a quantized model")
        else:
            self.fields["dtype"] = dtype

    def _take_liger(self, call: ast.Call, name: str) -> None:
        """Take over Liger's patch of the classes, which with all of its kernels is what
        use_liger_kernel does.
        """
        certain = self.tree.dead(call) is False and not call.args and not call.keywords
        if not certain or self.fields.get("trainer") != "transformers":
            self.note(call)
            return
        self.arguments["use_liger_kernel"] = True
        self.fields["liger_family"] = name.removeprefix("apply_liger_kernel_to_")

    def _account_for_target(
        self, target: ast.expr, node: ast.AST, value: ast.expr | None = None
    ) -> None:
        """An attribute or an element that is assigned to."""
        value = value if value is not None else getattr(node, "value", None)
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._account_for_target(one, node)
        elif isinstance(target, ast.Subscript):
            where, key = ast.unparse(target.value), getattr(target.slice, "value", "")
            known = isinstance(key, str) and key.startswith(tuple(WORDS["environment"]))
            if self.kind(target.value) in ("model", "args", "config", "trainer") or (
                where.endswith("environ") and not known
            ):
                self.note(node)
        elif isinstance(target, ast.Attribute):
            self._account_for_attribute(target, node, value)

    def _account_for_attribute(
        self, target: ast.Attribute, node: ast.AST, value: ast.expr | None
    ) -> None:
        name, whole, kind = target.attr, self.tree.dotted(target), self.kind(target.value)
        if name == "requires_grad":
            self.refuse(node, "is not modelled, as it changes which weights are trained")
        if kind == "args":
            self._set_argument(name, node, value)
        elif (
            name == "allow_tf32"
            and whole.startswith("torch.backends.cuda")
            and isinstance(value, ast.Constant)
        ):
            self.arguments.setdefault("tf32", bool(value.value))
        elif kind in ("model", "config") and name in WORDS["model_attributes"]:
            return
        elif (
            kind not in ("tokenizer", "data")
            and not self.names.is_of_modules(whole)
            and ast.unparse(target.value) != "self"
        ):
            self.note(node)

    def _set_argument(self, name: str, node: ast.AST, value: ast.expr | None) -> None:
        """A field of the Trainer's arguments that is set after they were made."""
        if name in CLASSIFIED["neutral"] or name == "_n_gpu":
            return
        before = self.trainer is None or start_of(node) < start_of(self.trainer)
        if (
            name in WORDS["settable"]
            and before
            and node not in self.of_data
            and self.tree.dead(node) is False
            and not isinstance(node, ast.AugAssign)
        ):
            try:
                self.arguments[name] = self.tree.value(value)
                return
            except Unread:
                pass
        self.note(node)

    def account_for_imports(self) -> None:
        """Note modules whose names are not known.

        Raises RecipeError for those that change what others do.
        """
        for node in self.tree.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._account_for_import(node)

    def _account_for_import(self, node: ast.Import | ast.ImportFrom) -> None:
        modules = [getattr(node, "module", None) or "", *(name.name for name in node.names)]
        for module in modules:
            if why := WORDS["refused_imports"].get(module.partition(".")[0]):
                self.refuse(node, f"is not modelled: {why}")
        if modules[-1] == "*" and not self.names.is_of_modules(modules[0]):
            self.note(node, "whose names are not known")
            return
        roots = (
            {name.name.partition(".")[0] for name in node.names}
            if isinstance(node, ast.Import)
            else {modules[0]}
        )
        foreign = [root for root in roots if self.names.is_foreign(root)]
        names = {name.asname or name.name.partition(".")[0] for name in node.names}
        if foreign and not names & self.tree.names:
            self.note(node, "which is run for what it changes, and not read")
