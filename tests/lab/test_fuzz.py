"""The API, fuzzed from its own schema: whatever is sent, the answer is data or one sentence, never a failure."""

import math
import os
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from phasor import ModelConfig, Transformer, save
from phasor.config.recipe import Recipe
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.server import build_app
from phasor.training.run import RunFolder

build_app()  # fills the table of endpoints
# Random text is no config.json, no list of token ids, and a run is no report.
NEEDS_TEXT = {"/api/extension/open", "/api/order/attention", "/api/order/text", "/api/runs/report"}
CASES = 1000 if os.environ.get("PHASOR_EXAMPLES") == "full" else 60
EACH = math.ceil(CASES / len(ENDPOINTS))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A lab with two folders: a model and a run."""
    place = tmp_path_factory.mktemp("folders")
    config = ModelConfig(vocab_size=50, dim=16, num_heads=2, num_layers=2, max_length=64, position="rotary")
    save(Transformer(config).eval(), place / "model")
    with RunFolder(place / "run", Recipe(), resume=False) as run:
        run.start(0)
        run.log(10, loss=3.5)
    app = build_app([place / "model", place / "run"])
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def schema(client):
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_no_request_makes_the_lab_fail(client, schema, path):
    """Requests that fit the schema, and requests that do not."""
    operation = schema[path]["POST"]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    statuses = Counter()

    @settings(
        max_examples=EACH,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def ask(case):
        body = case.body if isinstance(case.body, dict | list | str | int | float | bool) else None
        answer = client.request(case.method, path, json=body, headers=dict(case.headers or {}))
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (path, body, answer.text)
        assert str(answer.status_code) in {*operation.definition.raw["responses"], "405"}
        if answer.status_code >= 400 and case.method != "HEAD":
            sentence = answer.json()["error"]
            assert sentence
            assert "\n" not in sentence

    ask()
    if CASES >= 1000 and path not in NEEDS_TEXT:
        assert statuses[200], f"no request to {path} was answered with data: {statuses}"


def test_the_schema_has_every_endpoint_and_its_bounds(client):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == set(ENDPOINTS)
    for path, endpoint in ENDPOINTS.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{endpoint.record.__name__}"}
        assert document["paths"][path]["post"]["description"], f"{path} has no docstring"
