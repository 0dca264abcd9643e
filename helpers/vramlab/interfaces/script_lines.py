"""Every line of a script accounted for.

It is in the recipe, known to move no memory of a step, or listed.

What is known to move none is in `data/script_calls.json` (`script_names.py`).
"""

import ast
import re
from pathlib import Path

from ..recipe.arguments import CLASSIFIED
from ..recipe.options import DTYPES, REPEATED
from .script_kinds import Kinds
from .script_names import WORDS
from .script_tree import FUNCTIONS, start_of
from .script_values import Unread

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
TAKING_FUNCTIONS = ("map", "filter", "sorted", "min", "max")  # built in ones


class Lines(Kinds):
    """The lines of a script: which of them are understood.

    There are notes on the others.
    """

    def account(self) -> None:
        """Note every line that is neither understood nor known to move nothing.

        Raises RecipeError as `refuse` does.
        """
        # What runs after training, or only on data, cannot change a step unless it touches the
        # model.
        outside, self.of_data = self._outside()
        for node in self.tree.nodes:
            # A branch that is surely not taken is no line of the training.
            if node in outside or self.tree.dead(node) is True:
                continue
            if node in self.of_data and not self._touches_training(node):
                continue
            if isinstance(node, ast.Call) and node not in self.understood:
                self._account_for_call(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in _targets(node):
                    self._account_for_target(target, node)
            # Deleting a layer of the model changes what is trained.
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
        """Whether a node of data or evaluation is about the model, the Trainer or its arguments."""
        parts: list[ast.AST] = []
        if isinstance(node, ast.Call):
            parts = [node.func, *node.args, *(word.value for word in node.keywords)]
            if self.tree.name(node) in WORDS["refused"]:
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            parts = [*_targets(node)]
        elif isinstance(node, ast.Delete):
            parts = [*node.targets]
        elif isinstance(node, ast.Attribute):
            parts = [node]
        # Of an attribute or element the object that has it, of anything else itself.
        holders = [getattr(part, "value", part) for part in parts]
        is_switch = any(getattr(part, "attr", "") == "requires_grad" for part in parts)
        return is_switch or any(self.kind(one) in ("model", "trainer", "args") for one in holders)

    def _account_for_method_as_value(self, node: ast.Attribute) -> None:
        """Note a method that changes a model and is handed over, such as torch.nn.Module.half."""
        parent = self.tree.parents.get(node)
        # Assigned to, or called: both are accounted for elsewhere.
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
        self,
        node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    ) -> None:
        """Note what a class or function is made from or wrapped in, where that is not read."""
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
        """Whether a decorator is of a module that moves nothing, or the script's own.

        That is read, on what gives neither model nor Trainer.
        """
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        whole = self.tree.dotted(called)
        name = self.text(called).rpartition(".")[2]
        if whole or name in WORDS["builtins"]:
            return self.names.is_harmless_name(whole, name)
        # @x.setter and its like belong to a property of the class.
        if isinstance(called, ast.Attribute):
            return name in ("setter", "getter", "deleter")
        # What a function returns, or a class is made from, decides what the decorator could change.
        given = (
            self.tree.returns(node) if isinstance(node, FUNCTIONS) else getattr(node, "bases", [])
        )
        makes = any(self.kind(one) in ("model", "trainer", "args") for one in given)
        own = name in self.tree.functions or name in self.tree.classes
        return own and not makes and not any(self.text(one).endswith("Trainer") for one in given)

    def _outside(self) -> tuple[set[ast.AST], set[ast.AST]]:
        """Nodes that are no part of training.

        Those after it, and those of functions that prepare data or evaluate.
        """
        after: set[ast.AST] = set()
        outside: set[ast.AST] = set()
        for call in self.tree.calls:
            method = ""
            owner: ast.expr | None = None
            if isinstance(call.func, ast.Attribute):
                method = call.func.attr
                owner = call.func.value
            # Lines after the Trainer's train() run when the peak has been.
            if method == "train" and self.kind(owner) == "trainer":
                after.update(self.tree.following(self.statement(call)))
            values = [
                word.value for word in call.keywords if word.arg in WORDS["trainer_arguments"]
            ]
            # Functions that a data set is mapped with get rows and no model.
            if method in HANDED_OVER and self.kind(owner) != "model":
                values += [*call.args, *(word.value for word in call.keywords)]
                given = next(
                    (word.value for word in call.keywords if word.arg == "fn_kwargs"),
                    None,
                )
                if given is not None and any(self.kind(one) == "model" for one in ast.walk(given)):
                    self.note(call)
            if method == "register" and call.args and self.text(call.args[0]) == repr(REPEATED):
                # As a program of plan does: the recipe says so by its attn_implementation.
                self.understood.add(call)
                values += call.args
            for value in values:
                # A function by its name, or a lambda in its place.
                function = self.tree.functions.get(getattr(value, "id", ""), value)
                if isinstance(function, (*FUNCTIONS, ast.Lambda)):
                    outside.update(ast.walk(function))
        return after, outside

    def _account_for_call(self, call: ast.Call) -> None:
        name = self.tree.name(call)
        whole = self.tree.dotted(call.func)
        # None where the callee is a module's function and not a method.
        owner = call.func.value if isinstance(call.func, ast.Attribute) and not whole else None
        # By its own name, or by the class that it is a method of, as in
        # FastLanguageModel.from_pretrained.
        why = WORDS["refused"].get(name) or WORDS["refused"].get(
            whole.rpartition(".")[0].rpartition(".")[2]
        )
        if why:
            self.refuse(call, f"is not modelled, as {why}")
        if owner is not None:
            self._account_for_method(call, owner, name)
        # setattr(a, "b", c) is read as a.b = c.
        elif name == "setattr" and len(call.args) == 3:
            attribute = ast.Attribute(
                call.args[0],
                getattr(call.args[1], "value", "?"),
                ast.Store(),
            )
            self._account_for_target(attribute, call, call.args[2])
        elif re.fullmatch(r"apply_liger_kernel_to_\w+", name):
            self._take_liger(call, name)
        elif name == "set_float32_matmul_precision":
            self.arguments.setdefault(
                "tf32",
                # torch.set_float32_matmul_precision: "high" and "medium" allow tf32, "highest" does
                # not.
                getattr(call.args[0], "value", "") in ("high", "medium"),
            )
        elif not self._is_known_call(call, whole, name):
            self.note(call)

    def _is_known_call(self, call: ast.Call, whole: str, name: str) -> bool:
        # Its body is accounted for line by line where it is defined.
        own = not whole and (name in self.tree.functions or name in self.tree.classes)
        if own or (
            isinstance(call.func, ast.Name) and self.kind(call.func) in ("tokenizer", "data")
        ):
            return True
        # A copy of the arguments could be changed without the reader seeing which of both the
        # Trainer gets.
        if self.kind(call) in ("tokenizer", "config", "args") and name not in ("copy", "deepcopy"):
            return True
        # Variables of the environment may set the allocator or a kernel.
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
        # map(torch.nn.Module.half, layers) changes a model without a call that names a method.
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
        # A tensor that the script puts on the card itself is memory that no recipe has.
        on_card = whole.startswith("torch.") and any(word.arg == "device" for word in call.keywords)
        return self.names.is_harmless_name(whole, name) and not copies and not on_card

    def _is_harmless_function(self, node: ast.expr) -> bool:
        """Whether an argument is no function, or one that changes nothing of what it is given."""
        whole = self.tree.dotted(node)
        name = self.text(node).rpartition(".")[2]
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
        """A method of a model, a Trainer, its arguments, a tokenizer, data, or the unknown."""
        kind = self.kind(owner)
        # Under a condition that is not known it may or may not have run.
        certain = self.tree.dead(call) is False and call not in self.of_data
        if kind == "model" and certain and name in CHECKPOINTING:
            self.checkpoint(
                next((word.value for word in call.keywords), None) or next(iter(call.args), None)
            )
        elif kind == "model" and certain and (name in CASTS or name in ("to", "cuda")):
            self.cast(call, name)
        # Called by hand it sets a field under a name that is not read.
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
            # Of an unknown object any method of Python's own types may be called.
            names = WORDS[known[kind]] if kind in known else METHODS.union(WORDS["calls"])
            if name not in names or (
                name == "add_callback" and any(map(self.names.unread_callback, call.args))
            ):
                self.note(call)

    def checkpoint(self, options: ast.expr | None) -> None:
        """Take over that a model checkpoints its layers, with `options` such as use_reentrant."""
        names = ("activation_checkpointing", "gradient_checkpointing")
        # Two names of one argument: the one that the script uses already.
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
        given = [*call.args, *(word.value for word in call.keywords)] if name == "to" else ()
        for node in given:
            try:
                value = self.tree.value(node)
            except Unread:
                value = "a device" if re.search("device|rank|cuda", ast.unparse(node)) else None
            dtype = value if value in DTYPES else dtype
            if value is None:
                self.note(call)
        if dtype is None:
            return
        # Adapters and 4-bit weights do not all follow a cast of the whole model.
        if self.fields.get("lora") or self.fields.get("quantization"):
            self.note(call, "a cast of adapters or of a quantized model")
        else:
            self.fields["dtype"] = dtype

    def _take_liger(self, call: ast.Call, name: str) -> None:
        """Take over Liger's patch of the classes.

        With all of its kernels that is what use_liger_kernel does.
        """
        # With arguments only some of the kernels are put in place.
        certain = self.tree.dead(call) is False and not call.args and not call.keywords
        if not certain or self.fields.get("trainer") != "transformers":
            self.note(call)
            return
        self.arguments["use_liger_kernel"] = True
        self.fields["liger_family"] = name.removeprefix("apply_liger_kernel_to_")

    def _account_for_target(
        self,
        target: ast.expr,
        node: ast.AST,
        value: ast.expr | None = None,
    ) -> None:
        """An attribute or an element that is assigned to."""
        # setattr has no statement of assignment with a value.
        value = value if value is not None else getattr(node, "value", None)
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._account_for_target(one, node)
        elif isinstance(target, ast.Subscript):
            where = ast.unparse(target.value)
            key = getattr(target.slice, "value", "")
            known = isinstance(key, str) and key.startswith(tuple(WORDS["environment"]))
            # An element of a configuration or of a model's dictionary may change either.
            if self.kind(target.value) in ("model", "args", "config", "trainer") or (
                where.endswith("environ") and not known
            ):
                self.note(node)
        elif isinstance(target, ast.Attribute):
            self._account_for_attribute(target, node, value)

    def _account_for_attribute(
        self,
        target: ast.Attribute,
        node: ast.AST,
        value: ast.expr | None,
    ) -> None:
        name = target.attr
        whole = self.tree.dotted(target)
        kind = self.kind(target.value)
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
        # What is set after the Trainer was made may come too late for it, or not.
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


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
