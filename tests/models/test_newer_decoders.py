"""Gemma and gpt-oss in half precision, as their files are: a rounded embedding scale, norms that stay in float32."""

import json
import random

import pytest
import torch
import transformers
from families.cases import redraw
from families.decoders_b import gemma2_config, gemma3_config, gemma_config, gpt_oss_config
from safetensors.torch import load_file

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_gpt_oss_in_half_precision_keeps_every_number(dtype, tmp_path):
    """transformers keeps its norms in float32 beside float16; numbers the narrower type has come back as they were."""
    first = transformers.GptOssForCausalLM(gpt_oss_config(random.Random(2)))
    redraw(first, lambda buffer: False)
    first.to(dtype).save_pretrained(tmp_path / "rounded")
    transformers.GptOssForCausalLM.from_pretrained(tmp_path / "rounded").save_pretrained(tmp_path / "theirs")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {x.dtype for x in before.values()} == ({dtype} if dtype == torch.bfloat16 else {dtype, torch.float32})
    model = phasor.load(tmp_path / "theirs")
    assert {x.dtype for x in model.parameters()} == {dtype}
    phasor.save(model, tmp_path / "ours", format="hf")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name].double(), after[name].double()) for name in before)
    back = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(x, y) for x, y in zip(back.parameters(), first.parameters(), strict=True) if x.dim() > 1)


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_quantized_gpt_oss_is_refused_by_name(method, tmp_path):
    theirs = transformers.GptOssForCausalLM(gpt_oss_config(random.Random(3)))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match="quantization_config"):
        phasor.load(tmp_path)
