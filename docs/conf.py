"""The site: pages in docs/ in English, in docs/zh/ in Chinese; `make docs` builds both with this file."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

from sphinx_extensions.colors import COLORS  # noqa: E402

import phasor  # noqa: E402

project = "phasor"
author = "the phasor authors"
version = release = phasor.__version__
language = "en"  # Chinese: `-c docs -D language=zh_CN docs/zh`
html_title = f"phasor {release}"

extensions = [
    "myst_parser",
    "sphinx_extensions.chinese_search",
    "sphinx_extensions.lab_links",
    "sphinx_extensions.languages",
    "sphinx_extensions.mathml",
    "sphinx_extensions.plots",
    "sphinx_extensions.reference",
    "sphinx_extensions.repository",
]
exclude_patterns = ["sphinx_extensions", "static", "templates", "zh"]
templates_path = ["templates"]
needs_sphinx = "8.2"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 6

nitpick_ignore_regex = [("py:.*", r"(?!phasor\.).*")]  # types of others, whose documentation is elsewhere
python_maximum_signature_line_length = 88

html_theme = "furo"
html_static_path = ["static"]
html_favicon = str(DOCS.parent / "src" / "phasor" / "lab" / "page" / "icon.svg")
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
FONT = 'system-ui, "Source Sans 3", "Noto Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif'
html_theme_options = {
    f"{theme}_css_variables": {
        "color-background-primary": colors["card"],
        "color-background-secondary": colors["paper"],
        "color-background-hover": colors["hover"],
        "color-background-border": colors["line"],
        "color-foreground-primary": colors["ink"],
        "color-foreground-secondary": colors["soft"],
        "color-brand-primary": colors["query-text"],
        "color-brand-content": colors["query-text"],
        "color-brand-visited": colors["query-text"],
        "color-code-background": colors["paper"],
        "color-api-name": colors["query-text"],
        "color-api-pre-name": colors["soft"],
        "color-lab": colors["key-text"],
        "font-stack": FONT,
    }
    for theme, colors in COLORS.items()
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
