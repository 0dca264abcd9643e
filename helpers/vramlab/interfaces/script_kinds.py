"""What each expression of a script stands for: a model, a Trainer, its arguments, data."""

import ast
import re
from typing import Any

from ..recipe.argument_classes import OWN
from .script_names import Names
from .script_notes import Notes
from .script_tree import Tree

TOKENIZERS = re.compile(r"\w*(Tokenizer|TokenizerFast|Processor|FeatureExtractor)")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONTAINERS = (*COMPREHENSIONS, ast.Dict, ast.Set)
OPERATIONS = (ast.UnaryOp, ast.BinOp, ast.Compare)
LITERALS = (*CONTAINERS, *OPERATIONS, ast.Constant, ast.JoinedStr, ast.Lambda)


class Kinds(Notes):
    """What is known of a script's expressions and lines."""

    def __init__(self, tree: Tree):
        super().__init__(tree)
        self.names = Names(tree)
        self.understood: set[ast.AST] = set()
        self.kinds: dict[ast.AST | None, str] = {}
        self.arguments: dict[str, Any] = {}  # of the Trainer's
        self.fields: dict[str, Any] = {}  # of the recipe
        self.trainer: ast.Call | None = None
        # nodes of functions that prepare data or evaluate, which others call
        self.of_data: set[ast.AST] = set()

    def kind(self, node: ast.AST | None) -> str:
        """What an expression gives: "model", "trainer", "args", "tokenizer", "config", "data".

        "" where unknown.
        """
        # Set before it is worked out, so that a variable made from itself ends here.
        if node not in self.kinds:
            self.kinds[node] = ""
            found = {self._kind(one) for one in self.tree.sources(node)}  # type: ignore[arg-type]
            # A model in one branch counts as one everywhere: a line about it has to be accounted
            # for.
            self.kinds[node] = (
                "model" if "model" in found else found.pop() if len(found) == 1 else ""
            )
        return self.kinds[node]

    def _kind(self, node: ast.AST | None) -> str:
        if isinstance(node, ast.Call):
            return self._kind_of_call(node)
        # An attribute is of the kind of its object, but of a Trainer it may be the model or the
        # arguments.
        if isinstance(node, ast.Attribute) and not self.tree.dotted(node):
            whole = self.kind(node.value)
            return {"trainer": {"model": "model", "args": "args"}.get(node.attr, "")}.get(
                whole,
                whole,
            )
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.kind(node.value)
        if isinstance(node, ast.List | ast.Tuple | ast.BoolOp):
            # A pair of a model and a tokenizer has to count as a model.
            parts = {self.kind(one) for one in getattr(node, "elts", getattr(node, "values", ()))}
            return "model" if "model" in parts else "data"
        if isinstance(node, LITERALS) or (
            node is not None and self.names.is_of_modules(self.tree.dotted(node))
        ):
            return "data"
        return "data" if isinstance(node, ast.Name) and node.id in self.tree.classes else ""

    def _kind_of_call(self, call: ast.Call) -> str:
        whole = self.tree.dotted(call.func)
        name = self.tree.name(call)
        if name in ("from_pretrained", "from_config") and isinstance(call.func, ast.Attribute):
            owner = self.tree.dotted(call.func.value) or ast.unparse(call.func.value)
            owner = owner.rpartition(".")[2]
            # By the class that loads: AutoTokenizer, AutoConfig, and any other is a model's.
            kinds = {"tokenizer": TOKENIZERS.fullmatch(owner), "config": owner.endswith("Config")}
            return next((kind for kind, found in kinds.items() if found), "model")
        if name in ("get_peft_model", "prepare_model_for_kbit_training"):
            return "model"
        if name in OWN:
            return "args"
        if self.is_trainer(call):
            return "trainer"
        # A function of unknown effect that is given a model may return it, changed.
        given = "model" if any(self.kind(arg) == "model" for arg in call.args) else ""
        # vars(args) hands out the arguments' own dictionary, which can be assigned to.
        if name == "vars" and not whole:
            return self.kind(next(iter(call.args), None))
        if name in self.tree.classes and not whole:
            modules = any(
                self.text(base).endswith("Module") for base in self.tree.classes[name].bases
            )
            return "model" if modules else "data"
        # A method's result is of its object's kind: model.to(…) is the model, dataset.map(…) data.
        if isinstance(call.func, ast.Attribute) and not whole:
            return self.kind(call.func.value)
        return given or ("data" if self.names.is_harmless_name(whole, name) else "")

    def is_trainer(self, call: ast.Call) -> bool:
        """Whether a call makes a Trainer, of a library's class or of the script's own."""
        name = self.tree.name(call)
        bases = self.tree.classes[name].bases if name in self.tree.classes else ()
        ends = [name, *(self.text(base) for base in bases)]
        # A function called such-and-such Trainer may return anything.
        return name not in self.tree.functions and any(one.endswith("Trainer") for one in ends)
