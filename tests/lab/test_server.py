"""The server: files of the page, headers, refusals, limits."""

import importlib
import json
import sys

import numpy
import pytest
from starlette.testclient import TestClient

from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.server import MAX_BODY, PAGE, build_app

HERE = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def example():
    """A client of a lab that has the endpoints of example_endpoints.py as well."""
    before = dict(ENDPOINTS)
    importlib.import_module("example_endpoints")
    with client(modules=["example_endpoints"]) as page:
        yield page
    ENDPOINTS.clear()
    ENDPOINTS.update(before)
    del sys.modules["example_endpoints"]


def client(**options):
    return TestClient(build_app(**options), base_url=HERE, raise_server_exceptions=False)


def test_the_page_and_its_modules_are_served():
    with client() as page:
        assert "text/html" in page.get("/").headers["content-type"]
        assert page.get("/js/main.js").headers["content-type"].startswith("text/javascript")
        assert page.get("/style.css").status_code == 200
        assert page.get("/api/about").json()["folders"] == []
        assert page.get("/openapi.json").json()["openapi"] == "3.1.0"


def test_the_whole_page_is_under_250_kb():
    assert sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file()) < 250_000


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "/js/../../server.py", "/etc/passwd", "/js"])
def test_no_other_file_is_served(path):
    with client() as page:
        assert page.get(path).status_code == 404


def test_every_response_has_the_headers_of_the_guard():
    with client() as page:
        for response in (page.get("/"), page.get("/nowhere"), page.get("/api/about"), page.post("/api/a/b")):
            assert response.headers["content-security-policy"] == "default-src 'self'"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["x-frame-options"] == "DENY"
            assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "a@127.0.0.1", "", "[", "10.0.0.1"]
)
def test_another_host_is_refused(host):
    with client() as page:
        response = page.get("/", headers={"Host": host})
        assert response.status_code == 403
        assert "Host" in response.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:1", "LOCALHOST", "[::1]:8765"])
def test_this_machine_is_no_other_host(host):
    with client() as page:
        assert page.get("/", headers={"Host": host}).status_code == 200


def test_numeric_hosts_are_known_where_the_server_is_open_to_a_network():
    with client(hosts=("0.0.0.0",), numeric_hosts=True) as page:
        assert page.get("/", headers={"Host": "10.0.0.1:8765"}).status_code == 200
        assert page.get("/", headers={"Host": "evil.example:8765"}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_requests_of_other_pages_are_refused(example, headers):
    assert example.post("/api/example/echo", json={}, headers=headers).status_code == 403
    assert example.post("/api/example/echo", json={}, headers={"Origin": HERE}).status_code == 200


def test_a_link_on_another_page_is_followed():
    """By a browser in its own window, and not into a frame."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with client() as page:
        assert page.get("/", headers=link).status_code == 200
        assert page.get("/", headers=link | {"Sec-Fetch-Dest": "iframe"}).status_code == 403
        assert page.get("/", headers=link | {"Host": "evil.example"}).status_code == 403
        assert page.post("/api/extension/presets", json={}, headers=link).status_code == 403


def test_half_of_a_character_is_no_failure(example):
    for body in (b'{"\\ud800": 1}', b'{"number": "\\ud800"}'):
        answer = example.post("/api/example/echo", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


def test_answers_are_json_or_bytes(example):
    assert example.post("/api/example/echo", json={"number": 2}).json() == {"number": 2.0, "nothing": [None, None]}
    answer = example.post("/api/example/matrix", json={})
    assert answer.headers["x-shape"] == "2,3"
    assert json.loads(answer.headers["x-notes"]) == {"most": 5}
    assert numpy.frombuffer(answer.content, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("body", "sentence", "field"),
    [
        (b'{"number": 11}', "number must be at most 10, not 11.0", "number"),
        (b'{"number": "x"}', "number must be a number, not 'x'", "number"),
        (b'{"size": 3000}', "this matrix has 9,000,000 elements; at most 2,097,152 are sent", None),
        (b'{"number": NaN}', "this is not JSON: NaN is not a number of JSON", None),
        (b'{"number": 1, "number": 2}', "this is not JSON: the key 'number' stands twice", None),
        (b"[" * 100_000, "this is not JSON", None),
        (b"9" * 5000, "this is not JSON", None),
        (b"\xff\xfe\xfd", "this is not JSON", None),
        (b"", "this is not JSON", None),
        (b"[]", "ExampleRequest is read from a mapping of its fields, not from []", None),
    ],
)
def test_a_mistake_is_a_400_of_one_sentence(example, body, sentence, field):
    answer = example.post("/api/example/square", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)
    assert answer.json()["field"] == field


def test_a_body_has_a_type_and_a_greatest_size(example):
    path, headers = "/api/example/echo", {"Content-Type": "application/json"}
    assert example.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert example.post(path, content=b" " * (MAX_BODY + 1), headers=headers).status_code == 413
    assert example.post("/api/example/nothing", json={}).status_code == 404
    assert example.get(path).status_code == 405


def test_a_failure_of_the_lab_is_a_500_without_its_inside(example):
    answer = example.post("/api/example/fail", json={})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["content-security-policy"] == "default-src 'self'"
