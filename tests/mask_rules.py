"""Masks written token by token, and attention under such a rule compared with all scores at once."""

import functools

import torch
from references import EXACT, assert_same, normal, plain_attention

from phasor.ops.attention import Mask, ScoreMod


class Rule:
    """A mask, and independently of it a function of (row, query, key) that says which keys a query sees."""

    def __init__(self, can_see, **fields):
        self.can_see, self.fields = can_see, fields

    @functools.cache  # noqa: B019
    def visible(self, queries, keys):
        """`[rows, queries, keys]`; padding tokens see themselves, so that they see something."""
        alone = self.fields.get("aligned", True)
        return torch.tensor(
            [
                [[self.can_see(r, i, j) or (alone and i == j) for j in range(keys)] for i in range(queries)]
                for r in range(ROWS)
            ]
        )


TOKENS, ROWS = 63, 3
LEFT = [0, 5, 20]  # padding on the left of each row
RIGHT = [0, 7, 30]  # padding on the right
DOCUMENTS = [[0] * 20 + [1] * 23 + [2] * 20, [4] * 63, [9] * 1 + [3] * 50 + [5] * 12]
PREFIX = [0, 9, 40]


def is_real(row, token):
    return LEFT[row] <= token < TOKENS - RIGHT[row]


@functools.cache
def order_of(row, token, *, padded, packed):
    """How many real tokens of the same document come before."""
    return sum(
        (not padded or is_real(row, t)) and (not packed or DOCUMENTS[row][t] == DOCUMENTS[row][token])
        for t in range(token)
    )


def token_table(value):
    return torch.tensor([[value(row, token) for token in range(TOKENS)] for row in range(ROWS)])


def padding_fields(**fields):
    order = token_table(lambda r, t: order_of(r, t, padded=True, packed=False))
    return {"key_mask": token_table(is_real), "order": order, **fields}


def document_fields(**fields):
    document_ids = torch.tensor(DOCUMENTS)
    order = token_table(lambda r, t: order_of(r, t, padded=False, packed=True))
    return {"query_document_ids": document_ids, "key_document_ids": document_ids, "order": order, **fields}


def padding_and_document_fields(**fields):
    order = token_table(lambda r, t: order_of(r, t, padded=True, packed=True))
    return document_fields() | {"key_mask": token_table(is_real), "order": order, **fields}


def same_document(r, i, j):
    return DOCUMENTS[r][i] == DOCUMENTS[r][j]


def in_prefix(r, j, **kinds):
    return order_of(r, j, **{"padded": False, "packed": False} | kinds) < PREFIX[r]


RULES = {
    "everything": Rule(lambda r, i, j: True),
    "causal": Rule(lambda r, i, j: j <= i, causal=True),
    "window": Rule(lambda r, i, j: 0 <= i - j < 11, causal=True, window=11),
    "window-of-one": Rule(lambda r, i, j: i == j, causal=True, window=1),
    "wide-window": Rule(lambda r, i, j: j <= i, causal=True, window=63),
    "window-both-ways": Rule(lambda r, i, j: abs(i - j) < 11, window=11),
    "window-and-sinks": Rule(lambda r, i, j: j <= i and (i - j < 11 or j < 3), causal=True, window=11, sink_tokens=3),
    "window-and-many-sinks": Rule(
        lambda r, i, j: j <= i and (i - j < 5 or j < 20), causal=True, window=5, sink_tokens=20
    ),
    "window-both-ways-and-sinks": Rule(lambda r, i, j: abs(i - j) < 11 or j < 3, window=11, sink_tokens=3),
    "prefix_length": Rule(lambda r, i, j: j <= i or in_prefix(r, j), causal=True, prefix_length=torch.tensor(PREFIX)),
    "prefix-and-window": Rule(
        lambda r, i, j: 0 <= i - j < 11 or in_prefix(r, j), causal=True, window=11, prefix_length=torch.tensor(PREFIX)
    ),
    "prefix-window-sinks": Rule(
        lambda r, i, j: (j <= i and (i - j < 11 or j < 3)) or in_prefix(r, j),
        causal=True,
        window=11,
        sink_tokens=3,
        prefix_length=torch.tensor(PREFIX),
    ),
    "attention_mask": Rule(lambda r, i, j: is_real(r, j), **padding_fields()),
    "causal-padding": Rule(lambda r, i, j: is_real(r, j) and j <= i, **padding_fields(causal=True)),
    "window-padding": Rule(lambda r, i, j: is_real(r, j) and 0 <= i - j < 11, **padding_fields(causal=True, window=11)),
    "sinks-padding": Rule(
        lambda r, i, j: is_real(r, j) and j <= i and (i - j < 11 or order_of(r, j, padded=True, packed=False) < 3),
        **padding_fields(causal=True, window=11, sink_tokens=3),
    ),
    "prefix-padding": Rule(
        lambda r, i, j: is_real(r, j) and (j <= i or in_prefix(r, j, padded=True)),
        **padding_fields(causal=True, prefix_length=torch.tensor(PREFIX)),
    ),
    "document_ids": Rule(same_document, **document_fields()),
    "causal-documents": Rule(lambda r, i, j: same_document(r, i, j) and j <= i, **document_fields(causal=True)),
    "sinks-documents": Rule(
        lambda r, i, j: (
            same_document(r, i, j) and j <= i and (i - j < 5 or order_of(r, j, padded=False, packed=True) < 2)
        ),
        **document_fields(causal=True, window=5, sink_tokens=2),
    ),
    "prefix-documents": Rule(
        lambda r, i, j: same_document(r, i, j) and (j <= i or in_prefix(r, j, packed=True)),
        **document_fields(causal=True, prefix_length=torch.tensor(PREFIX)),
    ),
    "documents-padding": Rule(
        lambda r, i, j: same_document(r, i, j) and is_real(r, j) and j <= i, **padding_and_document_fields(causal=True)
    ),
}

SCORES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sink-logits": {"sinks": True},
    "bias": {"bias": True},
    "own-scale": {"scale": 1.3},
    "all": {"softcap": 3.0, "sinks": True, "bias": True, "scale": 0.9},
}
HEADS = {"multi-head": (4, 4), "grouped-query": (6, 2), "multi-query": (3, 1), "three groups": (6, 3)}


def slope_bias(queries, keys):
    """A bias that depends on the sign of the distance, different for each of six heads."""
    heads = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)[:, None, None]
    return heads * torch.sin(0.1 * (queries[:, None, :, None] - keys[:, None, None, :]).double())


def make_score_mod(options, heads, queries, keys, at=0):
    sinks = normal(heads, seed=7).requires_grad_() if options.get("sinks") else None
    biased = options.get("bias")
    positions = [torch.arange(n)[None] + at for n in (queries, keys)]
    score_mod = ScoreMod(
        scale=options.get("scale", 0.25),
        softcap=options.get("softcap"),
        sink_logits=sinks,
        bias=(lambda a, b: slope_bias(a, b)[:, :heads]) if biased else None,
        query_positions=positions[0] if biased else None,
        key_positions=positions[1] if biased else None,
    )
    return score_mod, slope_bias(*positions)[:, :heads] if biased else None


def real_rows(y, rule):
    """The outputs of real tokens: those of padding are not defined."""
    return y[rule.fields["key_mask"]] if "key_mask" in rule.fields else y


def compare(rule, scores, heads, run, queries=TOKENS, keys=TOKENS, tolerance=EXACT):
    h, groups = HEADS[heads]
    q = normal(ROWS, queries, h, 13, seed=1).requires_grad_()
    k, v = (normal(ROWS, keys, groups, 13, seed=s).requires_grad_() for s in (2, 3))
    score_mod, bias = make_score_mod(SCORES[scores], h, queries, keys)
    expected = plain_attention(
        q, k, v, rule.visible(q.shape[1], k.shape[1]), score_mod.scale, score_mod.softcap, score_mod.sink_logits, bias
    )
    inputs = [q, k, v] + ([] if score_mod.sink_logits is None else [score_mod.sink_logits])
    ours = run(q, k, v, Mask(**rule.fields), score_mod)
    if rule.fields.get("aligned", True):
        ours, expected = real_rows(ours, rule), real_rows(expected, rule)
    assert_same(ours, expected, inputs, tolerance)


SOURCE_DOCUMENTS = [[0] * 5 + [1] * 20 + [2] * 12, [4] * 37, [9] * 30 + [3] * 4 + [5] * 3]
CROSS = {
    "everything": Rule(lambda r, i, j: True, aligned=False),
    "attention_mask": Rule(
        lambda r, i, j: j >= 6 * r,
        key_mask=torch.tensor([[j >= 6 * r for j in range(37)] for r in range(ROWS)]),
        aligned=False,
    ),
    "document_ids": Rule(
        lambda r, i, j: DOCUMENTS[r][i] == SOURCE_DOCUMENTS[r][j],
        query_document_ids=torch.tensor(DOCUMENTS),
        key_document_ids=torch.tensor(SOURCE_DOCUMENTS),
        aligned=False,
    ),
}
