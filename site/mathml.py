"""Formulas as MathML, which current browsers draw by themselves: no script, no font, no network.

A formula that the converter cannot read is a warning, and so fails the build.
"""

from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def visit(display: str):
    """A Sphinx visitor that writes the formula and skips the node's text."""

    def write(translator, node) -> None:
        from docutils.nodes import SkipNode

        tex = node.astext()
        try:
            formula = convert(tex, display=display)
        except Exception as error:  # it raises a dozen kinds, IndexError among them
            logger.warning("no MathML for %r: %s", tex, error, location=node)
            formula = f"<code>{translator.encode(tex)}</code>"
        anchor = "".join(f'<span id="{name}"></span>' for name in node.get("ids", ()))
        tag = "div" if display == "block" else "span"
        translator.body.append(f'<{tag} class="formula">{anchor}{formula}</{tag}>')
        raise SkipNode

    return write


def setup(app: Sphinx) -> dict:
    app.add_html_math_renderer("mathml", (visit("inline"), None), (visit("block"), None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
