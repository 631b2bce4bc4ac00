"""Fixtures of the lab: one browser and one server for all tests that need them."""

import pytest
from playwright.sync_api import sync_playwright

from browser import ARGUMENTS, CHROMIUM, MISSING, serve, visit  # isort: skip

collect_ignore = ["example_endpoints.py"]  # importing it registers endpoints


@pytest.fixture(scope="session")
def chromium():
    """The browser; tests that need it are skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab():
    """The address of a lab without folders."""
    with serve() as base:
        yield base


@pytest.fixture
def open_page(chromium, lab):
    """A function that opens pages: open_page("phasors?q=3", width=390); they are checked and closed afterwards."""
    opened = []

    def open_one(address, base=lab, **options):
        opened.append(visit(chromium, base, **options))
        return opened[-1].open(address)

    yield open_one
    for one in opened:
        one.check()
        one.close()
