"""The text part of multimodal folders: the logits that the whole computes of text alone."""

import json

import pytest
import torch
import transformers

import phasor
from phasor.checkpoints.load import read_config
from phasor.checkpoints.text_part import NAMES
from phasor.checkpoints.text_part import SIZES as USUAL
from phasor.cli import main

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EYES |= {"image_size": 16, "patch_size": 8}


def gemma3():
    text = transformers.Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    eyes = transformers.SiglipVisionConfig(**EYES)
    config = transformers.Gemma3Config(text_config=text, vision_config=eyes, image_token_index=60)
    return transformers.Gemma3ForConditionalGeneration(config)


def llava():
    text, eyes = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**EYES)
    config = transformers.LlavaConfig(text_config=text, vision_config=eyes, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(config)


def mistral3():
    text = transformers.MistralConfig(**SIZES, sliding_window=None)
    eyes = transformers.PixtralVisionConfig(**EYES, head_dim=8)
    config = transformers.Mistral3Config(text_config=text, vision_config=eyes, image_token_index=60)
    return transformers.Mistral3ForConditionalGeneration(config)


MODELS = {"gemma3": gemma3, "llava": llava, "mistral3": mistral3}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_text_part_computes_what_the_whole_does_of_text(name, tmp_path, capsys):
    theirs = MODELS[name]().eval()
    theirs.save_pretrained(tmp_path / "whole")
    ours = phasor.load(tmp_path / "whole", part="text")
    text = torch.arange(2 * 12).view(2, 12) * 5 % 59
    expected = theirs(input_ids=text).logits
    assert (ours(text) - expected).abs().max() < 2e-5
    assert read_config(tmp_path / "whole", "text") == ours.config
    with pytest.raises(ValueError, match=f"multimodal '{name}' as a whole; its text part, a .* by part='text'"):
        phasor.load(tmp_path / "whole")
    out = str(tmp_path / "text")
    assert main(["convert", str(tmp_path / "whole"), out, "--part", "text", "--format", "hf", "--check"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert torch.equal(again(text).logits, expected) or (again(text).logits - expected).abs().max() < 2e-5


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
    assert tuple(getattr(theirs, name) for name in NAMES) == USUAL[kind]
