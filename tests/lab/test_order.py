"""The view "order": the ticket without and with positions, and texts as the models of folders read them."""

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import phasor
from phasor import ModelConfig, Transformer
from phasor.lab import texts
from phasor.lab.endpoints import ENDPOINTS, FieldError
from phasor.lab.folders import Folders
from phasor.lab.views import order

WORDS = ["<unk>", "<s>", "</s>", "<mask>", "the", "cat", "sat", "on", "mat", "."]
SMALL = {"vocab_size": len(WORDS), "dim": 32, "num_layers": 3, "num_heads": 4, "max_length": 64, "init": "fan-in"}
TEXT = "the cat sat on the mat ."


def answer(name, body, folders=None):
    return ENDPOINTS[f"/api/order/{name}"].answer(body, folders)


def word_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def build(folder, shape="decoder", **changes):
    torch.manual_seed(3)
    model = Transformer(ModelConfig(**{"shape": shape, "position": "rotary", **SMALL, **changes})).eval()
    model.tokenizer = word_tokenizer()
    model.special = phasor.SpecialTokens(start=1, stop=[2])
    phasor.save(model, folder)
    return model


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    built = {
        "decoder": build(place / "a"),
        "encoder": build(place / "b", "encoder", head="mlm"),
        "encoder-decoder": build(place / "c", "encoder-decoder"),
    }
    return Folders([place / name for name in "abc"]), built


def matrix(result):
    return torch.from_numpy(numpy.frombuffer(result.data, "<f4").reshape(result.shape).copy())


def test_without_positions_both_tickets_are_the_same():
    result = answer("ticket", {})
    assert result["tokens"][0] == ["<cls>", "从", "北京", "到", "上海", "的", "火车票"]
    assert result["same_words"]
    assert result["summary"]["same"]
    assert max(result["moved"]) < 1e-14


@pytest.mark.parametrize("position", [name for name in order.word_schemes() if name != "none"])
def test_with_positions_they_differ(position):
    result = answer("ticket", {"position": position})
    assert not result["summary"]["same"]
    assert result["summary"]["distance"] > 1e-3
    assert min(result["moved"]) > 1e-4


def test_a_causal_mask_alone_tells_orders_apart():
    result = answer("ticket", {"attention": "causal"})
    assert result["moved"][:2] == [0, 0]  # they have seen the same
    assert result["summary"]["tokens"] == ["火车票", "火车票"]
    assert result["summary"]["distance"] > 1e-3


def test_the_ticket_is_what_the_library_computes():
    body = {"position": "rotary", "num_layers": 1, "num_heads": 1, "first": "a b", "second": "b a"}
    result = answer("ticket", body)
    model = order.ticket_model("rotary", "bidirectional", 1, 1, 0)
    hidden = model(torch.tensor([[0, 1, 2], [0, 2, 1]]), head=False).detach()
    torch.testing.assert_close(torch.tensor(result["summary"]["vectors"], dtype=torch.float64), hidden[:, 0])
    torch.testing.assert_close(torch.tensor(result["attention"])[:, 0, 0].sum(-1), torch.ones(2, 3))
    assert result["moved"][1] == pytest.approx(float((hidden[0, 1] - hidden[1, 2]).norm() / hidden[0, 1].norm()))


def test_other_words_are_not_the_same_words():
    result = answer("ticket", {"first": "a b", "second": "a c"})
    assert not result["same_words"]
    assert result["moved"][2] is None


@pytest.mark.parametrize(
    ("body", "field", "sentence"),
    [
        ({"first": "  "}, "first", "1 to 16 words with spaces between them, not 0"),
        ({"second": "a " * 17}, "second", "1 to 16 words with spaces between them, not 17"),
        ({"position": "rotery"}, "position", "rotery"),
        ({"position": "selective"}, "position", "'selective' is called 'accumulated' now"),
        ({"num_heads": 3}, "num_heads", "num_heads"),
        ({"seed": -1}, "seed", "seed must be at least 0"),
    ],
)
def test_a_mistake_about_the_ticket_names_its_field(body, field, sentence):
    with pytest.raises(FieldError, match=sentence) as caught:
        answer("ticket", body)
    assert caught.value.field == field


def test_the_models_are_listed(given):
    models = answer("models", {}, given[0])["models"]
    assert models[0] == {"folder": 0, "name": "a", "shape": "decoder", "layers": 3, "heads": 4}
    assert [model["shape"] for model in models] == ["decoder", "encoder", "encoder-decoder"]


def test_next_tokens_have_the_probabilities_of_the_model(given):
    folders, built = given
    result = answer("text", {"text": TEXT, "index": 2}, folders)
    assert result["tokens"] == TEXT.split()
    assert result["kinds"] == {"causal": 3}
    logits = built["decoder"](torch.tensor([[WORDS.index(word) for word in TEXT.split()]]))
    expected = logits[0, 2].softmax(-1).detach()
    for found in result["likely"]:
        assert found["token"] == WORDS[found["id"]]
        assert found["probability"] == pytest.approx(float(expected[found["id"]]), rel=1e-5)
    assert sum(found["probability"] for found in result["likely"]) == pytest.approx(1)
    assert answer("text", {"text": TEXT}, folders)["index"] == 6


def test_an_encoder_fills_gaps_and_attends_both_ways(given):
    result = answer("text", {"folder": 1, "text": "the <mask> sat", "index": 1}, given[0])
    assert result["fills"]
    assert len(result["likely"]) == len(WORDS)
    weights = matrix(answer("attention", {"folder": 1, "text": TEXT, "kind": "bidirectional"}, given[0]))
    assert weights.shape == (3, 4, 7, 7)
    assert bool((weights > 0).all())


def test_attention_by_layer_and_head_is_that_of_the_model(given):
    folders, built = given
    record = phasor.Record("attention")
    built["decoder"](torch.tensor([[WORDS.index(word) for word in TEXT.split()]]), record=record)
    whole = matrix(answer("attention", {"text": TEXT}, folders))
    torch.testing.assert_close(whole, torch.stack(record.attention)[:, 0])
    one = matrix(answer("attention", {"text": TEXT, "layer": 1, "head": 2}, folders))
    torch.testing.assert_close(one, record.attention[1][:, 2:3])
    assert bool((one.triu(1) == 0).all())


def test_an_encoder_decoder_shows_three_maps_and_writes_its_own_target(given):
    folders, built = given
    body = {"folder": 2, "source": TEXT}
    result = answer("text", body, folders)
    assert result["kinds"] == {"cross": 3, "causal": 3, "bidirectional": 3}
    written = phasor.generate(built["encoder-decoder"], TEXT, max_new_tokens=texts.MAX_TARGET_TOKENS)
    assert result["tokens"][0] == "<s>"
    assert " ".join(result["tokens"][1:]).removesuffix(" </s>") == written
    count = len(result["tokens"])
    shapes = {kind: answer("attention", {**body, "kind": kind}, folders).shape for kind in result["kinds"]}
    assert shapes == {"cross": (3, 4, count, 7), "causal": (3, 4, count, count), "bidirectional": (3, 4, 7, 7)}
    own = answer("text", {**body, "text": "cat sat"}, folders)
    assert own["tokens"] == ["<s>", "cat", "sat"]


def test_of_long_texts_one_layer_is_kept(given, monkeypatch):
    folders, _ = given
    body = {"text": TEXT + " cat", "layer": 2, "head": 1}
    expected = matrix(answer("attention", body, folders))
    texts.READINGS.clear()
    monkeypatch.setattr(texts, "KEPT_ELEMENTS", 10)
    torch.testing.assert_close(matrix(answer("attention", body, folders)), expected)
    with pytest.raises(FieldError, match="ask for one layer and one head"):
        answer("attention", {"text": TEXT + " cat"}, folders)
    texts.READINGS.clear()


@pytest.mark.parametrize(
    ("name", "body", "field", "sentence"),
    [
        ("text", {"text": ""}, "text", "this text has no token"),
        ("text", {"text": "cat " * 513}, "text", "513 tokens, and at most 512 are read"),
        ("text", {"text": "cat " * 9999}, "text", "text must have at most 16,384 characters"),
        ("text", {"text": "\ud800"}, "text", "half a character"),
        ("text", {"text": "cat", "index": 1}, "index", "index must be at most 0"),
        ("text", {"text": "cat", "folder": 9}, "folder", "there is no folder 9; there are 0 to 2"),
        ("text", {"folder": 2, "text": "cat"}, "source", "this text has no token"),
        ("text", {"folder": 2, "source": "cat", "text": "\ud800"}, "text", "half a character"),
        ("attention", {"text": "cat", "kind": "cross"}, "kind", "has causal attention, and no cross attention"),
        ("attention", {"text": "cat", "layer": 3}, "layer", "layer must be at most 2, not 3"),
        ("attention", {"text": "cat", "head": 4}, "head", "head must be at most 3, not 4"),
        ("attention", {"text": "cat " * 512}, "layer", "ask for one layer and one head"),
    ],
)
def test_a_mistake_about_a_text_names_its_field(given, name, body, field, sentence):
    with pytest.raises(FieldError, match=sentence) as caught:
        answer(name, body, given[0])
    assert caught.value.field == field


def test_a_text_beyond_a_table_of_positions_is_one_sentence(tmp_path):
    build(tmp_path / "short", position="learned", max_length=8)
    with pytest.raises(FieldError, match="8") as caught:
        answer("text", {"text": "cat " * 9}, Folders([tmp_path / "short"]))
    assert caught.value.field == "text"


def test_a_model_without_a_tokenizer_reads_token_ids(tmp_path):
    phasor.save(Transformer(ModelConfig(**SMALL)), tmp_path / "plain")
    folders = Folders([tmp_path / "plain"])
    assert answer("text", {"text": "5 6"}, folders)["tokens"] == ["5", "6"]
    for text in ("the cat", "-1", "99999999999"):
        with pytest.raises(FieldError, match="this model has no tokenizer: give token ids"):
            answer("text", {"text": text}, folders)
    with pytest.raises(FieldError):
        answer("text", {"text": "10"}, folders)  # beyond the vocabulary


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_a_link_out_of_the_folder_is_not_read(tmp_path, name):
    build(tmp_path / "model")
    (tmp_path / "model" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "model" / name).symlink_to(tmp_path / "elsewhere")
    folders = Folders([tmp_path / "model"])
    for each, body in (("text", {"text": "cat"}), ("attention", {"text": "cat"})):
        with pytest.raises(FieldError, match=r"holds no model|is a link out of the folder, and is not read"):
            answer(each, body, folders)
    assert all("error" in model for model in answer("models", {}, folders)["models"])


def test_a_damaged_model_is_one_sentence_without_its_place(tmp_path):
    build(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(FieldError) as caught:
        answer("text", {"text": "cat"}, Folders([tmp_path / "model"]))
    assert caught.value.field == "folder"
    assert str(tmp_path) not in str(caught.value)


def test_attention_equals_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), output_attentions=True)
    body, folders = {"text": " ".join(map(str, ids))}, Folders([tmp_path / "gpt2"])
    found = matrix(answer("attention", body, folders))
    torch.testing.assert_close(found, torch.stack(expected.attentions)[:, 0], atol=1e-6, rtol=1e-5)
    likely = answer("text", body, folders)["likely"]
    probabilities = expected.logits[0, -1].softmax(-1)
    assert [each["id"] for each in likely] == probabilities.topk(10).indices.tolist()
    assert likely[0]["probability"] == pytest.approx(float(probabilities.max()), rel=1e-5)


class TwoLooks:
    """A tokenizer in which two tokens are read alike, as " A" and "A" are beside others."""

    words = ("A", "ĠA", "B", "Ġ")

    def decode(self, ids, skip_special_tokens):
        return self.words[ids[0]].replace("Ġ", " ")

    def id_to_token(self, token):
        return self.words[token]


def test_tokens_that_look_alike_are_told_apart():
    assert texts.distinct_texts(TwoLooks(), [0, 1, 2, 3]) == ["A", "ĠA", "B", "␣"]
    assert texts.distinct_texts(TwoLooks(), [1, 2]) == [" A", "B"]


def test_likely_tokens_that_look_alike_are_told_apart():
    model = Transformer(ModelConfig(**SMALL | {"vocab_size": 4})).eval()
    model.tokenizer = TwoLooks()
    reading = texts.forward(model, [0, 2], [], None)
    assert sorted(each["token"] for each in reading.likely_tokens(-1, 4)) == ["A", "B", "ĠA", "␣"]
