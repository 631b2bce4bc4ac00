"""The check of `convert`: it goes past windows and lengths, and says what it left out."""

import pytest
import torch
import transformers
from test_pages import prose

import phasor
from phasor.checkpoints import compare as comparing
from phasor.cli import main

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 40}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=50, max_position_embeddings=90)
    model = transformers.MistralForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_check_crosses_the_window_and_the_trained_length(folder, capsys):
    check = phasor.convert(folder, folder.parent / "ours", check=True)
    assert check.length > 90
    assert check.missed == ()
    assert check.largest < 1e-5
    assert main(["convert", str(folder), str(folder.parent / "again"), "--check"]) == 0
    assert f"the longest text has {check.length} tokens\n" in capsys.readouterr().out


def test_a_window_that_is_wrong_is_found(folder, monkeypatch):
    """A difference that shows only past the window, which a text of 32 tokens does not reach."""
    load = phasor.checkpoints.convert.__globals__["load"]

    def load_with_another_window(*args, **options):
        model = load(*args, **options)
        config = model.config.replace(attention=model.config.attention.replace(window=40))
        other = phasor.Transformer(config)
        other.load_state_dict(model.state_dict())
        other.special, other.origin = model.special, model.origin
        return other

    monkeypatch.setitem(phasor.checkpoints.convert.__globals__, "load", load_with_another_window)
    with pytest.raises(ValueError, match=r"transformers computes other logits .* in 106 tokens"):
        phasor.convert(folder, folder.parent / "ours", check=True)
    assert not (folder.parent / "ours").exists()


def test_what_is_not_affordable_is_said(folder, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "BUDGET", 2e6)
    check = phasor.convert(folder, folder.parent / "ours", check=True)
    assert check.missed == ("the trained length of 90 tokens",)
    assert check.length == 66
    assert main(["convert", str(folder), str(folder.parent / "again"), "--check-length", "40"]) == 0
    out = capsys.readouterr().out
    assert (
        "the longest text has 40 tokens; not crossed: the window of 50 tokens; not crossed: the trained length" in out
    )
    for wrong in (0, -3, 1.5, "long"):
        with pytest.raises(ValueError, match="check must be true, false or a number of tokens"):
            phasor.convert(folder, folder.parent / "other", check=wrong)


def test_falcon_with_alibi_is_written_and_the_difference_said(tmp_path, capsys):
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12}  # slopes it rounds
    theirs = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=True))
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--check-length", "300"]) == 0
    assert "note: transformers rounds ALiBi to bfloat16" in capsys.readouterr().out
    ours = phasor.load(tmp_path / "ours")
    assert ours.config.position.kind == "alibi"
    differences = {}
    for name in ("sdpa", "eager"):
        kept = transformers.FalconForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation=name).eval()
        with torch.no_grad():
            for length in (51, 256, 1024):
                ids = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(1))
                differences[name, length] = float((kept(ids).logits - ours(ids)).abs().max())
    assert differences["sdpa", 51] < differences["sdpa", 256] / 2 < differences["sdpa", 1024] / 4
    assert all(differences["eager", length] > 1.5 * differences["sdpa", length] for length in (51, 256, 1024))
    said = (
        "The default attention of `transformers` (sdpa) differs from it the more the longer the text is; its other "
        'path ("eager") adds ALiBi twice and differs by more.'
    )
    assert said in prose("docs/checkpoints.md")


@pytest.mark.parametrize("name", ["GPTJ", "CodeGen", "RoFormer"])
def test_tables_of_angles_in_transformers_are_not_passed(name, tmp_path):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "rotary_dim": 4}
    if name == "RoFormer":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
        sizes |= {"max_position_embeddings": 40}
    config = getattr(transformers, f"{name}Config")(vocab_size=61, **sizes)
    getattr(transformers, f"{name}ForCausalLM" if name != "RoFormer" else "RoFormerModel")(config).save_pretrained(
        tmp_path / "theirs"
    )
    check = phasor.convert(tmp_path / "theirs", tmp_path / "ours", check=64)
    assert (check.length, check.missed) == (40, ("the trained length of 40 tokens",))


@pytest.mark.parametrize("name", ["MarianMTModel", "PegasusForConditionalGeneration"])
def test_tables_of_sinusoids_in_transformers_are_not_passed(name, tmp_path):
    cls = getattr(transformers, name)
    sides = {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in SIDE.items()}
    config = cls.config_class(vocab_size=61, d_model=32, max_position_embeddings=40, pad_token_id=60, **sides)
    cls(config).save_pretrained(tmp_path / "theirs")
    check = phasor.convert(tmp_path / "theirs", tmp_path / "ours", check=True)
    assert (check.length, check.missed) == (40, ("the trained length of 40 tokens",))


@pytest.mark.parametrize("name", ["bert-like", "t5"])
def test_tables_and_encoders_are_checked_as_far_as_they_go(name, tmp_path):
    if name == "t5":
        sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
        theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, n_positions=40))
    else:
        theirs = transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=20))
    theirs.save_pretrained(tmp_path / "theirs")
    check = phasor.convert(tmp_path / "theirs", tmp_path / "ours", check=True)
    assert (check.length, check.missed) == ((56, ()) if name == "t5" else (20, ()))
