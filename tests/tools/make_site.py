"""`make site`: the course as a web site in build/site, from the outputs that are stored in the notebooks.

Nothing is executed but the experiments of the claims, whose verdicts are computed now. A warning of Sphinx, a link that
leads nowhere and a page that would fetch anything from the network are errors.
"""

import argparse
import os
import posixpath
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import canonical
import nbformat
import settings
import site_pages
import web_calculator
from vramlab_course.claims import Verdict, judge, load_claims

SITE = settings.ROOT / "site"
BUILD = settings.ROOT / "build"


def notebooks() -> list[Path]:
    """Every notebook of the site: the chapters and what else stands beside them, then the solutions."""
    return sorted(settings.NOTEBOOKS.glob("*.ipynb")) + sorted((settings.NOTEBOOKS / "solutions").glob("*.ipynb"))


def assemble(source: Path, notebooks: Sequence[Path], verdicts: Iterable[Verdict], pyodide: Path | None) -> None:
    """Lay out in `source` what Sphinx reads: the folder site/, the README, the notebooks and the generated pages.

    `pyodide` is the folder of Pyodide's files, without which the calculator does not start.

    Notebooks keep their place under notebooks/, so that their links to each other are the site's.
    """
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(SITE, source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(settings.NOTEBOOKS / "figures", source / "notebooks" / "figures")
    places = [path.relative_to(settings.ROOT).as_posix() for path in notebooks]
    readme = (settings.ROOT / "README.md").read_text(encoding="utf-8")
    (source / "README.md").write_text(link_files(readme, "README.md", places), encoding="utf-8")
    titles = {}
    for path, place in zip(notebooks, places, strict=True):
        notebook = nbformat.read(path, as_version=4)
        if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb", place):
            titles[path.name[:2]] = place, notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(for_the_site(notebook, place, places), target)
    glossary = source / "glossary.md"
    glossary.write_text(link_mentions(glossary.read_text(encoding="utf-8"), "glossary.md", places), encoding="utf-8")
    generated = source / "generated"
    generated.mkdir()
    (generated / "claims.md").write_text(site_pages.claims_page(verdicts, titles), encoding="utf-8")
    (generated / "usual.md").write_text(web_calculator.usual_answers(), encoding="utf-8")
    web_calculator.write_archive(source / "static" / "calculator" / "vramlab.zip")
    if pyodide:
        shutil.copytree(pyodide, source / "static" / "calculator" / "pyodide")
    (generated / "reference.md").write_text(site_pages.reference_page(), encoding="utf-8")


MENTION = re.compile(
    r"`(?P<place>notebooks/[\w/]+)(?:\.ipynb)?`"  # a notebook by its path
    r"|```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\$[^$]*\$|^#.*?$"  # left alone: code, links, formulas, headings
    r"|(?P<word>[Cc]hapter)\s(?P<number>\d\d)\b",
    re.DOTALL | re.MULTILINE,
)


def link_mentions(text: str, here: str, places: Sequence[str]) -> str:
    """Markdown with every "chapter 02" and every notebook's path as a link, on the page that stands at `here`.

    `places` are the notebooks that the site has; of others, and of the page itself, the mention stays as it is.
    """

    def link(found: re.Match) -> str:
        if found["place"]:
            shown, starts = found[0], found["place"] + "."
        elif found["number"]:
            shown, starts = f"{found['word']} {found['number']}", f"notebooks/{found['number']}_"
        else:
            return found[0]
        place = next((place for place in places if place.startswith(starts) and place != here), None)
        return f"[{shown}]({posixpath.relpath(place, posixpath.dirname(here))})" if place else found[0]

    return MENTION.sub(link, text)


def link_files(text: str, here: str, places: Sequence[str]) -> str:
    """Markdown whose links to the site's own pages lead there, and those to files that it has not to the repository.

    What is in neither stays as it is, and fails the build.
    """

    def link(found: re.Match) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[2]))
        if place in places or place.startswith("notebooks/figures/") or not (settings.ROOT / place).exists():
            return found[0]
        if place.startswith("site/"):
            return f"{found[1]}({posixpath.relpath(place.removeprefix('site/'), posixpath.dirname(here))})"
        return f"{found[1]}({settings.repository_url()}/blob/main/{place})"

    return re.sub(r"(\])\((?![a-z]+:|#)([^)\s#]+)\)", link, text)


def for_the_site(notebook: nbformat.NotebookNode, here: str, places: Sequence[str]) -> nbformat.NotebookNode:
    """The notebook with its set-up folded away, mentions as links, figures that say what they show, and no badge, which
    would be a picture from the network."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            source = re.sub(r"\[!\[Open in Colab\]\(\S+\)\]", "[Open in Colab]", cell.source)
            cell.source = link_mentions(link_files(source, here, places), here, places)
        elif cell.source.startswith("# " + canonical.SETUP_START):
            cell.metadata["tags"] = ["hide-input"]
        else:
            alts = [canonical.alternative_text(output, "image/png") for output in cell.outputs if "metadata" in output]
            if any(alts):
                cell.metadata["mystnb"] = {"image": {"alt": " ".join(filter(None, alts))}}
    return notebook


def render(source: Path, out: Path) -> int:
    """Run Sphinx; its exit status, which a warning makes 1."""
    from sphinx.cmd.build import build_main

    return build_main(
        ["-n", "-W", "--keep-going", "-q", "-j", "auto", "-b", "html", "-d", f"{out}.doctrees", str(source), str(out)]
    )


def lighten(out: Path) -> None:
    """Mend what the theme does: 0.5 MB of icons that its style sheet has too, a doubled title, names that hide a text."""
    for path in out.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        page = page.replace('<summary aria-label="Toggle hidden content">', "<summary>")
        page = re.sub(r'(<button class="btn search-button-field[^>]*) aria-label="Search"', r"\1", page)
        page = re.sub(r'<script[^>]*src="[^"]*/fontawesome\.js[^"]*"[^>]*></script>', "", page)
        path.write_text(page.replace("<title>VRAM Lab &#8212; VRAM Lab<", "<title>VRAM Lab<"), encoding="utf-8")


# --- links --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page of HTML offers and asks for: its anchors, its links, and what a browser would load with it."""

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
        elif tag == "link" and given.get("rel") in ("canonical", "search", "next", "prev", "index", "author"):
            self.links.extend([given["href"]] if "href" in given else [])
        else:
            self.loaded += [given[name] for name in ("src", "href", "data", "poster") if name in given]

    handle_startendtag = handle_starttag


def read_page(path: Path) -> Page:
    """The page at `path`, taken apart."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def check(out: Path) -> tuple[list[str], Counter]:
    """Look through every page under `out`: what is wrong, a line each, and how often each external link stands there.

    Wrong are links and files inside the site that lead nowhere, and whatever a browser would fetch from elsewhere.
    """
    pages = {path: read_page(path) for path in sorted(out.rglob("*.html")) if "_static" not in path.parts}
    wrong, external = [], Counter()
    for path, page in pages.items():
        name = path.relative_to(out).as_posix()
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") or parts.netloc:
                if link in page.links:
                    external[link] += 1
                else:
                    wrong.append(f"{name} loads {link} from the network")
            elif parts.scheme not in ("data", "mailto", "javascript") and (said := _missing(path, parts, pages)):
                wrong.append(f"{name}: {link} {said}")
    return wrong, external


def _missing(path: Path, parts, pages: dict[Path, Page]) -> str:
    """Why a link inside the site leads nowhere; "" when it leads somewhere."""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
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
    """The whole way: `build`/site-source, then `build`/site; what is wrong, and the external links."""
    source, out = build.resolve() / "site-source", build.resolve() / "site"
    assemble(source, notebooks, verdicts, pyodide)
    shutil.rmtree(out, ignore_errors=True)
    status = render(source, out)
    lighten(out)
    wrong, external = check(out)
    return ([f"Sphinx ended with {status}: see its warnings above"] if status else []) + wrong, external


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    settings.apply(deterministic=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop messages
    pages = notebooks()
    claims = load_claims()
    print(
        f"Testing {len(claims)} claims and rendering {len(pages)} notebooks; this takes two minutes or more",
        flush=True,
    )
    wrong, external = make(pages, map(judge, claims.values()), BUILD, web_calculator.fetch_pyodide(BUILD))
    print(f"{sum(external.values())} external links, not fetched, to:")
    print(*(f"  {link} ({count})" for link, count in sorted(external.items())), sep="\n")
    print(f"\n{BUILD / 'site' / 'index.html'}\nTo look at it: python -m http.server --directory build/site")
    if wrong:
        print("\nWrong:", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
