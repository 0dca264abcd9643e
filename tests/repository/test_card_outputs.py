"""What a card prints in the chapters: stored where it differs, shown on the site, never a
stand-in's.
"""

import json

import card_outputs
import nbformat
import on_card
import pytest
import settings
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ABOUT = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "driver": "580.1",
    "python": "3.12.3",
    "torch": "2.11.0",
    "transformers": "5.23.0",
    "date": "2026-11-26",
    "jobs": 1,
}
SOURCES = [
    "device = where()\nprint(device)",
    "print(1 + 1)",
    "draw(device)\nplt.show()",
    "draw(2)\nplt.show()",
]
PNG = "iVBORw0KGgo="


def notebook(on: str, sources: list[str] = SOURCES) -> nbformat.NotebookNode:
    picture = new_output(
        "display_data", {"image/png": PNG}, metadata={"image/png": {"alt": "Bars [of it]."}}
    )
    stamp = f"machine: {on}\n"
    outputs = [
        [new_output("stream", text=f"{stamp}{on}\n")],
        [new_output("stream", text="2\n")],
        [picture],
        [picture],
    ]
    cells = [
        new_code_cell(source, outputs=output)
        for source, output in zip(sources, outputs, strict=True)
    ]
    return new_notebook(cells=[new_markdown_cell("# 00 · A chapter"), *cells])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A stored notebook as a CPU ran it, and as a card ran it, with what is said about the card."""
    monkeypatch.setattr(settings, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(card_outputs, "FOLDER", tmp_path / "on_card")
    for name, on in (("notebooks", "cpu"), ("ran", "cuda in /home/grace/work")):
        (tmp_path / name).mkdir()
        nbformat.write(notebook(on), tmp_path / name / "00_chapter.ipynb")
    (tmp_path / "ran" / "about.json").write_text(json.dumps(ABOUT))
    return tmp_path


def test_what_the_card_changes_is_stored_and_nothing_else(folders):
    path = card_outputs.store(folders / "ran" / "00_chapter.ipynb")
    assert path == folders / "on_card" / "nvidia-h100-80gb-hbm3" / "00_chapter.json"
    stored = json.loads(path.read_text())
    assert stored["about"] == ABOUT
    said = [(part["cell"], part["text"], len(part["pictures"])) for part in stored["cells"]]
    assert said == [(1, "cuda in …", 0), (3, "", 1)], "cell 4's figure uses nothing of the card's"


def test_where_nothing_differs_nothing_is_stored(folders):
    nbformat.write(notebook("cpu"), folders / "ran" / "00_chapter.ipynb")
    assert (
        card_outputs.store(folders / "ran" / "00_chapter.ipynb") is None
        and not (folders / "on_card").exists()
    )


@pytest.mark.parametrize("change", [{"driver": "580.0-stand-in"}, {"driver": None}, {"gpu": None}])
def test_what_no_card_ran_is_refused(folders, change):
    (folders / "ran" / "about.json").write_text(json.dumps(ABOUT | change))
    with pytest.raises(ValueError, match="was not run on a card"):
        card_outputs.store(folders / "ran" / "00_chapter.ipynb")


def test_another_notebook_than_todays_is_refused(folders):
    changed = notebook("cuda", ["device = where(1)", *SOURCES[1:]])
    nbformat.write(changed, folders / "ran" / "00_chapter.ipynb")
    with pytest.raises(ValueError, match="is another notebook than"):
        card_outputs.store(folders / "ran" / "00_chapter.ipynb")


def test_the_site_shows_it_after_the_cpus_as_long_as_the_cell_is_the_same(folders):
    card_outputs.store(folders / "ran" / "00_chapter.ipynb")
    shown = notebook("cpu", [*SOURCES[:2], "draw(device, 3)\nplt.show()", SOURCES[3]])
    card_outputs.show(shown, folders / "site" / "00_chapter.ipynb")
    kinds = [cell.cell_type for cell in shown.cells]
    assert kinds == ["markdown", "code", "markdown", "code", "code", "code"], (
        "a figure of another cell is left out"
    )
    heading, *rest = shown.cells[2].source.splitlines()
    versions = "driver 580.1 · torch 2.11.0 · transformers 5.23.0 · 2026-11-26"
    assert heading == f"````{{admonition}} On this card: NVIDIA H100 80GB HBM3 · {versions}"
    assert "cuda in …" in rest


def test_a_figure_is_a_file_beside_the_page(folders):
    card_outputs.store(folders / "ran" / "00_chapter.ipynb")
    shown = notebook("cpu")
    (folders / "site").mkdir()
    card_outputs.show(shown, folders / "site" / "00_chapter.ipynb")
    name = "00_chapter-nvidia-h100-80gb-hbm3-3-0.png"
    assert f"![Bars of it.]({name})" in shown.cells[5].source
    assert (folders / "site" / name).read_bytes() == b"\x89PNG\r\n\x1a\n"


def test_what_is_stored_is_small_and_of_a_real_card():
    files = sorted(card_outputs.FOLDER.glob("*/*.json"))
    assert sum(path.stat().st_size for path in files) <= card_outputs.MOST
    for path in files:
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert "stand-in" not in stored["about"]["driver"] and stored["cells"]
        assert (settings.NOTEBOOKS / f"{path.stem}.ipynb").exists()


def test_chapters_that_show_most_of_a_card_come_first():
    order = [path.stem[:2] for path in on_card.in_order(settings.chapters())]
    assert order[:3] == ["07", "08", "00"] and sorted(order) == [
        path.stem[:2] for path in settings.chapters()
    ]


def test_what_a_card_gave_is_of_a_cell_as_it_stands():
    stale = []
    for path in sorted(card_outputs.FOLDER.glob("*/*.json")):
        cells = nbformat.read(settings.NOTEBOOKS / f"{path.stem}.ipynb", as_version=4).cells
        for part in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = cells[part["cell"]].source if part["cell"] < len(cells) else ""
            if part["source"] != card_outputs.digest(source):
                stale.append(f"{path.name}: cell {part['cell']} has changed, drop what it gave")
    assert stale == []
