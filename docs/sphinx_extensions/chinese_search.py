"""Search in Chinese: what is typed is split into words of the index, and the page says in Chinese what was found."""

import logging

from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese

# The longest words that the index has, from the left: a browser's own segmenter knows other words than jieba, by which
# the index was made. What is in no word is left out, unless nothing else was typed.
SPLITTER = """
function splitQuery(query) {
  const known = (word) => word in Search._index.terms || word in Search._index.titleterms;
  const wordsOf = (run) => {
    const words = [];
    for (let start = 0, end; start < run.length; start = end) {
      for (end = run.length; end > start + 1 && !known(run.slice(start, end)); end--);
      if (end > start + 1) words.push(run.slice(start, end));
    }
    return words.length ? words : [run];
  };
  const runs = query.match(/\\p{Script=Han}+|(?:(?!\\p{Script=Han})[\\p{Letter}\\p{Number}_])+/gu) ?? [];
  return [...new Set(runs.flatMap((run) => (/^\\p{Script=Han}/u.test(run) ? wordsOf(run) : [run])))];
}

// Sphinx's catalog has these in an older wording.
Documentation.addTranslations({
  locale: "zh_Hans_CN",
  plural_expr: "0",
  messages: { "Search finished, found one page matching the search query.": ["搜索完成，找到 ${resultCount} 页。"] },
});
"""


class ChineseSearch(SearchChinese):
    """Sphinx's search in Chinese, with a splitter for queries."""

    js_splitter_code = SPLITTER


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it reports that it reads its dictionary
    app.add_search_language(ChineseSearch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
