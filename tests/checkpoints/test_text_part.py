"""The text part of multimodal folders: the logits that the whole computes of text alone."""

import copy
import json
import random

import numpy as np
import pytest
import torch
import transformers
from families.cases import redraw
from families.delta import float64_for_float32
from safetensors.torch import load_file, save_file

import phasor
from phasor.checkpoints.load import read_config
from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.text_part import MULTIMODAL, NAMES
from phasor.checkpoints.text_part import SIZES as USUAL
from phasor.cli import main

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LIMIT = 2e-5  # as for every family
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EYES |= {"image_size": 16, "patch_size": 8}
VISUAL = {"depth": 1, "num_heads": 2, "patch_size": 8, "intermediate_size": 16}
TOKENS = {"image_token_id": 60, "video_token_id": 59}  # those of images, which no text here has
SPECIAL = [*TOKENS.values(), 61]  # and of sounds
LAYERS = ["dense", "sparse"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MROPE = {"rope_type": "default", "rope_theta": 500.0}


def text_sizes(rng, **fixed):
    heads = rng.choice([2, 4])
    sizes = {"vocab_size": 67, "hidden_size": heads * 12, "intermediate_size": 40, "num_attention_heads": heads}
    sizes |= {"num_hidden_layers": rng.choice([2, 3]), "num_key_value_heads": rng.choice([1, 2])}
    sizes |= {"max_position_embeddings": 64, "rms_norm_eps": rng.choice([1e-2, 1e-5])}
    return sizes | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | fixed


def build(name, text, eyes, tied, **fields):
    """A whole model of theirs by the beginning of its classes' names."""
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=eyes, tie_word_embeddings=tied, **fields
    )
    config.text_config.tie_word_embeddings = tied
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def like_llava(name, text, eyes):
    def model(rng, tied):
        sizes = text_sizes(rng, head_dim=10)
        return build(name, text(sizes), eyes(**EYES), tied, image_token_index=60)

    return model


def gemma3_text(sizes):
    layers = ["sliding_attention", *["full_attention"] * (sizes["num_hidden_layers"] - 1)]
    return transformers.Gemma3TextConfig(**sizes, sliding_window=6, layer_types=layers)


def gemma4(rng, tied):
    sizes = text_sizes(rng, head_dim=10, sliding_window=6, vocab_size_per_layer_input=67, pad_token_id=0)
    layers = ["sliding_attention", *["full_attention"] * (sizes["num_hidden_layers"] - 1)]
    text = transformers.Gemma4TextConfig(
        **sizes, layer_types=layers, global_head_dim=14, hidden_size_per_layer_input=rng.choice([0, 6])
    )
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = transformers.Gemma4VisionConfig(**eyes, num_key_value_heads=2, head_dim=8, patch_size=4)
    return build("Gemma4", text, seen, tied, **TOKENS, audio_token_id=61)


def mistral_text(sizes):
    return transformers.MistralConfig(**sizes, sliding_window=7)


def deepseek_ocr2(rng, tied):
    fields = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
    text = transformers.DeepseekOcr2TextConfig(**text_sizes(rng, num_hidden_layers=2, mlp_layer_types=LAYERS, **fields))
    sam = EYES | {"output_channels": 8, "downsample_channels": [8, 16], "window_size": 2, "global_attn_indexes": [0]}
    eyes = transformers.DeepseekOcr2VisionConfig(sam_config=sam, encoder_config=EYES | {"num_key_value_heads": 2})
    return build("DeepseekOcr2", text, eyes, tied, image_token_id=60)


def lfm2(rng, tied):
    sizes = text_sizes(rng, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8)
    sizes["norm_eps"] = sizes.pop("rms_norm_eps")
    eyes = transformers.Siglip2VisionConfig(**EYES, num_patches=16)
    return build("Lfm2Vl", transformers.Lfm2Config(**sizes), eyes, tied, image_token_id=60, projector_hidden_size=16)


def llama4(rng, tied):
    sizes = text_sizes(rng, head_dim=10, attention_chunk_size=7, no_rope_layers=[1, 0, 1], intermediate_size_mlp=24)
    text = transformers.Llama4TextConfig(**sizes, num_local_experts=5, moe_layers=[1], floor_scale=8)
    eyes = transformers.Llama4VisionConfig(
        **EYES, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16
    )
    return build("Llama4", text, eyes, tied, image_token_index=60)


def exaone(rng, tied):
    text = transformers.Exaone4Config(**text_sizes(rng, head_dim=10, num_hidden_layers=3), sliding_window=6)
    eyes = transformers.Exaone4_5_VisionConfig(
        **VISUAL, hidden_size=16, out_hidden_size=text.hidden_size, fullatt_block_indexes=[0], num_key_value_heads=2
    )
    return build("Exaone4_5_", text, eyes, tied, **TOKENS)


def kimi(rng, tied):
    heads = {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7}
    fields = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    sizes = text_sizes(rng, first_k_dense_replace=1, topk_group=1, **heads, **fields)
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    eyes = transformers.Kimi_K25VisionConfig(
        **EYES | {"image_size": None}, pos_emb_height=4, pos_emb_width=4, pos_emb_time=1
    )
    return build("Kimi_K25", transformers.DeepseekV3Config(**sizes), eyes, tied, projection_hidden_size=16, **TOKENS)


def qianfan(rng, tied):
    eyes = transformers.QianfanOCRVisionConfig(**EYES)
    return build("QianfanOCR", transformers.Qwen3Config(**text_sizes(rng, head_dim=10)), eyes, tied, image_token_id=60)


def plain(config):
    return lambda sizes: config(**sizes)


def internvl(rng, tied):
    eyes = transformers.InternVLVisionConfig(**EYES)
    return build("InternVL", transformers.Qwen3Config(**text_sizes(rng, head_dim=10)), eyes, tied, image_token_id=60)


def idefics(name):
    def model(rng, tied):
        eyes = getattr(transformers, f"{name}VisionConfig")(**EYES)
        text = transformers.LlamaConfig(**text_sizes(rng, head_dim=10))
        return build(name, text, eyes, tied, image_token_id=60, scale_factor=2)

    return model


def visual(name, rope, fixed=None, **eyes):
    """Models with positions of three axes; heads are of 12 features. `fixed` are further fields of the text part."""

    def model(rng, tied):
        sizes = text_sizes(rng, rope_parameters=MROPE | rope, **fixed or {})
        text = getattr(transformers, f"{name}TextConfig")(**sizes)
        seen = getattr(transformers, f"{name}VisionConfig")(**VISUAL | eyes, out_hidden_size=sizes["hidden_size"])
        return build(name, text, seen, tied, **TOKENS)

    return model


QUARTER = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.7}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
LINEAR |= {"full_attention_interval": 2, "head_dim": 12}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 24}
MODELS = {
    "deepseek_ocr2": deepseek_ocr2,
    "exaone4_5": exaone,
    "gemma3": like_llava("Gemma3", gemma3_text, transformers.SiglipVisionConfig),
    "gemma4": gemma4,
    "glm4v": visual("Glm4v", {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.7}, hidden_size=16),
    "idefics3": idefics("Idefics3"),
    "internvl": internvl,
    "kimi_k25": kimi,
    "lfm2_vl": lfm2,
    "llama4": llama4,
    "llava": like_llava("Llava", plain(transformers.LlamaConfig), transformers.CLIPVisionConfig),
    "llava_next": like_llava("LlavaNext", mistral_text, transformers.CLIPVisionConfig),
    "llava_onevision": like_llava("LlavaOnevision", plain(transformers.Qwen2Config), transformers.SiglipVisionConfig),
    "mistral3": like_llava("Mistral3", mistral_text, transformers.PixtralVisionConfig),
    "qianfan_ocr": qianfan,
    "qwen2_vl": visual("Qwen2VL", {"mrope_section": [2, 1, 3]}, embed_dim=16, hidden_size=24),
    "qwen2_5_vl": visual("Qwen2_5_VL", {"mrope_section": [1, 4, 1]}, hidden_size=16, fullatt_block_indexes=[0]),
    "qwen3_5": visual("Qwen3_5", QUARTER, LINEAR, hidden_size=16, num_position_embeddings=16),
    "qwen3_5_moe": visual("Qwen3_5Moe", QUARTER, LINEAR | SHARED, hidden_size=16, num_position_embeddings=16),
    "qwen3_vl": visual(
        "Qwen3VL",
        {"mrope_section": [3, 1, 2]},
        {"head_dim": 12},
        hidden_size=16,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "qwen3_vl_moe": visual(
        "Qwen3VLMoe",
        {"mrope_section": [3, 1, 2]},
        {"head_dim": 12, **EXPERTS, "mlp_only_layers": [1]},
        hidden_size=16,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "smolvlm": idefics("SmolVLM"),
}
OF_CODE = {"deepseek_vl_v2", "h2ovl_chat", "internvl_chat"}  # whose classes are not part of transformers


# Names of text layers that transformers' table for the vision tower spoils when it saves.
RENAMED = {
    "kimi_k25": "language_model.model.blocks.",
    "qianfan_ocr": "language_model.model.encoder.layers.",
}


def test_every_multimodal_model_is_tested():
    assert MULTIMODAL.keys() == MODELS.keys() | OF_CODE


@pytest.mark.parametrize("name", MODELS)
def test_what_a_file_leaves_out_is_as_in_transformers(name):
    theirs, ours = transformers.AutoConfig.for_model(name), MULTIMODAL[name]
    assert (theirs.text_config.model_type, theirs.tie_word_embeddings) == (ours.text, ours.tied)


@pytest.fixture(params=[(name, tied) for name in MODELS for tied in (False, True)], ids=lambda p: f"{p[0]}-{p[1]}")
def whole(request, tmp_path):
    """A model of theirs with every weight redrawn, and its folder."""
    name, tied = request.param
    theirs = MODELS[name](random.Random(f"{name} {tied}"), tied).eval()
    redraw(theirs, lambda name: False)
    if tied:
        theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    if name in RENAMED:
        rename(tmp_path / "whole", lambda tensor: tensor.replace(RENAMED[name], "language_model.model.layers."))
    return name, theirs, tmp_path / "whole"


def load_text(folder):
    with pytest.warns(UserWarning, match="a .* is loaded alone, and the vision tower .*left out") as caught:
        model = phasor.load(folder, part="text")
    assert len(caught) == 1
    return model


def in_float64(theirs):
    """A copy of theirs in float64."""
    wide = copy.deepcopy(theirs).double()
    for part in wide.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"  # the only one that float64 has
    return wide


def assert_near(found, theirs, run):
    """Ours is theirs up to the limit, or up to four times what float32 costs theirs."""
    expected = run(theirs)
    difference = float((found - expected).abs().max())
    if difference >= LIMIT:
        wide = in_float64(theirs)
        with float64_for_float32():
            assert difference <= 4 * float((run(wide) - expected).abs().max())


@pytest.mark.sample(9)
@torch.no_grad()
def test_the_text_part_computes_what_the_whole_does_of_text(whole, tmp_path, capsys):
    name, theirs, folder = whole
    ours = load_text(folder)
    text = torch.randint(0, 59, (2, 23), generator=torch.Generator().manual_seed(3))
    assert_near(ours(text), theirs, lambda model: model(input_ids=text).logits)
    assert read_config(folder, "text") == ours.config
    with pytest.raises(
        ValueError,
        match=f"multimodal '{name}' as a whole; its text part, a .* is loaded without the vision tower .*part='text'",
    ):
        phasor.load(folder)
    same_greedy(ours, theirs, text[:1, :7])
    same_when_saved(ours, theirs, folder, tmp_path / "text", text)
    capsys.readouterr()


def same_greedy(ours, theirs, prompt):
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"repetition_penalty": 9.0, "attention_mask": torch.ones_like(prompt), "suppress_tokens": SPECIAL}
    found = theirs.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    given = {"max_new_tokens": 24, "repetition_penalty": 9.0, "stop": [], "suppress_tokens": SPECIAL}
    assert phasor.generate(ours, prompt[0].tolist(), **given) == found
    assert len(set(found)) > 3


def same_when_saved(ours, theirs, folder, out, text):
    """Its own text family, the same weights bit by bit, checked by `convert`."""
    with pytest.warns(UserWarning, match="left out"):
        assert main(["convert", str(folder), str(out), "--part", "text", "--format", "hf", "--check"]) == 0
    saved = json.loads((out / "config.json").read_text())
    assert saved["model_type"] == theirs.config.text_config.model_type
    assert "vision_config" not in saved
    decoder = theirs.get_decoder()
    again, before = type(decoder).from_pretrained(out), decoder.state_dict()
    after = again.state_dict()
    assert before.keys() == after.keys()
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    back = phasor.load(out)
    assert torch.equal(back(text), ours(text))
    assert back.config == ours.config


@pytest.fixture
def three_axes(whole):
    """Those of several positions per token."""
    _, theirs, folder = whole
    if "mrope_section" not in getattr(theirs.config.text_config, "rope_parameters", {}):
        pytest.skip("one position per token")
    return theirs, folder


@pytest.mark.sample(24)
@torch.no_grad()
def test_three_positions_per_token_rotate_as_theirs(three_axes):
    theirs, folder = three_axes
    ours = load_text(folder)
    generator = torch.Generator().manual_seed(4)
    text, positions = torch.randint(0, 59, (2, 23), generator=generator), torch.randint(0, 40, (3, 2, 23))

    def run(model):
        return model.lm_head(model.model.language_model(input_ids=text, position_ids=positions).last_hidden_state)

    assert_near(ours(text, positions=positions), theirs, run)
    assert (ours(text) - run(theirs)).abs().max() > 0.01


@pytest.mark.sample(24)
@torch.no_grad()
def test_the_difference_vanishes_in_float64(three_axes):
    """Their angles, norms and states are of float32 whatever the weights are: theirs get those of float64."""
    theirs, folder = three_axes
    theirs, ours = in_float64(theirs), load_text(folder).double()
    text, positions = torch.arange(46).view(2, 23) % 59, torch.randint(0, 40, (3, 2, 23))
    rotary = theirs.model.language_model.rotary_emb
    config = theirs.config.text_config
    config._experts_implementation = "eager"  # the only one that float64 has
    width = 12 if "partial_rotary_factor" not in config.rope_parameters else 8
    frequencies = 500.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def angles(x, position_ids):
        each = position_ids.expand(3, -1, -1)[..., None].double() * frequencies
        return tuple(rotary.recomposition_frequencies(function(each)) for function in (torch.cos, torch.sin))

    rotary.forward = angles
    body = theirs.model.language_model
    for given in (None, positions):
        with float64_for_float32():
            expected = theirs.lm_head(body(input_ids=text, position_ids=given).last_hidden_state)
        assert (ours(text, positions=given) - expected).abs().max() < 1e-10


@torch.no_grad()
def test_experts_of_qwen3_vl_are_stored_in_two_ways(tmp_path):
    """As transformers saves them, and transposed as they are published; transformers reads both."""
    theirs = MODELS["qwen3_vl_moe"](random.Random(5), False).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    text = torch.arange(20)[None]
    expected = theirs(input_ids=text).logits
    tensors = load_file(tmp_path / "model.safetensors")
    for _ in range(2):
        assert (load_text(tmp_path)(text) - expected).abs().max() < LIMIT
        again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path)
        assert (again(input_ids=text).logits - expected).abs().max() < LIMIT
        turned = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
        save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def test_stacked_experts_are_read_and_layers_for_further_tokens_left_out(tmp_path):
    """As the hub's files of Qwen 3.5 have them; transformers writes experts one by one."""
    theirs = MODELS["qwen3_5_moe"](random.Random(5), False).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    stored = {name: x.contiguous() for name, x in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stored)
    save_file(stored | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="and the layers that predict further tokens left out"):
        ours = phasor.load(tmp_path, part="text")
    text = torch.arange(40).view(2, 20)
    assert_near(ours(text), theirs, lambda model: model(input_ids=text).logits)


def rename(folder, change):
    for file in folder.glob("*.safetensors"):
        save_file({change(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        data = json.loads(index.read_text())
        data["weight_map"] = {change(name): file for name, file in data["weight_map"].items()}
        index.write_text(json.dumps(data))


def add_eyes(folder, names):
    """Tensors beside those of text."""
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(3) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def test_names_and_fields_of_older_files(tmp_path):
    """Qwen2-VL as it is published: the fields of text beside those of the whole, `visual` beside `model`."""
    theirs = MODELS["qwen2_vl"](random.Random(1), False).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data |= data.pop("text_config") | {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    rope = data.pop("rope_parameters")
    data |= {"rope_theta": rope["rope_theta"], "vision_token_id": 7}
    data["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(data))
    old = {"model.language_model.": "model.", "model.visual.": "visual."}
    rename(tmp_path, lambda n: next((to + n.removeprefix(was) for was, to in old.items() if n.startswith(was)), n))
    assert "visual.merger.ln_q.weight" in load_file(tmp_path / "model.safetensors")
    text = torch.arange(20)[None]
    assert (load_text(tmp_path)(text) - theirs(input_ids=text).logits).abs().max() < LIMIT
    again = transformers.Qwen2VLForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=text).logits, theirs(input_ids=text).logits)


@torch.no_grad()
def test_kimi_is_deepseek_v3_by_another_name(tmp_path):
    """Kimi K2, whose code is DeepSeek's, and the text part of Kimi K2.5."""
    latent = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 8,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
    }
    sizes = text_sizes(random.Random(3)) | latent | experts
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).eval()
    redraw(theirs, lambda name: name.endswith("e_score_correction_bias"))
    theirs.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    text = torch.arange(20)[None]
    expected = theirs(input_ids=text).logits
    assert (phasor.load(tmp_path)(text) - expected).abs().max() < LIMIT
    rename(tmp_path, lambda n: f"language_model.{n}")
    add_eyes(tmp_path, ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"])
    config = {"model_type": "kimi_k25", "text_config": data, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (load_text(tmp_path)(text) - expected).abs().max() < LIMIT


@torch.no_grad()
def test_deepseek_ocr_has_keys_for_every_head_and_experts_one_by_one(tmp_path):
    """As published, with its code: the text's fields in `language_config`, which say that nothing is latent."""
    theirs = deepseek_ocr2(random.Random(4), False).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in load_file(tmp_path / "model.safetensors")
    whole = json.loads((tmp_path / "config.json").read_text())
    said = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "eos_token_id",
    )
    said += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "n_routed_experts", "n_shared_experts")
    text = {name: whole["text_config"][name] for name in (*said, "num_experts_per_tok", "moe_intermediate_size")}
    latent = dict.fromkeys(("q_lora_rank", "kv_lora_rank"))
    latent |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    text |= latent | {"architectures": ["DeepseekV2ForCausalLM"], "use_mla": False, "first_k_dense_replace": 1}
    text |= {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "lm_head": True, "rm_head": False}
    config = text | {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"], "tile_tag": "2D"}
    config |= {"language_config": text, "vision_config": {"model_name": "deeplip_b_l"}, "projector_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(20)[None]
    ours = load_text(tmp_path)
    assert (ours(tokens) - theirs(input_ids=tokens).logits).abs().max() < LIMIT
    phasor.save(ours, tmp_path / "text", format="hf")
    again = transformers.DeepseekOcr2TextModel.from_pretrained(tmp_path / "text")
    assert torch.equal(again(tokens).last_hidden_state, theirs.model.language_model(tokens).last_hidden_state)


@torch.no_grad()
def test_deepseek_vl2_has_latent_attention(tmp_path):
    sizes = text_sizes(
        random.Random(6), num_hidden_layers=2, q_lora_rank=None, kv_lora_rank=12, num_key_value_heads=None
    )
    sizes |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8}
    sizes |= {"moe_intermediate_size": 12, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
    theirs = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes)).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    rename(tmp_path, lambda n: f"language.{n}")
    add_eyes(tmp_path, ["vision.norm.weight", "projector.layers.0.weight", "image_newline", "view_seperator"])
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_vl_v2", "language_config": text}))
    tokens = torch.arange(20)[None]
    assert (load_text(tmp_path)(tokens) - theirs(input_ids=tokens).logits).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["h2ovl_chat", "internvl_chat"])
@torch.no_grad()
def test_text_parts_of_models_that_bring_their_code(name, tmp_path):
    """The text model is one of transformers, under `language_model`; its fields are called `llm_config`."""
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text_sizes(random.Random(2)))).eval()
    redraw(theirs, lambda name: False)
    theirs.save_pretrained(tmp_path)
    rename(tmp_path, lambda n: f"language_model.{n}")
    add_eyes(tmp_path, ["vision_model.embeddings.class_embedding", "mlp1.0.weight"])
    text_config = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": name, "llm_config": text_config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = torch.arange(20)[None]
    assert (load_text(tmp_path)(text) - theirs(text).logits).abs().max() < LIMIT


@pytest.mark.filterwarnings("ignore:.*is loaded alone")
def test_commands_take_the_text_part(tmp_path, capsys):
    MODELS["qwen3_vl"](random.Random(1), False).save_pretrained(tmp_path / "whole")
    folder, ids = str(tmp_path / "whole"), str(tmp_path / "ids.npy")
    np.save(ids, np.arange(40) % 59)
    model = phasor.load(folder, part="text")
    part = ["--part", "text"]
    options = ["--prompt", "1 2 3", "--max-new-tokens", "5", "--json"]
    assert main(["generate", folder, *part, *options]) == 0
    (generated,) = json.loads(capsys.readouterr().out)
    assert generated["tokens"] == phasor.generate(model, [1, 2, 3], max_new_tokens=5)
    assert main(["explain", folder, *part, "--json"]) == 0
    (scheme,) = json.loads(capsys.readouterr().out)["schemes"]
    assert [pair["axis"] for pair in scheme["pairs"]] == [0, 1, 2, 0, 0, 2]
    assert main(["plan", "--model", folder, *part, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(p.numel() for p in model.parameters())
    for mode in (["--lengths", "16", "--data", ids], ["--stream", ids]):
        assert main(["evaluate", folder, *part, *mode, "--device", "cpu", "--json"]) == 0
        capsys.readouterr()
        assert main(["evaluate", folder, *mode, "--device", "cpu"]) != 0
        assert "(--part text)" in capsys.readouterr().err


def test_a_part_is_of_a_folder():
    model = phasor.Transformer(phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=20))
    with pytest.raises(ValueError, match="a checkpoint, a part, a dtype and an adapter are for the folder"):
        open_model(model, part="text")
    with pytest.raises(ValueError, match="a part is that of a multimodal folder"):
        phasor.explain("preset:llama-2", part="text")


def test_what_is_neither_text_nor_known_to_be_left_out_is_refused(tmp_path):
    MODELS["llava"](random.Random(1), False).save_pretrained(tmp_path)
    rename(tmp_path, lambda n: n.replace("multi_modal_projector", "resampler"))
    with pytest.raises(ValueError, match=r"resampler.* is not the model's"):
        phasor.load(tmp_path, part="text")
    data = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"model_type": "paligemma"}, "unknown multimodal model_type 'paligemma'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "does not honor quantization_config"),
        ({"text_config": {"model_type": "internlm2"}}, "phasor does not load internlm2"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(data | change))
        with pytest.raises(ValueError, match=message):
            phasor.load(tmp_path, part="text")
    with pytest.raises(ValueError, match="'llava' as a whole, nor its text part: unknown model_type 'internlm2'"):
        phasor.load(tmp_path)


def test_parts_that_are_not_there_are_refused(tmp_path):
    model = phasor.Transformer(
        phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=20, hidden_dim=24)
    )
    phasor.save(model, tmp_path / "mine")
    phasor.save(model, tmp_path / "theirs", format="hf")
    with pytest.raises(ValueError, match="has no parts"):
        phasor.load(tmp_path / "mine", part="text")
    with pytest.raises(ValueError, match="has no separate part for text"):
        phasor.load(tmp_path / "theirs", part="text")
    for wrong in ("vision", 3):
        with pytest.raises(ValueError, match="unknown part"):
            phasor.load(tmp_path / "theirs", part=wrong)


@pytest.mark.parametrize(
    "published",
    [
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "model_type": "llava",
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5",
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "torch_dtype": "float16",
                "vocab_size": 32064,
            },
            "vision_config": {"hidden_size": 1024, "num_attention_heads": 16, "model_type": "clip_vision_model"},
        },
    ],
    ids=["gemma-3-4b-it", "llava-1.5-7b-hf"],
)
def test_published_text_parts_leave_out_what_is_usual(published, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_config(tmp_path, "text")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert (config.dim, config.num_layers, config.num_heads) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    assert config.vocab_size == theirs.vocab_size


@pytest.mark.parametrize("kind", USUAL)
def test_the_usual_sizes_are_those_of_transformers(kind):
    theirs = transformers.AutoConfig.for_model(kind)
    assert tuple(getattr(theirs, name, None) for name in NAMES) == USUAL[kind]
