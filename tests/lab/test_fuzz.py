"""The API, fuzzed from its own schema: to any request the answer is data or one sentence, never a failure."""

import math
import os
from collections import Counter
from pathlib import Path

import numpy
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from phasor import ModelConfig, Transformer, save
from phasor.config.recipe import Recipe
from phasor.evaluation import evaluate_lengths
from phasor.lab.endpoints import ENDPOINTS
from phasor.lab.rotary_model import rotary_presets
from phasor.lab.server import build_app
from phasor.training.run import RunFolder

build_app()  # fills the table of endpoints
PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))
MODEL, RUN, REPORT = range(3)  # the folders of the lab that is fuzzed
# Random text is no config.json and no list of token ids, and a random number no folder of a report: what may be.
TEXTS = st.lists(st.integers(0, 60), max_size=70).map(lambda ids: " ".join(map(str, ids)))
FITTING = {
    "/api/extension/open": st.one_of(
        st.fixed_dictionaries({"preset": st.sampled_from(rotary_presets()), "text": st.none()}),
        st.fixed_dictionaries({"preset": st.none(), "text": st.sampled_from(PUBLISHED).map(Path.read_text)}),
    ),
    "/api/order/text": st.fixed_dictionaries(
        {"folder": st.just(MODEL), "text": TEXTS, "source": st.just(""), "index": st.none() | st.integers(0, 5)}
    ),
    "/api/order/attention": st.fixed_dictionaries(
        {"folder": st.just(MODEL), "text": TEXTS, "source": st.just(""), "kind": st.just("causal")},
        optional={"layer": st.integers(0, 1), "head": st.integers(0, 1)},
    ),
    "/api/runs/report": st.fixed_dictionaries({"folder": st.just(REPORT)}),
}
CASES = 1000 if os.environ.get("PHASOR_EXAMPLES") == "full" else 30
EACH = math.ceil(CASES / len(ENDPOINTS))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A lab with a model, a run and a report."""
    place = tmp_path_factory.mktemp("folders")
    config = ModelConfig(vocab_size=50, dim=16, num_heads=2, num_layers=2, max_length=64, position="rotary")
    save(Transformer(config).eval(), place / "model")
    with RunFolder(place / "run", Recipe(), resume=False) as run:
        run.start(0)
        run.log(10, loss=3.5)
    numpy.save(place / "ids.npy", numpy.random.default_rng(0).integers(0, 50, 400))
    evaluate_lengths(
        Transformer(config), place / "ids.npy", lengths="64,128", extensions=["none", "yarn"], out=place / "report"
    )
    app = build_app([place / "model", place / "run", place / "report"])
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def schema(client):
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_no_request_makes_the_lab_fail(client, schema, path):
    """Requests that fit the schema, requests that do not, and requests that fit what is there as well."""
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
    @given(cases, st.none() | FITTING.get(path, st.none()))
    def ask(case, fitting):
        body = case.body if isinstance(case.body, dict | list | str | int | float | bool) else None
        if fitting is not None and isinstance(body, dict):
            body = body | fitting
        answer = client.request(case.method, path, json=body, headers=dict(case.headers or {}))
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (path, body, answer.text)
        assert str(answer.status_code) in {*operation.definition.raw["responses"], "405"}
        if answer.status_code >= 400 and case.method != "HEAD":
            sentence = answer.json()["error"]
            assert sentence
            assert "\n" not in sentence

    ask()
    if CASES >= 1000:
        assert statuses[200], f"no request to {path} was answered with data: {statuses}"


def test_the_schema_has_every_endpoint_and_its_bounds(client):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == set(ENDPOINTS)
    for path, endpoint in ENDPOINTS.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{endpoint.record.__name__}"}
        assert document["paths"][path]["post"]["description"], f"{path} has no docstring"
