"""Gemma in half precision, as its files are: the embedding scale is rounded."""

import random

import pytest
import torch
import transformers
from families.cases import redraw
from families.gemma import gemma2_config, gemma3_config, gemma_config

import phasor
from phasor.config import EmbeddingConfig, ModelConfig
from phasor.nn.embedding import Embedding

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GEMMAS = {
    "gemma": (transformers.GemmaForCausalLM, gemma_config),
    "gemma2": (transformers.Gemma2ForCausalLM, gemma2_config),
    "gemma3_text": (transformers.Gemma3ForCausalLM, gemma3_config),
}


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float16, 55.4375), (torch.float32, None)])
def test_an_embedding_scale_is_rounded_where_it_says_so(dtype, scale):
    """The square root of 3072 is 55.4256, and 55.5 in bfloat16."""
    tokens = torch.arange(7)
    for rounds in (False, True):
        embedding = EmbeddingConfig(scale="sqrt", round_scale=rounds)
        model = ModelConfig(vocab_size=7, dim=3072, num_layers=1, num_heads=1, embedding=embedding)
        part = Embedding(model, 7).to(dtype)
        torch.nn.init.normal_(part.weight, generator=torch.Generator().manual_seed(1))
        factor = scale if rounds and scale is not None else 3072**0.5
        torch.testing.assert_close(part(tokens), (part.weight.double() * factor).to(dtype), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", GEMMAS)
@torch.no_grad()
def test_gemma_embeds_the_same_in_bfloat16(name, tmp_path):
    cls, config = GEMMAS[name]
    theirs = cls(config(random.Random(1)))
    redraw(theirs, lambda buffer: False)
    theirs = theirs.to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours, tokens = phasor.load(tmp_path), torch.arange(50)
    assert torch.equal(ours.tokens(tokens), theirs.model.embed_tokens(tokens))
