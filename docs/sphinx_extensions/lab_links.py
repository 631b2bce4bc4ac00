"""The role `lab`: a link that opens the lab at a state, written {lab}`text <#/phasors?q=3&k=7>`."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import ReferenceRole

from phasor.cli.lab import add_options
from phasor.cli.parser import Parser
from phasor.lab.server import VIEWS

STATE = re.compile(r"#/(\w+)(?:\?\w[\w-]*=[^&#\s]*(?:&\w[\w-]*=[^&#\s]*)*)?")
TITLES = {"en": "opens in phasor lab, where it runs on this machine", "zh_CN": "在本机运行的 phasor lab 中打开"}


def default_address() -> str:
    """Where `phasor lab` listens unless told otherwise."""
    parser = Parser()
    add_options(parser)
    return "http://{host}:{port}/".format(**vars(parser.parse_args([])))


class LabRole(ReferenceRole):
    """A link into the lab that runs on the reader's machine."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The link, or an error where the lab has no such view."""
        found = STATE.fullmatch(self.target)
        if found is None or found[1] not in VIEWS:
            message = f"{self.target!r} is no state of the lab, such as '#/phasors?q=3'; views: {', '.join(VIEWS)}"
            error = self.inliner.reporter.error(message, line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, error)], [error]
        title = TITLES[self.config.language]
        refuri = default_address() + self.target
        return [nodes.reference("", self.title, refuri=refuri, classes=["lab"], reftitle=title)], []


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_role("lab", LabRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
