"""Hugging Face folders around the families: tying, types, shards, caches, tokenizers, bad folders, other positions."""

import json
import re
import runpy
import shutil
import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import phasor
from phasor.checkpoints import tensors as tensor_files
from phasor.checkpoints.hub import hub_cache
from phasor.cli import main
from phasor.models import families

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def llama(**fields):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | fields)).eval()


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def edit_tensors(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def assert_refuses(folder, *mentions, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        phasor.load(folder, **options)
    text = str(error.value)
    assert all(mention in text for mention in mentions), text
    assert "\n" not in text


TOKENS = torch.arange(2 * 11).view(2, 11) % 61


@torch.no_grad()
def same(folder, **options):
    """The model of a folder, after checking that transformers computes the same of it."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = phasor.load(folder, **options)
    assert float((ours.float()(TOKENS) - theirs(TOKENS).logits).abs().max()) < 2e-5
    return ours


class TestTying:
    """Tying follows the tensors that are there."""

    def test_a_flag_that_says_tied_with_a_head_of_its_own(self, folder):
        edit(folder, tie_word_embeddings=True)
        model = phasor.load(folder)
        assert not model.config.embedding.tied
        assert torch.equal(model.head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
        phasor.save(model, folder.parent / "back", format="hf")
        assert json.loads((folder.parent / "back" / "config.json").read_text())["tie_word_embeddings"] is False

    def test_a_flag_that_says_untied_without_a_head(self, tmp_path):
        llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
        edit(tmp_path / "tied", tie_word_embeddings=False)
        assert_refuses(tmp_path / "tied", "lm_head.weight is missing", "tie_word_embeddings")

    def test_a_tied_table_that_is_stored_twice(self, tmp_path):
        llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")

        def repeat(found):
            found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()

        edit_tensors(tmp_path / "tied", repeat)
        assert same(tmp_path / "tied").config.embedding.tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_model_has_the_type_of_its_file_unless_asked(tmp_path, dtype):
    llama().to(dtype).save_pretrained(tmp_path / "typed")
    model = phasor.load(tmp_path / "typed")
    assert {p.dtype for p in model.parameters()} == {dtype}
    other = phasor.load(tmp_path / "typed", dtype=torch.bfloat16)
    assert all(
        torch.equal(a.to(torch.bfloat16), b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    phasor.save(model, tmp_path / "back", format="hf")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


def test_shards_are_read_and_written(folder, monkeypatch):
    llama().save_pretrained(folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    model = same(folder)
    monkeypatch.setattr(tensor_files.write_tensors, "__defaults__", (None, 8192))
    phasor.save(model, folder.parent / "back", format="hf")
    assert len(list((folder.parent / "back").glob("model-*.safetensors"))) > 3
    same(folder.parent / "back")
    phasor.save(model, folder.parent / "native")
    again = phasor.load(folder.parent / "native")
    assert torch.equal(again(TOKENS), model(TOKENS))
    phasor.save(model, folder.parent / "back", format="hf")  # a sharded folder is one of ours and may be replaced


def test_an_entry_of_the_hub_cache(folder, monkeypatch, tmp_path):
    entry = tmp_path / "hub" / "models--someone--tiny"
    (entry / "refs").mkdir(parents=True)
    (entry / "blobs").mkdir()
    snapshot = entry / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():  # the cache holds links to files named by their content
        shutil.copy(file, entry / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (entry / "refs" / "main").write_text("0123abcd")
    expected = phasor.load(folder)(TOKENS)
    assert torch.equal(phasor.load(entry)(TOKENS), expected)
    assert torch.equal(phasor.load(snapshot)(TOKENS), expected)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert torch.equal(phasor.load("someone/tiny")(TOKENS), expected)
    assert phasor.explain("someone/tiny").name == "someone/tiny"
    (entry / "refs" / "main").unlink()
    assert torch.equal(phasor.load(entry)(TOKENS), expected)
    (entry / "snapshots" / "other").mkdir()
    assert_refuses(entry, "2 snapshots")
    assert_refuses("someone/unknown", "someone/unknown")
    entry.rename(tmp_path / "hub" / "models--tiny")
    (tmp_path / "hub" / "models--tiny" / "refs" / "main").write_text("0123abcd")
    assert torch.equal(phasor.load("tiny")(TOKENS), expected)


VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize("given", [VARIABLES[i:] for i in range(5)] + [(name,) for name in VARIABLES])
def test_the_hub_cache_is_where_huggingface_hub_has_it(given, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in given:
        monkeypatch.setenv(name, f"~/{name}")
    theirs = runpy.run_path(huggingface_hub.constants.__file__)["HF_HUB_CACHE"]
    assert str(hub_cache()) == theirs


def test_tokenizer_files_and_special_tokens_go_along(folder):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7], "temperature": 0.6, "pad_token_id": 1}')
    model = phasor.load(folder)
    assert model.special.stop == (5, 7)
    assert model.tokenizer.encode("w3").ids == [3]
    phasor.save(model, folder.parent / "back", format="hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder.parent / "back" / name).read_bytes() == (folder / name).read_bytes()
    generation = json.loads((folder.parent / "back" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.6
    assert generation["eos_token_id"] == [5, 7]
    phasor.save(phasor.load(folder.parent / "back"), folder.parent / "native")
    through = phasor.load(folder.parent / "native")
    assert through.special == model.special
    phasor.save(through, folder.parent / "through", format="hf")
    assert (folder.parent / "through" / "tokenizer_config.json").read_text() == '{"model_max_length": 64}'
    through.tokenizer.add_tokens(["new"])
    for format in ("hf", "phasor"):
        phasor.save(through, folder.parent / "through", format=format)
        assert phasor.load(folder.parent / "through").tokenizer.encode("new").ids == [61]
    shutil.rmtree(folder)
    phasor.save(model, folder.parent / "later", format="hf")
    assert phasor.load(folder.parent / "later").tokenizer.encode("w3").ids == [3]


def test_further_chat_templates_go_along(folder):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=templates).save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    back = folder.parent / "back"
    for format in ("hf", "phasor", "hf"):  # each replaces the one before
        phasor.save(phasor.load(folder), back, format=format)
        assert transformers.PreTrainedTokenizerFast.from_pretrained(back).chat_template == templates
    (back / "additional_chat_templates" / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"holds more than a model \(additional_chat_templates/notes.txt\)"):
        phasor.save(phasor.load(folder), back)


class TestBadFolders:
    def test_every_wrong_tensor_is_listed_at_once(self, folder):
        def spoil(found):
            del found["model.norm.weight"]
            found["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
            found["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 25)
            found["model.layers.1.mlp.down_proj.weight"] = torch.zeros(24, 40, dtype=torch.int8)

        edit_tensors(folder, spoil)
        assert_refuses(
            folder,
            "model.safetensors",
            "as llama",
            "model.norm.weight is missing",
            "model.layers.0.self_attn.q_proj.bias is not the model's",
            "model.layers.1.mlp.up_proj.weight has the shape [40, 25], not [40, 24]",
            "model.layers.1.mlp.down_proj.weight is stored as I8",
        )

    def test_a_tensor_nobody_knows(self, folder):
        edit_tensors(folder, lambda found: found.__setitem__("extra.weight", torch.zeros(2)))
        assert_refuses(folder, "extra.weight is not the model's")

    @pytest.mark.parametrize("keep", [0, 5, 8, 60, 4000])
    def test_truncated_files(self, folder, keep):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        assert_refuses(folder, "model.safetensors cannot be read as safetensors")

    def test_a_header_that_lies(self, folder):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
        assert_refuses(folder, "model.safetensors cannot be read as safetensors")

    def test_an_unknown_family(self, folder):
        edit(folder, model_type="lama")
        assert_refuses(folder, "'lama'", "did you mean 'llama'?", *families.names())
        edit(folder, model_type=None)
        assert_refuses(folder, "model_type")
        edit(folder, model_type=["llama"])
        assert_refuses(folder, "model_type")

    def test_a_pickle(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert_refuses(folder, "pytorch_model.bin", "pickle", "save_pretrained")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("quantization_config", {"quant_method": "quip"}),
            ("hidden_act", "tanh"),
            ("rope_scaling", {"type": "spiral", "factor": 2.0}),
            ("rope_scaling", 7),
            ("architectures", ["LlamaForQuestionAnswering"]),
            ("is_causal", False),
        ],
    )
    def test_a_field_that_is_not_honored(self, folder, field, value):
        edit(folder, **{field: value})
        name = {"rope_scaling": "rope_"}.get(field, field)
        assert_refuses(folder, "config.json", name if field != "architectures" else "LlamaForQuestionAnswering")

    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("new_trick", 3, "new_trick (3)"),
            ("rope_scaling", {"type": "linear", "factor": 2.0, "wobble": 1}, "rope_parameters.wobble (1)"),
        ],
    )
    def test_a_field_that_transformers_ignores(self, folder, field, value, named):
        edit(folder, **{field: value})
        with pytest.warns(UserWarning, match="phasor ignores") as caught:
            same(folder)
        assert [named in str(one.message) for one in caught if "phasor ignores" in str(one.message)] == [True]
        assert_refuses(folder, named, strict=True)
        with pytest.warns(UserWarning, match="phasor ignores"):
            assert main(["convert", str(folder), str(folder.parent / "mine")]) == 0
        assert main(["convert", str(folder), str(folder.parent / "other"), "--strict"]) == 2

    @pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
    @pytest.mark.parametrize("value", [None, "wide", -3, 2.5])
    def test_a_field_with_a_wrong_value(self, folder, field, value):
        edit(folder, **{field: value})
        assert_refuses(folder, "config.json")

    def test_an_index_that_does_not_fit(self, folder):
        llama().save_pretrained(folder, max_shard_size="8KB")
        (folder / "model.safetensors").unlink()
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        shard = index["weight_map"]["model.norm.weight"]
        changed = index | {"weight_map": index["weight_map"] | {"model.norm.bias": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        assert_refuses(folder, "model.norm.bias is not in", shard)
        changed = index | {"weight_map": index["weight_map"] | {"model.norm.weight": "../elsewhere.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        assert_refuses(folder, "weight_map")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / shard).unlink()
        assert_refuses(folder, shard)


def test_a_model_no_family_can_say(tmp_path):
    config = phasor.preset("llama-2", vocab_size=61, dim=24, num_heads=4, num_layers=2, placement="deepnorm")
    with pytest.raises(ValueError, match="no family of transformers computes what this model does"):
        phasor.save(phasor.Transformer(config), tmp_path / "none", format="hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["retention", "mamba2", "gated-delta"])
def test_a_model_with_a_state_in_every_layer_that_no_family_has(kind, tmp_path):
    config = phasor.ModelConfig(vocab_size=61, dim=32, num_heads=4, num_layers=1, attention=kind)
    with pytest.raises(ValueError, match="no family of transformers computes what this model does; the nearest is"):
        phasor.save(phasor.Transformer(config), tmp_path / "none", format="hf")


def test_the_family_that_comes_nearest_is_named(tmp_path):
    sizes = {"vocab_size": 61, "dim": 48, "num_heads": 4, "num_layers": 2, "max_length": 64}
    with pytest.raises(
        ValueError, match=r"does; the nearest is gemma4_text: it would differ in placement\.block_scale"
    ):
        phasor.save(phasor.Transformer(phasor.preset("grok-1", **sizes)), tmp_path / "none", format="hf")
    steeper = phasor.preset("mpt", **sizes).replace(position={"kind": "alibi", "max_bias": 16.0})
    with pytest.raises(ValueError, match="max_bias is 16, and always 8 in transformers"):
        phasor.save(phasor.Transformer(steeper), tmp_path / "none", format="hf")


@pytest.mark.parametrize(
    ("name", "part", "kind", "family", "theirs"),
    [
        ("llama-2", "position", "alibi", "llama", "rotary"),
        ("llama-2", "position", "learned", "llama", "rotary"),
        ("bert", "position", "alibi", "bert", "learned"),
        ("t5", "position", "rotary", "t5", "t5"),
        ("bloom", "norm", "rmsnorm", "bloom", "layernorm"),
        ("bloom", "placement", "post", "bloom", "pre"),
    ],
)
def test_the_part_is_named_with_which_a_family_would_fit(tmp_path, name, part, kind, family, theirs):
    config = phasor.preset(name, vocab_size=61, dim=24, num_heads=2, num_layers=2, **{part: kind})
    said = re.escape(f"the nearest is {family}: it would differ in {part} ('{kind}' and '{theirs}')")
    with pytest.raises(ValueError, match=said):
        phasor.save(phasor.Transformer(config), tmp_path / "none", format="hf")
    phasor.save(phasor.Transformer(config.replace(**{part: theirs})), tmp_path / "made", format="hf")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["model_type"] == family


@torch.no_grad()
def test_a_llama_without_positions_is_a_granite_without_them(tmp_path):
    config = phasor.preset("llama-2", vocab_size=61, dim=24, num_heads=2, num_layers=2, position="none")
    model, tokens = phasor.Transformer(config).eval(), torch.randint(0, 61, (1, 9))
    phasor.save(model, tmp_path / "made", format="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    assert theirs.config.model_type == "granitemoehybrid"
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ("decoder", {"position": "t5", "norm": "rmsnorm"}),
        ("decoder", {"position": "shaw", "norm": "rmsnorm"}),
        ("decoder", {"position": "combined", "placement": "post"}),
        ("encoder", {"position": "shaw", "placement": "sandwich"}),
        ("encoder-decoder", {"position": "rotary"}),
        ("encoder-decoder", {"position": "alibi", "norm": "rmsnorm", "placement": "deepnorm"}),
    ],
)
def test_the_nearest_family_has_the_shape_of_the_model(tmp_path, shape, parts):
    config = phasor.ModelConfig(vocab_size=61, dim=24, num_heads=2, num_layers=2, shape=shape, **parts)
    with pytest.raises(ValueError, match="the nearest is") as error:
        phasor.save(phasor.Transformer(config), tmp_path / "none", format="hf")
    nearest = re.search(r"the nearest is (\w+): (.*)", str(error.value))
    theirs = transformers.AutoConfig.for_model(nearest[1])
    ours = ("bert" in nearest[1], theirs.is_encoder_decoder)
    assert ours == (shape == "encoder", shape == "encoder-decoder"), nearest[0]
    assert "rules" not in nearest[2]


def test_a_pooler_with_weights_that_t5_does_not_have_is_named(tmp_path):
    config = phasor.preset("t5", vocab_size=61, dim=24, num_heads=2, num_layers=2).replace(num_encoder_layers=None)
    config = config.replace(shape="encoder", head={"kind": "pooled", "pooler": "first"})
    with pytest.raises(ValueError, match=r"the nearest is t5: it has no tensors for pooler\.dense\.weight"):
        phasor.save(phasor.Transformer(config), tmp_path / "none", format="hf")


@pytest.mark.parametrize("name", ["llama-2", "llama-3.1"])
@torch.no_grad()
def test_models_made_here_are_written_for_transformers(tmp_path, name):
    config = phasor.preset(name, vocab_size=61, dim=24, num_heads=4, num_layers=2, hidden_dim=40, num_kv_heads=2)
    phasor.save(phasor.Transformer(config), tmp_path / "made", format="hf")
    same(tmp_path / "made")


class TestOtherPositions:
    def test_an_extension_changes_no_weight(self, folder):
        extended = phasor.load(folder, extension={"kind": "yarn", "factor": 4.0, "original_length": 64})
        plain = phasor.load(folder)
        assert extended.newly_initialized == ()
        assert extended.config.position.extension.factor == 4.0
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), extended.state_dict().values(), strict=True)
        )
        phasor.save(extended, folder.parent / "extended", format="hf")
        same(folder.parent / "extended")
        removed = phasor.load(folder.parent / "extended", extension="none")
        assert torch.equal(removed(TOKENS), plain(TOKENS))

    def test_a_scheme_with_weights_is_drawn_anew_and_told(self, folder):
        with pytest.warns(UserWarning, match=r"newly initialized: decoder\.positions\.0\.weight"):
            model = phasor.load(folder, position={"kind": "learned", "max_length": 32}, dtype=torch.bfloat16)
        assert model.newly_initialized == ("decoder.positions.0.weight",)
        assert model.decoder.positions[0].weight.dtype == torch.bfloat16
        assert 0 < float(model.decoder.positions[0].weight.detach().float().std()) < 1
        assert torch.isfinite(model(TOKENS)).all()
        phasor.save(model, folder.parent / "native")
        with pytest.warns(UserWarning, match=r"newly initialized: decoder\.positions\.0\.weight\[32:\]"):
            longer = phasor.load(folder.parent / "native", position={"kind": "learned", "max_length": 48})
        assert torch.equal(longer.decoder.positions[0].weight[:32], model.decoder.positions[0].weight)
        with pytest.warns(UserWarning, match=r"initialized: (\S+); dropped: decoder\.positions\.0\.weight"):
            phasor.load(folder.parent / "native", position="t5")
        with pytest.warns(UserWarning, match=r"dropped: decoder\.positions\.0\.weight"):
            back = phasor.load(folder.parent / "native", position="rotary")
        assert torch.equal(back(TOKENS), phasor.load(folder, dtype=torch.bfloat16)(TOKENS))

    @pytest.mark.parametrize("kind", list(phasor.kinds("positions")))
    @pytest.mark.filterwarnings("ignore:weights of the position scheme")
    def test_every_scheme_can_be_swapped_in(self, folder, kind):
        model = phasor.load(folder, position=kind)
        assert model.config.position.kind == kind
        assert torch.isfinite(model(TOKENS)).all()

    def test_what_does_not_fit_is_refused(self, folder):
        assert_refuses(folder, "rotary", position="spiral")
        assert_refuses(folder, "extension", extension="spiral")
        assert_refuses(folder, "factor", extension={"kind": "linear"})
        with pytest.raises(ValueError, match="needs rotary positions"):
            phasor.load(folder, position="alibi", extension={"kind": "linear", "factor": 2.0})


class TestCommand:
    def run(self, capsys, *arguments):
        code = main(["convert", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_there_and_back(self, folder, tmp_path, capsys):
        code, out, _ = self.run(capsys, folder, tmp_path / "native", "--check")
        assert code == 0
        assert "transformers computes the same logits of 144 random tokens" in out
        code, _, _ = self.run(capsys, tmp_path / "native", tmp_path / "back", "--check")
        assert code == 0
        theirs, back = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "back"))
        assert theirs.keys() == back.keys()
        assert all(torch.equal(theirs[name], back[name]) for name in theirs)

    def test_json_type_and_extension(self, folder, tmp_path, capsys):
        arguments = ("--dtype", "bfloat16", "--extension", "yarn", "--factor", "4", "--format", "hf", "--json")
        code, out, _ = self.run(capsys, folder, tmp_path / "out", *arguments)
        assert code == 0
        assert json.loads(out)["check"] is None
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert written["dtype"] == "bfloat16"
        assert written["rope_parameters"]["rope_type"] == "yarn"

    def test_a_check_that_fails_writes_nothing(self, folder, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(sys.modules["phasor.checkpoints.compare"], "TOLERANCE", -1.0)
        code, _, err = self.run(capsys, folder, tmp_path / "out", "--check")
        assert code == 2
        assert "other logits" in err
        assert {file.name for file in tmp_path.iterdir()} == {folder.name}

    @pytest.mark.parametrize(
        ("arguments", "mention"),
        [
            (("{folder}", "{folder}"), "onto itself"),
            (("{folder}", "{out}", "--format", "onnx"), "unknown format 'onnx'"),
            (("{folder}", "{out}", "--dtype", "int8"), "--dtype must be one of"),
            (("{folder}", "{out}", "--factor", "4"), "--factor belongs to an extension"),
            (("{folder}", "{out}", "--position", "spiral"), "spiral"),
            (("{out}", "{folder}x"), "does not exist"),
            (("{folder}", "{out}", "--check", "--position", "alibi"), "nothing to check against"),
        ],
    )
    def test_bad_arguments(self, folder, tmp_path, capsys, arguments, mention):
        code, _, err = self.run(capsys, *(a.format(folder=folder, out=tmp_path / "out") for a in arguments))
        assert code == 2
        assert mention in err
        assert {file.name for file in tmp_path.iterdir()} == {folder.name}

    def test_a_folder_can_be_explained(self, folder, capsys):
        assert main(["explain", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["schemes"][0]["kind"] == "rotary"


def test_saving_onto_the_folder_it_came_from(folder):
    model = phasor.load(folder)
    before = load_file(folder / "model.safetensors")
    phasor.save(model, folder, format="hf")
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {p.name for p in Path(folder).parent.iterdir()} == {folder.name}
