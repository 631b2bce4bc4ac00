"""Tokenizers of exported models, as transformers' AutoTokenizer reads them."""

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import phasor
from phasor.checkpoints.compare import compare
from phasor.data.tokenizers import byte_tokenizer

TEXT = "Zwölf Boxkämpfer, 12 "


def tiny(name="llama-2", **fields):
    return phasor.Transformer(
        phasor.preset(name, dim=32, num_heads=2, num_layers=2, vocab_size=261, max_length=64, **fields)
    )


@pytest.fixture
def trained():
    """A decoder as `train` leaves it: bytes as tokens, and no file about them but the tokenizer."""
    model = tiny()
    model.tokenizer, model.special = byte_tokenizer(), phasor.SpecialTokens(stop=(2,), bos=1, pad=0)
    return model


def ids(tokenizer):
    return tuple(getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk", "mask"))


@pytest.mark.parametrize("name", ["llama-2", "gpt-2", "bert", "t5"])
@pytest.mark.parametrize("direct", [True, False])
def test_special_tokens_survive(trained, name, direct, tmp_path):
    model = tiny(name)
    model.tokenizer, model.special = trained.tokenizer, trained.special
    if direct:
        phasor.save(model, tmp_path / "hf", format="hf")
    else:
        phasor.save(model, tmp_path / "native")
        assert phasor.convert(tmp_path / "native", tmp_path / "hf", check=True).tokenizer is None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert ids(theirs) == (1, 2, 0, 3, 4)
    assert len(theirs) == 261
    assert theirs(TEXT)["input_ids"] == model.tokenizer.encode(TEXT).ids
    assert theirs.decode(theirs(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    padded = theirs(["a", "abc"], padding=True)
    assert padded.keys() == {"input_ids", "attention_mask"}
    assert padded["input_ids"][0] == [1, 102, 0, 0]


def test_a_chat_template_is_kept(trained, tmp_path):
    phasor.save(trained, tmp_path / "hf", format="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "phasor_manifest.json").unlink()
    phasor.convert(tmp_path / "hf", tmp_path / "native")
    phasor.convert(tmp_path / "native", tmp_path / "back", check=True)
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert ids(back) == (1, 2, 0, 3, 4)


def test_files_of_a_hugging_face_folder_stay_as_they_are(trained, tmp_path):
    phasor.save(trained, tmp_path / "hf", format="hf")
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    (tmp_path / "hf" / "phasor_manifest.json").unlink()
    check = phasor.convert(tmp_path / "hf", tmp_path / "again", "hf", check=True)
    assert not (tmp_path / "again" / "tokenizer_config.json").exists()
    assert check.tokenizer == "the tokenizer of transformers has no bos_token and no eos_token and no pad_token"


def test_a_check_refuses_another_tokenizer(trained, tmp_path):
    phasor.save(trained, tmp_path / "hf", format="hf")
    words = Tokenizer(models.WordLevel({"The": 0, "cat": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "hf" / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"transformers tokenizes .* as .*, and not as .*; nothing is written"):
        compare(trained, tmp_path / "hf")


def test_a_second_tokenizer_is_noted(trained, tmp_path):
    model = tiny("t5")
    model.tokenizer = model.source_tokenizer = byte_tokenizer("$A <eos>")
    model.special = trained.special.replace(start=1)
    phasor.save(model, tmp_path / "native")
    check = phasor.convert(tmp_path / "native", tmp_path / "hf", check=True)
    assert "does not read that of the source" in check.tokenizer


def test_a_tokenizer_that_pads_and_truncates_is_the_same(tmp_path):
    model = tiny("bert")
    model.tokenizer, model.special = byte_tokenizer("<bos> $A <eos>"), phasor.SpecialTokens(stop=(2,), bos=1, pad=0)
    model.tokenizer.enable_padding(length=20)
    model.tokenizer.enable_truncation(20)
    phasor.save(model, tmp_path / "native")
    assert phasor.convert(tmp_path / "native", tmp_path / "hf", check=True).tokenizer is None


def test_a_model_without_its_tokenizer_is_saved(trained, tmp_path):
    phasor.save(trained, tmp_path / "native")
    model = phasor.load(tmp_path / "native")
    model.tokenizer = None
    phasor.save(model, tmp_path / "hf", format="hf")
    assert phasor.load(tmp_path / "hf").config == model.config
