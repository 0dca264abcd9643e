"""`make site`: the course as a web site, from the outputs that are stored in the notebooks.

It goes into build/site.

Nothing is executed but the experiments of the claims, whose verdicts are computed now. A warning of
Sphinx, a link that leads nowhere and a page that would fetch anything from the network are errors.
"""

import argparse
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import canonical
import card_outputs
import nbformat
import settings
import simulated_tables
import site_evidence
import site_links
import site_pages
import web_calculator
from vramlab.measurement.records import measurements_folder
from vramlab_course.claims import Verdict, judge, load_claims

SITE = settings.ROOT / "site"
BUILD = settings.ROOT / "build"
JOBS = "auto"  # processes of Sphinx


def notebooks() -> list[Path]:
    """Every notebook of the site.

    The chapters and what else stands beside them come first, then the solutions.
    """
    return sorted(settings.NOTEBOOKS.glob("*.ipynb")) + sorted(
        (settings.NOTEBOOKS / "solutions").glob("*.ipynb")
    )


def assemble(
    source: Path, notebooks: Sequence[Path], verdicts: Iterable[Verdict], pyodide: Path | None
) -> None:
    """Lay out in `source` what Sphinx reads.

    That is the folder site/, the README, the notebooks and the generated pages.

    `pyodide` is the folder of Pyodide's files, without which the calculator does not start.

    Notebooks keep their place under notebooks/, so that their links to each other are the site's.
    """
    # Pages that are gone from the sources must not stay in the site.
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(SITE, source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(settings.NOTEBOOKS / "figures", source / "notebooks" / "figures")
    places = [path.relative_to(settings.ROOT).as_posix() for path in notebooks]
    readme = (settings.ROOT / "README.md").read_text(encoding="utf-8")
    (source / "README.md").write_text(
        site_links.link_files(readme, "README.md", places), encoding="utf-8"
    )
    for page in ("index.md", "use.md", "accuracy.md"):
        text = (SITE / page).read_text(encoding="utf-8")
        linked = site_links.link_files(text, f"site/{page}", places)
        (source / page).write_text(linked, encoding="utf-8")
    titles = {}
    uses = {}
    tested = set()
    glossary = source / "glossary.md"
    # Read before any chapter is linked, as links go both ways: to the glossary and back.
    terms = site_links.glossary_terms(glossary.read_text(encoding="utf-8"))
    for path, place in zip(notebooks, places, strict=True):
        notebook = for_the_site(nbformat.read(path, as_version=4), place, places)
        if chapter := re.fullmatch(r"notebooks/(\d\d)_\w+\.ipynb", place):
            titles[chapter[1]] = place, notebook.cells[0].source.splitlines()[0].removeprefix("# ")
            # Which words this chapter uses, so that the glossary can lead back to them.
            uses[chapter[1]] = site_links.link_terms(notebook.cells, terms, chapter[1])
            tested |= site_links.link_claims(notebook.cells, load_claims(chapter[1]).values())
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        # Last, as it inserts cells: until then they have the numbers of the stored notebook.
        card_outputs.show(notebook, target)
        nbformat.write(notebook, target)
    text = site_links.link_back(glossary.read_text(encoding="utf-8"), uses, places)
    glossary.write_text(site_links.link_mentions(text, "glossary.md", places), encoding="utf-8")
    pages = {
        "claims": site_pages.claims_page(verdicts, titles, tested),
        "usual": web_calculator.usual_answers(),
        "quick": web_calculator.quick_answers(),
        "grpo": simulated_tables.answers("grpo"),
        "images": simulated_tables.answers("images"),
        "largest": simulated_tables.answers("largest"),
        "reference": site_pages.reference_page(),
        "accuracy": site_evidence.summary(),
        "published": site_evidence.runs_table(),
        "speed": site_evidence.speed_page(
            source / "static" / "step_times.png", "/static/step_times.png"
        ),
        "records": site_evidence.records_page(measurements_folder(), site_evidence.wanted()),
    }
    generated = source / "generated"
    generated.mkdir()
    for name, page in pages.items():
        (generated / f"{name}.md").write_text(page, encoding="utf-8")
    llms = site_pages.llms_page(source, places, os.environ.get("SITE_URL", ""))
    (source / "llms.txt").write_text(llms, encoding="utf-8")
    shutil.copy(settings.ROOT / "data" / "schema.json", source / "static" / "schema.json")
    site_evidence.open_graph(source / "static" / "open_graph.png")
    calculator = source / "static" / "calculator"
    if pyodide:
        web_calculator.lay_out(calculator, pyodide)
    else:
        web_calculator.write_archive(calculator / "vramlab.zip")


def for_the_site(
    notebook: nbformat.NotebookNode, here: str, places: Sequence[str]
) -> nbformat.NotebookNode:
    """The notebook as the site shows it.

    Its set-up is left out of page and search, mentions are links, figures say what they show, and
    there is no badge, which would be a picture from the network.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            source = re.sub(r"\[!\[Open in Colab\]\(\S+\)\]", "[Open in Colab]", cell.source)
            cell.source = site_links.link_mentions(
                site_links.link_files(source, here, places), here, places
            )
        # The only cell with metadata of its own is the set-up cell.
        elif canonical.metadata_of(cell):
            cell.metadata["tags"] = ["remove-cell"]
        else:
            alts = [
                canonical.alternative_text(output, "image/png")
                for output in cell.outputs
                if "metadata" in output
            ]
            if any(alts):
                # MyST-NB has one alternative text for all figures of a cell.
                cell.metadata["mystnb"] = {"image": {"alt": " ".join(filter(None, alts))}}
    return notebook


def render(source: Path, out: Path) -> int:
    """Run Sphinx; its exit status, which a warning makes 1."""
    from sphinx.cmd.build import build_main

    return build_main(
        [
            # Names that lead nowhere are warnings too, and with -W warnings are errors.
            "-n",
            "-W",
            "--keep-going",
            "-q",
            "-j",
            JOBS,
            "-b",
            "html",
            "-d",
            f"{out}.doctrees",
            str(source),
            str(out),
        ]
    )


def lighten(out: Path) -> None:
    """Mend what the theme does to the pages.

    It has 0.5 MB of icons that its style sheet has too, a doubled title, and names that hide a
    text.
    """
    for path in out.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        # The label would replace the words of a summary for who hears the page.
        page = page.replace('<summary aria-label="Toggle hidden content">', "<summary>")
        page = re.sub(
            r'(<button class="btn search-button-field[^>]*) aria-label="Search"', r"\1", page
        )
        page = re.sub(r'<script[^>]*src="[^"]*/fontawesome\.js[^"]*"[^>]*></script>', "", page)
        page = page.replace("<title>VRAM Lab &#8212; VRAM Lab<", "<title>VRAM Lab<")
        sidebar = 'class="bd-sidebar-primary bd-sidebar"'
        page = page.replace(sidebar, f'{sidebar} role="region" aria-label="Pages"')
        page = wrap_sentences(page)
        path.write_text(frame_figures(page, path.parent), encoding="utf-8")


PRINTED = re.compile(
    r'(<div class="output [^>]*highlight-[^>]*><div class="highlight"><pre>(?:<span></span>)?)'
    r"(.*?)(</pre>)",
    re.DOTALL,
)
NARROW = 40  # letters, which every phone has room for


def wrap_sentences(page: str) -> str:
    """The page with the printed sentences marked, which wrap, while tables of text scroll."""

    def mark(line: str) -> str:
        # Two blanks in a row are a table's columns, which must not wrap.
        is_table = "  " in line.strip() or len(re.sub(r"<[^>]*>|&[a-z]+;", "", line)) < NARROW
        # A span of highlighting that goes over a line's end would be cut by another one.
        is_whole = line.count("<span") == line.count("</span")
        return f'<span class="sentence">{line}</span>' if is_whole and not is_table else line

    def block(found: re.Match) -> str:
        return found[1] + "\n".join(map(mark, found[2].split("\n"))) + found[3]

    return PRINTED.sub(block, page)


def frame_figures(page: str, folder: Path) -> str:
    """The page with each figure at the size that its resolution asks for, linked to the full one.

    The figures are those of `folder`'s site.

    100 dots an inch are shown pixel by pixel, 200 in half the size. The first is loaded at once,
    others when they are near.
    """
    count = 0

    def frame(found: re.Match) -> str:
        nonlocal count
        image = found["image"]
        place = folder / unquote(found["src"])
        if place.suffix != ".png" or not place.is_file():
            return found[0]
        (width, height), scale = read_png(place)
        size = f'width="{round(width / scale)}" height="{round(height / scale)}"'
        # The first figure is what a reader waits for.
        lazy = ' loading="lazy"' if count else ""
        count += 1
        return (
            f'<a class="full" href="{found["src"]}">{image[:-1].rstrip("/ ")} {size}{lazy} '
            f'decoding="async"></a>'
        )

    # A figure with a width of its own has a link already, and a link in a link is none.
    return re.sub(
        r'(?P<linked><a class="reference internal image-reference"[^>]*>\s*)?'
        r'(?P<image><img (?=[^>]*src="(?P<src>[^":]*_images/[^"]+)")[^>]*>)(?(linked)\s*</a>)',
        frame,
        page,
    )


def read_png(path: Path) -> tuple[tuple[int, int], int]:
    """Width and height of a PNG file in pixels, and how many pixels it has for one of the page.

    The latter is a whole number.
    """
    from PIL import Image

    with Image.open(path) as image:
        # matplotlib writes the resolution into the file; a picture without one has 100 dots an
        # inch.
        return image.size, max(1, round(image.info.get("dpi", (100,))[0] / 100))


# --- links


class Page(HTMLParser):
    """What a page of HTML offers and asks for.

    That is its anchors, its links, and what a browser would load with it.
    """

    def __init__(self):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value is not None}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        # These only name other pages; a browser fetches what other kinds of link name.
        elif tag == "link" and given.get("rel") in (
            "canonical",
            "search",
            "next",
            "prev",
            "index",
            "author",
        ):
            self.links.extend([given["href"]] if "href" in given else [])
        else:
            self.loaded += [
                given[name] for name in ("src", "href", "data", "poster") if name in given
            ]

    handle_startendtag = handle_starttag


def read_page(path: Path) -> Page:
    """The page at `path`, taken apart."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def check(out: Path) -> tuple[list[str], Counter]:
    """Look through every page under `out`.

    Return what is wrong, a line each, and how often each external link stands there.

    Wrong are links and files inside the site that lead nowhere, and whatever a browser would fetch
    from elsewhere.
    """
    pages = {
        path: read_page(path) for path in sorted(out.rglob("*.html")) if "_static" not in path.parts
    }
    wrong = []
    external = Counter()
    for path, page in pages.items():
        name = path.relative_to(out).as_posix()
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") or parts.netloc:
                # A link may lead anywhere, and only what is loaded by itself would tell others of
                # the reader.
                if link in page.links:
                    external[link] += 1
                else:
                    wrong.append(f"{name} loads {link} from the network")
            elif parts.scheme not in ("data", "mailto", "javascript") and (
                said := _missing(path, parts, pages)
            ):
                wrong.append(f"{name}: {link} {said}")
    return wrong, external


def _missing(path: Path, parts, pages: dict[Path, Page]) -> str:
    """Why a link inside the site leads nowhere; "" when it leads somewhere."""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        # What a server answers for a folder.
        target /= "index.html"
    if not target.is_file():
        return "is not there"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "has no such anchor"
    return ""


def make(
    notebooks: Sequence[Path], verdicts: Iterable[Verdict], build: Path, pyodide: Path | None = None
) -> tuple[list[str], Counter]:
    """Go the whole way, from the notebooks to `build`/site.

    Sphinx reads `build`/site-source; the calculator alone goes into `build`/space. Return
    what is wrong, and the external links.
    """
    source = build.resolve() / "site-source"
    out = build.resolve() / "site"
    assemble(source, notebooks, verdicts, pyodide)
    if pyodide:
        web_calculator.write_space(build.resolve() / "space", pyodide)
    # Sphinx leaves pages of documents that are gone.
    shutil.rmtree(out, ignore_errors=True)
    status = render(source, out)
    lighten(out)
    wrong, external = check(out)
    return (
        [f"Sphinx ended with {status}: see its warnings above"] if status else []
    ) + wrong, external


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    settings.apply(deterministic=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop messages
    pages = notebooks()
    claims = load_claims()
    print(
        f"Testing {len(claims)} claims and rendering {len(pages)} notebooks; this takes two "
        f"minutes or more",
        flush=True,
    )
    wrong, external = make(
        pages, map(judge, claims.values()), BUILD, web_calculator.fetch_pyodide(BUILD)
    )
    print(f"{sum(external.values())} external links, not fetched, to:")
    print(*(f"  {link} ({count})" for link, count in sorted(external.items())), sep="\n")
    print(
        f"\n{BUILD / 'site' / 'index.html'}\nTo look at it: python -m http.server --directory "
        f"build/site"
    )
    if wrong:
        print("\nWrong:", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
