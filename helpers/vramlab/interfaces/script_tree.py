"""The syntax tree of a script: what names are bound to, which branches run, and constants.

Nothing of it is executed.
"""

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import RecipeError
from ..base.files import read_text
from .script_values import MOST_DEPTH, Constants, Unread

MOST_SCRIPT = 2 * 1024**2  # bytes
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef, ast.Module)
# Methods that change a list or dictionary in place.
CHANGING = {
    "update",
    "append",
    "extend",
    "insert",
    "pop",
    "popitem",
    "setdefault",
    "clear",
    "remove",
}


class Binding(NamedTuple):
    """What a statement binds a name to: None where that is no expression of the script."""

    value: ast.expr | None
    statement: ast.AST


def line_of(node: ast.AST) -> int:
    """Return the line where a node's text begins."""
    return getattr(node, "lineno")  # noqa: B009 — of all but a few nodes


def start_of(node: ast.AST) -> tuple[int, int]:
    """Return (line, column) where a node's text begins."""
    return line_of(node), getattr(node, "col_offset")  # noqa: B009 — of all but a few nodes


class Tree:
    """A script's tree with its scopes.

    Raises RecipeError for what is no Python file, or one that is too large.
    """

    def __init__(self, path: Path):
        self.path = path
        # Values need names, and names need values to know which branch runs: each asks the other.
        self._constants = Constants(self.sources, self.is_written, self.dotted)
        try:
            self.module = ast.parse(read_text(path, MOST_SCRIPT))
        except (RecursionError, MemoryError) as error:
            raise RecipeError(
                "script",
                str(path),
                "it must be a Python file (it is nested too deeply)",
            ) from error
        except (OSError, ValueError, SyntaxError) as error:
            why = str(error).rstrip(".")
            raise RecipeError("script", str(path), f"it must be a Python file ({why})") from error
        # ast has no link from a node to the one around it.
        self.parents = {
            child: node for node in ast.walk(self.module) for child in ast.iter_child_nodes(node)
        }
        self.nodes = list(self.parents)
        self.functions = {node.name: node for node in self.nodes if isinstance(node, FUNCTIONS)}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.imported: dict[str, str] = {}
        self.bindings: dict[tuple[ast.AST, str], list[Binding]] = {}
        self.decided: dict[ast.expr, bool | None] = {}
        self.found: dict[ast.expr | None, list[ast.expr | None]] = {}
        self.changed: list[ast.Name] = []  # containers that statements write to
        self.written: set[ast.expr | None] | None = None
        # A name declared global binds in the module, in whatever function it is assigned.
        declared = [node for node in self.nodes if isinstance(node, ast.Global)]
        self.globals = {(self.scope(node), name) for node in declared for name in node.names}
        for node in self.nodes:
            self._import(node)
            for target, value in _targets(node):
                if value is not None:
                    self.parents.setdefault(value, node)  # of what is made up for an element
                self._bind(target, value, node)
            if isinstance(node, FUNCTIONS):
                self._bind_parameters(node)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                # `import a.b` binds a, `import a.b as c` binds a.b.
                whole = name.name if name.asname else name.name.partition(".")[0]
                self.imported[name.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                self.imported[name.asname or name.name] = f"{node.module or ''}.{name.name}"

    def _bind(self, target: ast.expr, value: ast.expr | None, statement: ast.AST) -> None:
        if isinstance(target, ast.Name):
            scope = self.scope(statement)
            scope = self.module if (scope, target.id) in self.globals else scope
            # In the script's order, on which `_bound` relies.
            self.bindings.setdefault((scope, target.id), []).append(Binding(value, statement))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            # An assignment to an element changes a container that another name may hold as well.
            self.changed.append(target.value)
        elif isinstance(target, ast.Tuple | ast.List):
            for index, one in enumerate(target.elts):
                each: ast.expr | None = None
                # Unpacking a call or a name: each target is an element of it, said by a made-up
                # subscript.
                if value is not None and not isinstance(value, ast.Tuple | ast.List):
                    each = ast.copy_location(
                        ast.Subscript(value, ast.Constant(index), ast.Load()),
                        value,
                    )
                    self.parents[each] = statement
                # Two displays of one length are matched by place; a starred one is left unknown.
                elif value is not None and len(value.elts) == len(target.elts):
                    each = value.elts[index]
                self._bind(one, each, statement)

    def _bind_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Bind parameters to what the function is called with, or to the default."""
        said = function.args
        names = [*said.posonlyargs, *said.args]
        # Defaults belong to the last parameters, so both are matched from the end.
        defaults = dict(zip([one.arg for one in names[::-1]], said.defaults[::-1], strict=False))
        defaults |= {
            one.arg: value
            for one, value in zip(said.kwonlyargs, said.kw_defaults, strict=True)
            if value
        }
        # Without following aliases: a function called under another name has callers that are not
        # seen.
        calls = [node for node in self.calls if getattr(node.func, "id", None) == function.name]
        for index, one in enumerate([*names, *said.kwonlyargs]):
            bindings = self.bindings.setdefault((function, one.arg), [])
            for call in calls:
                keywords = {word.arg: word.value for word in call.keywords}
                place = call.args[index] if index < len(call.args) and index < len(names) else None
                # With *args or **kwargs nobody can tell which parameter gets what.
                starred = None in keywords or any(isinstance(arg, ast.Starred) for arg in call.args)
                value = None if starred else place or keywords.get(one.arg, defaults.get(one.arg))
                bindings.append(Binding(value, function))
            if (
                not calls
            ):  # a method is called by others, with what they have; a function by Fire, say
                is_method = isinstance(self.parents.get(function), ast.ClassDef)
                bindings.append(Binding(None if is_method else defaults.get(one.arg), function))

    @cached_property
    def names(self) -> set[str]:
        """All names that are read or bound, but for those of imports."""
        return {node.id for node in self.nodes if isinstance(node, ast.Name)}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def options(self) -> dict[str, ast.expr | None]:
        """Defaults of command line options and classes' fields, by attribute."""
        defaults: dict[str, list[ast.expr | None]] = {}
        for call in self.calls:
            if self.name(call) == "add_argument":
                words = {word.arg: word.value for word in call.keywords}
                # argparse's own defaults for a switch: False for store_true.
                action = getattr(words.get("action"), "value", "")
                usual = ast.Constant({"store_true": False, "store_false": True}.get(action))
                default = words.get("default", None if "required" in words else usual)
                values = [getattr(arg, "value", None) for arg in call.args]
                said: list[Any] = [value for value in values if isinstance(value, str)]
                named = words.get("dest")
                if isinstance(named, ast.Constant):
                    said += [named.value]
                for name in said:
                    defaults.setdefault(name.lstrip("-").replace("-", "_"), []).append(default)
        for node in self.classes.values():
            for target, value in (pair for line in node.body for pair in _targets(line)):
                if isinstance(target, ast.Name):
                    defaults.setdefault(target.id, []).append(value)
        # An option that the script assigns to later may have either value.
        for target, _ in (pair for node in self.nodes for pair in _targets(node)):
            if isinstance(target, ast.Attribute) and target.attr in defaults:
                defaults[target.attr].append(None)
        # Two options of one name, as of two parsers, make it unknown.
        return {name: values[0] if len(values) == 1 else None for name, values in defaults.items()}

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a node stands in."""
        node = self.parents.get(node, self.module)
        while not isinstance(node, SCOPES):
            node = self.parents[node]
        return node

    def dotted(self, node: ast.AST) -> str:
        """The imported name that an expression is, such as "torch.cuda.is_available".

        "" for others.
        """
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            # Only a chain that begins with an import has a dotted name; `model.config` has none.
            return before and f"{before}.{node.attr}"
        return self.imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    def name(self, call: ast.Call) -> str:
        """The last part of what is called, under its original name."""
        whole = self.dotted(call.func) or getattr(call.func, "attr", getattr(call.func, "id", ""))
        return whole.rpartition(".")[2]

    def dead(self, node: ast.AST) -> bool | None:
        """Whether a node is in a branch that does not run; None where only running would tell."""
        is_dead: bool | None = False
        child = node
        parent = self.parents.get(node)
        # Up to the function only: whether that is called is another question.
        while parent is not None and not isinstance(parent, SCOPES):
            if isinstance(parent, ast.If) and child is not parent.test:
                said = self.decide(parent.test)
                # In the branch that the condition rules out.
                if said is not None and said != (child in parent.body):
                    return True
                is_dead = None if said is None else is_dead
            # Whether an exception or a pattern comes can only be seen by running.
            if isinstance(parent, ast.ExceptHandler | ast.match_case):
                is_dead = None
            child, parent = parent, self.parents.get(parent)
        return is_dead

    def decide(self, test: ast.expr) -> bool | None:
        """Whether a condition holds, None where only running would tell.

        A GPU is there, and this is the main program.
        """
        if test not in self.decided:
            self.decided[test] = (
                None  # while it is looked at, as a name in it may be bound under it
            )
            try:
                is_main = ast.unparse(test) == "__name__ == '__main__'"
                # A script is read as the program that is started, not as a module that is imported.
                self.decided[test] = is_main or bool(self.value(test))
            except Unread:
                pass
        return self.decided[test]

    def value(self, node: ast.expr | None, depth: int = MOST_DEPTH) -> Any:
        """The value of a constant expression (`Constants.value`). Raises Unread."""
        return self._constants.value(node, depth)

    def following(self, statement: ast.AST) -> set[ast.AST]:
        """Nodes of the statements that follow in the same blocks, unless they train again."""
        nodes: set[ast.AST] = set()
        # Outwards from block to block, as far as what follows is sure to run after it.
        while isinstance(statement, ast.stmt) and not isinstance(statement, SCOPES):
            parent = self.parents[statement]
            for _, block in ast.iter_fields(parent):
                if isinstance(block, list) and statement in block:
                    rest = block[block.index(statement) + 1 :]
                    nodes.update(node for one in rest for node in ast.walk(one))
            # In a loop the lines before come round again.
            if not isinstance(parent, ast.With | ast.Try | ast.If):
                break
            statement = parent
        # A second train() makes all that stands before it a part of training.
        trains = (isinstance(node, ast.Call) and self.name(node) == "train" for node in nodes)
        return set() if any(trains) else nodes

    def sources(self, node: ast.expr | None, depth: int = MOST_DEPTH) -> list[ast.expr | None]:
        """What an expression may stand for.

        Itself, or what its name is bound to, what the function called returns.
        """
        if node not in self.found:
            self.found[node] = [node]  # where a name stands for itself
            self.found[node] = list(dict.fromkeys(self._sources(node, depth)))
        return self.found[node]

    def _sources(self, node: ast.expr | None, depth: int) -> list[ast.expr | None]:
        self._constants.step(depth)
        if isinstance(node, ast.Name):
            found = self._bound(node)
            return (
                [one for value in found for one in self.sources(value, depth - 1)]
                if found
                else [node]
            )
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in self.functions
        ):
            returned = self.returns(self.functions[node.func.id])
            # A function that returns nothing that can be followed stands for something unknown.
            return [one for value in returned for one in self.sources(value, depth - 1)] or [None]
        if isinstance(node, ast.Call) and self.dotted(node.func) == "torch.cuda.is_available":
            return [ast.copy_location(ast.Constant(True), node)]  # as `decide` has it
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            whole = self.sources(node.value, depth - 1)
            # An element of a container that changes may be another by then.
            if any(map(self.is_written, whole)):
                return [None]
            parts = [
                part
                for part in (_element(one, node.slice.value) for one in whole)
                if part is not None
            ]
            return (
                [one for part in parts for one in self.sources(part, depth - 1)]
                if parts
                else [node]
            )
        if isinstance(node, ast.IfExp):
            said = self.decide(node.test)
            # Where the condition is known one branch is left, else both.
            both = [node.body] * (said is not False) + [node.orelse] * (said is not True)
            return [one for value in both for one in self.sources(value, depth - 1)]
        if isinstance(node, ast.Attribute) and not self.dotted(node) and self._is_option(node):
            return self.sources(self.options[node.attr], depth - 1)
        return [node]

    def is_written(self, container: ast.expr | None) -> bool:
        """Whether a statement writes to a literal container after it was made."""
        if self.written is None:
            self.written = set()  # while they are looked for
            self.written = {one for name in self.changed for one in self.sources(name)}
        return container in self.written

    def returns(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
        """What a function's return statements give, of those that may run."""
        values = []
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or not node.value:
                continue
            if self.scope(node) is function and not self.dead(node):
                values.append(node.value)
        return values

    def _is_option(self, node: ast.Attribute) -> bool:
        """Whether an attribute is one of the parsed command line, or a class's field."""
        if self.options.get(node.attr) is None:
            return False
        held = self.sources(node.value) if isinstance(node.value, ast.Name) else []
        own = (isinstance(one, ast.Name) and one.id in self.classes for one in held)
        calls = (isinstance(one, ast.Call) and self._makes_options(one) for one in held)
        # Also where the object is unknown, such as a parameter: people pass their parsed options
        # on.
        return any(own) or any(calls) or all(one is None or one is node.value for one in held)

    def _makes_options(self, call: ast.Call) -> bool:
        """Whether a call gives an object with the defaults as they are written."""
        made = self.name(call) in (
            "parse_args",
            "parse_known_args",
            "parse_args_into_dataclasses",
            *self.classes,
        )
        # With arguments the defaults may be overruled.
        return made and not (call.args or call.keywords)

    def _bound(self, use: ast.Name) -> list[ast.expr | None]:
        """What a name may be bound to where it is used.

        The last certain binding before, and uncertain ones after that.
        """
        scope = inner = self.scope(use)
        # Names of a class's body are not seen in its methods.
        while (scope, use.id) not in self.bindings or (
            isinstance(scope, ast.ClassDef) and scope is not inner
        ):
            if scope is self.module:
                return []
            scope = self.scope(scope)
        bindings = [each for each in self.bindings[scope, use.id] if not self._never(each)]
        # In another scope the order is not known: all bindings there may count.
        if scope is inner:
            before = [each for each in bindings if self._is_before(each.statement, use)]
            # The last assignment that surely ran hides those before it.
            certain = [index for index, each in enumerate(before) if not self._uncertain(each, use)]
            # In a loop a name may be bound further down than it is used.
            bindings = before[certain[-1] :] if certain else before or bindings
        return [each.value for each in bindings]

    def _never(self, binding: Binding) -> bool:
        return not isinstance(binding.statement, FUNCTIONS) and self.dead(binding.statement) is True

    def _uncertain(self, binding: Binding, use: ast.AST) -> bool:
        """Whether a binding may not have happened when the name is used."""
        if isinstance(binding.statement, FUNCTIONS):
            return False
        if self.scope(binding.statement) is not self.scope(use):
            return True  # of a function that declares it global
        # A binding is certain where the use stands in the same block or in one inside it.
        block = self.parents[binding.statement]
        node = use
        while node in self.parents and node is not block:
            node = self.parents[node]
        return self.dead(binding.statement) is None and node is not block

    def _is_before(self, statement: ast.AST, use: ast.AST) -> bool:
        # Their targets are bound at their head, but the statement ends after its body.
        if isinstance(
            statement,
            (*FUNCTIONS, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.comprehension),
        ):
            return True
        end = getattr(statement, "end_lineno"), getattr(statement, "end_col_offset")  # noqa: B009
        return end <= start_of(use)


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The targets that a statement binds, and to what; to an element of what is iterated over."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield from [(node.target, node.value)] if node.value else []
    elif isinstance(node, ast.AugAssign):
        yield node.target, None
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        # A slice stands for any element of what is iterated over.
        element = ast.copy_location(ast.Subscript(node.iter, ast.Slice(), ast.Load()), node.iter)
        yield node.target, element
    elif isinstance(node, ast.With | ast.AsyncWith):
        # What a context manager returns is taken for the manager itself.
        yield from (
            (item.optional_vars, item.context_expr) for item in node.items if item.optional_vars
        )
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGING
    ):
        # As if an element had been assigned to.
        yield ast.Subscript(node.func.value, ast.Slice(), ast.Store()), None


def _element(node: ast.expr | None, key: Any) -> ast.expr | None:
    """The element of a literal container, None where it has none."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return next(
            (value for one, value in pairs if isinstance(one, ast.Constant) and one.value == key),
            None,
        )
    if (
        isinstance(node, ast.Tuple | ast.List)
        and isinstance(key, int)
        and -len(node.elts) <= key < len(node.elts)
    ):
        return node.elts[key]
    return None
