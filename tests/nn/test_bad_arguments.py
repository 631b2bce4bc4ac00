"""A mistake in what a forward is given is one ValueError, one sentence that names it."""

import numpy as np
import pytest
import torch
from bad_inputs.sentences import NAN, assert_refusal, cases, config
from device import ON_GPU

from phasor import (
    DynamicYaRN,
    Rotary,
    Transformer,
    XPosConfig,
    balancing_loss,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="values on a GPU are not looked at, which would wait for it")
TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture(scope="module")
def models():
    """One small model of each kind the mistakes below need."""
    dynamic = {"kind": "rotary", "extension": DynamicYaRN(original_length=4)}
    made = {
        "decoder": {},
        "encoder": {"shape": "encoder"},
        "encoder-decoder": {"shape": "encoder-decoder"},
        "windowed": {"attention": {"window": 3}},
        "learned": {"position": "learned", "max_length": 5},
        "learned-offset": {"position": {"kind": "learned", "offset": 2}, "max_length": 5},
        "rotary": {"position": "rotary"},
        "axial": {"position": "axial"},
        "mrope": {"position": "mrope"},
        "xpos": {"position": "xpos"},
        "alibi": {"position": "alibi"},
        "normalized": {"position": "normalized"},
        "dynamic": {"position": dynamic},
        "typed": {"shape": "encoder", "embedding": {"token_types": 2}},
    }
    return {name: Transformer(config(**fields)).eval() for name, fields in made.items()}


def calls(table):
    """Parametrize over calls of a model: name: (model, arguments, keywords, mentions...)."""
    each = [(m, a, k, said) for m, a, k, *said in table.values()]
    return pytest.mark.parametrize(("model", "arguments", "keywords", "mentions"), each, ids=table)


def rows(*given):
    return torch.tensor(given)


TOKEN_MISTAKES = {
    "too-large": ("decoder", [TOKENS + 11], {}, "token id 20", "vocabulary of 20"),
    "negative": ("decoder", [TOKENS - 1], {}, "token id -1", "vocabulary of 20"),
    "target-too-large": ("encoder-decoder", [TOKENS, TOKENS + 11], {}, "token id 20"),
    "source-too-large": ("encoder-decoder", [TOKENS + 11, TOKENS], {}, "token id 20"),
    "other-device": ("decoder", [TOKENS.to("meta")], {}, "tokens are on meta, and the model's weights on cpu"),
    "floats": ("decoder", [TOKENS.float()], {}, "tokens", "float32"),
    "booleans": ("decoder", [TOKENS.bool()], {}, "tokens", "bool"),
    "one-row": ("decoder", [TOKENS[0]], {}, "[batch, tokens]", "[5]"),
    "three-axes": ("decoder", [TOKENS[None]], {}, "[batch, tokens]", "[1, 2, 5]"),
    "list": ("decoder", [[[1, 2]]], {}, "tokens", "list"),
    "text": ("decoder", ["hello"], {}, "tokens", "str"),
    "nothing": ("decoder", [None], {}, "tokens"),
    "array": ("decoder", [np.zeros((2, 5), dtype=np.int64)], {}, "tokens", "ndarray"),
    "no-tokens": ("decoder", [TOKENS[:, :0]], {}, "empty", "[2, 0]"),
    "no-rows": ("decoder", [TOKENS[:0]], {}, "empty", "[0, 5]"),
    "no-target": ("encoder-decoder", [TOKENS], {}, "target"),
    "target-for-decoder": ("decoder", [TOKENS, TOKENS], {}, "target", "decoder"),
    "target-for-encoder": ("encoder", [TOKENS, TOKENS], {}, "target", "encoder"),
    "target-padding-for-decoder": (
        "decoder",
        [TOKENS],
        {"target_attention_mask": TOKENS.bool()},
        "target_attention_mask",
    ),
    "target-rows": ("encoder-decoder", [TOKENS, TOKENS[:1]], {}, "2 rows", "1"),
    "source-rows": ("encoder-decoder", [TOKENS[:1], TOKENS], {}, "1 rows", "2"),
    "types-without-table": ("decoder", [TOKENS], {"token_types": TOKENS * 0}, "token types"),
    "type-too-large": ("typed", [TOKENS], {"token_types": TOKENS * 0 + 2}, "[0, 2)", "2"),
    "type-negative": ("typed", [TOKENS], {"token_types": TOKENS * 0 - 1}, "[0, 2)", "-1"),
    "type-floats": ("typed", [TOKENS], {"token_types": TOKENS * 0.0}, "token_types", "float32"),
    "type-shape": ("typed", [TOKENS], {"token_types": TOKENS[:1] * 0}, "token_types", "[1, 5]"),
    "type-list": ("typed", [TOKENS], {"token_types": [[0] * 5] * 2}, "token_types", "list"),
    "record": ("decoder", [TOKENS], {"record": "hidden"}, "record", "'hidden'"),
}


@calls(TOKEN_MISTAKES)
def test_tokens(models, model, arguments, keywords, mentions):
    assert_refusal(lambda: models[model](*arguments, **keywords), *mentions)


AT = torch.arange(5)
POSITION_MISTAKES = {
    "negative": ("rotary", AT - 1, "-1"),
    "negative-without-scheme": ("decoder", AT - 1, "-1"),
    "floats": ("rotary", AT.float(), "int64", "float32"),
    "int32": ("rotary", AT.int(), "int64", "int32"),
    "list": ("rotary", [0, 1, 2, 3, 4], "int64", "list"),
    "number": ("rotary", torch.tensor(3), "[T]", "[]"),
    "too-few": ("rotary", AT[:4], "[4]", "[2, 5]"),
    "too-many": ("rotary", torch.arange(6), "[6]", "[2, 5]"),
    "too-many-rows": ("rotary", AT.expand(3, 5), "[3, 5]", "[2, 5]"),
    "one-axis-too-many": ("rotary", AT.expand(1, 2, 5), "1"),
    "two-axes-for-text": ("rotary", AT.expand(2, 2, 5), "2"),
    "two-axes-without-scheme": ("decoder", AT.expand(2, 2, 5), "2"),
    "axes-for-learned": ("learned", AT.expand(1, 2, 5), "1"),
    "three-axes-for-grid": ("axial", AT.expand(3, 2, 5), "2", "3"),
    "two-axes-for-mrope": ("mrope", AT.expand(2, 2, 5), "3", "2"),
    "four-dimensions": ("mrope", AT.expand(1, 3, 2, 5), "[1, 3, 2, 5]"),
    "beyond-the-table": ("learned", AT + 1, "position 5", "5 positions"),
    "beyond-the-table-with-offset": ("learned-offset", AT + 1, "position 5", "5 positions"),
    "beyond-the-table-in-one-row": ("learned", torch.stack((AT, AT * 2)), "position 8", "5 positions"),
    "xpos-span": ("xpos", AT * 8192, "32768"),
}


@pytest.mark.parametrize(
    ("model", "positions", "mentions"), [(m, p, s) for m, p, *s in POSITION_MISTAKES.values()], ids=POSITION_MISTAKES
)
def test_positions(models, model, positions, mentions):
    assert_refusal(lambda: models[model](TOKENS, positions=positions), *mentions)


def test_sequence_longer_than_a_learned_table(models):
    assert_refusal(lambda: models["learned"](torch.zeros(1, 6, dtype=torch.int64)), "6 tokens", "5 positions")
    packed = torch.zeros(1, 8, dtype=torch.int64)
    halves = torch.tensor([[0] * 4 + [1] * 4])
    models["learned"](packed, document_ids=halves)  # each document fits
    assert_refusal(lambda: models["learned"](packed, document_ids=halves.new_tensor([[0] * 6 + [1] * 2])), "position 5")


def test_xpos_span_is_a_sequence_and_not_a_position(models):
    models["xpos"](TOKENS, positions=AT + 2**40)
    assert_refusal(lambda: models["xpos"](TOKENS, positions=torch.tensor([0, 1, 2, 3, 32768])), "32768")


REAL = torch.ones(2, 5, dtype=torch.bool)
HOLE = torch.tensor([[True, False, True, True, True], [True] * 5])
BACK = rows([0, 1, 0, 1, 1], [0] * 5)
PACKED = rows([0, 0, 0, 1, 1], [7] * 5)
MASK_MISTAKES = {
    "padding-floats": ("decoder", {"attention_mask": REAL.float()}, "attention_mask", "float32"),
    "padding-numbers": ("decoder", {"attention_mask": REAL.long()}, "attention_mask", "int64"),
    "padding-shape": ("decoder", {"attention_mask": REAL[:1]}, "[2, 5]", "[1, 5]"),
    "padding-list": ("decoder", {"attention_mask": [[True] * 5] * 2}, "attention_mask", "list"),
    "padding-everywhere": ("decoder", {"attention_mask": ~REAL}, "row 0", "no real token"),
    "padding-of-one-row": ("encoder", {"attention_mask": torch.stack((REAL[0], ~REAL[1]))}, "row 1", "no real token"),
    "padding-hole-under-window": ("windowed", {"attention_mask": HOLE}, "row 0", "window"),
    "documents-floats": ("decoder", {"document_ids": REAL.float()}, "document_ids", "float32"),
    "documents-booleans": ("decoder", {"document_ids": REAL}, "document_ids", "bool"),
    "documents-complex": ("decoder", {"document_ids": REAL.to(torch.complex64)}, "document_ids", "complex64"),
    "documents-shape": ("decoder", {"document_ids": BACK[:, :4]}, "[2, 5]", "[2, 4]"),
    "documents-list": ("decoder", {"document_ids": [[0] * 5] * 2}, "document_ids", "list"),
    "documents-return": ("decoder", {"document_ids": BACK}, "row 0", "earlier document"),
    "prefix-for-encoder": ("encoder", {"prefix_length": 2}, "prefix_length", "encoder"),
    "prefix-negative": ("decoder", {"prefix_length": -1}, "prefix_length", "-1"),
    "prefix-too-long": ("decoder", {"prefix_length": 6}, "prefix_length", "5 tokens", "6"),
    "prefix-too-long-in-one-row": ("decoder", {"prefix_length": [1, 9]}, "prefix_length", "9"),
    "prefix-float": ("decoder", {"prefix_length": 2.5}, "prefix_length", "2.5"),
    "prefix-flag": ("decoder", {"prefix_length": True}, "prefix_length", "True"),
    "prefix-text": ("decoder", {"prefix_length": "2"}, "prefix_length", "'2'"),
    "prefix-rows": ("decoder", {"prefix_length": [1, 2, 3]}, "prefix_length", "[1, 2, 3]"),
    "prefix-none-in-list": ("decoder", {"prefix_length": [None, 1]}, "prefix_length", "None"),
    "prefix-float-tensor": ("decoder", {"prefix_length": torch.tensor([1.0, 2.0])}, "prefix_length"),
    "prefix-column": ("decoder", {"prefix_length": rows([1], [2])}, "prefix_length"),
    "prefix-huge": ("decoder", {"prefix_length": 2**70}, "prefix_length"),
    "prefix-object": ("decoder", {"prefix_length": {}}, "prefix_length", "{}"),
}


@pytest.mark.parametrize(
    ("model", "keywords", "mentions"), [(m, k, s) for m, k, *s in MASK_MISTAKES.values()], ids=MASK_MISTAKES
)
def test_padding_documents_and_prefix(models, model, keywords, mentions):
    assert_refusal(lambda: models[model](TOKENS, **keywords), *mentions)


LENGTH_MISTAKES = {
    "shorter": ({"length": 4}, "4", "5 tokens"),
    "nothing": ({"length": 0}, "0", "5 tokens"),
    "negative": ({"length": -1}, "-1", "5 tokens"),
    "flag": ({"length": True}, "length", "True"),
    "float": ({"length": 5.0}, "length", "float"),
    "text": ({"length": "5"}, "length"),
    "tensor": ({"length": torch.tensor([5, 5])}, "length", "Tensor"),
    "past-64-bits": ({"length": 2**70}, "length", "63 bits"),
    "row-shorter": ({"length": [5, 4]}, "4", "row 1"),
    "row-past-64-bits": ({"length": [5, 2**70]}, "length", "63 bits"),
    "too-few-rows": ({"length": [5]}, "1 rows", "2"),
    "too-many-rows": ({"length": [5, 5, 5]}, "3 rows", "2"),
    "row-text": ({"length": ["5", 5]}, "length", "'5'"),
    "row-float": ({"length": [5.0, 5]}, "length", "5.0"),
    "row-of-documents-without-documents": ({"length": [[5, 1], [5]]}, "row 0", "2 documents"),
    "document-shorter": ({"document_ids": PACKED, "length": [[3, 1], [5]]}, "1", "row 0"),
    "first-document-shorter": ({"document_ids": PACKED, "length": [[2, 2], [5]]}, "2", "row 0"),
    "one-for-all-documents-shorter": ({"document_ids": PACKED, "length": 2}, "2", "row 0"),
    "too-many-documents": ({"document_ids": PACKED, "length": [[3, 2], [5, 5]]}, "row 1", "2 documents"),
    "shorter-than-the-real-tokens": ({"attention_mask": HOLE, "length": [3, 5]}, "3", "4 tokens"),
}


@pytest.mark.parametrize("model", ["decoder", "rotary", "dynamic", "normalized", "alibi", "encoder"])
@pytest.mark.parametrize(("keywords", "mentions"), [(k, s) for k, *s in LENGTH_MISTAKES.values()], ids=LENGTH_MISTAKES)
def test_length(models, model, keywords, mentions):
    """Refused for every scheme, also where the length has no effect."""
    assert_refusal(lambda: models[model](TOKENS, **keywords), *mentions)


def test_length_of_real_tokens_is_enough(models):
    models["dynamic"](TOKENS, attention_mask=HOLE, length=[4, 5])
    models["dynamic"](TOKENS, document_ids=PACKED, length=[[3, 2], [5]])


def test_encoder_decoder_misuse(models):
    model, decoder, encoder = models["encoder-decoder"], models["decoder"], models["encoder"]
    memory = model.encode(TOKENS)
    assert_refusal(lambda: decoder.encode(TOKENS), "no encoder")
    assert_refusal(lambda: encoder.decode(TOKENS), "no decoder")
    assert_refusal(lambda: model.decode(TOKENS), "memory")
    assert_refusal(lambda: decoder.decode(TOKENS, memory), "memory")
    assert_refusal(lambda: model.decode(TOKENS, memory.hidden), "memory")
    assert_refusal(lambda: model.decode(TOKENS, 3), "memory")
    assert_refusal(lambda: model.decode(TOKENS, model.encode(TOKENS[:1])), "1 rows", "2")
    assert_refusal(lambda: model(TOKENS, TOKENS, prefix_length=2), "prefix_length")
    assert_refusal(lambda: model(TOKENS, TOKENS, document_ids=PACKED), "document_ids", "both")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_document_ids=PACKED), "document_ids", "both")
    other = PACKED.clone()
    other[1] = 8
    assert_refusal(lambda: model(TOKENS, TOKENS, document_ids=PACKED, target_document_ids=other), "document 8", "row 1")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_attention_mask=REAL[:, :4]), "attention_mask", "[2, 5]")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_length=4), "4", "5 tokens")
    assert_refusal(lambda: model(TOKENS, TOKENS, target_positions=AT - 1), "-1")


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
ROTARY_MISTAKES = {
    "q-width": (lambda r: r.rotate(Q[..., :6], K, AT), "q must", "8]", "[2, 4, 5, 6]"),
    "k-width": (lambda r: r.rotate(Q, K[..., :6], AT), "k must", "[2, 2, 5, 6]"),
    "q-dimensions": (lambda r: r.rotate(Q[0], K, AT), "q must", "[4, 5, 8]"),
    "q-integers": (lambda r: r.rotate(Q.long(), K, AT), "q must", "int64"),
    "k-complex": (lambda r: r.rotate(Q, K.to(torch.complex64), AT), "k must", "complex64"),
    "q-list": (lambda r: r.rotate(Q.tolist(), K, AT), "q must", "list"),
    "k-nothing": (lambda r: r.rotate(Q, None, AT), "k must", "NoneType"),
    "rows-differ": (lambda r: r.rotate(Q[:1], K, AT), "q has 1 rows", "k 2"),
    "fewer-queries": (lambda r: r.rotate(Q[:, :, :3], K, AT), "5 positions", "3 queries"),
    "fewer-positions": (lambda r: r.rotate(Q, K, AT[:4]), "4 positions", "5 queries"),
    "positions-rows": (lambda r: r.rotate(Q, K, AT.expand(3, 5)), "3 rows", "2"),
    "positions-floats": (lambda r: r.rotate(Q, K, AT.float()), "int64", "float32"),
    "positions-list": (lambda r: r.rotate(Q, K, [0, 1, 2, 3, 4]), "int64", "list"),
    "positions-nothing": (lambda r: r.rotate(Q, K, None), "int64"),
    "positions-negative": (lambda r: r.rotate(Q, K, AT - 1), "-1"),
    "positions-axes": (lambda r: r.rotate(Q, K, AT.expand(2, 2, 5)), "2"),
    "cos-sin-negative": (lambda r: r.cos_sin(AT - 1), "-1"),
    "cos-sin-int32": (lambda r: r.cos_sin(AT.int()), "int64", "int32"),
    "cos-sin-dtype": (lambda r: r.cos_sin(AT, dtype=torch.int64), "floating-point", "int64"),
    "length-shorter": (lambda r: r.rotate(Q, K, AT, length=4), "4", "5 tokens"),
    "length-float": (lambda r: r.rotate(Q, K, AT, length=5.0), "length", "float"),
    "length-flag": (lambda r: r.rotate(Q, K, AT, length=True), "length", "True"),
    "length-tensor": (lambda r: r.rotate(Q, K, AT, length=torch.tensor(5)), "length", "Tensor"),
    "length-rows": (lambda r: r.rotate(Q, K, AT.expand(2, 5), length=[5]), "1 rows"),
    "length-rows-without-rows": (lambda r: r.rotate(Q, K, AT, length=[5, 5]), "2 rows", "[5]"),
    "length-text-in-list": (lambda r: r.rotate(Q, K, AT.expand(2, 5), length=[5, "5"]), "length", "'5'"),
}


@pytest.mark.parametrize("extension", [None, DynamicYaRN(original_length=4)], ids=["fixed", "dynamic"])
@cases(ROTARY_MISTAKES)
def test_rotary_alone(extension, make, mentions):
    assert_refusal(lambda: make(Rotary(head_dim=8, extension=extension)), *mentions)


def test_dynamic_rotary_needs_its_length():
    rope = Rotary(head_dim=8, extension=DynamicYaRN(original_length=4))
    assert_refusal(lambda: rope.rotate(Q, K, AT), "'dynamic-yarn'", "length")
    assert_refusal(lambda: rope.cos_sin(AT), "'dynamic-yarn'", "length")
    for wrong in (0, -1, 5.0, True, "5", NAN, torch.tensor(5)):
        assert_refusal(lambda wrong=wrong: rope.frequencies(wrong), "length")
        assert_refusal(lambda wrong=wrong: rope.attention_factor(wrong), "length")


def test_xpos_alone_ends_at_its_span():
    rope = Rotary(XPosConfig(), head_dim=8)
    rope.rotate(Q, K, torch.tensor([0, 1, 2, 3, 32767]))
    assert_refusal(lambda: rope.rotate(Q, K, torch.tensor([0, 1, 2, 3, 32768])), "32768")


def test_balancing_loss():
    logits = torch.zeros(1, 8, 4)
    assert_refusal(lambda: balancing_loss([], 2), "router_logits")
    assert_refusal(lambda: balancing_loss(None, 2), "router_logits")
    assert_refusal(lambda: balancing_loss(logits, 2), "router_logits")
    assert_refusal(lambda: balancing_loss([logits], 5), "top_k", "4 experts", "5")
    assert_refusal(lambda: balancing_loss([logits], 0), "top_k", "0")
    short = torch.ones(1, 7, dtype=torch.bool)
    assert_refusal(lambda: balancing_loss([logits], 2, attention_mask=short), "[1, 8]", "[1, 7]")


def test_mistakes_on_other_devices_are_left_to_them():
    """Values are looked at on the CPU alone: on meta only shapes and types are checked."""
    with torch.device("meta"):
        model = Transformer(config(position="rotary"))
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        assert model(tokens, positions=torch.zeros(5, dtype=torch.int64)).shape == (2, 5, 20)
    assert_refusal(lambda: model(tokens.float()), "float32")
