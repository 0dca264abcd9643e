"""The one form in which notebooks are committed, and what is wrong with those that are not.

`--check` says what is wrong, `--write` puts right what it can.

`--write` never invents a result: counts, outputs and figures come from running the notebook (`make
notebooks`). nbval lets through a cell without a count, a skipped cell and any picture, so what it
cannot see is refused here.
"""

import argparse
import ast
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hands
import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from settings import ROOT, TOOLS, all_notebooks, notebook_path, repository_url

MAX_BYTES = 1_000_000
SETUP = (TOOLS / "setup_cell.py").read_text().rstrip("\n")
SETUP_START = SETUP.split(" ", 2)[
    1
]  # "Set-up.": how a set-up cell of an earlier version is recognised
BADGE_START = "[![Open in Colab]("
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "pygments_lexer": "ipython3"}
GPU = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4"},
}  # the only other metadata, for chapters that gain by a GPU
WIDGET = "application/vnd.jupyter.widget-view+json"
# GitHub renders none of these, and nbval compares them with nothing.
FOREIGN_OUTPUTS = (WIDGET, "application/javascript", "application/vnd.plotly.v1+json")
FOLD = re.compile(
    r"^<details><summary>[^\n<]+</summary>\n\n(?:(?!</?details).)+\n\n</details>$",
    re.MULTILINE | re.DOTALL,
)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SKIPS = re.compile(r"#\s*(nbval|pytest_validate)_\w+", re.IGNORECASE)
ABSOLUTE = re.compile(r"(?<![\w./:~-])/(?:home|root|Users|work|tmp)\b|(?<!\w)[A-Za-z]:\\{1,2}\w")
# A tagged figure of this run (vramlab_course.live) is not compared by nbval, so a size in one needs
# an assert beside it.
LIVE_SIZE = re.compile(r"^live: .*\d\s?(?:[KMGT]i?B|bytes)\b(?!/s)", re.MULTILINE)


def setup_source(url: str) -> str:
    """The set-up cell's text for the repository at `url`."""
    return SETUP.replace("https://repository.invalid", url)


def badge(url: str, name: str) -> str:
    """The Colab badge of the notebook `name` in the repository at `url`.

    `name` is the notebook's path from the repository's root.
    """
    target = url.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"{BADGE_START}https://colab.research.google.com/assets/colab-badge.svg)]({target}/blob/main/{name})"


def alternative_text(output: NotebookNode, mime: str) -> str:
    """What a figure's output says to who cannot see it, "" when nothing."""
    about = output.metadata.get(mime)
    return about.get("alt", "") if isinstance(about, dict) else ""


def says_in_text(output: NotebookNode) -> bool:
    """Whether an output's text is more than the one line by which any widget describes itself."""
    return "\n" in output.get("data", {}).get("text/plain", "")


def notebook_name(path: Path, root: Path = ROOT) -> str:
    """The notebook's path from the repository's `root`, also for a copy that lies elsewhere."""
    path = path.resolve()
    return (
        path.relative_to(root).as_posix() if path.is_relative_to(root) else f"notebooks/{path.name}"
    )


def text(nb: NotebookNode) -> str:
    """The notebook as the file holds it: indent 1, sorted keys, a newline at the end."""
    return nbformat.writes(nb, indent=1, sort_keys=True, ensure_ascii=False).rstrip("\n") + "\n"


def canonical(nb: NotebookNode, url: str, name: str) -> NotebookNode:
    """A copy in canonical form: ids, metadata, badge and set-up cell.

    Sources, counts and outputs stay as they are.

    Only of a widget that also says in text what it shows, the text alone is kept.
    """
    # The caller compares the copy with what it read.
    nb = copy.deepcopy(nb)
    nb.nbformat = 4
    nb.nbformat_minor = 5
    # Asked before all metadata are replaced: a chapter says by itself that it gains by a GPU.
    asks_gpu = nb.metadata.get("accelerator") == "GPU"
    nb.metadata = nbformat.from_dict(
        {"kernelspec": KERNELSPEC, "language_info": LANGUAGE, **(GPU if asks_gpu else {})}
    )
    _write_badge(nb, badge(url, name))
    _write_setup(nb, setup_source(url))
    for number, cell in enumerate(nb.cells, 1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict(metadata_of(cell))
        # Blanks at line ends would differ from editor to editor, and nobody sees them in a review.
        cell.source = "\n".join(line.rstrip() for line in cell.source.splitlines())
        for output in cell.get("outputs", []):
            if says_in_text(output):
                output.data.pop(WIDGET, None)
            if "metadata" in output:  # alternative texts and widths stay, all else goes
                own = {
                    mime: about
                    for mime, about in output.metadata.items()
                    if alternative_text(output, mime)
                }
                kept = {
                    mime: {k: about[k] for k in ("alt", "width") if k in about}
                    for mime, about in own.items()
                }
                output.metadata = nbformat.from_dict(kept)
    return nb


def metadata_of(cell: NotebookNode) -> dict[str, dict[str, bool]]:
    """The metadata that a cell may have: JupyterLab folds the set-up cell away."""
    is_setup = cell.cell_type == "code" and cell.source.startswith("# " + SETUP_START)
    return {"jupyter": {"source_hidden": True}} if is_setup else {}


def _write_badge(nb: NotebookNode, line: str) -> None:
    # The badge belongs into the first text, under its title.
    first = next((cell for cell in nb.cells if cell.cell_type == "markdown"), None)
    if first is None:
        return
    kept = [old for old in first.source.splitlines() if not old.startswith(BADGE_START)]
    had = len(kept) < len(first.source.splitlines())
    if had:  # where it stood
        where = next(
            i for i, old in enumerate(first.source.splitlines()) if old.startswith(BADGE_START)
        )
        kept.insert(where, line)
    else:  # under the title
        kept[1:1] = ["", line]
    first.source = "\n".join(kept)


def _write_setup(nb: NotebookNode, source: str) -> None:
    first = next((cell for cell in nb.cells if cell.cell_type == "code"), None)
    if first is not None and first.source.lstrip("# ").startswith(SETUP_START):
        first.source = source
        return
    # Behind the title, so that a reader does not begin with an install.
    after = next((i + 1 for i, cell in enumerate(nb.cells) if cell.cell_type == "markdown"), 0)
    nb.cells.insert(after, nbformat.v4.new_code_cell(source))


def problems(path: Path, url: str | None = None) -> list[str]:
    """What is wrong with the notebook at `path`, one sentence each; [] when it may be committed."""
    # The text itself is kept, since the layout is compared letter by letter at the end.
    raw = path.read_text(encoding="utf-8")
    try:
        nb = nbformat.reads(raw, as_version=nbformat.NO_CONVERT)
        nbformat.validate(nb)
    # nbformat and jsonschema raise errors without a class in common.
    except Exception as error:
        return [f"is no valid notebook: {str(error).splitlines()[0]}"]
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        return [f"has format {nb.nbformat}.{nb.nbformat_minor}, not 4.5"]
    url = url or repository_url()
    found = list(_notebook_problems(nb, len(raw.encode()), url, notebook_name(path)))
    # In solutions the blanks are filled in and the guesses made.
    if "/solutions/" not in notebook_name(path):
        found += hands.problems(nb)
    count = 0
    for number, cell in enumerate(nb.cells, 1):
        kinds = list(_cell_problems(cell))
        if cell.cell_type == "code":
            count += 1
            kinds = [*_count_problems(cell, count), *kinds, *_code_problems(cell)]
        found += [f"cell {number}: {kind}" for kind in kinds]
    # With other problems the layout is no news: --write would change it anyway.
    if not found and raw != text(canonical(nb, url, notebook_name(path))):
        found.append(
            "is not laid out as --write lays it out (key order, indent, blanks at line ends, "
            "last newline)"
        )
    return found


def _notebook_problems(nb: NotebookNode, size: int, url: str, name: str) -> Iterator[str]:
    if size > MAX_BYTES:
        yield f"has {size:,} bytes, and {MAX_BYTES:,} is the limit"
    if "widgets" in nb.metadata:
        yield "holds widget state, which GitHub cannot render"
    expected = canonical(nb, url, name)
    if dict(nb.metadata) != dict(expected.metadata):
        stray = sorted(set(nb.metadata) ^ set(expected.metadata) - {"widgets"}) or [
            "kernelspec or language_info"
        ]
        yield f"has other metadata than the canonical: {', '.join(stray)}"
    markdown = [cell.source for cell in nb.cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    # The site's page and its entry in the navigation take their title from there.
    if not nb.cells or nb.cells[0].cell_type != "markdown" or not markdown[0].startswith("# "):
        yield "does not begin with a markdown cell that begins with a title ('# …')"
    elif badge(url, name) not in markdown[0].splitlines():
        yield "has no Colab badge for this repository's address in its first markdown cell"
    if not code or code[0] != setup_source(url):
        yield "has a first code cell that is not the set-up cell of tests/tools/setup_cell.py"
    if [cell.get("id") for cell in nb.cells] != [
        f"cell-{n:02d}" for n in range(1, len(nb.cells) + 1)
    ]:
        yield "has cell ids other than cell-01, cell-02, …"


def _cell_problems(cell: NotebookNode) -> Iterator[str]:
    if cell.metadata.get("tags"):
        yield (
            f"tags are not used ({', '.join(cell.metadata.tags)}); a skipped cell is an "
            f"unchecked one"
        )
    elif cell.metadata != metadata_of(cell):
        stray = ", ".join(sorted(cell.metadata)) or "none, and a set-up cell is folded"
        yield f"stray cell metadata: {stray}"
    if match := ABSOLUTE.search(cell.source):
        yield f"an absolute path in the source: {_around(cell.source, match)}"
    if cell.get("attachments"):
        yield "attachments are not used"
    if cell.cell_type == "markdown":
        yield from _markdown_problems(cell.source)


def _markdown_problems(source: str) -> Iterator[str]:
    if re.search(r"</?details", FOLD.sub("", source)):
        yield (
            "a fold that not every viewer shows: <details><summary>…</summary>, a blank line, "
            "its text, a blank line, </details>"
        )
    # The site's colours read such a block as Python, which a line for the shell is not.
    for block in PYTHON_BLOCK.findall(source):
        if re.search(r"^\s*[!%]", block, re.MULTILINE):
            yield "a ```python block with a line for the shell: leave out its language"


def _count_problems(cell: NotebookNode, count: int) -> Iterator[str]:
    if cell.execution_count is None:
        yield "no execution count, and nbval compares nothing without one: run the notebook"
    elif cell.execution_count != count:
        yield f"execution count {cell.execution_count} where a run from top to bottom gives {count}"


def _code_problems(cell: NotebookNode) -> Iterator[str]:
    source = cell.source
    if not source.strip():
        yield "an empty code cell"
        return
    if match := SKIPS.search(source):
        yield f"the marker '{match[0]}' switches the comparison off"
    if re.search(r"^\s*%matplotlib\b", source, re.MULTILINE):
        yield "%matplotlib is not needed"
    if re.search(r"^\s*[!%].*\bpip3? install\b", source, re.MULTILINE):
        yield "only the set-up cell installs anything"
    if source.rstrip().endswith(";"):
        yield "ends with a semicolon, after which nbval's output differs: end with plt.show()"
    # All outputs are looked through before the question is asked, since a figure may stand in any.
    images = False
    for output in cell.outputs:
        images |= any(mime.startswith("image/") for mime in output.get("data", {}))
        yield from _output_problems(output)
    if images and not _ends_with_show(source):
        yield "draws a figure and does not end with plt.show()"
    if any(LIVE_SIZE.search(part) for part in _output_texts(cell)) and "assert " not in source:
        yield (
            "prints a size as a live figure, which nbval does not compare, and asserts nothing "
            "about it"
        )


def _output_problems(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"an error output: {output.ename}"
    if output.output_type == "stream" and output.name == "stderr":
        yield (
            f"output on stderr: "
            f"{output.text.strip().splitlines()[0][:80] if output.text.strip() else '(blank)'}"
        )
    for mime, data in output.get("data", {}).items():
        # In canonical form a widget that also says in text what it shows is text alone, so what is
        # found here says nothing.
        if mime in FOREIGN_OUTPUTS:
            yield f"an output that GitHub cannot render: {mime}"
        if mime.startswith("image/") and not alternative_text(output, mime):
            yield "a figure without alternative text"
        if not mime.startswith("image/") and (match := ABSOLUTE.search(str(data))):
            yield f"an absolute path in the output: {_around(str(data), match)}"
    if match := ABSOLUTE.search(output.get("text", "")):
        yield f"an absolute path in the output: {_around(output.text, match)}"


def _output_texts(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        yield output.get("text", "")
        yield str(output.get("data", {}).get("text/plain", ""))


def _ends_with_show(source: str) -> bool:
    """Whether the last statement is `plt.show()`.

    Cell magics and shell lines are read as IPython reads them.
    """
    try:
        # Magics such as %time are no Python until IPython has rewritten them.
        body = ast.parse(TransformerManager().transform_cell(source)).body
    except SyntaxError:
        return False
    return bool(body) and ast.unparse(body[-1]) == "plt.show()"


def _around(where: str, match: re.Match) -> str:
    line = where[where.rfind("\n", 0, match.start()) + 1 :].split("\n", 1)[0].strip()
    return repr(line if len(line) <= 80 else match[0])


def write(path: Path, url: str | None = None, root: Path = ROOT) -> bool:
    """Put the notebook at `path` into canonical form; True when that changed the file."""
    old = path.read_text(encoding="utf-8")
    new = text(
        canonical(
            nbformat.reads(old, as_version=4),
            url or repository_url(root),
            notebook_name(path, root),
        )
    )
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    parser.add_argument(
        "notebooks", nargs="*", type=notebook_path, help="all of the course when none is named"
    )
    arguments = parser.parse_args()
    paths = arguments.notebooks or all_notebooks()
    if arguments.write:
        for path in paths:
            if write(path):
                print(f"wrote {notebook_name(path)}")
        return 0
    wrong = {path: found for path in paths if (found := problems(path))}
    for path, found in wrong.items():
        print(*(f"{notebook_name(path)}: {problem}" for problem in found), sep="\n")
    print(f"notebook gate: {len(paths) - len(wrong)} of {len(paths)} in canonical form")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
