"""gpt-oss in half precision, as its files are: norms stay in float32 beside float16, MXFP4 is read."""

import json
import random

import pytest
import torch
import transformers
from device import DEVICE
from families.cases import redraw
from families.gpt_oss import gpt_oss_config
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


@torch.no_grad()
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    """Every byte there is, and exponents over the whole range that bfloat16 has; logits of the whole model too."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 61}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, sliding_window=6, max_position_embeddings=40)
    config._experts_implementation = "eager"
    theirs = transformers.GptOssForCausalLM(config).eval().bfloat16()
    redraw(theirs, lambda buffer: False)
    generator, tensors = torch.Generator().manual_seed(0), dict(theirs.state_dict())
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        scales[0, :, 0] = torch.randint(1, 120, (rows,), generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        theirs.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales))
    theirs.save_pretrained(tmp_path)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": published}))
    with pytest.warns(UserWarning, match="mxfp4 are dequantized"):
        ours = phasor.load(tmp_path, DEVICE)
    assert {x.dtype for x in ours.parameters()} == {torch.bfloat16}
    text = torch.randint(0, 61, (2, 30), generator=generator)
    fresh = transformers.GptOssForCausalLM(config).eval()  # bfloat16 has rounded the frequencies of the first
    fresh.load_state_dict(theirs.state_dict())
    expected = fresh(text).logits
    assert expected.std() > 0.1
    assert (ours.float()(text) - expected).abs().max() < 2e-5 * expected.std().clamp(min=1)
    with pytest.warns(UserWarning, match="mxfp4 are dequantized"):
        phasor.save(phasor.load(tmp_path), tmp_path / "back", format="hf")
    back = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    before = theirs.state_dict()
    assert all(torch.equal(back[name], before[name]) for name in before)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_quantized_gpt_oss_is_refused_by_name(method, tmp_path):
    theirs = transformers.GptOssForCausalLM(gpt_oss_config(random.Random(3)))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match="quantization_config"):
        phasor.load(tmp_path)
