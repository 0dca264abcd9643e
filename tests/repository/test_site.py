"""The site: its glossary and generated pages as text, the check of links, and one real build
without a warning.
"""

import dataclasses
import json
import re
import runpy
import shutil

import card_outputs
import make_site
import nbformat
import numpy as np
import pytest
import settings
import site_evidence
import site_links
import site_pages
import yaml
from settings import ROOT
from vramlab import GiB, Recipe, Sharding, predict
from vramlab.measurement.records import save
from vramlab.report.report import Interval
from vramlab_course.claims import Finding, Verdict, load_claims

# What the theme and the parser still do in the manner of an earlier Sphinx.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Check CHANGES for Sphinx")

make_site.JOBS = "1"  # the other core is another test's
SITE = ROOT / "site"
CHAPTERS = {path.name[:2] for path in settings.chapters()}


def entries() -> list[tuple[list[str], str]]:
    """The glossary's entries: the lines that name a term, and its sentence."""
    blocks = re.findall(
        r"```\{glossary\}\n(.*?)\n```",
        (SITE / "glossary.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    found = []
    for entry in "\n\n".join(blocks).split("\n\n"):
        lines = entry.splitlines()
        names = [line for line in lines if not line.startswith(" ")]
        found.append((names, " ".join(line.strip() for line in lines if line.startswith(" "))))
    return found


def stub(claim) -> Verdict:
    """A verdict nobody computed: its first case has what the claim says, the others wait for a
    record.
    """
    first, case = next(iter(claim.each.items()))
    value = (
        Interval(case.quoted, case.quoted, case.quoted) if claim.rule == "within" else case.quoted
    )
    return Verdict(
        claim, {**dict.fromkeys(claim.cases), first: Finding(value, "derived", "a configuration")}
    )


@pytest.fixture(scope="module")
def stubs() -> list[Verdict]:
    return [stub(claim) for claim in load_claims().values()]


# --- glossary


def test_every_term_has_its_korean_name_and_one_sentence():
    found = entries()
    assert len(found) >= 55
    for names, sentence in found:
        assert len(names) == 2, names
        assert not re.search("[가-힣]", names[0]) and re.search("[가-힣]", names[1]), names
        text = re.fullmatch(r"(.+)\. \(chapter \d\d\)", sentence)
        assert text and not re.search(r"\. [A-Z]", text[1]), (
            f"{names[0]}: one sentence, then its chapter"
        )


def test_no_term_stands_twice():
    names = [name.lower() for both, _ in entries() for name in both]
    assert sorted(names) == sorted(set(names))


def test_every_chapter_that_the_glossary_names_is_there_or_announced():
    announced = set(
        re.findall(
            r"\b\d\d\b", re.search(r"In the making.*|$", (ROOT / "README.md").read_text())[0]
        )
    )
    named = {re.search(r"\(chapter (\d\d)\)$", sentence)[1] for _, sentence in entries()}
    assert named <= CHAPTERS | announced
    assert len(named) >= 7


# --- what the notebooks become

PLACES = [
    "notebooks/01_types.ipynb",
    "notebooks/02_memory.ipynb",
    "notebooks/solutions/02_memory_solutions.ipynb",
]


@pytest.mark.parametrize(
    "here, text, expected",
    [
        ("notebooks/01_types.ipynb", "See chapter 02.", "See [chapter 02](02_memory.ipynb)."),
        (PLACES[2], "Chapter 02 counts", "[Chapter 02](../02_memory.ipynb) counts"),
        ("glossary.md", "so (chapter\n02)", "so ([chapter 02](notebooks/02_memory.ipynb))"),
        (
            PLACES[1],
            "`notebooks/solutions/02_memory_solutions`",
            "[](solutions/02_memory_solutions.ipynb)",
        ),
        (PLACES[1], "as chapter 02 says", "as chapter 02 says"),  # the page itself
        (PLACES[1], "chapter 09", "chapter 09"),  # not there
        (PLACES[1], "`chapter 01`", "`chapter 01`"),
        (PLACES[1], "# After chapter 01", "# After chapter 01"),
        (PLACES[1], "[in chapter 01](x.md)", "[in chapter 01](x.md)"),
        (PLACES[1], "```\nchapter 01\n```", "```\nchapter 01\n```"),
    ],
)
def test_mentions_become_links(here, text, expected):
    assert site_links.link_mentions(text, here, PLACES).startswith(expected)


@pytest.mark.parametrize(
    "here, text, expected",
    [
        ("README.md", "[table](site/accuracy.md)", "[table](accuracy.md)"),
        (
            "README.md",
            "[licence](LICENSE)",
            f"[licence]({settings.repository_url()}/blob/main/LICENSE)",
        ),
        (
            PLACES[0],
            "[claims](../data/claims.json)",
            f"[claims]({settings.repository_url()}/blob/main/data/claims.json)",
        ),
        (PLACES[2], "[back](../02_memory.ipynb)", "[back](../02_memory.ipynb)"),
        ("site/use.md", f"[one](../{PLACES[0]})", f"[one]({PLACES[0]})"),
        ("site/use.md", "[page](accuracy.md)", "[page](accuracy.md)"),
        (
            "site/use.md",
            "[what](../LICENSE)",
            f"[what]({settings.repository_url()}/blob/main/LICENSE)",
        ),
        (PLACES[0], "![peak](figures/timeline.png)", "![peak](figures/timeline.png)"),
        (PLACES[0], "[nowhere](nowhere.md)", "[nowhere](nowhere.md)"),  # the build says so
        (
            PLACES[0],
            "[a](https://example.org/LICENSE) [b](#LICENSE)",
            "[a](https://example.org/LICENSE) [b](#LICENSE)",
        ),
    ],
)
def test_files_outside_of_the_site_are_in_the_repository(here, text, expected):
    assert site_links.link_files(text, here, PLACES) == expected


def test_the_badge_goes_the_setup_is_left_out_and_figures_keep_their_words(notebook):
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "AAAA"}, metadata={"image/png": {"alt": "A bar."}}
    )
    notebook.cells.append(nbformat.v4.new_code_cell("plt.show()", outputs=[picture]))
    assert "colab-badge" in notebook.cells[0].source
    made = make_site.for_the_site(notebook, PLACES[0], PLACES)
    assert (
        "colab-badge" not in made.cells[0].source
        and "[Open in Colab](https://" in made.cells[0].source
    )
    assert [cell.metadata.get("tags") for cell in made.cells].count(["remove-cell"]) == 1
    assert made.cells[-1].metadata["mystnb"] == {"image": {"alt": "A bar."}}


def test_nothing_is_executed_and_nothing_is_fetched():
    conf = runpy.run_path(str(SITE / "conf.py"))
    assert conf["nb_execution_mode"] == "off"
    assert conf["nb_ipywidgets_js"] == {}
    assert conf["html_math_renderer"] == "mathml"
    static = "".join(
        path.read_text() for path in (SITE / "static").rglob("*.*") if path.suffix != ".pyc"
    )
    static = static.replace("http://www.w3.org/2000/svg", "")  # a name, no address
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", static)


# --- claims and names


def rows_of(page: str, claim) -> list[str]:
    return [line for line in page.splitlines() if f"{{#{claim.name}}}" in line]


def test_the_page_has_every_claim_with_its_figure_verdict_and_source(stubs):
    page = site_pages.claims_page(stubs, {"02": ("notebooks/02_memory.ipynb", "02 · Memory")})
    for verdict in stubs:
        (row,) = rows_of(page, verdict.claim)
        assert re.sub(r"\\", "", row).count(verdict.text) >= 1, verdict.claim.name
        assert re.search(r"(?<!\\)\|", row[1:-1]) and len(re.findall(r"(?<!\\)\|", row)) == 5, (
            verdict.claim.name
        )
        assert verdict.claim.by in row and verdict.claim.condition in re.sub(r"\\", "", row)
    assert "[chapter 02](notebooks/02_memory.ipynb)" in page
    assert f"| all five | {len(stubs)} |" in page


CLAIM = load_claims()["lecture-seven-billion"]
CASES = list(CLAIM.cases)


def page_of(*values, text: str = "arithmetic") -> str:
    findings = [None if value is None else Finding(value, "derived", text) for value in values]
    return site_pages.claims_page([Verdict(CLAIM, dict(zip(CASES, findings, strict=True)))], {})


def test_what_an_experiment_says_stays_in_its_cell():
    (row,) = rows_of(page_of(2, 2, text="a | b\n`c` *d* <e> $f$\n| g |"), CLAIM)
    assert row.endswith("<br><small>a \\| b \\`c\\` \\*d\\* \\<e\\> \\$f\\$ \\| g \\|</small> |")


def test_what_does_not_hold_comes_first():
    found = [Finding(value, "derived", "") for value in (2, 13)]
    good, bad = (Verdict(CLAIM, dict.fromkeys(CASES, finding)) for finding in found)
    page = site_pages.claims_page([good, bad], {})
    assert (
        page.index("## Does not hold")
        < page.index("**does not hold**")
        < page.index("## Holds")
        < page.index("**holds**")
    )


def test_another_verdict_gives_another_page():
    assert "**holds**" in page_of(2, 2) and "**does not hold**" in page_of(13, 14)
    assert f"**holds under {CASES[0]}**" in page_of(2, 14)


def test_a_waiting_claim_says_for_what_hardware():
    claim = load_claims()["guide-mixed-speed"]
    missing = {
        "bf16": "Waits for a GPU with a fan.",
        "fp16": "there is no recorded measurement of it",
    }
    page = site_pages.claims_page([Verdict(claim, dict.fromkeys(claim.cases), missing)], {})
    assert "waits for a GPU with a fan<" in page and "waits for a record of a GPU<" in page
    assert "**waits for a GPU record**" in page


def test_the_reference_has_every_public_name_with_its_description():
    import vramlab

    page = site_pages.reference_page()
    found = re.findall(r"^`(\w+)(?:\(.*?\))?`\n: (\S.*)$", page, re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(vramlab.__all__)
    assert (
        "`predict(recipe, gpu=…, other_memory=…, expandable_segments=…)`" in page
        and "1,073,741,824 bytes" in page
    )


# --- links

GOOD = '<html><h1 id="top">T</h1><a href="b.html#there">b</a><img src="p.png"><a href="https://example.org/x">x</a></html>'


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("b.html#there", "c.html", "a.html: c.html is not there"),
        ("#there", "#nowhere", "a.html: b.html#nowhere has no such anchor"),
        ("b.html#there", "#nowhere", "a.html: #nowhere has no such anchor"),
        ("p.png", "q.png", "a.html: q.png is not there"),
        ('src="p.png"', 'src="https://cdn.example.org/p.png"', "from the network"),
        ("<img", '<script src="//cdn.example.org/s.js"></script><img', "from the network"),
        (
            "<img",
            '<link rel="stylesheet" href="https://fonts.example.org/f.css"><img',
            "from the network",
        ),
    ],
)
def test_what_leads_nowhere_or_away_is_found(tmp_path, old, new, said):
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "b.html").write_text('<p id="there">')
    (tmp_path / "a.html").write_text(GOOD)
    assert make_site.check(tmp_path) == ([], {"https://example.org/x": 1})
    (tmp_path / "a.html").write_text(GOOD.replace(old, new))
    (wrong,) = make_site.check(tmp_path)[0]
    assert said in wrong


def test_the_readmes_short_answer_is_the_one_of_the_page_of_use():
    whole = (SITE / "use.md").read_text(encoding="utf-8").splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in readme if re.match(r"(lora|qlora|full) {2,}\w", line)]
    assert len(rows) == 3
    for row in rows:
        assert any(line.startswith(row) for line in whole), row


# --- for language models, and on a phone


def test_llms_txt_has_a_line_for_every_page():
    places = [path.relative_to(ROOT).as_posix() for path in make_site.notebooks()]
    text = llms_of(places, "https://example.org/")
    assert text.startswith("# VRAM Lab\n\n> Does my training fit on this GPU?")
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    links = [re.fullmatch(r"- \[[^]]+\]\(https://example\.org/(\S+)\): .+", s)[1] for s in lines]
    own = [f"{path.stem}.html" for path in SITE.glob("*.md") if path.stem != "index"]
    assert sorted(links) == sorted([*own, *(place.replace("ipynb", "html") for place in places)])
    assert "Open in Colab" not in text and "**" not in text
    assert "(calculator.html): GPU memory calculator" in llms_of(places, "")
    assert text.index("## Course") < text.index("## Optional") < text.index("_solutions.html")


def llms_of(places: list[str], root: str) -> str:
    """llms.txt of the pages as they lie in the repository."""
    return site_pages.llms_page(SITE, [f"../{place}" for place in places], root).replace("../", "")


def test_a_reports_sentences_wrap_and_its_tables_do_not():
    start = (
        '<div class="output stream highlight-myst-ansi notranslate"><div class="highlight"><pre>'
    )
    long = "forward of &lt;x&gt; makes 4 GiB of activations beside 2 GiB of weights"
    table = "phase      peak   forward, backward and step of all of it"
    page = f"{start}<span></span>{table}\nwhy there: {long}\nnote: a\n</pre></div><pre>{long}</pre>"
    wrapped = f'<span class="sentence">why there: {long}</span>'
    assert make_site.wrap_sentences(page) == (
        f"{start}<span></span>{table}\n{wrapped}\nnote: a\n</pre></div><pre>{long}</pre>"
    )


def test_a_figure_has_one_link(tmp_path):
    from PIL import Image

    (tmp_path / "_images").mkdir()
    Image.new("RGB", (200, 100)).save(tmp_path / "_images" / "a.png", dpi=(100, 100))
    image = '<img alt="A." src="_images/a.png" style="width: 5px;" />'
    linked = f'<a class="reference internal image-reference" href="_images/a.png">{image}\n</a>'
    for page in (image, linked):
        made = make_site.frame_figures(f"<p>{page}</p>", tmp_path)
        assert made.count("<a ") == made.count("</a>") == 1
        assert made.startswith('<p><a class="full" href="_images/a.png"><img alt="A."')


# --- a real build


@pytest.fixture(scope="module")
def built(tmp_path_factory, stubs):
    """The whole site with every notebook there is, and what was wrong with it; the verdicts alone
    are made up.
    """
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    return folder, make_site.make(make_site.notebooks(), stubs, folder)


def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(built):
    folder, (wrong, external) = built
    assert wrong == []
    links = re.findall(r"\]\((\S+)\): ", (folder / "site" / "llms.txt").read_text("utf-8"))
    assert len(links) > 30 and all((folder / "site" / link).is_file() for link in links)
    report = (folder / "site" / "notebooks" / "02_memory_decomposition.html").read_text("utf-8")
    assert '<span class="sentence">llama-3.1-8b · batch 4 · 1024 tokens' in report
    assert all(link.startswith("https://") for link in external)
    pages = {
        path.relative_to(folder / "site").as_posix() for path in (folder / "site").rglob("*.html")
    }
    expected = {
        path.relative_to(ROOT).with_suffix(".html").as_posix() for path in make_site.notebooks()
    }
    assert (
        expected | {"index.html", "glossary.html", "claims.html", "reference.html", "search.html"}
        <= pages
    )


def test_figures_formulas_and_tables_are_on_the_pages(built):
    folder, _ = built
    for path in settings.chapters():
        html = (folder / "site" / path.relative_to(ROOT).with_suffix(".html")).read_text(
            encoding="utf-8"
        )
        cells = nbformat.read(path, 4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs]
        figures = [o for o in outputs if "image/png" in o.get("data", {})]
        on_card = [
            json.loads(stored.read_text())
            for stored in card_outputs.FOLDER.glob(f"*/{path.stem}.json")
        ]
        figures += [
            picture
            for stored in on_card
            for part in stored["cells"]
            for picture in part["pictures"]
        ]
        shown = len(figures) + len(re.findall(r"!\[[^\]]*\]\((?!https:)", text))
        article = html[html.index("<article") : html.index("</article>")]
        assert article.count("<img ") == shown, path.name
        assert len(re.findall(r'<img alt="[^"]{20,}', article)) == shown, path.name
        assert ("<math" in article) == ("$" in text) and "$$" not in article, path.name
        ledgers = "".join(o["data"].get("text/markdown", "") for o in outputs if "data" in o)
        assert ("<table" in article) == ("\n|--" in text + ledgers or "\n| --" in text + ledgers), (
            path.name
        )


def test_the_index_asks_the_question_and_carries_the_promise_the_picture_and_the_syllabus(built):
    html = (built[0] / "site" / "index.html").read_text(encoding="utf-8")
    assert (
        "Does my training fit?" in html
        and 'id="quick"' in html
        and 'href="calculator.html"' in html
    )
    assert "No number in this course is an opinion" in html and "published.png" in html
    assert (
        html.count("Syllabus") >= 2
        and html.count('href="notebooks/02_memory_decomposition.html') >= 2
    )
    assert "timeline.png" in (built[0] / "site" / "use.html").read_text(encoding="utf-8")


def test_terms_lead_to_the_glossary_and_the_glossary_to_where_a_chapter_uses_them(built):
    """That both ends are there is what the check of links has seen."""
    page = (built[0] / "site" / "notebooks" / "02_memory_decomposition.html").read_text(
        encoding="utf-8"
    )
    glossary = (built[0] / "site" / "glossary.html").read_text(encoding="utf-8")
    assert (
        page.count('id="word-activation"') == 1
        and 'href="../glossary.html#term-activation"' in page
    )
    assert (
        'href="notebooks/02_memory_decomposition.html#word-activation">chapter 02</a>' in glossary
    )
    assert glossary.count("#word-") > 60


def test_claims_are_linked_from_their_chapter_and_back(built):
    claims = (built[0] / "site" / "claims.html").read_text(encoding="utf-8")
    for path in settings.chapters():
        page = (built[0] / "site" / path.relative_to(ROOT).with_suffix(".html")).read_text(
            encoding="utf-8"
        )
        shown = [claim.name for claim in load_claims(path.name[:2]).values() if claim.chapter_page]
        assert all(f'href="../claims.html#{name}"' in page for name in shown), path.name
        assert all(f'href="notebooks/{path.stem}.html#claim-{name}"' in claims for name in shown), (
            path.name
        )


def test_figures_have_their_size_and_lead_to_the_whole_picture(built):
    page = (built[0] / "site" / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<img [^>]*published.png" width="716" height="538" decoding="async">', page)
    page = (built[0] / "site" / "use.html").read_text(encoding="utf-8")
    assert re.search(r'<a class="full" href="_images/timeline.png"><img [^>]*width="716"', page)


def test_a_link_shows_its_picture_only_where_the_address_is_known(built):
    conf = runpy.run_path(str(SITE / "conf.py"))
    for address, pictures in (("", 0), ("https://example.org/lab/", 1)):
        conf["link_card"].__globals__["html_baseurl"] = address
        context = {"title": "A <b>title</b>", "metatags": '<meta name="description" content="own">'}
        conf["link_card"](None, "claims", "page.html", context, None)
        assert (
            context["metatags"].count('content="https://example.org/lab/_static/open_graph.png"')
            == pictures
        )
        assert (
            context["metatags"].count('name="description"') == 1
            and 'content="A title"' in context["metatags"]
        )
    assert make_site.read_png(built[0] / "site" / "_static" / "open_graph.png")[0] == (1200, 630)


# --- evidence


def test_records_appear_by_themselves(tmp_path):
    assert "no record yet" in site_evidence.records_page(
        tmp_path, 3
    ) and "3 groups" in site_evidence.records_page(tmp_path, 3)
    recipe = Recipe("gpt2", batch_size=2, seq_len=64)
    about = {
        "gpu": "T4",
        "driver": "1.2",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "date": "2026-11-22",
    }
    report = dataclasses.replace(
        predict(recipe, gpu="T4"),
        source="measured",
        environment=about,
        reserved=5 * GiB,
        process=6 * GiB,
    )
    save(report, tmp_path)
    page = site_evidence.records_page(tmp_path, 3)
    assert (
        "## T4" in page
        and "driver 1.2, torch 2.13.0" in page
        and "t4-torch2.13-transformers5.23.json" in page
    )
    (row,) = [line for line in page.splitlines() if line.startswith("| gpt2")]
    assert "+0.00%" in row and "5.000 GiB" in row and row.endswith("2026-11-22 |")
    sharded = dataclasses.replace(
        report, recipe=recipe.replace(sharding=Sharding(3, 8, "deepspeed")).to_dict()
    )
    table = site_evidence.records_table([report, sharded])
    assert table.count("rank 0 alone, without communication") == 1


def test_the_readme_claims_what_the_page_computes_and_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    errors = [abs(said["simulated"] / run.allocated - 1) for run, said in site_evidence.pairs()]
    near = sum(error <= 0.01 for error in errors)
    mean = sum(errors) / len(errors)
    claim = (
        f"Of {len(errors)} runs that others measured and published, **{near} are simulated within"
    )
    assert claim in readme
    assert f"(mean {mean:.2%}, worst {max(errors):.2%})".replace("%", " %") in readme
    assert len(readme.split()) <= 900
    assert site_evidence.runs_table().count("\n") == 97


def test_the_search_finds_english_words_and_korean_terms(built):
    script = (built[0] / "site" / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script[script.index("(") + 1 : script.rindex(")")])
    found = {
        word: {index["docnames"][n] for n in np.atleast_1d(index["terms"][word])}
        for word in ("quantiz", "그레이디언트")
    }
    assert {"glossary", "notebooks/06_qlora"} <= found["quantiz"] and found["그레이디언트"] == {
        "glossary"
    }


def test_a_broken_link_fails_the_build(built, tmp_path, capfd):
    source = tmp_path / "source"
    pages = "*.md", "*.ipynb", "notebooks"
    shutil.copytree(built[0] / "site-source", source, ignore=shutil.ignore_patterns(*pages))
    (source / "index.md").write_text(
        "# A page\n\n[nowhere](notebooks/99_nowhere.ipynb)\n", encoding="utf-8"
    )
    assert make_site.render(source, tmp_path / "site") != 0
    said = capfd.readouterr().err
    assert "99_nowhere" in said and said.count("WARNING") == 1


def test_the_pages_workflow_builds_checks_and_then_publishes():
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "pages.yml").read_text(encoding="utf-8")
    )
    steps = workflow["jobs"]["site"]["steps"]
    said = [step.get("run", step.get("uses", "")) for step in steps]
    parts = ("configure-pages", "make site", "pytest", "upload-pages", "deploy-pages")
    order = [next(i for i, text in enumerate(said) if part in text) for part in parts]
    assert order == sorted(order)
    for path in re.findall(r"\btests/[\w/]+\.py", " ".join(said)):
        assert (ROOT / path).exists()
    assert (
        next(step["with"]["path"] for step in steps if "upload-pages" in step.get("uses", ""))
        == "build/site"
    )
