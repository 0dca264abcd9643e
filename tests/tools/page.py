"""Executed notebooks as web pages that need no network.

Styles and figures are inside, formulas are MathML, and there are no scripts.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import canonical
import nbformat
from execute import Run
from jinja2 import Environment, FileSystemLoader, pass_context
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from settings import TOOLS

TEMPLATES = FileSystemLoader(TOOLS / "templates")


class MathML(IPythonRenderer):
    """Markdown whose formulas every current browser draws by itself."""

    def block_math(self, body: str) -> str:
        return _formula(body, "block") or super().block_math(body)

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline") or super().inline_math(body)

    def latex_environment(self, name: str, body: str) -> str:
        tex = f"\\begin{{{name}}}{body}\\end{{{name}}}"
        return _formula(tex, "block") or super().latex_environment(name, body)


def _formula(tex: str, display: str) -> str:
    """MathML, or "" for a formula that the converter cannot read.

    That one is then shown as it was written.
    """
    try:
        return convert(tex, display=display)
    except Exception:  # it raises a dozen kinds, IndexError among them
        return ""


class Exporter(HTMLExporter):
    @pass_context
    def markdown2html(self, context, source: str) -> str:
        return MarkdownWithMath(renderer=MathML(escape=False, exclude_anchor_links=True)).render(
            source
        )


def chapter(run: Run, links: dict[str, str] | None = None) -> str:
    """The executed notebook as one HTML page.

    `links` are what its navigation says, each with its address.
    """
    # A copy: the executed notebook is written with its badge.
    notebook = nbformat.from_dict(run.notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # the badge is a picture from the network
            cell.source = re.sub(r"\[!\[Open in Colab\]\(\S+\)\]", "[Open in Colab]", cell.source)
    exporter = Exporter(
        template_name="lab", template_file="chapter.html.j2", extra_loaders=[TEMPLATES]
    )
    return exporter.from_notebook_node(
        notebook, {"metadata": {"name": run.title}, "links": links or {}}
    )[0]


def index(runs: list[Run], machine: str, witnesses: str = "") -> str:
    """The front page: each chapter with its result, solutions and time.

    Then comes the three witnesses' table as text.
    """
    template = Environment(loader=TEMPLATES, autoescape=True).get_template("index.html.j2")
    solutions = {run.path: path.stem for run in runs if (path := solutions_of(run)).exists()}
    seconds = sum(run.seconds for run in runs)
    return template.render(
        runs=runs, machine=machine, witnesses=witnesses, solutions=solutions, seconds=seconds
    )


def save(run: Run, folder: Path, course: Sequence[Path] = ()) -> None:
    """Write the executed notebook and its page into `folder`.

    So is its solutions' page, from their stored outputs.

    `course` are all notebooks that are run: the page links to those before and after its own.
    """
    stem = run.path.stem
    stems = [path.stem for path in course]
    at = stems.index(stem) if stem in stems else 0
    around = {"← previous": stems[max(at - 1, 0) : at], "next →": stems[at + 1 : at + 2]}
    links = {words: f"{found[0]}.html" for words, found in around.items() if found}
    if (solutions := solutions_of(run)).exists():
        links["solutions"] = f"{solutions.stem}.html"
        stored = Run(solutions, nbformat.read(solutions, as_version=4), 0.0)
        back = {"the chapter": f"{stem}.html"}
        (folder / f"{solutions.stem}.html").write_text(chapter(stored, back), encoding="utf-8")
    (folder / run.path.name).write_text(canonical.text(run.notebook), encoding="utf-8")
    (folder / f"{stem}.html").write_text(chapter(run, links), encoding="utf-8")


def solutions_of(run: Run) -> Path:
    """Where a chapter's solutions would be."""
    return run.path.parent / "solutions" / f"{run.path.stem}_solutions.ipynb"
