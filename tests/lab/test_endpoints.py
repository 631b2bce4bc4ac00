"""The table of endpoints: records with bounds, mistakes that name their field."""

import re

import numpy
import pytest

from phasor.config import ModelConfig
from phasor.lab.endpoints import Endpoint, FieldError, LabRequest, Matrix, bounded_field


class TwoModelsRequest(LabRequest):
    one: ModelConfig
    other: ModelConfig | None = None
    positions: tuple[int, ...] = bounded_field((0,), 0, 100, max_items=3)
    text: str = bounded_field("", maximum=5)


MODEL = {"vocab_size": 9, "dim": 8, "num_layers": 1, "num_heads": 1}


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"positions": [1, 101]}, "positions", "positions must be at most 100, not 101"),
        ({"positions": [1, 2, 3, 4]}, "positions", "positions must have at most 3 items, not 4"),
        ({"positions": 1}, "positions", "positions must be a list, not 1"),
        ({"text": "longer"}, "text", "text must have at most 5 characters, not 6 characters"),
        ({"other": {**MODEL, "dim": "x"}}, "other.dim", "ModelConfig.dim must be an integer, not 'x'"),
        ({"other": {**MODEL, "norm": {"kind": "rmsnorm", "eps": -1}}}, "other.norm.eps", "eps"),
        ({"other": {**MODEL, "position": {"kind": "rotery"}}}, "other.position", "did you mean 'rotary'"),
        ({"third": 1}, None, "unknown field of TwoModelsRequest 'third'"),
    ],
)
def test_a_mistake_names_its_field(change, field, sentence):
    endpoint = Endpoint("example", "two", TwoModelsRequest, lambda request: {})
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        endpoint.answer({"one": MODEL} | change)
    assert getattr(caught.value, "field", None) == field


@pytest.mark.parametrize("body", [None, 3, [], "x", {"one": None}])
def test_a_body_of_another_shape_is_a_mistake(body):
    with pytest.raises(ValueError, match=r"TwoModelsRequest|one must be"):
        Endpoint("example", "two", TwoModelsRequest, lambda request: {}).answer(body)


def test_a_mistake_that_the_function_finds_names_its_field_too():
    def refuse(request):
        raise FieldError("one", "this model has no rotary positions")

    with pytest.raises(FieldError, match="no rotary"):
        Endpoint("example", "two", TwoModelsRequest, refuse).answer({"one": MODEL})


def test_a_matrix_is_float32_row_by_row():
    matrix = Matrix.of([[1, 2, 3], [4, 5, 6]], count=2)
    assert matrix.shape == (2, 3)
    assert numpy.frombuffer(matrix.data, "<f4").tolist() == [1, 2, 3, 4, 5, 6]
    assert matrix.notes == {"count": 2}
