"""The lab in a real browser: a server in a thread, and pages that collect what goes wrong.

Chromium is the system's, driven by playwright: `apt-get install --no-install-recommends chromium`. Where it is missing
the tests are skipped and say so.
"""

import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from unittest import mock
from urllib.parse import urlsplit

import uvicorn
from axe_playwright_python.sync_playwright import Axe

from phasor.lab import server as lab_server
from phasor.lab.server import PAGE, VIEWS, build_app

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Every name and address but this machine's is unknown to the browser, and `Visit.outside` lists what asked for one.
ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
MISSING = "chromium is missing: apt-get install --no-install-recommends chromium"
PRESENT = [view for view in VIEWS if (PAGE / "js" / "views" / f"{view}.js").exists()]

# What a picture is, without the ids of its elements: texts, shapes and the pixels of canvases.
PICTURE = """() => {
  const names = ["d", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "width", "height", "fill"];
  const shape = (x) => x.tagName + names.map((n) => x.getAttribute(n)) + (x.childElementCount ? "" : x.textContent);
  const drawn = (e) => e.tagName === "CANVAS" ? e.toDataURL()
    : e.tagName === "svg" ? [...e.querySelectorAll("*")].map(shape).join() : e.textContent;
  return [...document.querySelectorAll("main h1, main td, figure svg, figure canvas")].map(drawn).join("|");
}"""
# Resolves when a title is there and no answer has been waited for during six frames in a row.
SETTLE = """() => new Promise((done, fail) => {
  const start = performance.now();
  let quiet = 0;
  const look = () => {
    const view = document.querySelector("main .view");
    quiet = view?.querySelector("h1")?.textContent && view.getAttribute("aria-busy") !== "true" ? quiet + 1 : 0;
    if (quiet >= 6) done();
    else if (performance.now() - start > 30000) fail(new Error("the view is still waiting for answers"));
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})"""


class Visit:
    """An open page of the lab, with what it reported: console errors, requests off the machine, bodies of requests."""

    def __init__(self, page, base):
        self.page, self.base = page, base
        self.errors, self.outside, self.asked = [], [], []
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self.note_request)

    def note_request(self, request):
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and f"{url.scheme}://{url.netloc}" != self.base:
            self.outside.append(request.url)
        if request.method == "POST":
            self.asked.append((urlsplit(request.url).path, json.loads(request.post_data or "null")))

    def open(self, address):
        """Open `view?state`, and wait until it is drawn."""
        self.page.goto(f"{self.base}/#/{address}")
        if (view := address.partition("?")[0]) in VIEWS:
            self.page.wait_for_selector(f"main .view.{view}", state="attached")
        return self.settle()

    def settle(self):
        """Wait until the view has its answers and has drawn them."""
        self.page.evaluate(SETTLE)
        return self

    def picture(self):
        """What is drawn, as a text that can be compared."""
        return self.page.evaluate(PICTURE)

    def address(self):
        """The part of the address after #/, once it has been written."""
        self.page.wait_for_timeout(250)
        return self.page.evaluate("location.hash.slice(2)")

    def control(self, name):
        """The input of a control."""
        return self.page.locator(f'[data-control="{name}"]').locator("input, select, textarea, button").last

    def error(self, name):
        """The sentence beside a control, or an empty text."""
        return self.page.locator(f'[data-control="{name}"] .error').inner_text()

    def serious_findings(self):
        """What axe finds that is serious or critical, a line each."""
        found = Axe().run(self.page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
        return [
            f"{violation['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
            for violation in found.response["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]

    def sideways(self):
        """Pixels by which the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def draw_times(self):
        """Milliseconds that each drawing of a plot took."""
        return self.page.evaluate("performance.getEntriesByName('draw').map((one) => one.duration)")

    def check(self):
        """Nothing went wrong: no console error, no request off the machine."""
        assert not self.errors, self.errors
        assert not self.outside, self.outside

    def close(self):
        self.page.context.close()


@contextmanager
def serve(folders=(), computing=1, **options):
    """The address of a server in a thread, until the block is left; each process that computes has to import torch."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with mock.patch.object(lab_server, "COMPUTING", computing):
            app = build_app(folders, **options)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield base
        server.should_exit = True
        thread.join(10)


def visit(browser, base, width=1280, theme="light", language="en", height=900):
    """A new page at a width, in a theme and a language."""
    locale = {"en": "en-US", "zh": "zh-CN"}[language]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, locale=locale, accept_downloads=True
    )
    context.set_default_timeout(15_000)
    return Visit(context.new_page(), base)
