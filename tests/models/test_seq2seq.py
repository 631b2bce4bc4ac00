"""Encoder-decoders of other families: beams, the tokens that bind them, tables that files repeat, and real configs."""

import json

import pytest
import torch
import transformers
from decoding import speaker
from families.cases import redraw
from families.seq2seq import CASES, OwnHead, OwnHeadMT5, OwnHeadUMT5, logits_bias
from safetensors.torch import load_file, save_file

import phasor
from phasor.checkpoints.load import read_config
from phasor.config.generation import SpecialTokens
from phasor.models.families import family

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SOURCES = [[5, 17, 30, 8, 9], [44], [3, 3, 9, 21, 40, 2, 11]]
T5 = {"pad_token_id": 1, "vocab_size": 61, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 2, "num_heads": 3}
BART = {"vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
BART |= {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0}
UNTIED = BART | {"tie_word_embeddings": False}


def made(cls, config, folder):
    """A model of theirs with every weight redrawn, saved."""
    model = cls(config).eval()
    redraw(model, logits_bias)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def t5(tmp_path):
    return made(transformers.T5ForConditionalGeneration, transformers.T5Config(**T5), tmp_path / "t5")


@pytest.fixture
def bart(tmp_path):
    return made(transformers.BartForConditionalGeneration, transformers.BartConfig(**BART), tmp_path / "bart")


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def edit_tensors(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def names(folder):
    return set(load_file(folder / "model.safetensors"))


@torch.no_grad()
def same(theirs, ours, vocab=61):
    """The logits of a batch with a padded source."""
    source, target = torch.randint(3, vocab, (2, 9)), torch.randint(3, vocab, (2, 7))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 6:] = False
    out = theirs(input_ids=source, attention_mask=real.long(), decoder_input_ids=target)
    expected = out.logits if "logits" in out else out.last_hidden_state
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(ours(source, target, attention_mask=real), expected, atol=2e-5, rtol=0)


def assert_refuses(folder, *mentions):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        phasor.load(folder)
    assert all(mention in str(error.value) for mention in mentions), error.value


def new_tokens(theirs, source, **options):
    """What transformers generates after the start token, up to and with the end token."""
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    tokens = torch.tensor([source])
    with torch.no_grad():
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, **options)
    new = out[0, 1:].tolist()
    stop = theirs.generation_config.eos_token_id
    return new[: new.index(stop) + 1] if stop in new else new


def gemma_config():
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "pad_token_id": 1, "bos_token_id": 2}
    side = transformers.T5GemmaModuleConfig(**sizes, **heads, query_pre_attn_scalar=8, eos_token_id=3)
    return transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=61, tie_word_embeddings=False)


def switch():
    """A head of its own and one table for both sides, and rows within the capacity."""
    sizes = T5 | {"num_decoder_layers": 2, "num_experts": 3, "tie_word_embeddings": False}
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**sizes))
    for side in (model.encoder, model.decoder):
        side.embed_tokens = model.shared
    return model


MODELS = {  # with untied heads: a tied one repeats what it reads
    "t5": lambda: OwnHead(transformers.T5Config(**T5)),
    "mt5": lambda: OwnHeadMT5(transformers.MT5Config(**T5)),
    "umt5": lambda: OwnHeadUMT5(transformers.UMT5Config(**T5)),
    "switch_transformers": switch,
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**UNTIED)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**UNTIED)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**UNTIED, scale_embedding=True)),
    "m2m_100": lambda: transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**UNTIED)),
    "t5gemma": lambda: transformers.T5GemmaForConditionalGeneration(gemma_config()),
    "plbart": lambda: transformers.PLBartForConditionalGeneration(transformers.PLBartConfig(**UNTIED)),
}


def talkative(family):
    """A model of theirs whose texts differ by source: large matrices, norms near one and small biases."""
    theirs = MODELS[family]().eval()
    redraw(theirs, logits_bias)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.requires_grad:
                weight.mul_(2.0 if weight.dim() > 1 else 0.1).add_(float(weight.dim() == 1 and "bias" not in name))
        theirs.get_output_embeddings().weight[1] = 0.0  # padding, which M2M-100 sees in what it wrote itself
    return theirs


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_beams_find_what_theirs_find_by_what_the_folder_says(name, tmp_path):
    """Start, end, forced and forbidden tokens are those of generation_config.json alone, in both."""
    theirs = talkative(name)
    theirs.save_pretrained(tmp_path)
    free = phasor.generate(phasor.load(tmp_path), SOURCES, max_new_tokens=20, num_beams=4, start=3, stop=[])
    stop = next(token for token in free[0][5:] if token not in free[1])  # which ends one text, and not another
    settings = {"eos_token_id": stop, "decoder_start_token_id": 3, "forced_eos_token_id": 9, "pad_token_id": 1}
    if name in ("mbart", "m2m_100"):
        settings["forced_bos_token_id"] = 7
    if name == "marian":
        settings |= {"bad_words_ids": [[free[1][0]]], "renormalize_logits": True}
    for field, value in settings.items():
        setattr(theirs.generation_config, field, value)
    theirs.generation_config.save_pretrained(tmp_path)
    ours = phasor.load(tmp_path)
    for beams in (4, 1):
        expected = [new_tokens(theirs, source, num_beams=beams, max_new_tokens=20) for source in SOURCES]
        assert phasor.generate(ours, SOURCES, num_beams=beams, max_new_tokens=20) == expected
        assert len(set(map(tuple, expected))) == len(SOURCES)
        assert {text[-1] for text in expected} <= {stop, 9}
        assert max(map(len, expected)) == 20


def test_a_forced_last_token_comes_last_and_others_never():
    model = speaker(shape="encoder-decoder")
    free = phasor.generate(model, SOURCES, max_new_tokens=8, start=2)
    model.special = SpecialTokens(start=2, forced_last=17)
    assert phasor.generate(model, SOURCES, max_new_tokens=8) == [[*text[:7], 17] for text in free]
    assert all(text[-1] == 17 for text in phasor.generate(model, SOURCES, max_new_tokens=8, num_beams=3))
    assert phasor.generate(model, SOURCES[0], max_new_tokens=1) == [17]
    model.special = SpecialTokens(start=2, never=tuple({token for text in free for token in text}))
    for options in ({}, {"num_beams": 3}, {"temperature": 1.0, "seed": 0}):
        texts = phasor.generate(model, SOURCES, max_new_tokens=8, **options)
        assert not {token for text in texts for token in text} & set(model.special.never)


def test_tokens_that_are_never_generated_come_back(tmp_path):
    model = speaker()
    model.special = SpecialTokens(never=(3, 9), forced_last=4)
    phasor.save(model, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["bad_words_ids"] == [[3], [9]]
    assert phasor.load(tmp_path).special == model.special


def test_sequences_that_are_never_generated_are_kept_as_they_are(tmp_path, t5):
    folder = tmp_path / "t5"
    t5.generation_config.bad_words_ids = [[3, 4], [9]]
    t5.generation_config.save_pretrained(folder)
    ours = phasor.load(folder)
    assert ours.special.never == ()
    phasor.save(ours, tmp_path / "again", format="hf")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["bad_words_ids"] == [[3, 4], [9]]


def test_a_file_may_repeat_the_token_table(tmp_path, t5, bart):
    def repeat(*copies):
        def change(found):
            table = found.get("shared.weight", found.get("model.shared.weight"))
            found |= {name: table.clone() for name in copies}

        return change

    edit_tensors(tmp_path / "t5", repeat("encoder.embed_tokens.weight", "lm_head.weight"))
    ours = phasor.load(tmp_path / "t5")
    assert ours.config.embedding.tied
    same(t5, ours)
    sides = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    edit_tensors(tmp_path / "bart", repeat(*sides, "lm_head.weight"))
    ours = phasor.load(tmp_path / "bart")
    assert ours.config.embedding == phasor.EmbeddingConfig(norm=True)
    same(bart, ours)


@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"])
def test_a_file_may_hold_the_token_table_under_another_name_alone(name, tmp_path, t5, bart):
    edit_tensors(tmp_path / "t5", lambda found: found.update({name: found.pop("shared.weight")}))
    same(t5, phasor.load(tmp_path / "t5"))
    theirs = name if name == "lm_head.weight" else f"model.{name}"
    edit_tensors(tmp_path / "bart", lambda found: found.update({theirs: found.pop("model.shared.weight")}))
    same(bart, phasor.load(tmp_path / "bart"))


def test_a_copy_that_is_none_is_refused(tmp_path, t5):
    edit_tensors(tmp_path / "t5", lambda f: f.update({"encoder.embed_tokens.weight": f["shared.weight"] + 1}))
    assert_refuses(tmp_path / "t5", "encoder.embed_tokens.weight should repeat shared.weight and does not")


def test_a_table_that_is_missing_under_every_name_is_missing(tmp_path, bart):
    edit_tensors(tmp_path / "bart", lambda found: found.pop("model.shared.weight"))
    assert_refuses(tmp_path / "bart", "model.shared.weight is missing")


def test_a_head_of_its_own_whatever_the_flag_says(tmp_path):
    theirs = made(OwnHead, transformers.T5Config(**T5), tmp_path / "t5")
    for flag in (True, False):
        edit(tmp_path / "t5", tie_word_embeddings=flag)
        ours = phasor.load(tmp_path / "t5")
        assert not ours.config.embedding.tied
        same(theirs, ours)


def test_the_old_flag_of_a_tie_says_whether_t5_scales(tmp_path, t5):
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    del config["scale_decoder_outputs"]
    for flag, multiplier in ((True, "rsqrt"), (False, 1.0), (None, "rsqrt")):
        (tmp_path / "t5" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": flag}))
        ours = phasor.load(tmp_path / "t5")
        assert ours.config.head.multiplier == multiplier
        assert ours.config.embedding.tied
        same(transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "t5"), ours)


def test_an_older_bart_with_a_head_of_its_own_shares_the_other_tables(tmp_path, bart):
    """Such files hold one table and the head. Transformers of today would draw two tables anew; ours gives it three."""
    folder = tmp_path / "bart"
    bart.lm_head.weight = torch.nn.Parameter(torch.randn(61, 24) / 5)
    edit_tensors(folder, lambda found: found.update({"lm_head.weight": bart.lm_head.weight.detach()}))
    edit(folder, tie_word_embeddings=False)
    ours = phasor.load(folder)
    assert (ours.config.embedding.tied, ours.config.embedding.source_vocab_size) == (False, None)
    same(bart, ours)
    phasor.save(ours, tmp_path / "again", format="hf")
    same(transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "again"), ours)
    assert phasor.load(tmp_path / "again").config == ours.config


def test_two_tables_and_no_head_are_refused(tmp_path):
    config = transformers.BartConfig(**BART, tie_word_embeddings=False)
    made(transformers.BartForConditionalGeneration, config, tmp_path)
    edit_tensors(tmp_path, lambda found: found.pop("lm_head.weight"))
    assert_refuses(tmp_path, "separate token embeddings", "no lm_head.weight")


def test_a_marian_with_three_tables_comes_back_as_one_that_shares_none(tmp_path):
    """Transformers of today shares nothing if the head is not tied, though the other flag says it does."""
    config = transformers.MarianConfig(**BART, tie_word_embeddings=False, share_encoder_decoder_embeddings=True)
    theirs = made(transformers.MarianMTModel, config, tmp_path / "theirs")
    ours = phasor.load(tmp_path / "theirs")
    assert ours.config.embedding.source_vocab_size == 61
    same(theirs, ours)
    phasor.save(ours, tmp_path / "again", format="hf")
    back = transformers.MarianMTModel.from_pretrained(tmp_path / "again")
    assert not back.config.share_encoder_decoder_embeddings
    same(back, ours)


def test_a_file_without_the_bias_of_the_logits_has_none(tmp_path, bart):
    edit_tensors(tmp_path / "bart", lambda found: found.pop("final_logits_bias"))
    ours = phasor.load(tmp_path / "bart")
    assert not ours.config.head.bias
    same(transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "bart"), ours)
    phasor.save(ours, tmp_path / "again", format="hf")
    assert "final_logits_bias" not in names(tmp_path / "again")
    same(transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "again"), ours)


def test_weights_of_no_use_come_back_and_buffers_of_old_are_left_out(tmp_path, t5, bart):
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    edit_tensors(tmp_path / "t5", lambda found: found.update({unused: torch.ones(32, 3)}))
    ours = phasor.load(tmp_path / "t5")
    same(t5, ours)
    phasor.save(ours, tmp_path / "again", format="hf")
    assert names(tmp_path / "again") == names(tmp_path / "t5")
    edit_tensors(tmp_path / "bart", lambda found: found.update({"model.encoder.version": torch.ones(1)}))
    same(bart, phasor.load(tmp_path / "bart"))


@pytest.mark.parametrize(
    ("cls", "config", "name"),
    [
        (transformers.MarianMTModel, transformers.MarianConfig, "model.encoder.embed_positions.weight"),
        (
            transformers.M2M100ForConditionalGeneration,
            transformers.M2M100Config,
            "model.decoder.embed_positions.weights",
        ),
    ],
    ids=["marian", "m2m_100"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_table_of_sinusoids_may_be_in_the_file_and_must_be_one(cls, config, name, dtype, tmp_path):
    theirs = made(cls, config(**BART), tmp_path)
    table = theirs.model.encoder.embed_positions
    table = (table.weight if name.endswith("weight") else table.weights).detach().to(dtype)
    edit_tensors(tmp_path, lambda found: found.update({name: table}))
    same(theirs, phasor.load(tmp_path))
    edit_tensors(tmp_path, lambda found: found.update({name: table.flip(0)}))
    assert_refuses(tmp_path, f"{name} should follow from the configuration and does not")


def test_m2m_100_counts_positions_from_its_padding(tmp_path):
    for pad in (1, 6):
        config = transformers.M2M100Config(**BART | {"pad_token_id": pad})
        theirs = made(transformers.M2M100ForConditionalGeneration, config, tmp_path / str(pad))
        ours = phasor.load(tmp_path / str(pad))
        assert ours.config.position.offset == pad + 1
        source = torch.tensor([[9, 8, 7, 10, 11], [12, 13, 14, pad, pad]])
        target, real = torch.tensor([[2, 9, 8], [2, 20, 21]]), source != pad
        with torch.no_grad():
            expected = theirs(input_ids=source, attention_mask=real.long(), decoder_input_ids=target).logits
            torch.testing.assert_close(ours(source, target, attention_mask=real), expected, atol=2e-5, rtol=0)


LARGE = """
    "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "num_hidden_layers": 12"""
OLD = """
    "_num_labels": 3, "classif_dropout": 0.0, "classifier_dropout": 0.0, "output_past": true, "num_beams": 4,
    "gradient_checkpointing": false, "add_bias_logits": false, "max_length": 142, "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0}, "task_specific_params": {"summarization": {}}, "do_blenderbot_90_layernorm": false,
    "force_bos_token_to_be_generated": true, "decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0, "prefix": " ",
    "length_penalty": 2.0"""
REAL = {  # as the hub has them, a little shortened
    "t5-small": """
    "model_type": "t5", "architectures": ["T5WithLMHeadModel"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "num_heads": 8, "num_layers": 6, "vocab_size": 32128, "dropout_rate": 0.1, "initializer_factor": 1.0,
    "layer_norm_epsilon": 1e-06, "n_positions": 512, "output_past": true, "relative_attention_num_buckets": 32,
    "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "is_encoder_decoder": true""",
    "flan-t5-base": """
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 768,
    "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12, "vocab_size": 32128, "n_positions": 512,
    "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": true, "output_past": true,
    "tie_word_embeddings": false, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32""",
    "flan-ul2": """
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 16384, "d_kv": 256,
    "d_model": 4096, "num_heads": 16, "num_layers": 32, "num_decoder_layers": 32, "vocab_size": 32128,
    "feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": true, "dropout_rate": 0.0,
    "tie_word_embeddings": false, "output_past": true""",
    "mt5-small": """
    "model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "num_heads": 6, "num_layers": 8, "num_decoder_layers": 8, "vocab_size": 250112, "tie_word_embeddings": false,
    "feed_forward_proj": "gated-gelu", "tokenizer_class": "T5Tokenizer", "relative_attention_num_buckets": 32""",
    "bart-large-cnn": f"""
    "model_type": "bart", "architectures": ["BartForConditionalGeneration"], {OLD}, {LARGE}, "vocab_size": 50264,
    "max_position_embeddings": 1024, "normalize_before": false, "replacing_rate": 0, "add_final_layer_norm": false,
    "normalize_embedding": true, "static_position_embeddings": false, "student_decoder_layers": null,
    "extra_pos_embeddings": 2, "save_step": 15, "scale_embedding": false, "forced_eos_token_id": 2""",
    "mbart-large-50": f"""
    "model_type": "mbart", "architectures": ["MBartForConditionalGeneration"], {OLD}, {LARGE}, "vocab_size": 250054,
    "max_position_embeddings": 1024, "normalize_before": true, "add_final_layer_norm": true,
    "normalize_embedding": true, "static_position_embeddings": false, "scale_embedding": true""",
    "opus-mt-en-de": f"""
    "model_type": "marian", "architectures": ["MarianMTModel"], {OLD}, "d_model": 512, "encoder_layers": 6,
    "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048, "num_hidden_layers": 6, "vocab_size": 58101, "decoder_vocab_size": 58101,
    "share_encoder_decoder_embeddings": true, "activation_function": "swish", "bad_words_ids": [[58100]],
    "pad_token_id": 58100, "scale_embedding": true, "normalize_before": false, "normalize_embedding": false,
    "static_position_embeddings": true, "add_final_layer_norm": false, "extra_pos_embeddings": 58101,
    "max_position_embeddings": 512""",
    "nllb-200-distilled-600M": f"""
    "model_type": "m2m_100", "architectures": ["M2M100ForConditionalGeneration"], {LARGE}, "init_std": 0.02,
    "activation_function": "relu", "decoder_layerdrop": 0, "encoder_layerdrop": 0, "max_position_embeddings": 1024,
    "pad_token_id": 1, "scale_embedding": true, "vocab_size": 256206, "tokenizer_class": "NllbTokenizer",
    "use_cache": true, "dropout": 0.1""",
}


@pytest.mark.parametrize("name", REAL)
def test_configurations_of_the_hub_are_read(name, tmp_path):
    given = json.loads(f"{{{REAL[name]}}}")
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = read_config(tmp_path)
    assert (config.vocab_size, config.dim) == (given["vocab_size"], given["d_model"])
    assert config.depth("encoder") == given.get("num_layers", given.get("encoder_layers"))
    multiplier = {"t5-small": "rsqrt"}.get(name, 1.0)
    assert config.head.multiplier == multiplier
    if "d_kv" not in given:
        assert config.embedding.scale == ("sqrt" if given["scale_embedding"] else 1.0)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == given["model_type"]


@pytest.mark.parametrize(
    ("name", "fields", "mention"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh", "dense_act_fn": None}, "gated-tanh"),
        ("t5", {"feed_forward_proj": "half-relu"}, "half-relu"),
        ("t5", {"architectures": ["T5ForQuestionAnswering"]}, "T5WithLMHeadModel"),
        ("t5", {"relative_attention_num_buckets": 6}, "multiple of 4"),
        ("bart", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2"),
        ("bart", {"decoder_ffn_dim": 80}, "decoder_ffn_dim = 80"),
        ("bart", {"num_hidden_layers": 3}, "num_hidden_layers = 3"),
        ("bart", {"normalize_before": True}, "normalize_before = true"),
        ("bart", {"static_position_embeddings": True}, "static_position_embeddings = true"),
        ("bart", {"activation_function": "tanh"}, "tanh"),
        ("bart", {"is_decoder": True}, "is_decoder (true)"),
        (
            "bart",
            {"model_type": "marian", "architectures": ["MarianMTModel"], "decoder_vocab_size": 70},
            "decoder_vocab",
        ),
    ],
)
def test_what_the_model_cannot_say_is_refused_by_name(name, fields, mention, tmp_path, t5, bart):
    edit(tmp_path / name, **fields)
    assert_refuses(tmp_path / name, "config.json", mention)


def test_presets_go_out_as_a_family_that_computes_them(tmp_path):
    for name in ("t5", "t5-1.1"):
        model = phasor.Transformer(phasor.preset(name, dim=24, num_heads=3, num_layers=2, vocab_size=61)).eval()
        phasor.save(model, tmp_path / name, format="hf")
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] in ("t5", "mt5")
        same(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name), model)


def test_every_family_here_is_among_the_cases():
    random_ones_repeat_themselves = {"pegasus"}
    assert set(MODELS) == {name.partition("/")[0] for name in CASES} - random_ones_repeat_themselves


@pytest.mark.parametrize("name", ["t5", "encoder"])
@torch.no_grad()
def test_t5_in_float16_stays_finite_where_its_sums_overflow(name, tmp_path):
    """All of theirs in float16, as ours: they clamp the residual stream after every sub-layer."""
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    cls = {"t5": transformers.T5ForConditionalGeneration, "encoder": transformers.T5EncoderModel}[name]
    theirs = made(cls, transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"), tmp_path)
    for weight in (p for n, p in theirs.named_parameters() if ".block.0." in n and n.endswith(".wo.weight")):
        weight *= 60000
    theirs.save_pretrained(tmp_path)
    theirs, ours = theirs.half(), phasor.load(tmp_path, dtype=torch.float16)
    source, target = torch.arange(18).view(2, 9) + 4, torch.arange(10).view(2, 5) + 30
    if name == "t5":
        expected, found = theirs(input_ids=source, decoder_input_ids=target).logits, ours(source, target)
    else:
        expected, found = theirs(input_ids=source).last_hidden_state, ours(source)
    assert torch.isfinite(expected).all()
    assert torch.isfinite(found).all()
    assert (found.float() - expected.float()).abs().max() < 0.1 * expected.float().std()


@torch.no_grad()
def test_m2m_100_counts_tokens_other_than_padding_where_no_mask_is_given(tmp_path):
    config = transformers.M2M100Config(**BART | {"pad_token_id": 6})
    theirs = made(transformers.M2M100ForConditionalGeneration, config, tmp_path)
    ours = phasor.load(tmp_path)
    source = torch.tensor([[9, 8, 6, 10, 11], [6, 6, 14, 13, 6]])
    target = torch.tensor([[2, 9, 8, 5], [2, 6, 21, 6]])
    expected = theirs(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(source, target), expected, atol=2e-5, rtol=0)


def test_outputs_of_umt5_are_scaled_where_the_file_says_that_its_head_is_tied(tmp_path):
    """transformers scales them in any case."""
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**sizes)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert phasor.load(tmp_path).config.head.multiplier == "rsqrt"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    config = phasor.load(tmp_path).config
    assert config.head.multiplier == 1.0
    assert "UMT5" in family("umt5").differs_from_transformers(config)
    for tied in (True, False):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": tied}))
        model = phasor.load(tmp_path)
        untied = phasor.Transformer(model.config.replace(embedding={"tied": False}))
        for name, one in {"as it is": model, "with its own head": untied}.items():
            phasor.save(one, tmp_path / name, format="hf")
            assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == "umt5"
            assert phasor.load(tmp_path / name).config.head == one.config.head


@torch.no_grad()
def test_switch_leaves_no_token_out_where_transformers_does_beyond_the_capacity(tmp_path):
    """Equal in rows within the capacity, and beyond it to a capacity that is enough."""
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
    theirs = made(
        transformers.SwitchTransformersForConditionalGeneration,
        transformers.SwitchTransformersConfig(**sizes, expert_capacity=5),
        tmp_path,
    )
    ours = phasor.load(tmp_path)
    for length, same in ((5, True), (23, False)):
        source = torch.arange(2 * length).view(2, length) + 4
        found = ours(source, source.flip(0))
        difference = (found - theirs(input_ids=source, decoder_input_ids=source.flip(0)).logits).abs().max()
        assert (difference < 2e-5) == same
    for module in theirs.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 23
    assert (found - theirs(input_ids=source, decoder_input_ids=source.flip(0)).logits).abs().max() < 2e-5
    assert "expert_capacity" in family("switch_transformers").differs_from_transformers(ours.config)
    phasor.save(ours, tmp_path / "again", format="hf")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["expert_capacity"] == 5


@torch.no_grad()
def test_switch_with_tables_of_its_own_for_each_side_is_refused(tmp_path):
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(**sizes, num_decoder_layers=2, tie_word_embeddings=False)
    transformers.SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"decoder.embed_tokens.weight should repeat shared.weight"):
        phasor.load(tmp_path)
