"""The link from a page to the same page in the other language, and what the theme says in Chinese."""

from typing import Any

from sphinx.application import Sphinx

from sphinx_extensions.repository import ROOT, SITES, page_of

OTHER = {"en": ("zh", "中文", "zh-CN"), "zh": ("en", "English", "en")}

# What furo says and Sphinx has no translation of.
CHINESE = {
    "Back to top": "回到顶部",
    "Home": "首页",
    "Next": "下一页",
    "On this page": "本页目录",
    "Previous": "上一页",
    "Skip to content": "跳到正文",
    "Made with": "构建工具：",
    '<a href="https://www.sphinx-doc.org/">Sphinx</a> and': '<a href="https://www.sphinx-doc.org/">Sphinx</a>、',
}


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


def translate_theme(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Have the templates of a Chinese page say in Chinese what they say in English."""
    if app.config.language == "zh_CN":
        context["_"] = context["gettext"] = lambda text: CHINESE.get(text.strip(" \n")) or app.translator.gettext(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", add_link)
    app.connect("html-page-context", translate_theme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
