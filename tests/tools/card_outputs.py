"""What chapters print and draw on a real card, for the site to show after the CPU's outputs.

    python tests/tools/card_outputs.py FOLDER     # executed notebooks and about.json, of on_card.py

Stored are the outputs that the card changes: of cells whose text differs from the stored
notebook's, and the figures of cells that use a name from such a cell. What a stand-in for a GPU
printed is refused. A cell that is another today is not shown.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import canonical
import nbformat
import settings
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from vramlab.base.files import write_atomically
from vramlab.interfaces.doctor import MARKER
from vramlab.measurement.share import PATH

FOLDER = settings.ROOT / "data" / "on_card"
MOST = 5 * 1024**2  # bytes of all that is stored
ABOUT = "about.json"  # card, driver, versions and date, written by on_card.py


def store(executed: Path) -> Path | None:
    """Store what the card changed in one executed notebook.

    Return the file; None where nothing differs.

    Raises ValueError where no real card ran it, as `about.json` beside it says, or it is another
    notebook than today's.
    """
    about = json.loads((executed.parent / ABOUT).read_text(encoding="utf-8"))
    # A stand-in for a GPU computes nothing, so what is printed there are no measurements.
    if not about["gpu"] or not about["driver"] or "stand-in" in about["driver"]:
        raise ValueError(f"{executed.name} was not run on a card: {about}")
    ran, kept = (
        nbformat.read(path, as_version=4) for path in (executed, settings.NOTEBOOKS / executed.name)
    )
    # Outputs of an older text would be shown beside a newer one.
    if [cell.source for cell in ran.cells] != [cell.source for cell in kept.cells]:
        raise ValueError(
            f"{executed.name} is another notebook than {settings.NOTEBOOKS / executed.name}"
        )
    cells = list(changed(ran, kept))
    if not cells:
        return None
    # A folder for each card, named as it calls itself.
    card = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    path = FOLDER / card / f"{executed.stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, json.dumps({"about": about, "cells": cells}, indent=1, ensure_ascii=False) + "\n"
    )
    return path


def changed(ran: NotebookNode, kept: NotebookNode) -> Iterator[dict[str, Any]]:
    """What is stored of each cell that the card changed."""
    of_the_card: set[str] = set()  # names that such a cell gave a value
    for number, (cell, before) in enumerate(zip(ran.cells, kept.cells, strict=True)):
        if cell.cell_type != "code":
            continue
        # The line about the environment differs on every machine and says nothing about the cell.
        text = [line for line in lines(cell) if not line.startswith(MARKER)]
        differs = text != [line for line in lines(before) if not line.startswith(MARKER)]
        loads, stores = names(cell.source)
        if differs:
            of_the_card |= stores
        # Figures are bytes that differ by the fonts of a machine, so it is the names they are drawn
        # from that count.
        pictures = list(figures(cell)) if differs or loads & of_the_card else []
        if differs or pictures:
            said = "\n".join(PATH.sub("…", line) for line in text) if differs else ""
            yield {
                "cell": number,
                "source": digest(cell.source),
                "text": said,
                "pictures": pictures,
            }


def lines(cell: NotebookNode) -> list[str]:
    """The lines that a cell printed or gave as its value."""
    said = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            said += output.text.splitlines()
        elif "data" in output and "image/png" not in output.data:
            said += output.data.get("text/plain", "").splitlines()
    return said


def figures(cell: NotebookNode) -> Iterator[dict[str, str]]:
    """The figures that a cell drew: PNG in base64, with the words that stand for it."""
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            yield {
                "alt": canonical.alternative_text(output, "image/png") or "",
                "png": output.data["image/png"].strip(),
            }


def names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell reads, and those to which it gives a value."""
    reads: set[str] = set()
    writes: set[str] = set()
    # An attribute or an item holds the node of its name, which counts as read even where something
    # is assigned to it.
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if isinstance(node, ast.Name):
            (writes if isinstance(node.ctx, ast.Store) else reads).add(node.id)
    return reads, writes


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def show(notebook: NotebookNode, target: Path) -> None:
    """Add to a notebook of the site, after each cell that a card changed, what it gave there.

    Figures are written beside `target`, the notebook's place.
    """
    after: dict[int, list[NotebookNode]] = {}
    for path in sorted(FOLDER.glob(f"*/{target.stem}.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        for part in stored["cells"]:
            # A cell that was edited since is skipped: what the card printed is of its earlier text.
            if part["cell"] < len(notebook.cells) and part["source"] == digest(
                notebook.cells[part["cell"]].source
            ):
                shown = nbformat.v4.new_markdown_cell(words(stored["about"], part, path, target))
                after.setdefault(part["cell"], []).append(shown)
    cells = []
    # Inserted after all are known, or each insertion would move the numbers behind it.
    for number, cell in enumerate(notebook.cells):
        cells += [cell, *after.get(number, [])]
    notebook.cells = cells


def words(about: dict[str, str], part: dict[str, Any], path: Path, target: Path) -> str:
    """What a cell gave on a card, in MyST: text as it was printed, figures as files."""
    versions = " · ".join(
        f"{name} {about[name]}" for name in ("driver", "torch", "transformers") if about[name]
    )
    # Notebooks that share a card also share its time.
    blurred = f" · {about['jobs']} notebooks at a time" if about["jobs"] > 1 else ""
    heading = f"On this card: {about['gpu']} · {versions} · {about['date']}{blurred}"
    # Four backquotes, since the block of printed text inside has three.
    said = [f"````{{admonition}} {heading}", ":class: on-card", ""]
    if part["text"]:
        said += ["```text", part["text"], "```", ""]
    for number, picture in enumerate(part["pictures"]):
        name = f"{path.stem}-{path.parent.name}-{part['cell']}-{number}.png"
        target.with_name(name).write_bytes(base64.b64decode(picture["png"]))
        # Brackets would end the alternative text.
        said += [f"![{re.sub(r'([][])', r'', picture['alt'])}]({name})", ""]
    return "\n".join([*said, "````"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    wrong = 0
    for path in sorted(parser.parse_args().folder.glob("[0-9][0-9]_*.ipynb")):
        try:
            print(path.name, store(path) or "nothing that the card changes")
        except ValueError as error:
            print(error, file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
