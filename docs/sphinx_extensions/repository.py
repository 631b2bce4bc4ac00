"""Links between files lead on the site where they lead on GitHub.

README, CONTRIBUTING and CHANGELOG are pages of the site. A link to a page of the other language leads to its site,
and a link to a source file leads to a page that shows it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
SITES = {"en": ROOT / "docs", "zh": ROOT / "docs" / "zh"}


def page_of(path: Path) -> tuple[str, str] | None:
    """The site and the name of the page that a Markdown file is; None for other files."""
    if path.suffix != ".md":
        return None
    if path.parent == ROOT:
        return "zh" if path.stem.endswith(".zh-CN") else "en", path.stem.removesuffix(".zh-CN")
    for site in ("zh", "en"):
        if path.is_relative_to(SITES[site]):
            return site, path.relative_to(SITES[site]).with_suffix("").as_posix()
    return None


class RepositoryProject(Project):
    """The pages of a site, with those at the root of the repository."""

    def discover(self, exclude_paths: Iterable[str] = (), include_paths: Iterable[str] = ("**",)) -> set[str]:
        """Find the pages."""
        super().discover(exclude_paths, include_paths)
        for path in sorted(ROOT.glob("*.md")):
            site, name = page_of(path)
            if SITES[site] == Path(self.srcdir):
                self.docnames.add(name)
                self._docname_to_path[name] = Path(*[".."] * len(SITES[site].relative_to(ROOT).parts), path.name)
                self._path_to_docname[path] = self._path_to_docname[self._docname_to_path[name]] = name
        return self.docnames


def use_repository(app: Sphinx) -> None:
    """Have Sphinx look for pages in the repository."""
    app.project = app.env.project = RepositoryProject(app.srcdir, app.config.source_suffix)
    if not hasattr(app.env, "linked_sources"):
        app.env.linked_sources = {}


class RepositoryLinks(SphinxTransform):
    """Links to files that are not pages of this site."""

    default_priority = 400

    def apply(self) -> None:
        """Replace them by links to the other site or to the page of a source file."""
        self.env.linked_sources[self.env.docname] = set()
        for node in list(self.document.findall(addnodes.download_reference)):
            self.replace(node, node["reftarget"], "")
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] == "myst" and node["refdomain"] == "doc":
                if node["reftarget"] not in self.env.found_docs:
                    self.replace(node, f"/{node['reftarget']}.md", node["reftargetid"])
            elif node["reftype"] == "myst":
                self.replace(node, *node["reftarget"].partition("#")[::2])

    def replace(self, node: nodes.Element, target: str, fragment: str | None) -> None:
        """Replace a link, unless nothing is there: then Sphinx warns of it."""
        path = Path(target)
        if not path.is_relative_to(ROOT):
            path = Path(self.env.relfn2path(target)[1])
        if not path.exists() or not path.is_relative_to(ROOT):
            return
        if page := page_of(path):
            name = f"../{page[0]}/{page[1]}"
        else:
            name = f"sources/{path.relative_to(ROOT).as_posix()}"
            self.env.linked_sources[self.env.docname].add(path)
        refuri = self.app.builder.get_relative_uri(self.env.docname, name) + (f"#{fragment}" if fragment else "")
        node.replace_self(nodes.reference("", "", *node.children, refuri=refuri, internal=True))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """A page for every file that is linked: its text, or for a folder the names in it."""
    for path in sorted(set().union(*app.env.linked_sources.values())):
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir() if child.name[0] not in "_.")
            text, lexer = "\n".join(names), "text"
        else:
            text = path.read_text(encoding="utf-8")
            try:
                lexer = get_lexer_for_filename(path.name).aliases[0]
            except ClassNotFound:
                lexer = "text"
        shown = app.builder.highlighter.highlight_block(text, lexer, linenos="inline" if path.is_file() else False)
        yield f"sources/{name}", {"title": name, "body": f'<h1 class="file">{name}</h1>{shown}'}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", use_repository)
    app.connect("html-collect-pages", source_pages)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
