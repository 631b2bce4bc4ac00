"""Evaluation: every number against a plain loop or the library that defines it, and translations in their order."""

import gzip
import json
import math
import shutil

import pytest
import sacrebleu
import torch
from commands import CommandRunner
from training_runs import Notes, StopAt, recipe

import phasor
from phasor.bench.chart import check_folder
from phasor.checkpoints import open_model as opening
from phasor.checkpoints import runs
from phasor.data.store import prepare
from phasor.data.tokenizers import SpecialIds
from phasor.evaluation import evaluate, translate, translation
from phasor.evaluation.document_batches import DocumentBatches
from phasor.evaluation.scores import mostly_chinese, scores
from phasor.generation.translation import default_new_tokens, length_batches
from phasor.training import train
from phasor.training.build import check_config

LENGTH = 24  # tokens of a row: some of the documents are longer
DOCUMENTS = [
    "short",
    "naïve café 狐狸",
    "a document of more bytes than a row has, and more than two rows have",
    "x" * 23,
]
WORDS = {"one": "uno", "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco"}
PAIRS = [(f"{a} and {b} or {a}", f"{WORDS[a]} o {WORDS[b]} y {WORDS[a]}") for a in WORDS for b in WORDS]
OTHERS = [
    ("five", "cinco"),
    ("one and two and three and four", "uno y dos y tres y cuatro"),
    ("two", "dos dos dos dos"),
]
# Sums of float32 rounding in a model of two layers, relative to losses of order 1.
CLOSE = 1e-5


def write_lines(file, lines):
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wt", encoding="utf-8") as text:
        text.writelines(f"{line}\n" for line in lines)
    return str(file)


def document_data(folder, **data):
    """A recipe's data of a few documents, validated with the ones above."""
    train_on = write_lines(
        folder / "train.jsonl", [json.dumps({"text": f"some {n} words, más o menos"}) for n in range(30)]
    )
    valid = write_lines(folder / "valid.jsonl", [json.dumps({"text": text}) for text in DOCUMENTS])
    return {"train": train_on, "valid": valid, "tokenizer": "bytes", "sequence_length": LENGTH, **data}


def parallel_data(folder, **data):
    train_on = write_lines(folder / "train.tsv", ["\t".join(pair) for pair in PAIRS])
    valid = write_lines(folder / "valid.tsv", ["\t".join(pair) for pair in PAIRS[::3] + OTHERS])
    return {"train": train_on, "valid": valid, "tokenizer": "bytes", "sequence_length": 64, **data}


def train_run(folder, data, *, stop=0, **changes):
    given = {"train__steps": 4, "train__batch_tokens": 80, "schedule": "constant", "model__dropout": {}, **changes}
    train(recipe(folder / "run", data=data, **given), progress=Notes(StopAt(stop)))
    return folder / "run"


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Positions that depend on the length, so that a document's padding would be seen if it counted."""
    folder = tmp_path_factory.mktemp("lm")
    position = {"kind": "rotary", "extension": {"kind": "dynamic-ntk", "factor": 4.0, "original_length": 8}}
    return train_run(
        folder, document_data(folder), model__position=position, model__init={"kind": "normal", "std": 0.5}
    )


@pytest.fixture(scope="module")
def mlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    return train_run(folder, document_data(folder), task="mlm")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A run that has learned some of its pairs."""
    folder = tmp_path_factory.mktemp("translation")
    changes = {"train__steps": 120, "train__batch_tokens": 600, "train__evaluate_every": 99, "save__every": 99}
    return train_run(folder, parallel_data(folder), task="translation", train__log_every=99, **changes)


def log_probabilities(model, tokens, *source):
    """Of each token after those before it, in float64, one sequence alone."""
    given = [torch.tensor([ids]) for ids in (*source, tokens[:-1])]
    with torch.no_grad():
        logits = model(*given)[0].log_softmax(-1)
    return logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def ids_of(text):
    return [5 + byte for byte in text.encode()]


def test_perplexity_and_bits_per_byte_are_those_of_single_documents(lm):
    model = phasor.load(lm / "model").double()
    found = []
    for text in DOCUMENTS:
        tokens = [1, *ids_of(text), 2]
        for start in range(0, len(tokens) - 1, LENGTH):
            found += log_probabilities(model, tokens[start : start + LENGTH + 1])
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert len(found) == size + len(DOCUMENTS)  # every byte, and the end of every document
    measured = evaluate(lm, device="cpu")
    assert (measured["task"], measured["weights"], measured["documents"]) == ("lm", "model", 4)
    assert (measured["tokens"], measured["bytes"]) == (len(found), size)
    assert measured["loss"] == pytest.approx(-sum(found) / len(found), rel=CLOSE)
    assert measured["perplexity"] == pytest.approx(math.exp(-sum(found) / len(found)), rel=10 * CLOSE)
    assert measured["bits_per_byte"] == pytest.approx(-sum(found) / math.log(2) / size, rel=CLOSE)


def test_other_documents_and_fewer_of_them(tmp_path, lm):
    file = write_lines(tmp_path / "other.jsonl.gz", [json.dumps({"text": text}) for text in DOCUMENTS[1:]])
    seen = []
    first = evaluate(lm, file, limit=2, device="cpu", progress=lambda *done: seen.append(done))
    assert first["bytes"] == sum(len(text.encode()) for text in DOCUMENTS[1:3])
    assert seen == [(n, seen[-1][1]) for n in range(1, seen[-1][1] + 1)]
    again = write_lines(tmp_path / "again.jsonl", [json.dumps({"text": text}) for text in DOCUMENTS[1:3]])
    assert evaluate(lm, again, device="cpu") == first
    assert evaluate(lm, limit=3, device="cpu")["bytes"] == sum(len(text.encode()) for text in DOCUMENTS[:3])


def test_masked_accuracy_is_that_of_single_rows(mlm):
    model = phasor.load(mlm / "model").double()
    valid = prepare(recipe(mlm, task="mlm", data=document_data(mlm.parent)), mlm / "data").valid
    nats, right, count, rows = 0.0, 0, 0, []
    for batch in DocumentBatches(valid, LENGTH, 80, SpecialIds(), 261):
        apart = torch.zeros_like(batch.tokens) if batch.document_ids is None else batch.document_ids
        for tokens, targets, asked, beyond in zip(batch.tokens, batch.targets, batch.weights, apart, strict=True):
            real = beyond == 0
            rows.append(targets[real].tolist())
            with torch.no_grad():
                logits = model(tokens[None, real])[0].log_softmax(-1)
            for i in asked[real].nonzero()[:, 0].tolist():
                nats -= float(logits[i, targets[i]])
                right += int(logits[i].argmax()) == int(targets[i])
                count += 1
            hidden = (tokens != targets)[real]
            assert not (hidden & (asked[real] == 0)).any()
            assert not asked[~real].any()
            assert not asked[targets <= 4].any()
    whole = [[1, *ids_of(text), 2] for text in DOCUMENTS]
    assert sorted(rows) == sorted(ids[at : at + LENGTH] for ids in whole for at in range(0, len(ids), LENGTH))
    measured = evaluate(mlm, device="cpu")
    assert measured["tokens"] == count > 9
    assert measured["masked_accuracy"] == right / count
    assert measured["loss"] == pytest.approx(nats / count, rel=CLOSE)
    assert evaluate(mlm, device="cpu") == measured


def one_at_a_time(model, texts, **options):
    return [phasor.generate(model, text, max_new_tokens=64, **options) for text in texts]


def test_translation_is_scored_as_sacrebleu_scores_translations_made_one_at_a_time(speaker):
    model = phasor.load(speaker / "model")
    texts, references = zip(*PAIRS[::3] + OTHERS, strict=True)
    said = one_at_a_time(model, texts, num_beams=5)
    measured = evaluate(speaker, device="cpu")
    assert measured["bleu"] == sacrebleu.corpus_bleu(said, [references]).score
    assert measured["chrf"] == sacrebleu.corpus_chrf(said, [references]).score
    assert 10 < measured["bleu"] < 95  # some are right and some are wrong
    same = sum(a == b for a, b in zip(said, references, strict=True))
    assert measured["exact_match"] == same / len(texts)
    assert measured["sentences"] == len(texts)
    assert "tok:13a" in measured["bleu_signature"]
    model.double()
    nats = [
        -one
        for source, target in zip(texts, references, strict=True)
        for one in log_probabilities(model, [1, *ids_of(target), 2], [*ids_of(source), 2])
    ]
    assert measured["tokens"] == len(nats)
    assert measured["loss"] == pytest.approx(sum(nats) / len(nats), rel=CLOSE)
    assert measured["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=10 * CLOSE)


def test_pairs_from_other_files(tmp_path, speaker):
    seen = []
    pairs = PAIRS[1:9]
    found = [
        evaluate(speaker, write_lines(tmp_path / "a.tsv.gz", ["\t".join(pair) for pair in pairs]), device="cpu"),
        evaluate(
            speaker,
            tmp_path / write_lines(tmp_path / "a.en", [a for a, _ in PAIRS[1:]]),
            tmp_path / write_lines(tmp_path / "a.es.gz", [b for _, b in PAIRS[1:]]),
            limit=8,
            device="cpu",
            progress=lambda *done: seen.append(done),
        ),
    ]
    assert found[0] == found[1]
    assert found[0]["sentences"] == 8
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert [done == total for done, total in seen].count(True) == 1


def test_chinese_is_scored_by_its_characters(tmp_path, speaker):
    file = write_lines(tmp_path / "zh.tsv", ["one\t二〇三一年", "two\t打开 Konqueror 浏览器", "three\tKDE"])
    assert "tok:zh" in evaluate(speaker, file, device="cpu")["bleu_signature"]
    said, meant = ["二〇三一年三月六日"], ["二〇三一年三月五日"]
    assert scores(said, meant)["bleu"] == sacrebleu.corpus_bleu(said, [meant], tokenize="zh").score > 0
    assert not mostly_chinese(["東京に行く", "カメラを買う 本"])
    assert not mostly_chinese(["打开", "año"])
    assert not mostly_chinese(["1, 2", "你", "..."])


TEXTS = ["two and one or two", "", "five and five or five", " ", "three and four or three", "one and one", "x", "four"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("beams", [1, 3])
def test_translations_come_in_the_order_of_their_texts(speaker, beams):
    model = phasor.load(speaker / "model")
    expected = [one_at_a_time(model, [text], num_beams=beams)[0] if text.strip() else "" for text in TEXTS]
    assert len(set(expected)) > 3
    runs = [(speaker, 1), (speaker / "model", 30), (str(speaker / "model"), 4096)]
    for run, most in (*runs, *((model, most) for most in (1, 30, 4096))):
        seen = []
        found = translate(
            run, TEXTS, num_beams=beams, batch_tokens=most, progress=lambda *done, seen=seen: seen.append(done)
        )
        assert found == expected
        assert seen == sorted(seen)
        assert seen[-1] == (len(TEXTS), len(TEXTS))
    assert translate(speaker, []) == []
    assert translate(speaker, [""]) == [""]


def test_length_penalty_and_limit_reach_the_search(speaker):
    model = phasor.load(speaker / "model")
    for options in ({"length_penalty": -3.0}, {"length_penalty": 4.0}, {"max_new_tokens": 3}):
        expected = [phasor.generate(model, TEXTS[0], **{"max_new_tokens": 64, "num_beams": 4, **options})]
        assert translate(model, TEXTS[:1], **options) == expected


def test_batches_hold_every_source_once_and_no_more_than_fits():
    lengths = [int(n) for n in torch.randint(0, 70, (200,), generator=torch.Generator().manual_seed(1))]
    found = list(length_batches(lengths, 128))
    assert sorted(i for batch in found for i in batch) == [i for i, n in enumerate(lengths) if n]
    assert all(max(lengths[i] for i in batch) * len(batch) <= 128 for batch in found)
    assert len(found) < 90
    for group in {default_new_tokens(n) for n in lengths}:
        sizes = {len(batch) for batch in found if default_new_tokens(lengths[batch[0]]) == group}
        assert max(sizes) - min(sizes) <= 1


def test_the_name_of_a_special_token_is_text_to_a_run(speaker, monkeypatch):
    read = []
    monkeypatch.setattr(translation, "translate_tokens", lambda model, sources, **_: read.extend(sources) or sources)
    translate(speaker, ["two<eos>"])
    assert read == [[*ids_of("two<eos>"), 2]]


def test_bad_texts_are_refused_in_a_sentence(tmp_path, speaker, lm):
    folder = tmp_path / "learned"
    folder.mkdir()
    learned = {"model__position": "learned", "model__max_length": 64}
    run = train_run(folder, parallel_data(folder), task="translation", train__steps=1, **learned)
    for given, message in [
        ((run, ["one", "two", "x" * 64]), "^text 3 has 65 tokens, and this model reads at most 64$"),
        ((speaker, "one"), "list of texts, not 'one'"),
        ((speaker, ["one", None]), "text 2 is None"),
        ((speaker, ["\ud83d"]), "text 1: character 0 is half a character"),
        ((lm, ["one"]), "needs an encoder-decoder, and this model is a decoder"),
        ((tmp_path / "nowhere", ["one"]), "nowhere"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            translate(*given)
        assert "\n" not in str(error.value)
    assert len(translate(run, ["x" * 63], num_beams=2)) == 1
    file = write_lines(tmp_path / "long.tsv", ["one\t" + "x" * 64])
    with pytest.raises(ValueError, match="the target 1 has 65 tokens, and this model allows 64"):
        evaluate(run, file, device="cpu")
    model = phasor.load(speaker / "model")
    model.tokenizer = None
    with pytest.raises(ValueError, match="a tokenizer"):
        translate(model, ["one"])


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(tmp_path, lm):
    empty = write_lines(tmp_path / "empty.jsonl", [])
    shutil.copy(lm / "run.json", tmp_path)
    for run, options, message in [
        (lm / "model", {}, "is a model and no run, so it has no validation data"),
        (tmp_path / "nowhere", {}, "nowhere is neither the folder of a run"),
        (lm / "model", {"checkpoint": "best"}, "is not the folder of a run"),
        (tmp_path, {}, "neither a model nor a whole checkpoint"),
        (lm, {"data": empty}, r"empty\.jsonl holds no text"),
        (lm, {"data": empty, "target": empty}, "for a run that translates"),
        (lm, {"limit": 0}, "limit must be an integer from 1 to 2147483647"),
        (lm, {"device": "nonsense"}, "the device 'nonsense' cannot be used"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            evaluate(run, **options)
        assert "\n" not in str(error.value)


def test_a_run_that_was_stopped_is_measured_by_its_newest_whole_checkpoint(tmp_path):
    """With averaged weights, and as one that ended there."""
    options = {"train__ema_decay": 0.5, "save__every": 1}
    for name in ("ended", "stopped"):
        (tmp_path / name).mkdir()
    ended = train_run(tmp_path / "ended", document_data(tmp_path), train__steps=3, **options)
    stopped = train_run(tmp_path / "stopped", document_data(tmp_path), train__steps=9, stop=3, **options)
    expected, found = (evaluate(run, device="cpu") for run in (ended, stopped))
    assert (expected.pop("weights"), found.pop("weights")) == ("model", "step-00000003")
    assert found == expected
    file = stopped / "checkpoints" / "step-00000003" / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    older = evaluate(stopped, device="cpu")
    assert older.pop("weights") == "step-00000002"
    assert older["loss"] != found["loss"]


@pytest.mark.parametrize(("module", "name"), [(runs, "is_whole"), (opening, "load")])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_missed(tmp_path, monkeypatch, module, name):
    """A run beside the evaluation saves its next checkpoint, and deletes the one that is about to be read."""
    run = train_run(tmp_path, document_data(tmp_path), train__steps=9, stop=3, save__every=1, train__evaluate_every=99)
    old, new = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 3))
    new.rename(tmp_path / "next")
    original = getattr(module, name)

    def prune_first(*given, **options):
        if old.exists():
            (tmp_path / "next").rename(new)
            shutil.rmtree(old)
        return original(*given, **options)

    monkeypatch.setattr(module, name, prune_first)
    assert evaluate(run, device="cpu")["weights"] == new.name


def test_a_run_whose_data_are_cached_needs_neither_its_sources_nor_for_other_data_its_cache(tmp_path):
    cache = tmp_path / "cache"
    run = train_run(tmp_path, parallel_data(tmp_path, cache=str(cache)), task="translation", train__steps=2)
    assert (run / "data").is_symlink()
    (tmp_path / "train.tsv").unlink()
    expected = evaluate(run, device="cpu")
    valid = tmp_path / "valid.tsv"
    shutil.rmtree(cache)
    assert evaluate(run, valid, device="cpu") == expected
    with pytest.raises(ValueError, match="no longer in"):
        evaluate(run, device="cpu")
    shutil.rmtree(run / "model")
    with pytest.raises(ValueError, match="step-00000002 has no tokenizer, since the data of"):
        evaluate(run, valid, device="cpu")


def test_a_run_that_makes_its_own_data_is_measured_on_files_too(tmp_path, monkeypatch):
    monkeypatch.setattr("phasor.data.dates.COUNTS", {"train": 20, "valid": 5})
    data = {"format": "dates", "tokenizer": "bytes", "sequence_length": 64}
    run = train_run(tmp_path, data, task="translation", train__steps=1)
    assert evaluate(run, device="cpu", num_beams=1)["sentences"] == 5
    file = write_lines(tmp_path / "a.tsv", ["\t".join(pair) for pair in PAIRS[:3]])
    assert evaluate(run, file, device="cpu", num_beams=1)["sentences"] == 3


def test_separate_tokenizers_from_training_to_translation(tmp_path):
    data = parallel_data(tmp_path, tokenizer="bpe", vocab_size=275, share_vocabulary=False)
    run = train_run(tmp_path, data, task="translation", train__steps=2)
    model = phasor.load(run / "model")
    reader, writer = (x.encode("uno cuatro", add_special_tokens=False).ids
                      for x in (model.source_tokenizer, model.tokenizer))  # fmt: skip
    assert len(reader) > len(writer)
    texts = [a for a, _ in PAIRS[:4]]
    ids = [model.source_tokenizer.encode(text).ids for text in texts]
    new = [phasor.generate(model, one, num_beams=2, max_new_tokens=64) for one in ids]
    expected = [model.tokenizer.decode(tokens) for tokens in new]
    assert one_at_a_time(model, texts, num_beams=2) == expected
    for folder in (run, run / "model", model):
        assert translate(folder, texts, num_beams=2) == expected
    assert evaluate(run, device="cpu", num_beams=1)["sentences"] == len(PAIRS[::3] + OTHERS)
    for format in ("phasor", "hf"):
        try:
            phasor.save(model, tmp_path / format, format=format)
        except ValueError:
            assert format == "hf"  # no family computes the same
            continue
        assert phasor.load(tmp_path / format).source_tokenizer.to_str() == model.source_tokenizer.to_str()
    tuned = recipe(tmp_path / "tuned", task="translation", data=data | {"tokenizer": "auto"}, train__steps=1,
                   model={}, init_from=str(run / "model"))  # fmt: skip
    train(tuned, progress=Notes())
    assert (tmp_path / "tuned" / "model" / "source_tokenizer.json").read_text() == model.source_tokenizer.to_str()
    model.source_tokenizer = None
    phasor.save(model, tmp_path / "phasor")
    assert not (tmp_path / "phasor" / "source_tokenizer.json").exists()
    with pytest.raises(
        ValueError, match="the source's tokenizer has 290 tokens, and the model's source vocabulary 275"
    ):
        check_config(model.config, tuned, 275, 290)


def test_a_hugging_face_folder_translates(tmp_path, speaker):
    config = phasor.preset("t5", dim=16, num_heads=2, head_dim=8, num_layers=1, hidden_dim=24, vocab_size=261)
    model = phasor.Transformer(config).eval()
    model.tokenizer = phasor.load(speaker / "model").tokenizer
    model.special = phasor.SpecialTokens(start=0, stop=(2,))
    phasor.save(model, tmp_path / "t5", format="hf")
    expected = phasor.generate(model, TEXTS[:1], num_beams=2, max_new_tokens=9)
    assert translate(tmp_path / "t5", TEXTS[:1], num_beams=2, max_new_tokens=9) == expected


def test_translations_do_not_replace_parts_of_models(tmp_path, speaker, capsys):
    run_phasor = CommandRunner(capsys)
    phasor.save(phasor.load(speaker / "model"), tmp_path / "other")
    theirs = tmp_path / "theirs"
    phasor.save(phasor.load(speaker / "model"), theirs)
    (theirs / "phasor_manifest.json").unlink()
    given = ["a text", "--max-new-tokens", "2", "--num-beams", "1", "--device", "cpu", "--out"]
    for run, out, said in (
        (speaker, speaker / "model" / "model.safetensors", "is part of the model in"),
        (speaker, tmp_path / "other" / "phasor_manifest.json", "is part of the model in"),
        (theirs, theirs / "model.safetensors", f"is part of {theirs}, and is not replaced"),
    ):
        before = out.read_bytes()
        assert said in run_phasor.expect_error("translate", str(run), *given, str(out))
        assert out.read_bytes() == before
    for _ in range(2):  # its own output is replaced
        run_phasor("translate", str(speaker), *given, str(tmp_path / "translations.txt"))
    with pytest.raises(ValueError, match="is part of the model in"):
        check_folder(tmp_path / "other" / "config.json")
