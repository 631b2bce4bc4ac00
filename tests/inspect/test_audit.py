"""Recorded faults of engines with rotary settings: each is found in a configuration that has it, and in no other."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import phasor
from phasor.cli import main
from phasor.inspect.audit import audit
from phasor.inspect.audit.audit import RULES, find
from phasor.inspect.audit.settings import RopeConfig

PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONG |= {"original_max_position_embeddings": 1024}
SECTIONS = {"rope_type": "default", "mrope_section": [8, 4, 4]}
OLMO3 = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
V5 = {"rope_type": "default", "rope_theta": 500000.0}


def old(block, **config):
    return {**LLAMA, "rope_theta": 10000.0, "rope_scaling": block, **config}


def new(block, **config):
    return {**LLAMA, "rope_parameters": block, **config}


# Where it was seen, a configuration with the fault, the finding, and a configuration without it.
FAULTS = {
    "vllm-project/vllm#42624 lost": (new(V5), "warning rope_parameters.rope_theta", new(V5, rope_theta=500000.0)),
    "deepspeedai/DeepSpeed#8345": (
        new(V5),
        "warning rope_parameters.rope_theta",
        new({**V5, "rope_theta": 10000.0}),
    ),
    "vllm-project/vllm#42624": (new(V5, rope_theta=10000.0), "error rope_theta", new(V5, rope_theta=500000.0)),
    "sgl-project/sglang#26187": (new(YARN), "warning rope_parameters", new(YARN, rope_scaling=YARN)),
    "vllm-project/vllm#28542": (new(V5, rope_scaling=YARN), "error rope_scaling", new(YARN, rope_scaling=YARN)),
    "ml-explore/mlx-examples#909": (old(LLAMA3), "note rope_scaling.rope_type", old({**LLAMA3, "type": "llama3"})),
    "huggingface/transformers#32167": (
        old({"type": "linear", "factor": 2.0}),
        "note rope_scaling.type",
        old({"type": "linear", "rope_type": "linear", "factor": 2.0}),
    ),
    "modelscope/ms-swift#2340": (
        old({**SECTIONS, "type": "default"}),
        "error rope_scaling.type",
        old({"type": "mrope", "rope_type": "mrope", "mrope_section": [8, 4, 4]}),
    ),
    "ggml-org/llama.cpp#8262": (
        old({**LONG, "rope_type": "su"}),
        "warning rope_scaling.type",
        old(LONG),
    ),
    "huggingface/transformers#37134": (old({**YARN, "factor": 4}), "note rope_scaling.factor", old(YARN)),
    "vllm-project/speculators#649": (
        new({"full_attention": V5, "sliding_attention": {"rope_type": "default"}}),
        "warning rope_parameters",
        new(V5),
    ),
    "ggml-org/llama.cpp#13322": (old(YARN, model_type="qwen3_moe"), "note rope_scaling", old(YARN)),
    "NVIDIA-NeMo/Automodel#2652": (
        old({"rope_type": "yarn", "factor": 4.0}),
        "error rope_scaling.original_max_position_embeddings",
        old(YARN),
    ),
    "ROCm/aiter#4742": (
        old({"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=1024),
        "warning rope_scaling.original_max_position_embeddings",
        old(YARN),
    ),
    "huggingface/transformers#38224": (
        old(YARN, max_position_embeddings=8192),
        "warning rope_scaling.factor",
        old(YARN),
    ),
    "huggingface/transformers#33783": (
        old(YARN, max_position_embeddings=1024),
        "error rope_scaling.factor",
        old(YARN),
    ),
    "sgl-project/sglang#6030": (
        old(YARN),
        "note rope_scaling",
        old({**YARN, "factor": 1.0}, max_position_embeddings=1024),
    ),
    "vllm-project/vllm#56446": (
        old({**YARN, "rope_type": "telechat3-yarn"}),
        "error rope_scaling.rope_type",
        old(YARN),
    ),
    "vllm-project/vllm#53634": (old({**YARN, "rope_type": "deepseek_yarn"}), "error rope_scaling.rope_type", old(YARN)),
    "vllm-project/vllm#41236": (old({"rope_type": "dynamic", "factor": 2.0}), "warning rope_scaling", old(LLAMA3)),
    "vllm-project/vllm#52665": (
        old({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8192}),
        "error max_position_embeddings",
        old({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}),
    ),
    "b4rtaz/distributed-llama#120": (
        old({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}),
        "error rope_scaling.low_freq_factor",
        old({**LLAMA3, "original_max_position_embeddings": 512}),
    ),
    "unslothai/unsloth#6197": (old(LLAMA3), "note rope_scaling", old({"rope_type": "linear", "factor": 2.0})),
    "lablup/mlxcel#1358": (old(LONG), "warning rope_scaling.long_factor", old(YARN)),
    "apache/tvm#18102": (
        old(LONG, partial_rotary_factor=0.75),
        "error rope_scaling.short_factor",
        old({**LONG, "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}, partial_rotary_factor=0.75),
    ),
    "lm-sys/FastChat#3907": (
        old({name: value for name, value in LONG.items() if name != "factor"}),
        "note rope_scaling.factor",
        old(LONG),
    ),
    "NVIDIA/Megatron-LM#1429": (old({**YARN, "mscale_all_dim": 1.0}), "warning rope_scaling.mscale_all_dim", old(YARN)),
    "vllm-project/vllm#27722": (old({**YARN, "truncate": False}), "warning rope_scaling.truncate", old(YARN)),
    "huggingface/transformers#48241": (
        old(None, rotary_dim=16),
        "error rotary_dim",
        old(None, rotary_dim=16, partial_rotary_factor=0.5),
    ),
    "vllm-project/vllm#29966 twice": (
        new({**V5, "partial_rotary_factor": 0.5}, partial_rotary_factor=0.5),
        "warning partial_rotary_factor",
        new({**V5, "partial_rotary_factor": 0.5}),
    ),
    "vllm-project/vllm#29966": (
        new({**V5, "partial_rotary_factor": 0.5}),
        "warning rope_parameters.partial_rotary_factor",
        new(V5, partial_rotary_factor=0.5),
    ),
    "AI-Hypercomputer/maxtext#4616": (
        old({**SECTIONS, "mrope_section": [4, 2, 2]}, partial_rotary_factor=0.5),
        "warning rope_scaling.partial_rotary_factor",
        old(SECTIONS),
    ),
    "pytorch/torchtitan#4286": (
        old({**SECTIONS, "mrope_section": [8, 4, 5]}),
        "error rope_scaling.mrope_section",
        old(SECTIONS),
    ),
    "ohdearquant/lattice#1507": (
        old({**SECTIONS, "mrope_section": [5, 5, 6], "mrope_interleaved": True}),
        "error rope_scaling.mrope_section",
        old({**SECTIONS, "mrope_section": [6, 5, 5], "mrope_interleaved": True}),
    ),
    "huggingface/transformers#48671": (
        old({"rope_type": "mrope", "mrope_section": [8, 4, 4]}),
        "note rope_scaling.rope_type",
        old(SECTIONS),
    ),
    "huggingface/transformers#45945": (
        {**OLMO3, "rope_scaling": YARN},
        "warning rope_scaling",
        {**OLMO3, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
    ),
    "ggml-org/llama.cpp#14367": (
        old({"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=10000.0),
        "warning rope_local_base_freq",
        old({"rope_type": "linear", "factor": 8.0}),
    ),
}


def findings(config, reference=None):
    """The findings about a configuration, those with a reference alone where one is given."""
    found = find(RopeConfig.read(copy.deepcopy(config)))
    return {f"{one.severity} {one.field}" for one in found if reference is None or reference in one.seen}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_fault_is_found(fault):
    config, expected, without = FAULTS[fault]
    reference = fault.split()[0]
    assert expected in findings(config, reference)
    assert expected not in findings(without, reference)


def test_every_rule_has_a_recorded_fault():
    for rule in RULES:
        assert any(list(rule(RopeConfig.read(config))) for config, *_ in FAULTS.values()), rule.__name__
    assert len({fault.split()[0] for fault in FAULTS}) >= 20


@pytest.mark.parametrize("fault", FAULTS)
def test_findings_are_sentences_with_references(fault):
    for one in find(RopeConfig.read(FAULTS[fault][0])):
        assert one.seen
        for reference in one.seen:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", reference)
        assert one.what[0].islower()
        assert not one.what.endswith(".")
        assert one.instead


def test_published_configurations_have_no_errors_but_the_known_one():
    """MiniMax M2's: transformers rotated whole heads until it read rotary_dim."""
    wrong = {path.stem: audit(path).findings for path in PUBLISHED if audit(path).has_errors}
    assert {name: [one.field for one in found if one.severity == "error"] for name, found in wrong.items()} == {
        "minimax-m2": ["rotary_dim"]
    }


@pytest.mark.parametrize(
    "extension",
    [
        None,
        phasor.LinearScaling(factor=4.0),
        phasor.YaRN(factor=4.0, original_length=1024),
        phasor.Llama3Scaling(factor=4.0, original_length=1024),
    ],
    ids=lambda extension: "none" if extension is None else extension.kind,
)
def test_what_phasor_writes_has_no_errors(extension, tmp_path):
    config = phasor.preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50, max_length=1024)
    config = config if extension is None else config.with_extension(extension)
    phasor.save(phasor.Transformer(config), tmp_path, format="hf")
    assert not audit(tmp_path).has_errors


def test_transformers_ignores_truncate_in_a_block_of_a_layer_type():
    """The finding says so: of blocks that differ in `truncate` alone, transformers computes the same frequencies."""
    block = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

    def frequencies(nested, truncate):
        one = {**block, "truncate": truncate}
        config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=4096)
        config.layer_types = ["full_attention"]
        config.rope_parameters = {"full_attention": one} if nested else one
        layer_type = {"layer_type": "full_attention"} if nested else {}
        return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"), **layer_type)[0]

    assert not torch.equal(frequencies(False, True), frequencies(False, False))
    assert torch.equal(frequencies(True, True), frequencies(True, False))
    found = find(RopeConfig.read({**LLAMA, "rope_parameters": {"full_attention": {**block, "truncate": False}}}))
    assert any("transformers in a block of a layer type" in one.what for one in found)


def test_the_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(old(YARN, max_position_embeddings=1024)))
    assert main(["explain", "--audit", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    for word in ("error", "rope_scaling.factor", "huggingface/transformers#33783", "instead"):
        assert word in shown
    assert main(["explain", str(tmp_path), "--audit", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["field"] == "rope_scaling.factor"
    (tmp_path / "config.json").write_text(json.dumps(old(None)))
    assert main(["explain", "--audit", str(tmp_path)]) == 0
    assert "no findings" in capsys.readouterr().out
    for more in (["preset:llama-2"], ["--length", "9"], ["--extension", "yarn"], ["--part", "text"]):
        assert main(["explain", "--audit", str(tmp_path), *more]) == 2
        assert "--audit" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["explain", "--audit", str(tmp_path)]) == 2
    assert "no Hugging Face configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (old({**YARN, "factor": "4"}), "rope_scaling.factor must be a number, not '4'"),
        (old({**YARN, "factor": 10**400}), "rope_scaling.factor must be a number"),
        (old({**YARN, "original_max_position_embeddings": 0}), "original_max_position_embeddings must be above 0"),
        (old(LONG, hidden_size="128"), "hidden_size must be a number"),
        (old(LONG, partial_rotary_factor=float("nan")), "partial_rotary_factor must be a number, not nan"),
        (old({**SECTIONS, "mrope_section": [10**12, 4, 4], "mrope_interleaved": True}), "from 0 to 65,536"),
        (old({**SECTIONS, "mrope_section": ["8"]}), "rope_scaling.mrope_section must be a list of integers"),
        (new(V5, rope_theta="1e6"), "rope_theta must be a number"),
        (old("yarn"), "rope_scaling must be an object, not 'yarn'"),
    ],
)
def test_values_of_another_type_are_refused_by_name(config, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        audit(tmp_path)
    assert str(refused.value).startswith(str(tmp_path))


def test_a_value_per_layer_is_no_mistake(tmp_path):
    for more in ({"num_attention_heads": [4, 2]}, {"rope_theta": [1e4, 1e6]}, {"layer_types": 5}):
        (tmp_path / "config.json").write_text(json.dumps(old(LONG, **more)))
        assert not audit(tmp_path).has_errors


def test_the_text_part_of_a_multimodal_folder(tmp_path):
    config = {"model_type": "llava", "text_config": old(YARN, max_position_embeddings=1024)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert audit(tmp_path).has_errors
