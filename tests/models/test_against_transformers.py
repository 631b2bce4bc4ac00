"""Whole models against transformers: tiny, every parameter redrawn, the same logits."""

import pytest
import torch
from transformers_pairs import CASES, ROWS, TOKENS, VOCAB, make

from phasor import Record


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(build):
    case, model = make(build)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    target = torch.randint(0, VOCAB, (ROWS, 17), generator=generator)
    seq2seq = case.config.shape == "encoder-decoder"
    every = torch.ones(ROWS, 17 if seq2seq else TOKENS, dtype=torch.bool)
    real = every if seq2seq else case.arguments.get("attention_mask", every)

    record = Record()
    ours = model(tokens, *([target] if seq2seq else []), **case.arguments, record=record)
    more = {"decoder_input_ids": target} if seq2seq else {}
    out = case.theirs(input_ids=tokens, **case.inputs, **more)
    theirs = out.logits if hasattr(out, "logits") else out.last_hidden_state
    assert float(theirs.std()) > 0.1
    # logits of size one after three layers: float32 sums of fifty terms leave 1e-6 to 5e-6
    assert float((ours - theirs)[real].abs().max()) <= 2e-5
    if hasattr(out, "pooler_output"):
        assert float((record.pooled - out.pooler_output).abs().max()) <= 2e-5
