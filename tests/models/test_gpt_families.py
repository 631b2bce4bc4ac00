"""GPT-2 and the decoders before Llama as the Hugging Face hub has them: old field names, missing prefixes, buffers.

And the options that parts have for their sake: a norm without a weight, a normed residual stream, scaled ALiBi slopes,
and hidden states in the width of a narrow embedding.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from families.cases import redraw
from references import normal
from safetensors.torch import load_file, save_file

import phasor
from phasor.nn.norm import build_norm
from phasor.nn.positions.alibi.module import ALiBi, alibi_slopes
from phasor.nn.residual import build_residual

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GPT_2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50,
    "embd_pdrop": 0.1,
    "eos_token_id": 50,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 40,
    "n_embd": 12,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 40,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 60,
}
GPT_J = {name: value for name, value in GPT_2.items() if not name.startswith(("n_ctx", "n_special", "predict"))} | {
    "architectures": ["GPTJForCausalLM"],
    "gradient_checkpointing": False,
    "model_type": "gptj",
    "n_inner": None,
    "rotary": True,
    "rotary_dim": 4,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "transformers_version": "4.18.0.dev0",
}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "custom_pipelines": {"text-generation": {"impl": "pipeline.Pipeline", "pt": "AutoModelForCausalLM"}},
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 40,
    "model_type": "gpt_neox",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "rotary_emb_base": 5000,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_parallel_residual": False,
    "vocab_size": 60,
}
OPT = {
    "_name_or_path": "facebook/opt-350m",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 40,
    "hidden_size": 12,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "learned_embeddings": True,
    "max_position_embeddings": 40,
    "model_type": "opt",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "prefix": "</s>",
    "scale_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.20.0.dev0",
    "use_cache": True,
    "vocab_size": 60,
    "word_embed_proj_dim": 8,
}
BLOOM = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 12,
    "n_inner": None,
    "n_layer": 2,
    "num_attention_heads": 3,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 4,
    "seq_length": 40,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 60,
}
MPT = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
    "d_model": 12,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"fan_mode": "fan_in", "init_gain": 0, "name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 40,
    "model_type": "mpt",
    "n_heads": 3,
    "n_layers": 2,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "float32",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 60,
}
FALCON = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 24,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_kv_heads": 2,
    "parallel_attn": True,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 60,
}


def without(prefix):
    return lambda name: name.removeprefix(prefix)


def embed_out(name):
    return name.replace("lm_head.", "embed_out.")


MASK = torch.ones(1, 1, 40, 40).tril()
# For each file of the hub: its fields, how its names differ from those of today, and buffers of old.
HUB = {
    "gpt2": (GPT_2, without("transformer."), {"h.0.attn.bias": MASK, "h.1.attn.bias": MASK.bool()}),
    "gptj": (GPT_J, without(""), {"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}),
    "gpt_neox": (
        PYTHIA,
        embed_out,
        {
            "gpt_neox.layers.0.attention.bias": MASK.bool(),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        },
    ),
    "opt": (OPT, without("model."), {"decoder.version": torch.tensor([3.0])}),
    "bloom": (BLOOM, without("transformer."), {}),
    "mpt": (MPT, without(""), {}),
    "falcon": (FALCON, without(""), {}),
}
NAMES = {"mpt": "MptForCausalLM"}


def write_hub_folder(folder, name, more=None):
    """A folder as the hub has it, of random weights, and the class of transformers that reads it."""
    fields, rename, buffers = HUB[name]
    fields = fields | (more or {})
    cls = getattr(transformers, NAMES.get(name, fields["architectures"][0]))
    model = cls(cls.config_class.from_dict(fields))
    redraw(model, lambda buffer: False)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    folder.mkdir()
    save_file(
        {rename(n): x.contiguous() for n, x in state.items()} | buffers,
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(fields))
    return cls


@pytest.mark.parametrize("name", HUB)
@torch.no_grad()
def test_files_of_the_hub_load_and_come_back(name, tmp_path):
    cls = write_hub_folder(tmp_path / "theirs", name)
    theirs, ours = cls.from_pretrained(tmp_path / "theirs").eval(), phasor.load(tmp_path / "theirs")
    tokens = torch.randint(0, 60, (2, 23), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-5)
    phasor.save(ours, tmp_path / "ours", format="hf")
    back = cls.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(x, back[n]) for n, x in theirs.state_dict().items())
    assert list(back) == list(theirs.state_dict())


@torch.no_grad()
def test_masks_of_old_files_are_left_out(tmp_path):
    write_hub_folder(tmp_path / "theirs", "gpt2")
    phasor.save(phasor.load(tmp_path / "theirs"), tmp_path / "ours", format="hf")
    assert not any(name.endswith(".attn.bias") for name in load_file(tmp_path / "ours" / "model.safetensors"))


@torch.no_grad()
def test_a_clip_that_is_an_integer_comes_back_as_transformers_takes_it(tmp_path):
    """MPT-7B-storywriter has `"clip_qkv": 6` and its own slopes, and transformers refuses the 6."""
    write_hub_folder(tmp_path / "theirs", "mpt")
    fields = MPT | {"attn_config": MPT["attn_config"] | {"clip_qkv": 6, "alibi_bias_max": 16}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match="alibi_bias_max is 16, and phasor follows it"):
        ours = phasor.load(tmp_path / "theirs")
    assert (ours.config.attention.clip, ours.config.position.max_bias) == (6.0, 16.0)
    phasor.save(ours, tmp_path / "ours", format="hf")
    attention = transformers.MptForCausalLM.from_pretrained(tmp_path / "ours").config.attn_config
    assert (attention.clip_qkv, attention.alibi_bias_max) == (6.0, 16)


@pytest.mark.filterwarnings("ignore:.*alibi_bias_max is 16, and phasor follows it")
@pytest.mark.parametrize("own", [8, 16])
def test_slopes_transformers_does_not_go_by_are_not_swapped_in(tmp_path, own):
    """Those of the file are given back as they were."""
    write_hub_folder(tmp_path / "theirs", "mpt")
    fields = MPT | {"attn_config": MPT["attn_config"] | {"alibi_bias_max": own}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields))
    for swapped in (4.0, 8.0, 16.0):
        ours = phasor.load(tmp_path / "theirs", position=phasor.ALiBiConfig(max_bias=swapped))
        if swapped in (8, own):
            phasor.save(ours, tmp_path / "ours", format="hf")
            assert phasor.load(tmp_path / "ours").config.position.max_bias == swapped
        else:
            with pytest.raises(ValueError, match=f"max_bias is {swapped:g}, and always 8 in transformers"):
                phasor.save(ours, tmp_path / "ours", format="hf")


REFUSED = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention (true)"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function = 'quick_gelu'"),
    ("gpt2", {"hidden_size": 24}, "hidden_size = 24; it must be 12"),
    ("gptj", {"rotary": False}, "rotary = false"),
    ("gptj", {"rotary_dim": 8}, "wider than the head"),
    ("gpt_neox", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type = 'ntk'"),
    ("gpt_neox", {"rotary_pct": 0.0}, "rotary_dim must be even and at least 2, not 0"),
    ("opt", {"scale_embeddings": True}, "scale_embeddings = true"),
    ("bloom", {"slow_but_exact": True}, "slow_but_exact = true"),
    ("mpt", {"no_bias": False}, "no_bias = false"),
    ("mpt", {"expansion_ratio": 2}, "expansion_ratio = 2"),
    ("mpt", {"logit_scale": 0.5}, "logit_scale = 0.5"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm'"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi = false"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln = true"),
    ("mpt", {"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 1}}, "attn_config.attn_type"),
    ("mpt", {"attn_config": 3}, "attn_config must be an object"),
    ("mpt", {"ffn_config": {"ffn_type": "mptgeglu"}}, "ffn_config.ffn_type"),
    ("falcon", {"parallel_attn": False}, "parallel_attn = false"),
    ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3"),
    ("falcon", {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False}, "num_kv_heads = 2; it must be 4"),
    ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm = true"),
]


@pytest.mark.parametrize(("name", "more", "complaint"), REFUSED)
def test_what_phasor_does_not_compute_is_refused_by_name(name, more, complaint, tmp_path):
    write_hub_folder(tmp_path / "theirs", name)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(HUB[name][0] | more))
    with pytest.raises(ValueError, match=r"config\.json") as raised:
        phasor.load(tmp_path / "theirs")
    assert complaint in str(raised.value)


def model(**parts):
    return phasor.ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=2, **parts)


@pytest.mark.parametrize(("shape", "bias"), [((6,), False), ((6,), True), ((3, 6), False)])
def test_a_norm_without_a_weight(shape, bias):
    x = normal(2, 5, *shape)
    norm = build_norm(phasor.LayerNormConfig(eps=1e-2, weight=False, bias=bias), *shape).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    centered = x - x.mean(-1, keepdim=True)
    plain = centered / (centered.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    torch.testing.assert_close(norm(x), plain + (norm.bias if bias else 0))
    assert [name for name, _ in norm.named_parameters()] == (["bias"] if bias else [])


def test_a_normed_stream_is_the_norm_and_what_is_made_of_it():
    residual = build_residual(model(placement={"kind": "pre", "normed_stream": True, "multiplier": 0.5}), "decoder", 2)
    for parameter in residual.parameters():
        torch.nn.init.normal_(parameter)
    x = normal(3, 8, dtype=torch.float32)
    expected = x
    for norm, f in zip(residual.norms, (torch.sin, torch.tanh), strict=True):
        h = F.layer_norm(expected, (8,), norm.weight, norm.bias, 1e-5)
        expected = h + 0.5 * f(h)
    torch.testing.assert_close(residual(x, torch.sin, torch.tanh), expected)


def test_alibi_with_a_multiplier_scales_every_slope():
    module = ALiBi(phasor.ALiBiConfig(multiplier=0.25), num_heads=3)
    assert module.slopes == tuple(slope / 4 for slope in alibi_slopes(3))
    with pytest.raises(ValueError, match="multiplier"):
        phasor.ALiBiConfig(multiplier=0.0)


def test_hidden_states_of_a_narrow_table_come_out_in_its_width():
    narrow = model(embedding={"width": 5}, head={"kind": "none", "project": True})
    wide = narrow.replace(head="none")
    torch.manual_seed(0)
    projected, plain = phasor.Transformer(narrow).eval(), phasor.Transformer(wide).eval()
    plain.load_state_dict({n: x for n, x in projected.state_dict().items() if n != "head.project.weight"})
    tokens = torch.arange(7)[None]
    torch.testing.assert_close(projected(tokens), plain(tokens) @ projected.head.project.weight.T)
    with pytest.raises(ValueError, match=r"NoHeadConfig.project needs EmbeddingConfig.width"):
        model(head={"kind": "none", "project": True})


@pytest.mark.parametrize(("preset", "family"), [("gpt-2", "gpt2"), ("bloom", "bloom"), ("mpt", "mpt")])
@torch.no_grad()
def test_presets_are_written_as_their_family(preset, family, tmp_path):
    small = {"dim": 24, "hidden_dim": 96, "num_layers": 2, "num_heads": 3, "vocab_size": 60, "max_length": 40}
    ours = phasor.Transformer(phasor.preset(preset, **small)).eval()
    redraw(ours, lambda buffer: False)
    phasor.save(ours, tmp_path / "model", format="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert theirs.config.model_type == family
    tokens = torch.randint(0, 60, (2, 23), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-5)


def test_a_model_of_parts_no_family_has_is_refused(tmp_path):
    grouped = phasor.preset("gpt-2", dim=24, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=60, max_length=40)
    with pytest.raises(ValueError, match=r"no family .* num_kv_heads"):
        phasor.save(phasor.Transformer(grouped), tmp_path / "model", format="hf")
