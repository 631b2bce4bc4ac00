"""Fields of config.json, family by family: what their absence means, and what is not taken."""

import importlib
import inspect
import pkgutil
import random
import re
import sys
from pathlib import Path

import families
import pytest
import transformers

import phasor
from phasor.models.families import family
from phasor.models.family import differences
from phasor.models.fields import HARMLESS, UNSUPPORTED, Fields

transformers.logging.set_verbosity_error()

BUILDERS = {}
for module in pkgutil.iter_modules(families.__path__):
    BUILDERS |= getattr(importlib.import_module(f"families.{module.name}"), "CASES", {})
every = pytest.mark.parametrize("name", [name for name in BUILDERS if "/" not in name])


def drawn(name, seed):
    """A random configuration of transformers, and its fields."""
    case = BUILDERS[name](random.Random(f"{name} {seed}"))
    return case, fields_of(case, case.config)


def fields_of(case, config):
    return config.to_dict() | {"architectures": [case.cls.__name__]}


def read(name, data, strict=False):
    return family(name).read_whole(Fields(data, Path("config.json"), strict=strict))


@pytest.mark.sample(4)
@every
def test_a_missing_field_means_what_it_means_to_transformers(name):
    wrong, compared = {}, 0
    for seed in range(3):
        case, whole = drawn(name, seed)
        for field in whole.keys() - {"model_type", "architectures"}:
            rest = {n: value for n, value in whole.items() if n != field}
            try:
                filled = read(name, fields_of(case, type(case.config).from_dict(rest)))
            except Exception:
                continue  # their default does not go with the rest
            try:
                left_out = read(name, rest)
            except ValueError as error:
                if f"{field} is missing" not in str(error):
                    wrong[field] = str(error)
                continue
            found = differences(filled, left_out)
            found += [n for n in ("max_length", "dropout") if getattr(filled, n) != getattr(left_out, n)]
            compared += 1
            if found:
                wrong[field] = found
    assert wrong == {}
    assert compared > 30


@pytest.mark.sample(40)
@every
@pytest.mark.parametrize("value", ["x", -1, 0, 1.5, True, [], [None], {}, {"x": 1}, float("nan")], ids=repr)
def test_nonsense_is_read_or_refused_in_a_sentence(name, value):
    _, whole = drawn(name, 0)
    said = []
    for field in whole:
        try:
            read(name, whole | {field: value})
        except ValueError as error:
            said.append(str(error))
    assert [text for text in said if not text.startswith("config.json: ")] == []


REFUSED = {
    "mistral": {
        "partial_rotary_factor": 0.5,
        "layer_types": ["full_attention"],
        "quantization_config": {"quant_method": "fp8"},
        "sliding_window": 0,
    },
    "phimoe": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "mixtral": {"router_jitter_noise": 0.1, "num_experts_per_tok": 99},
    "qwen2": {"use_mrope": True, "layer_types": ["chunked_attention"]},
    "qwen3": {"attention_bias": "no", "layer_types": ["full_attention"] * 9},
    "qwen3_moe": {
        "qkv_bias": True,
        "use_qk_norm": False,
        "shared_expert_intermediate_size": 12,
        "decoder_sparse_step": 0,
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 0},
    "smollm3": {"no_rope_layers": [1], "sliding_window": "wide"},
    "glm4_moe": {"topk_group": 9, "n_group": 7},
    "minimax_m2": {"scoring_func": "softmax", "use_routing_bias": False, "shared_intermediate_size": 8},
    "ernie4_5_moe": {"use_bias": True, "moe_norm_min": 0.1, "moe_layer_interval": 0},
    "olmoe": {"clip_qkv": 8.0},
    "granite": {"logits_scaling": 0, "residual_multiplier": 0.0},
    "starcoder2": {"mlp_type": "gated", "norm_type": "rms_norm"},
    "stablelm": {"head_dim": 10, "hidden_dropout": 0.1},
    "gemma": {"use_bidirectional_attention": True, "hidden_activation": "sigmoid", "partial_rotary_factor": 0.5},
    "gemma2": {"use_bidirectional_attention": True, "query_pre_attn_scalar": 0, "layer_types": ["full_attention"]},
    "gemma3_text": {
        "attn_logit_softcapping": 50.0,
        "sliding_window_pattern": 0,
        "rope_parameters": {"rope_type": "default"},
    },
    "phi": {"hidden_act": "swiglu"},
    "phi3": {"attention_bias": True, "lm_head_bias": True, "mlp_bias": True, "full_attn_mod": 2},
    "olmo2": {"partial_rotary_factor": 0.5},
    "olmo3": {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default"}},
    "exaone4": {"layer_types": ["chunked_attention"], "partial_rotary_factor": 0.5},
    "cohere2": {"logit_scale": 0.0, "layer_types": ["full_attention"] * 9},
    "gpt_neo": {"attention_types": [[["global", "far"], 1]], "attention_layers": ["local"], "window_size": "wide"},
    "xglm": {"add_cross_attention": True},
    "persimmon": {"head_dim": 3, "hidden_dropout": 0.1},
    "codegen": {"activation_function": "mish"},
    "openai-gpt": {"afn": "gelu_new"},
    "arcee": {"hidden_act": "swiglu", "partial_rotary_factor": 0.5},
    "gpt_bigcode": {"add_cross_attention": True, "num_key_value_heads": 5},
    "cohere": {"logit_scale": 0.0},
    "bert": {"is_decoder": True, "add_cross_attention": True},
    "gpt2": {"add_cross_attention": True},
    "llama": {"sliding_window": 8, "is_causal": False, "quantization_config": {"quant_method": "gptq"}},
    "t5": {"is_encoder_decoder": False, "num_hidden_layers": 9, "head_dim": 5},
    "bart": {"is_encoder_decoder": False},
    "t5gemma": {"is_encoder_decoder": False},
    "whisper": {"is_encoder_decoder": False, "num_mel_bins": 0, "decoder_attention_heads": 9, "decoder_ffn_dim": 9},
    "moonshine": {"encoder_num_attention_heads": 9, "decoder_num_key_value_heads": 1, "hidden_act": "relu"},
    "apertus": {"hidden_act": "swiglu", "mlp_bias": True, "qk_norm": False, "post_norm": True},
    "switch_transformers": {"is_encoder_decoder": False, "router_dtype": "bfloat16", "hidden_size": 7},
    "nemotron_h": {
        "attention_bias": True,
        "hybrid_override_pattern": "M*X-",
        "mamba_d_conv": 3,
        "mamba_hidden_act": "gelu",
        "mamba_proj_bias": True,
        "mlp_bias": True,
        "n_shared_experts": 2,
        "num_hidden_layers": 99,
        "tie_word_embeddings": True,
        "time_step_limit": [0.1, 1.0],
    },
    "gpt_oss": {"quantization_config": {"quant_method": "fp8"}, "hidden_act": "gelu", "layer_types": ["chunked"]},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, given in REFUSED.items() for field in given])
def test_what_a_family_has_no_part_for_is_refused_by_name(name, field):
    _, whole = drawn(name, 0)
    used = {"use_sliding_window": True, "layer_types": None} if field == "sliding_window" and name != "mistral" else {}
    word = {
        "topk_group": "top_groups",
        "n_group": "num_groups",
        "num_experts_per_tok": "top_k",
        "shared_expert_intermediate_size": "shared",
        "residual_multiplier": "multiplier",
        "sliding_window": "window",
    }
    with pytest.raises(ValueError, match=word.get(field, field)):
        read(name, whole | used | {field: REFUSED[name][field]})


# Of other families, or of training code; transformers reads none of them here.
IGNORED = {
    "mistral": {"attention_bias": True},
    "qwen2": {"attention_bias": True},
    "gemma3_text": {"original_max_position_embeddings": 20},
    "phi": {"attention_bias": False},
    "olmo2": {"clip_qkv": 8.0},
    "cohere": {"layer_norm_bias": True},
    "glm": {"mlp_bias": True},
    "glm4": {"use_qk_norm": True},
    "llama": {"unsloth_version": "2025.1", "neftune_noise_alpha": 5, "rope_interleaved": True, "loss_type": "x"},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, given in IGNORED.items() for field in given])
def test_what_transformers_ignores_is_ignored_unless_strict(name, field):
    _, whole = drawn(name, 0)
    whole |= {field: IGNORED[name][field]}
    fields = Fields(whole, Path("config.json"))
    assert family(name).read_whole(fields) == read(name, {n: v for n, v in whole.items() if n != field})
    assert list(fields.ignored) == [field]
    assert field in fields.unread_fields()
    with pytest.raises(ValueError, match=f"phasor does not honor {field}"):
        read(name, whole, strict=True)


def honored_by_transformers(cls, config):
    """The fields that a model's class or its configuration's reads."""
    model = next(c for c in cls.__mro__ if c.__module__.startswith("transformers."))
    source = inspect.getsource(sys.modules[model.__module__])
    found = set(re.findall(r"config\.(\w+)", source)) | set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))
    of_config = inspect.getsource(sys.modules[type(config).__module__])
    found |= set(re.findall(r"self\.(\w+)", of_config))
    found |= set(re.findall(r'kwargs\.(?:pop|get|setdefault)\("(\w+)"', of_config))
    found |= set(config.attribute_map) | set(config.attribute_map.values())
    own = set().union(*(getattr(c, "__annotations__", {}) for c in type(config).__mro__))
    beside = vars(sys.modules[type(config).__module__]).values()  # such as that of the vision tower
    others = [c.__annotations__ for c in beside if isinstance(c, type) and issubclass(c, transformers.PreTrainedConfig)]
    return (found - set().union(*others)) | own


# Names in the same files that are no fields of a text model's config.json, or belong to other heads.
NO_FIELDS = set(
    """
    _auto_class _list_to_pattern _pattern_to_list attribute_map base_config_key base_model_ep_plan
    base_model_fsdp_plan base_model_pp_plan base_model_tp_plan
    default_theta extra_config_files extra_files get_text_config standardize_rope_params
    sub_configs_defaults text_config expand_attention_types_params
    vision_config image_token_id mm_tokens_per_image classifier_dropout hidden_dropout summary_last_dropout
    summary_proj_to_labels
    """.split()  # noqa: SIM905
)
COMPUTED = {"falcon": {"head_dim"}, "gpt_neox": {"head_dim"}, "modernbert": {"sliding_window"}}
COMPUTED |= {"deepseek_ocr2_text": {"scale"}}  # of its vision tower
COMPUTED |= {"whisper": {"n_positions"}, "moonshine": {"decoder_config", "update"}}  # in docstrings, and a method


@pytest.mark.sample(60)
@every
def test_every_field_that_transformers_reads_is_understood_or_refused(name):
    taken = set()
    for builder in [b for b in BUILDERS if b.partition("/")[0] == name]:
        for seed in range(4):
            case, whole = drawn(builder, seed)
            fields = Fields(whole, Path("config.json"))
            family(name).read(fields)
            taken |= fields.taken
    honored = honored_by_transformers(case.cls, case.config)
    known = taken | HARMLESS | UNSUPPORTED | family(name).harmless | family(name).unsupported
    assert honored - known - NO_FIELDS - COMPUTED.get(name, set()) == set()
    assert family(name).unsupported - honored == set(), "transformers no longer reads these"


def test_windows_that_nobody_gave_a_width_are_refused():
    _, whole = drawn("qwen2", 0)
    layers = ["sliding_attention"] * whole["num_hidden_layers"]
    with pytest.raises(ValueError, match="sliding_window"):
        read("qwen2", whole | {"layer_types": layers, "use_sliding_window": False})


@pytest.mark.parametrize("name", ["bart", "mbart", "marian", "m2m_100"])
@pytest.mark.parametrize("field", ["decoder_attention_heads", "decoder_ffn_dim"])
def test_the_decoder_of_bart_is_not_guessed_from_its_encoder(name, field):
    _, whole = drawn(name, 0)
    with pytest.raises(ValueError, match=f"{field} is missing"):
        read(name, {n: value for n, value in whole.items() if n != field})


def test_a_model_without_special_tokens_does_not_get_the_usual_ones(tmp_path):
    model = phasor.Transformer(phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    phasor.save(model, tmp_path / "model", format="hf")
    config = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_a_share_of_zero_is_not_a_whole_head():
    """transformers rotates nothing then, which a rotary scheme cannot say; also not where a factor or length is 0."""
    _, whole = drawn("gpt_neox", 0)
    old = {name: value for name, value in whole.items() if name != "rope_parameters"}
    with pytest.raises(ValueError, match="rotary_dim must be even and at least 2, not 0"):
        read("gpt_neox", old | {"rotary_pct": 0.0})
    _, whole = drawn("llama", 0)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    for field in ("factor", "original_max_position_embeddings"):
        with pytest.raises(ValueError, match=rf"{field.partition('_max')[0]}.* 0"):
            read("llama", whole | {"rope_parameters": scaling | {field: 0}})


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"], "index_topk_freq": 1}, [1, 3]),
        ({"index_topk_pattern": "FSSF"}, [1, 2]),
        ({"index_topk_pattern": ["full", "full", "shared", "shared"]}, [2, 3]),
        ({"index_topk_freq": 4}, [2, 3]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [3]),
        ({}, []),
    ],
    ids=str,
)
def test_which_layers_share_the_choice_of_tokens(said, shared):
    _, whole = drawn("glm_moe_dsa", 0)
    whole = {name: value for name, value in whole.items() if name != "indexer_types"} | said
    config = read("glm_moe_dsa", whole)
    assert [i for i in range(4) if config.layer(i).attention.shared_index] == shared
    theirs = transformers.GlmMoeDsaConfig.from_dict(whole).indexer_types
    assert [i for i in range(4) if theirs[i] == "shared"] == shared


@pytest.mark.parametrize(
    ("types", "why"),
    [
        (["shared", "full", "full", "full"], "layer 0 shares the index of a layer before it .*, and there is none"),
        (["full", "full"], "indexer_types must be 4 times full or shared"),
        ("FSSX", "indexer_types must be 4 times full or shared"),
        ([None, "full", "full", "full"], "indexer_types must be 4 times full or shared"),
    ],
    ids=str,
)
def test_types_of_indexers_that_make_no_sense_are_refused(types, why):
    _, whole = drawn("glm_moe_dsa", 0)
    with pytest.raises(ValueError, match=why):
        read("glm_moe_dsa", whole | {"indexer_types": types})


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4"])
def test_a_scale_of_latent_scores_by_another_extension_than_yarn_is_refused(name):
    """Theirs multiplies scores by it whatever the extension is."""
    _, whole = drawn(name, 0)
    rope = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
    if name == "mistral4":
        rope |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 20}
    assert read(name, whole | {"rope_parameters": rope}).num_layers > 0
    with pytest.raises(ValueError, match=r"does not honor rope_parameters\.mscale_all_dim = 0\.7"):
        read(name, whole | {"rope_parameters": rope | {"mscale_all_dim": 0.7}})


def test_the_rotated_share_of_a_head_follows_from_its_widths():
    _, whole = drawn("mistral4", 0)
    rope = whole["rope_parameters"] | {"partial_rotary_factor": 0.99}
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.99 of \d+ features of a head is not"):
        read("mistral4", whole | {"rope_parameters": rope})
