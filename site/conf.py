"""How Sphinx renders the course. `make site` copies this folder and the notebooks side by side, and
starts it there.

Nothing is executed and no page fetches from elsewhere: outputs are those stored in the notebooks,
formulas become MathML, and fonts are the reader's own.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "VRAM Lab"
author = "the VRAM Lab authors"
copyright = "Apache 2.0"
language = "en"
DESCRIPTION = (
    "How much GPU memory does training need, and why? Every byte predicted, simulated and measured."
)
PICTURE = (
    "Does my training fit? Beside it simulated over measured peaks of 95 published runs, "
    "all on the diagonal."
)

extensions = ["myst_nb", "mathml"]
exclude_patterns = ["README.md", "generated", "**/__pycache__"]
html_math_renderer = "mathml"
smartquotes = False

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # no widgets, hence neither require.js nor a CDN
nb_render_markdown_format = "myst"  # tables and formulas in outputs, as in text
nb_number_source_lines = False
myst_enable_extensions = ["amsmath", "attrs_inline", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = "VRAM Lab"
html_baseurl = os.environ.get(
    "SITE_URL", ""
)  # where the site will stand, with a slash at its end; "" when not known
html_favicon = "static/favicon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["static"]
html_extra_path = ["llms.txt"]  # made by `make site`, at the site's root
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_show_sourcelink = False
html_show_copyright = False
html_last_updated_fmt = None
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def link_card(app, name, template, context, doctree) -> None:
    """Say to pages that show a link what this one is; the picture by its whole address, so only
    where that is known.
    """
    from html import escape

    said = context.get("metatags", "")
    tags = {
        "og:title": context.get("title") or project,
        "og:site_name": project,
        "og:type": "website",
    }
    if html_baseurl and name != "404":
        picture = {"og:image:width": "1200", "og:image:height": "630", "og:image:alt": PICTURE}
        tags |= {
            "og:url": f"{html_baseurl}{name}.html",
            "og:image": f"{html_baseurl}_static/open_graph.png",
        } | picture
    lines = [
        f'<meta property="{key}" content="{escape(re.sub("<[^>]*>", "", text))}">'
        for key, text in tags.items()
    ]
    if 'name="description"' not in said:
        lines.append(f'<meta name="description" content="{escape(DESCRIPTION)}">')
    lines.append('<meta name="twitter:card" content="summary_large_image">')
    context["metatags"] = said + "\n".join(
        line for line in lines if line.split(" content")[0] not in said
    )


def setup(app) -> None:
    app.connect("html-page-context", link_card)
