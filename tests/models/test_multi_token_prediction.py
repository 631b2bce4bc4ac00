"""Layers that predict further tokens, behind the last one of a folder: no part of the model, and written back."""

import json
import random

import pytest
import torch
from families.cases import redraw
from families.deepseek import deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa
from families.routed import ernie4_5_moe, glm4_moe
from safetensors.torch import load_file, save_file

import phasor

LIMIT = 2e-5  # as for every family
BEHIND = [
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
    "embed_tokens.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
    "input_layernorm.weight",
    "self_attn.o_proj.weight",
    "mlp.experts.0.up_proj.weight",
]
CASES = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "ernie4_5_moe": ernie4_5_moe,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
}


def further_tensors(name: str, depth: int) -> list[str]:
    if name == "ernie4_5_moe":
        return ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"]
    return [f"model.layers.{depth}.{part}" for part in BEHIND]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_layers_that_predict_further_tokens_are_left_out_and_written_back(name, tmp_path):
    case = CASES[name](random.Random(name))
    theirs = case.cls(case.config).eval()
    redraw(theirs, case.buffers)
    case.touch(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    file, settings = tmp_path / "theirs" / "model.safetensors", tmp_path / "theirs" / "config.json"
    further = {one: torch.randn(3, 5) for one in further_tensors(name, case.config.num_hidden_layers)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_nextn_predict_layers": 1}))
    ours, tokens = phasor.load(tmp_path / "theirs"), torch.arange(34).view(2, 17)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < LIMIT
    phasor.save(ours, tmp_path / "back", format="hf")
    before, after = load_file(file), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert [one for one in before if not torch.equal(before[one], after[one])] == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again = case.cls.from_pretrained(tmp_path / "back", experts_implementation="eager")
    assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)
