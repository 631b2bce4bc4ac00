"""Search in Chinese: the browser splits what is typed into words, as jieba does with the pages."""

import logging

from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese

# One character alone is not in the index, so it is not searched for unless nothing else was typed.
SPLITTER = """
function splitQuery(query) {
  const words = [...new Intl.Segmenter("zh", { granularity: "word" }).segment(query)]
    .filter((part) => part.isWordLike)
    .map((part) => part.segment);
  const long = words.filter((word) => word.length > 1);
  return long.length ? long : words;
}
"""


class ChineseSearch(SearchChinese):
    """Sphinx's search in Chinese, with a splitter for queries."""

    js_splitter_code = SPLITTER


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it reports that it reads its dictionary
    app.add_search_language(ChineseSearch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
