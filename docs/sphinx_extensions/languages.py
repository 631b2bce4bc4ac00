"""The link from a page to the same page in the other language, or to the first page where there is none."""

from typing import Any

from sphinx.application import Sphinx

from sphinx_extensions.repository import ROOT, SITES, page_of

OTHER = {"en": ("zh", "中文", "zh-CN"), "zh": ("en", "English", "en")}


def add_link(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the template the address, the name and the code of the other language."""
    site, name, code = OTHER[app.config.language[:2]]
    pages = {page_of(path) for path in ROOT.glob("*.md")}
    there = (site, pagename) in pages or (SITES[site] / f"{pagename}.md").exists()
    target = f"../{site}/{pagename if there else 'index'}"
    context["other_language"] = {
        "url": app.builder.get_relative_uri(pagename, target),
        "name": name,
        "code": code,
    }


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", add_link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
