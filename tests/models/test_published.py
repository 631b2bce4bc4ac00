"""The config.json of well-known models, as they are published: each is understood, and means what transformers reads.

The files in tests/published are written down and not downloaded: they hold the fields and values of the hub's files as
far as they are known here, and may lack some. The last one collects what training code leaves in fine-tuned models.
"""

import json
from pathlib import Path

import pytest
import transformers

import phasor
from phasor.checkpoints.load import read_config
from phasor.checkpoints.quantized_folders import take_format
from phasor.checkpoints.text_part import has_text_part, text_fields
from phasor.config.parameters import parameters_of
from phasor.models.families import family, names
from phasor.models.family import differences
from phasor.models.fields import Fields

transformers.logging.set_verbosity_error()

FOLDER = Path(__file__).parents[1] / "published"
PUBLISHED = {file.stem: file for file in sorted(FOLDER.glob("*.json"))}
every = pytest.mark.parametrize("name", PUBLISHED)


# The parameters that model cards and reports state, in billions, as far as they are known here.
BILLIONS = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "deepseek-r1": 671,
    "glm-4.5-air": 106,
    "glm-4.7-flash": 30,
    "glm-5": 744,
    "minimax-m2": 229,
    "dots.llm1.inst": 142,
    "olmoe-1b-7b-0924": 6.9,
    "ernie-4.5-21b-a3b-pt": 21.8,
    "granite-3.1-3b-a800m-base": 3.3,
    "hunyuan-a13b-instruct": 80.4,
    "apertus-8b-instruct-2509": 8.05,
    "qwen3-next-80b-a3b-instruct": 80,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
    "hyperclovax-seed-think-14b": 14.7,
    "solar-open-100b": 102.6,
    "mistral-small-4-119b-2603": 119,
    "nemotron-nano-9b-v2": 8.89,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-super-120b-a12b": 120.6,
    "whisper-large-v3": 1.55,
    "moonshine-tiny": 0.027,
}


def published(name):
    """The fields of a file, less those of a quantization of its weights, which is undone as they are read."""
    data, _ = take_format(json.loads(PUBLISHED[name].read_text()), PUBLISHED[name])
    return data


@pytest.mark.sample(110)
@every
def test_a_published_configuration_means_what_transformers_reads(name, tmp_path):
    data = published(name)
    (tmp_path / "config.json").write_text(json.dumps(data))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    part = "text" if has_text_part(data) else None
    ours, theirs = read_config(tmp_path, part), theirs if part is None else theirs.text_config
    spelled = theirs.to_dict() | ({"architectures": data.get("architectures")} if part is None else {})
    spelled, _ = take_format(spelled, Path("config.json"))
    again = family(theirs.model_type).read_whole(Fields(spelled, Path("config.json")))
    # Whether a head is tied shows in the tensors: a T5 of transformers says that it is, against the file.
    assert differences(ours, again.replace(embedding=again.embedding.replace(tied=ours.embedding.tied))) == []
    assert ours.max_length == again.max_length
    theirs = getattr(theirs, "decoder", theirs)
    assert ours.dim == theirs.hidden_size
    assert (
        ours.depth("encoder" if ours.shape == "encoder" else "decoder") == getattr(theirs, "decoder_layers", None)
        or getattr(theirs, "num_decoder_layers", None)
        or theirs.num_hidden_layers
    )


def test_most_families_are_among_them():
    files = [json.loads(file.read_text()) for file in PUBLISHED.values()]
    texts = [text_fields(data, Path("config.json")) if has_text_part(data) else data for data in files]
    assert {data["model_type"] for data in texts} == set(names())


@pytest.mark.parametrize("name", BILLIONS)
def test_a_published_model_has_its_number_of_parameters(name):
    data = published(name)
    data = text_fields(data, PUBLISHED[name]) if has_text_part(data) else data
    config = family(data["model_type"]).read_whole(Fields(data, PUBLISHED[name]))
    # Half a unit of the last digit of 30 and of 3.3, stated in two digits, is up to 1.7 %.
    assert parameters_of(config).total / 1e9 == pytest.approx(BILLIONS[name], rel=0.017)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.7-flash", "glm-5"])
def test_published_latent_attention_keeps_576_elements_of_a_token(name):
    """The latent vector and the rotated key, and 128 more of an indexer."""
    data = published(name)
    config = family(data["model_type"]).read_whole(Fields(data, PUBLISHED[name], strict=True))
    indexed = "index_topk" in data
    assert {layer.attention.cached_elements(config) for layer in map(config.layer, range(config.num_layers))} == {
        576 + 128 * indexed
    }


@pytest.mark.parametrize(
    "change",
    [{"num_shared_expert": 2}, {"moe_topk": [8] * 31 + [4]}, {"moe_intermediate_size": 1024}, {"use_cla": True}],
)
def test_hunyuan_with_layers_that_differ_or_share_is_refused(change):
    data = published("hunyuan-a13b-instruct") | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} .*must be"):
        family(data["model_type"]).read_whole(Fields(data, Path("config.json")))


@pytest.mark.parametrize("field", ["rope_interleave", "indexer_rope_interleave"])
def test_glm_5_with_pairs_that_its_layers_do_not_have_is_refused(field):
    data = published("glm-5") | {field: False}
    with pytest.raises(ValueError, match=f"{field} = false; it must be true"):
        family(data["model_type"]).read_whole(Fields(data, Path("config.json")))


@pytest.mark.parametrize("name", ["smollm2-135m", "vicuna-7b-v1.3", "starcoder2-3b", "finetune-with-trainer-fields"])
def test_fields_without_effect_are_named_once_or_refused(name, tmp_path):
    data = json.loads(PUBLISHED[name].read_text())
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"num_key_value_heads": 3, "vocab_size": 50, "torch_dtype": "float32"}
    config = transformers.AutoConfig.for_model(data["model_type"], **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(data | sizes))
    with pytest.warns(UserWarning, match="phasor ignores fields that have no effect in transformers") as caught:
        model = phasor.load(tmp_path)
    assert len(caught) == 1
    named = {"smollm2-135m": ["is_llama_config (true)", "rope_interleaved (false)"]}
    named |= {"vicuna-7b-v1.3": ["max_sequence_length (2048)"]}
    named |= {"starcoder2-3b": ["attention_softmax_in_fp32", "layer_norm_epsilon", "scale_attn_weights"]}
    named |= {"finetune-with-trainer-fields": ["bos_token ('<s>')", "unsloth_version", "use_flash_attention"]}
    assert all(text in str(caught[0].message) for text in named[name])
    with pytest.raises(ValueError, match="phasor does not honor"):
        phasor.load(tmp_path, strict=True)
    phasor.save(model, tmp_path / "back", format="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert [text for text in named[name] if text.partition(" ")[0] not in back] == []
