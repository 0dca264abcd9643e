"""Links that the site has and the notebooks have not.

They lead to chapters and files that a text names, to the glossary and the claims, and from those
back to where a chapter uses the word or tests the claim.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

import nbformat
import settings
from vramlab_course.claims.verdicts import Claim

LEFT_ALONE = r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\$\$.*?\$\$|\$[^$\n]*\$|<[^>\n]*>|^#.*?$"
MENTION = re.compile(
    r"`(?P<place>notebooks/[\w/]+)(?:\.ipynb)?`"  # a notebook by its path
    rf"|{LEFT_ALONE}|(?P<word>[Cc]hapter)\s(?P<number>\d\d)\b",
    re.DOTALL | re.MULTILINE,
)
# Words with another meaning outside of the chapter that explains them.
TWO_MEANINGS = {"view", "temporary", "fraction", "kernel", "buffer", "container", "recipe", "token"}


def link_mentions(text: str, here: str, places: Sequence[str]) -> str:
    """Markdown with every "chapter 02" and every notebook's path as a link.

    `here` is the page on which it stands.

    A path is shown as the notebook's title, which MyST puts into a link without text. `places` are
    the notebooks that the site has; of others, and of the page itself, the mention stays as it is.
    """

    def link(found: re.Match) -> str:
        if found["place"]:
            shown = ""
            starts = found["place"] + "."
        elif found["number"]:
            shown = f"{found['word']} {found['number']}"
            starts = f"notebooks/{found['number']}_"
        else:
            return found[0]
        # A chapter's file begins with its number, so that the name itself may change.
        place = next(
            (place for place in places if place.startswith(starts) and place != here), None
        )
        return (
            f"[{shown}]({posixpath.relpath(place, posixpath.dirname(here))})" if place else found[0]
        )

    return MENTION.sub(link, text)


def link_files(text: str, here: str, places: Sequence[str]) -> str:
    """Markdown whose links to files lead to the site's pages, or else to the repository.

    What is in neither stays as it is, and fails the build. A file of the folder site/ stands at the
    site's own root.
    """
    on_site = here.removeprefix("site/")
    folder = posixpath.dirname(on_site)

    def link(found: re.Match) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[2]))
        is_there = place in places or place.startswith("notebooks/figures/")
        if not is_there and not (settings.ROOT / place).exists():
            return found[0]
        if is_there or place.startswith("site/"):
            target = posixpath.relpath(place.removeprefix("site/"), folder)
            return f"{found[1]}({target})"
        return f"{found[1]}({settings.repository_url()}/blob/main/{place})"

    # Not what has a scheme, as https:, and not a place on the same page.
    return re.sub(r"(\])\((?![a-z]+:|#)([^)\s#]+)\)", link, text)


# --- glossary


def glossary_terms(glossary: str) -> dict[str, str]:
    """The English terms of the glossary's text, and the chapter that explains each."""
    # A term of a MyST glossary has two lines, in English and Korean, and an indented text that ends
    # with its chapter.
    entry = r"^(?P<term>\S.*)\n\S.*\n(?:  .*\n)*?  .*\(chapter\s+(?P<chapter>\d\d)\)$"
    text = re.sub(r"\(chapter\n\s+", "(chapter ", glossary)
    return {found["term"]: found["chapter"] for found in re.finditer(entry, text, re.MULTILINE)}


def anchor_of(term: str) -> str:
    """The id of the place where a chapter first uses a term."""
    return "word-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def link_terms(
    cells: Iterable[nbformat.NotebookNode], terms: Mapping[str, str], chapter: str
) -> set[str]:
    """Link each term's first appearance in the text of `cells` to the glossary, in place.

    Return the terms linked.

    The place gets an id, `anchor_of`, to which the glossary links back. Headings, code, formulas
    and links stay as they are.
    """
    left = {term for term, home in terms.items() if term not in TWO_MEANINGS or home == chapter}
    linked: set[str] = set()
    for cell in cells:
        if cell.cell_type != "markdown" or not left:
            continue
        # The longest first: "gradient accumulation" must not be taken for "gradient".
        words = "|".join(re.escape(term) for term in sorted(left, key=len, reverse=True))
        pattern = re.compile(
            rf"{LEFT_ALONE}|(?<![\w-])(?P<term>{words})(?P<plural>s?)(?![\w-])",
            re.DOTALL | re.MULTILINE | re.IGNORECASE,
        )
        by_name = {term.lower(): term for term in left}

        def link(found: re.Match, by_name=by_name) -> str:
            term = by_name.get((found["term"] or "").lower())
            if term is None or term in linked:
                return found[0]
            linked.add(term)
            # MyST's role shows the words as they stand in the text, and leads to the term.
            return f'<span id="{anchor_of(term)}"></span>{{term}}`{found[0]} <{term}>`'

        cell.source = pattern.sub(link, cell.source)
        # Only a first appearance becomes a link, or half of a page would be blue.
        left -= linked
    return linked


def link_back(glossary: str, uses: Mapping[str, set[str]], places: Sequence[str]) -> str:
    """The glossary whose "(chapter 02)" leads there.

    It leads to the term's place if the term is in `uses`, the terms by chapter.
    """
    text = re.sub(r"\(chapter\n\s+(\d\d)\)", r"(chapter \1)", glossary)
    for term, chapter in glossary_terms(text).items():
        place = next((place for place in places if place.startswith(f"notebooks/{chapter}_")), None)
        if place:
            target = place.removesuffix(".ipynb") + ".html"
            if term in uses.get(chapter, ()):
                target += f"#{anchor_of(term)}"
            entry = re.compile(
                rf"(^{re.escape(term)}\n(?:.+\n)*?.*\()chapter {chapter}\)$", re.MULTILINE
            )
            text = entry.sub(rf'\g<1><a href="{target}">chapter {chapter}</a>)', text, count=1)
    return text


# --- claims


def link_claims(cells: Iterable[nbformat.NotebookNode], claims: Iterable[Claim]) -> set[str]:
    """Link each claim in the tables of `cells`, in place, to its row on the page of claims.

    Return the names linked.
    """
    linked: set[str] = set()
    tables = [
        output.data
        for cell in cells
        for output in cell.get("outputs", ())
        if "| what they say |" in output.get("data", {}).get("text/markdown", "")
    ]
    # Without a table there is nothing to link, and the claims need not be gone through.
    if not tables:
        return linked
    for claim in claims:
        said = f"| {claim.said}".replace("\\", "").strip()
        for data in tables:
            rows = data["text/markdown"].splitlines()
            at = [i for i, row in enumerate(rows) if row.startswith(f"{said} |")]
            for i in at:
                link = (
                    f'<a id="claim-{claim.name}" class="claim" '
                    f'href="../claims.html#{claim.name}">in the ledger</a>'
                )
                rows[i] = rows[i].replace(f"{said} |", f"{said} {link} |", 1)
                linked.add(claim.name)
            data["text/markdown"] = "\n".join(rows)
    return linked
