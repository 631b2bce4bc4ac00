"""Quantized folders whose weights stay in 8 or 4 bits: they have the values of the dequantized ones."""

import warnings
from functools import partial

import pytest
import torch
import transformers
from quantized_packers import (
    CASES,
    FOUR,
    NF4,
    Case,
    awq,
    compressed,
    compressed_int8,
    compressed_packed,
    eight_bits,
    four_bits,
    fp8,
    gptq,
)
from schemes import relative_change
from test_quantized_folders import load, quantize

import phasor
from phasor.cli import main
from phasor.nn.quantized import QuantizedLinear
from phasor.ops import dispatch
from phasor.ops.quantized import Int4Matrix, Int8Matrix, dequantize

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPTQ, AWQ = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "version": "gemm"}
PACKED = partial(compressed, "pack-quantized", num_bits=4, type="int", strategy="group")
INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
KEPT = {
    "gptq": (Case(GPTQ, torch.float16, gptq(4, 32, 1, False, symmetric=True)), Int4Matrix, 32),
    "gptq of one group": (Case(GPTQ, torch.float16, gptq(4, None, 1, False, symmetric=True)), Int4Matrix, 32),
    "awq": (Case(AWQ, torch.float16, partial(awq, group=32, symmetric=True)), Int4Matrix, 32),
    "pack-quantized": (Case(PACKED(group_size=32), torch.bfloat16, compressed_packed(4, 32, True)), Int4Matrix, 32),
    "int-quantized": (Case(INT8, torch.bfloat16, compressed_int8(True)), Int8Matrix, None),
    "bitsandbytes": (Case({"load_in_8bit": True}, torch.float16, eight_bits), Int8Matrix, None),
}
LEFT = {
    "fp8": (Case(CASES["fp8 by blocks"].config, torch.bfloat16, fp8(16, 12)), "not integers times scales"),
    "nf4": (Case(FOUR, torch.bfloat16, four_bits(NF4, "nf4", False)), "not integers times scales"),
    "awq with zero points": (Case(AWQ, torch.float16, partial(awq, group=32)), "too large for 4 bits without zero"),
    "gptq in order of activations": (
        Case(GPTQ, torch.float16, gptq(4, 32, 1, True, symmetric=True)),
        "scales of other groups than 32, 64, 128 neighbors",
    ),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KEPT)
def test_weights_are_kept_and_equal_those_that_are_dequantized(name, model, tmp_path):
    case, kind, group = KEPT[name]
    quantize(model, case, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all are kept
        small = phasor.load(tmp_path / "quantized", weights="stored")
    large = phasor.load(tmp_path / "plain")
    linears = {name: part for name, part in small.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(linears) == 2 * 4
    for path, linear in linears.items():
        matrix = linear.matrix
        assert type(matrix) is kind
        assert group is None or group <= matrix.group_size <= 64
        expected = large.get_parameter(f"{path}.weight")
        # bitsandbytes multiplies by its scale and by 1/127 one after the other.
        if name == "bitsandbytes":
            torch.testing.assert_close(dequantize(matrix, torch.float32), expected.float(), rtol=2**-10, atol=0)
        else:
            assert torch.equal(dequantize(matrix, expected.dtype), expected)
    assert {p.dtype for p in small.parameters()} == {case.dtype}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        if kind is Int4Matrix:  # in 8 bits the sum is scaled, and not every weight
            with dispatch.force_path("reference"):
                assert torch.equal(small(ids), large(ids))
        small, large = small.float(), large.float()
        # CPU kernels round rows to 8 bits and scales to bfloat16; plain weights are rounded to float16 or bfloat16.
        assert relative_change(small(ids), large(ids)) < 0.05
    assert len(phasor.generate(small, [1, 2, 3], max_new_tokens=3)) == 3


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_kept_is_said(name, model, tmp_path):
    case, reason = LEFT[name]
    quantize(model, case, tmp_path)
    with pytest.raises(ValueError, match=f"no weight in .* can be kept, so leave weights out: .*{reason}") as caught:
        phasor.load(tmp_path / "quantized", weights="stored")
    assert "\n" not in str(caught.value)


def test_some_weights_are_kept_and_others_named(model, tmp_path):
    """Zero points in the projections of attention, and none elsewhere."""
    packers = {True: gptq(4, 32, 1, False, symmetric=True), False: gptq(4, 32, 1, False)}
    quantize(model, Case(GPTQ, torch.float16, lambda rng, n, k: packers[96 in (n, k)](rng, n, k)), tmp_path)
    with pytest.warns(UserWarning, match=r"are dequantized: .*self_attn.*\(too large for 4 bits"):
        small = phasor.load(tmp_path / "quantized", weights="stored")
    block, expected = small.decoder.blocks[1], load(tmp_path / "quantized").decoder.blocks[1]
    assert type(block.attention.qkv) is torch.nn.Linear
    assert torch.equal(block.attention.qkv.weight, expected.attention.qkv.weight)
    assert isinstance(block.feedforward.up.matrix, Int4Matrix)


def test_errors_and_commands(model, tmp_path, capsys):
    case = KEPT["gptq"][0]
    quantize(model, case, tmp_path)
    with pytest.raises(ValueError, match="plain has no quantized weights to keep as they are stored"):
        phasor.load(tmp_path / "plain", weights="stored")
    for wrong in ("int8", 4, ["stored"]):
        with pytest.raises(ValueError, match=r"unknown weights .*; known: stored"):
            phasor.load(tmp_path / "plain", weights=wrong)
    small = phasor.load(tmp_path / "quantized", weights="stored")
    with pytest.raises(ValueError, match="cannot be saved"):
        phasor.save(small, tmp_path / "back")
    command = ["generate", str(tmp_path / "quantized"), "--prompt", "1 2 3", "--max-new-tokens", "4", "--device", "cpu"]
    assert main([*command, "--weights", "stored"]) == 0
    assert [int(token) for token in capsys.readouterr().out.split()] == phasor.generate(
        small, [1, 2, 3], max_new_tokens=4
    )
