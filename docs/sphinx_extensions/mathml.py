"""Formulas as MathML, written when the site is built: the pages need no script for them."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
BLOCK = re.compile(r"&(?!\w+;)|\\\\")  # an alignment or a line break, which a block may have without an environment

# The name of a function is an operator to the converter, or stands without a space beside its argument. LaTeX leaves a
# thin space on both sides, and none before a parenthesis.
NAMED_OPERATOR = re.compile(r"<mo>([A-Za-z]{2,})</mo>")
BEHIND_NAME = re.compile(r"(?<!<msu[bp]>)(?<!<munder>)(<mi>[A-Za-z]{2,}</mi>)(?=<m(?:[in]>|sub|frac))")
BEFORE_NAME = re.compile(r"(</m(?:[in]|sub)>)(?=<mi>[A-Za-z]{2,}</mi>)")
GAP = r'\1<mspace width="0.167em" />'
# Browsers break lines between a formula and what stands beside it, even a comma.
PUNCTUATED = re.compile(r"([(（“]*<math\b(?:(?!</math>).)*</math>[,.;:!?)，。；：！？、）”]+)", re.DOTALL)


def to_mathml(node: nodes.math | nodes.math_block, display: str) -> str:
    """The MathML of a formula; what LaTeX would not know is a warning at its place."""
    latex = node.astext().strip()
    if display == "block" and r"\begin" not in latex and BLOCK.search(latex):
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    latex = latex.replace("{aligned}", "{align*}")  # the same, by the name that the converter knows
    try:
        found = convert(latex, display=display)
    except Exception as error:
        logger.warning("%r is no formula: %s: %s", latex, type(error).__name__, error, location=node)
        raise nodes.SkipNode from None
    if unknown := re.findall(r">\s*(\\[A-Za-z]+)", found):
        logger.warning("the formula %r has commands without MathML: %s", latex, ", ".join(unknown), location=node)
    if "<mi>&</mi>" in found:
        logger.warning("the formula %r has an alignment in an environment without MathML", latex, location=node)
    named = NAMED_OPERATOR.sub(r"<mi>\1</mi>", found)
    return BEFORE_NAME.sub(GAP, BEHIND_NAME.sub(GAP, named))


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    self.body.append(to_mathml(node, "inline"))
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    """A formula in lines of its own, with its number where it has a label."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        number = get_node_equation_number(self, node)
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(to_mathml(node, "block"))
    self.body.append("</div>")
    raise nodes.SkipNode


def keep_punctuation(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Have no line begin with the punctuation behind a formula."""
    if "body" in context:
        context["body"] = PUNCTUATED.sub(r'<span class="unbroken">\1</span>', context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", keep_punctuation)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
