"""The site's generated pages, as MyST text.

They say what became of each claim, and list the package's public names.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import nbformat
from vramlab.base.text import markdown as plain
from vramlab_course.claims import Verdict
from vramlab_course.claims.verdicts import (
    HOLDS,
    NOT,
    UNDER,
    UNSEEN,
    WAITS,
    WAS,
    quoted,
    shown,
    stored,
)

# Those that do not hold come first.
SECTIONS = {
    NOT: "Does not hold",
    UNSEEN: "Not seen here",
    WAS: "Was so, and is not any more",
    UNDER: "Holds under some conditions",
    WAITS: "Waits for a record of a GPU",
    HOLDS: "Holds",
}

SIGNS = {
    NOT: ("✗", "not"),
    UNSEEN: ("○", "unseen"),
    WAS: ("↺", "was"),
    UNDER: ("◐", "under"),
    WAITS: ("…", "waits"),
    HOLDS: ("✓", "holds"),
}


def claims_page(
    verdicts: Iterable[Verdict], titles: Mapping[str, tuple[str, str]], tested: Collection[str] = ()
) -> str:
    """Every claim with its source, figure, finding and verdict, a section for each outcome.

    `titles` has the target and title of each chapter's page by its number, like {"02":
    ("notebooks/02_….ipynb", "02 · …")}; `tested` are the claims whose chapter has an anchor for
    them.
    """
    verdicts = list(verdicts)
    parts = [_summary(verdicts)]
    # In the order of SECTIONS, and without headings over nothing.
    for outcome, title in SECTIONS.items():
        if own := [verdict for verdict in verdicts if verdict.outcome == outcome]:
            parts.append(f"## {title}\n\n{_table(own, titles, tested)}")
    return "\n\n".join(parts) + "\n"


def _summary(verdicts: list[Verdict]) -> str:
    rows = []
    for key, source in stored("sources").items():
        rows.append((source["name"], [v for v in verdicts if v.claim.source == key]))
    rows.append(("all five", verdicts))
    lines = [
        "| source | claims | " + " | ".join(SECTIONS) + " |",
        "|---" * (2 + len(SECTIONS)) + "|",
    ]
    for name, own in rows:
        numbers = [len(own), *(sum(v.outcome == outcome for v in own) for outcome in SECTIONS)]
        lines.append(f"| {plain(name)} | " + " | ".join(map(str, numbers)) + " |")
    titles = "; ".join(
        f"**{plain(s['name'])}** is {plain(s['title'])}" for s in stored("sources").values()
    )
    return "\n".join(lines) + (
        f"\n\nOf the five, {titles}.\n\n"
        "*Holds under* names the conditions under which the claim holds; under the others it "
        "does not. *Not seen here*: the "
        "source says that it can be so, and no case that was tried shows it. *Was so until* "
        "names the version up to which it was so. A finding is *derived* (arithmetic on "
        "specifications), *predicted* (closed "
        "formulas), *simulated* (the real step on tensors without contents), *measured* (here, "
        "on a CPU, when the page was "
        "made) or *recorded* (earlier). What waits for a GPU gets its verdict by itself as soon "
        "as `vramlab record`, or the "
        "chapter, has run on one."
    )


def _table(
    verdicts: list[Verdict], titles: Mapping[str, tuple[str, str]], tested: Collection[str]
) -> str:
    lines = ["| claim | the source says | verdict | found, and on what |", "|---|---|---|---|"]
    for verdict in verdicts:
        claim = verdict.claim
        target, _ = titles.get(claim.chapter, ("", ""))
        where = f"[chapter {claim.chapter}]({target})" if target else f"chapter {claim.chapter}"
        if claim.name in tested:
            # Raw HTML, since MyST does not know ids that the notebook's own output sets.
            page = target.replace(".ipynb", ".html")
            where = f'<a href="{page}#claim-{claim.name}">chapter {claim.chapter}</a>'
        by = (
            f"<small>[{plain(claim.by)}]{{.source}}, {plain(claim.place)}; "
            f"[{where}]{{.chapter}}</small>"
        )
        about = f"[{plain(claim.said)}]{{#{claim.name}}}<br>{by}"
        sign, kind = SIGNS[verdict.outcome]
        outcome = f"[{sign} **{plain(verdict.text)}**]{{.verdict .{kind}}}"
        cells = (about, plain(quoted(claim)), outcome, _found(verdict))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _found(verdict: Verdict) -> str:
    """Each case's finding and its configuration.

    A configuration that all cases share stands once, at the end.
    """
    several = len(verdict.findings) > 1
    # None for a case without a record keeps a shared line from speaking for it.
    configurations = {found.configuration if found else None for found in verdict.findings.values()}
    shared = several and len(configurations) == 1 and None not in configurations
    said = []
    for case, found in verdict.findings.items():
        name = f"*{plain(case)}*: " if several or not found else ""
        if found:
            text = (
                f"{name}{plain(shown(found.value, verdict.claim.unit))} "
                f"([{found.witness}]{{.witness}})"
            )
            about = "" if shared else plain(found.configuration)
        else:
            text = f"{name}no record yet"
            about = f"waits for {plain(verdict.waits_for(case))}"
        said.append(f"{text}<br><small>{about}</small>" if about else text)
    if shared:
        said.append(f"<small>{plain(configurations.pop())}</small>")
    return "<br>".join(said)


LOOK_UP = ("calculator", "use", "accuracy", "claims", "records", "glossary", "reference")
LONGEST = 160  # characters of a line about a chapter


def llms_page(source: Path, notebooks: Iterable[str], root: str = "") -> str:
    """The site for language models, in llms.txt's form (llmstxt.org): each page in one line.

    Args:
        source: the folder that Sphinx reads, with the pages of LOOK_UP.
        notebooks: paths inside it; those of solutions come last, as what may be left out.
        root: the site's address with a slash at its end; "" gives relative links.
    """
    texts = {f"{name}.html": (source / f"{name}.md").read_text("utf-8") for name in LOOK_UP}
    looked_up = [_entry(root + page, text, _description(text)) for page, text in texts.items()]
    chapters = []
    solutions = []
    for place in notebooks:
        cell = nbformat.read(source / place, as_version=4).cells[0].source
        entry = _entry(root + place.replace(".ipynb", ".html"), cell, _promise(cell))
        (solutions if "/solutions/" in place else chapters).append(entry)
    parts = [
        "# VRAM Lab",
        f"> {_description((source / 'index.md').read_text('utf-8'))}",
        "## To look things up",
        "\n".join(looked_up),
        "## Course",
        "\n".join(chapters),
        "## Optional",
        "\n".join(solutions),
    ]
    return "\n\n".join(parts) + "\n"


def _entry(link: str, text: str, about: str) -> str:
    title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    return f"- [{title}]({link}): {about}"


def _description(page: str) -> str:
    return re.search(r'^    description: "(.+)"$', page, re.MULTILINE)[1]


def _promise(cell: str) -> str:
    """The paragraph below a chapter's title and badge, of a long one its first sentence."""
    for part in cell.split("\n\n")[1:]:
        plain_text = re.sub(r"\*\*|\[!?\[?[^]]*Open in Colab.*", "", part).strip()
        if plain_text:
            line = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain_text).split())
            return line if len(line) <= LONGEST else re.split(r"(?<=[.?!]) ", line)[0]
    raise ValueError(f"a chapter says nothing below its title: {cell[:80]!r}")


def reference_page() -> str:
    """The public names by kind.

    Each stands with how it is called and the first paragraph of its docstring.
    """
    import vramlab

    kinds: dict[str, list[str]] = {
        "Functions": [],
        "Classes": [],
        "Errors": [],
        "Constants": [],
        "Modules": [],
    }
    for name in vramlab.__all__:
        value = getattr(vramlab, name)
        home = vramlab._HOME[name] or name
        kind = _kind(value)
        # A definition list of MyST: the name, and an indented line that begins with a colon.
        kinds[kind].append(
            f"`{_call(name, value, kind)}`\n: {_first(name, value, kind)}\n  <small>in "
            f"`vramlab.{home}`</small>"
        )
    return (
        "\n\n".join(
            f"## {kind}\n\n" + "\n\n".join(entries) for kind, entries in kinds.items() if entries
        )
        + "\n"
    )


def _kind(value: object) -> str:
    if inspect.ismodule(value):
        return "Modules"
    if inspect.isclass(value):
        return "Errors" if issubclass(value, Exception) else "Classes"
    return "Functions" if callable(value) else "Constants"


def _call(name: str, value: object, kind: str) -> str:
    if kind not in ("Functions", "Classes"):
        return name
    parameters = []
    for parameter in inspect.signature(value).parameters.values():
        # As it would be written in a call; annotations and default values would take lines.
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else "=…"
        parameters.append(star + parameter.name + default)
    return f"{name}({', '.join(parameters)})"


def _first(name: str, value: object, kind: str) -> str:
    if kind == "Constants":
        return f"{value:,} bytes." if isinstance(value, int) else f"{value!r}."
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if not text:
        raise ValueError(f"vramlab.{name} has no docstring")
    # Signs of Markdown in a docstring are meant as letters.
    return re.sub(r"([*_\[\]<>|$#])", r"\\\1", text)
