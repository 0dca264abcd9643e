"""Blanks: the reader's piece is judged by what it does, and the chapter runs with any."""

import ast
import re

import nbformat
import pytest
import settings
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vramlab_course import blank
from vramlab_course.exercises import ExerciseError
from vramlab_course.session import Session

NUMBERS = [path.name[:2] for path in settings.chapters()]
EVERY = {name: piece for number in NUMBERS for name, piece in blank.blanks(number).items()}
MISTAKES = [(name, index) for name, piece in EVERY.items() for index in range(len(piece.mistakes))]


def notebook_of(number: str, solutions: bool = False) -> nbformat.NotebookNode:
    folder = settings.NOTEBOOKS / "solutions" if solutions else settings.NOTEBOOKS
    return nbformat.read(next(folder.glob(f"{number}_*.ipynb")), as_version=4)


def filled(source: str) -> str:
    """A cell's source with the course's solution in place of each blank that it checks."""
    tree = ast.parse(source)
    lines = source.splitlines()
    checked = {ast.unparse(call.args[1]): call.args[0].value for call in checks(tree)}
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in checked:
            lines[node.lineno - 1 : node.end_lineno] = [blank.find(checked[node.name]).solution]
    return "\n".join(lines)


def checks(tree: ast.Module) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "blank.check"]


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds at a cell's level."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {each.id for each in stored if isinstance(each.ctx, ast.Store)}


@pytest.mark.parametrize("number", NUMBERS)
def test_no_later_cell_takes_the_name_of_the_readers_piece(number):
    """An exercise may call it at the chapter's end."""
    pieces: set[str] = set()
    for cell in notebook_of(number).cells:
        if cell.cell_type != "code" or cell.source.startswith("%"):
            continue
        tree = ast.parse(cell.source)
        if "blank.check(" in cell.source:
            pieces |= {ast.unparse(call.args[1]) for call in checks(tree)}
            continue
        taken = [name for node in tree.body for name in bound(node) if name in pieces]
        assert not taken, cell.source


def cells_with_blanks(number: str) -> list[str]:
    cells = [cell.source for cell in notebook_of(number).cells if cell.cell_type == "code"]
    return [source for source in cells if "blank.check(" in source]


# The pieces of the course


@pytest.mark.parametrize("name", EVERY)
def test_the_solution_is_accepted_and_returned_as_the_readers_own(name, capsys):
    piece = EVERY[name].own()
    assert blank.check(name, piece) is piece
    assert capsys.readouterr().out.startswith(f"{name}: right")


@pytest.mark.parametrize(("name", "index"), MISTAKES)
def test_each_mistake_is_told_its_own_sentence_and_the_chapter_goes_on(name, index, capsys):
    make, says = EVERY[name].mistakes[index]
    wrong = make()
    assert blank.check(name, wrong) is not wrong
    said = " ".join(capsys.readouterr().out.split())
    pattern = re.sub(r"\\{.*?\\}", ".+", re.escape(" ".join(says.split())))
    assert re.fullmatch(
        rf"{re.escape(name)}: {pattern} Until that is mended, .* the course's own\.", said
    )


@pytest.mark.parametrize("name", EVERY)
def test_nonsense_is_refused_and_never_raises(name, capsys):
    for answer in ("text", 7, [], lambda *_: 1 / 0, lambda *_: "text", lambda: 3):
        feedback = blank.judge(EVERY[name], answer)
        assert not feedback.right, answer


@pytest.mark.parametrize("number", [number for number in NUMBERS if blank.blanks(number)])
def test_a_chapter_asks_for_each_of_its_blanks_once_and_in_their_order(number):
    asked = [
        call.args[0].value
        for source in cells_with_blanks(number)
        for call in checks(ast.parse(source))
    ]
    assert asked == list(blank.blanks(number))


@pytest.mark.parametrize("name", EVERY)
def test_the_stub_has_the_solutions_signature_and_docstring(name):
    solution = ast.parse(EVERY[name].solution).body[0]
    stubs = [node for source in cells_with_blanks(name[:2]) for node in ast.parse(source).body]
    stub = next(node for node in stubs if getattr(node, "name", "") == solution.name)
    if isinstance(stub, ast.FunctionDef):
        assert ast.unparse(stub.args) == ast.unparse(solution.args)
    assert ast.get_docstring(stub) == ast.get_docstring(solution)


@pytest.mark.parametrize("name", EVERY)
def test_a_filled_cell_takes_the_readers_piece(name, capsys):
    """With nothing but the imports of the cells above, as in the notebook: the solution needs no
    others.
    """
    above: list[str] = []
    for cell in notebook_of(name[:2]).cells:
        if cell.cell_type != "code" or "REPOSITORY" in cell.source:
            continue
        tree = ast.parse(cell.source)
        above += [
            ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        if f'blank.check("{name}"' in cell.source:
            wanted = ast.parse(filled(cell.source)).body
            checked = [node for node in wanted if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            checked += [node for node in wanted if checks(ast.Module([node], []))]
            exec("\n".join([*above, *map(ast.unparse, checked)]), {})
    assert f"{name}: right" in capsys.readouterr().out


@pytest.mark.parametrize("name", EVERY)
def test_the_solutions_notebook_has_the_piece(name):
    cells = [
        cell.source
        for cell in notebook_of(name[:2], solutions=True).cells
        if cell.cell_type == "code"
    ]
    mine = next(source for source in cells if f'blank.check("{name}"' in source)
    assert EVERY[name].solution in mine


@pytest.mark.slow  # runs whole chapters
@pytest.mark.parametrize("number", [number for number in NUMBERS if blank.blanks(number)])
def test_a_chapter_with_all_blanks_filled_prints_what_it_prints_without(number, tmp_path):
    import execute

    notebook = notebook_of(number)
    for cell in notebook.cells:
        if cell.cell_type == "code" and "blank.check(" in cell.source:
            cell.source = filled(cell.source)
    path = tmp_path / f"{number}_filled.ipynb"
    nbformat.write(notebook, path)
    run = execute.run(path)
    assert not run.error, run.error
    for before, after in zip(notebook_of(number).cells, run.notebook.cells, strict=True):
        assert printed(after, rights=True) == printed(before, rights=False), before.source


def printed(cell: nbformat.NotebookNode, rights: bool) -> list[str]:
    """What a cell prints, without figures of this run and the lines about blanks, which say
    `rights` or not.
    """
    text = "".join(output.get("text", "") for output in cell.get("outputs", []))
    about = re.compile(r"^\d\d\.[A-Za-z_]\w*[: ][^.]*.*?goes\s+on\s+with\s+.*?\.$", re.M | re.S)
    assert all((": right" in said) == rights for said in about.findall(text)), about.findall(text)
    lines = about.sub("", text).splitlines()
    return [line for line in lines if line and not line.startswith(("live: ", "machine: "))]


# The machinery, on a chapter of its own


SMALL = '''
[blanks.double]
needs = "import math"
solution = """
def double(number):
    \\"\\"\\"Twice the number.\\"\\"\\"
    return math.fsum([number, number])
"""
hints = ["What is twice?", "Add it to itself."]
right = "right."
[blanks.double.names]
found = "answer(3)"
[[blanks.double.conditions]]
must = "answer(1) == 2"
says = "Twice one is not that."
mistakes = [["[number, number]", "[number]"]]
[[blanks.double.conditions]]
must = "answer(3) == 6"
says = "Of 3 it makes {found:g}."
mistakes = [["return math.fsum([number, number])", "return number + 1.0"]]
'''


def endless(number):
    return endless(number)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Chapter 99, which has one blank."""
    path = tmp_path / "exercises" / "99.toml"
    path.parent.mkdir()
    path.write_text(SMALL)
    monkeypatch.setattr(blank, "data_path", tmp_path.joinpath)
    monkeypatch.setattr(blank, "SESSION", Session())
    blank.blanks.cache_clear()
    yield path
    blank.blanks.cache_clear()


def described(number):
    """Twice the number."""
    ...


def half_written(number):
    twice = ...
    return twice


def half_kept(number):
    half_kept.twice = ...
    return half_kept.twice


class Watcher(TorchDispatchMode):  # torch wraps the method
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None): ...


class Doubler:
    def __init__(self, by):
        self.by = by

    def double(self, number): ...


def empty(number): ...


@pytest.mark.parametrize(
    "answer", [..., None, empty, described, half_written, half_kept, Doubler, Watcher]
)
def test_left_blank_the_chapter_goes_on_with_the_courses_piece(small, answer, capsys):
    piece = blank.check("99.double", answer)
    assert piece(5) == 10
    assert (
        capsys.readouterr().out
        == "99.double is blank, so the chapter goes on with the course's own.\n"
    )


def test_a_right_piece_in_other_words_is_used(small, capsys):
    def mine(number):
        return 2 * number

    assert blank.check("99.double", mine) is mine
    assert capsys.readouterr().out == "99.double: right. The chapter goes on with yours.\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda number: number + 1, "Of 3 it makes 4."),
        # Dots of an index do not make a piece a blank.
        (lambda number: number + int(torch.tensor([1, 0])[..., ::2]), "Of 3 it makes 4."),
        (lambda number: number, "Twice one is not that."),
        (lambda number: number / 0, "fails with ZeroDivisionError: division by zero."),
        (endless, "never ends (RecursionError)."),
        (lambda number: None if number == 3 else 2 * number, "returns nothing."),
        (lambda: 2, "fails with TypeError"),
        (7, "Twice one is not that."),
    ],
)
def test_a_wrong_piece_is_told_why_and_replaced(small, wrong, said, capsys):
    assert blank.check("99.double", wrong)(5) == 10
    out = " ".join(capsys.readouterr().out.split())
    assert said in out and out.endswith(
        "Until that is mended, the chapter goes on with the course's own."
    )


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx, d_y):
        return None, block(d_y)  # noqa: F821


class Number(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, rows=128):
        return 1.0


class Absent:
    def __init__(self, *given):
        self.see(given)

    def see(self, tensors):
        self.alive = [tensor.storage_address() for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("03.Recompute", Failing, "Your backward fails with NameError: name 'block' is not"),
        ("03.FusedLoss", Number, "Your forward returns no tensor"),
        ("02.Tracker", Absent, "Your see fails with AttributeError: 'Tensor' object has no"),
    ],
)
def test_a_class_that_fails_is_told_its_own_error_and_method(name, wrong, said):
    assert blank.judge(EVERY[name], wrong).text.startswith(said)


def test_an_accumulate_that_multiplies_by_a_reciprocal_is_right():
    def accumulate(loss_of, ids, labels, parts):
        scale, total = 1 / (labels[:, 1:] != -100).sum(), 0.0  # in fp32
        for few, right in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
            loss = loss_of(few, right) * scale
            loss.backward()
            total += loss.item()
        return total

    assert blank.judge(EVERY["03.accumulate"], accumulate).right


def test_hints_come_one_by_one_and_the_solution_is_source(small, capsys):
    for _ in range(3):
        blank.hint("99.double")
    blank.solution("99.double")
    first, second, third, *source = capsys.readouterr().out.splitlines()
    assert first == "99.double, hint 1 of 2: What is twice?" and second.endswith(
        "Add it to itself."
    )
    assert 'blank.solution("99.double")' in third
    assert source == [
        "def double(number):",
        '    """Twice the number."""',
        "    return math.fsum([number, number])",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [("99.triple", "no blank 99.triple: this chapter has 99.double"),
        ("98.double", "this chapter has none"),
     ("double", "named by chapter and piece"), (99, "named by chapter and piece")],
)  # fmt: skip
def test_an_unknown_blank_is_one_sentence(small, name, words):
    with pytest.raises(ExerciseError, match=words):
        blank.check(name, empty)


def test_a_mistake_that_is_no_text_of_the_solution_is_refused(small):
    small.write_text(SMALL.replace('["[number, number]", "[number]"]', '["numbers", "number"]'))
    with pytest.raises(ValueError, match="no text 'numbers'"):
        blank.blanks("99")
