"""Fixtures of the lab: one server for all tests that need it, and its pages."""

import pytest

from browser import serve, visit  # isort: skip

collect_ignore = ["example_endpoints.py"]  # importing it registers endpoints


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
