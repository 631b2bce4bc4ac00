"""gpt-oss in half precision, as its files are: norms stay in float32 beside float16, quantized weights are refused."""

import json
import random

import pytest
import torch
import transformers
from families.cases import redraw
from families.gpt_oss import gpt_oss_config
from safetensors.torch import load_file

import phasor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_gpt_oss_in_half_precision_keeps_every_value(dtype, tmp_path):
    """transformers keeps norms in float32 beside float16; values that the narrower dtype has come back unchanged."""
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
