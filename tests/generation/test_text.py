"""Text in and out: whole characters, stop texts, and pieces that join to the whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from decoding import byte_tokenizer, reciter, speaker
from hypothesis import given
from hypothesis import strategies as st
from schemes import build
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from phasor import SpecialTokens, Transformer, generate, load, preset, save, stream, translate
from phasor.generation.text import TextDecoder

PROMPT = "Say: "
HALF = "\ufffd"


def says(text: str | bytes, tokenizer: Tokenizer | None = None, prompt: str = PROMPT) -> Transformer:
    """A model that continues the prompt with a text, or with bytes that need not be one."""
    tokenizer = tokenizer or byte_tokenizer()
    if isinstance(text, str):
        script = tokenizer.encode(text).ids
    else:
        by_byte = dict(zip(bytes_of_alphabet(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
        script = [tokenizer.token_to_id(by_byte[b]) for b in text]
    return reciter(script, tokenizer, len(tokenizer.encode(prompt).ids))


def bytes_of_alphabet() -> list[int]:
    """The byte that each character of the byte-level alphabet stands for, as GPT-2 defined them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stands_for = {chr(b): b for b in printable}
    stands_for |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    return [stands_for[c] for c in sorted(pre_tokenizers.ByteLevel.alphabet())]


def size(model: Transformer) -> int:
    """How many tokens the model has to say."""
    return model.config.max_length - len(model.tokenizer.encode(PROMPT).ids)


def test_text_comes_back_for_text() -> None:
    text = "Grüße, 世界! 🙂 done"
    model = says(text)
    assert generate(model, PROMPT, max_new_tokens=size(model)) == text
    assert generate(model, [PROMPT, "Yes, "], max_new_tokens=size(model)) == [text, text]
    found = generate(model, PROMPT, max_new_tokens=size(model), details=True)
    assert found.text == text
    assert found.tokens == model.tokenizer.encode(text).ids
    ids = model.tokenizer.encode(PROMPT).ids
    assert generate(model, ids, max_new_tokens=size(model)) == found.tokens  # ids for ids


def test_texts_of_different_lengths_in_one_batch() -> None:
    model = speaker(vocab_size=300)
    model.tokenizer = byte_tokenizer()
    prompts = ["a", "Hello there", "été 世界"]
    found = generate(model, prompts, max_new_tokens=20)
    assert found == [generate(model, p, max_new_tokens=20) for p in prompts]
    for prompt, text in zip(prompts, found, strict=True):
        ids = generate(model, model.tokenizer.encode(prompt).ids, max_new_tokens=20)
        assert text == model.tokenizer.decode(ids)
    best = generate(model, prompts, max_new_tokens=5, num_beams=3, num_return_sequences=2)
    assert [[type(text) for text in texts] for texts in best] == [[str, str]] * 3


def test_a_piece_comes_as_soon_as_it_is_certain() -> None:
    assert list(stream(says("ab 世x"), PROMPT, max_new_tokens=7)) == ["a", "b", " ", "世", "x"]
    assert list(stream(says("abc"), PROMPT, max_new_tokens=3, stop="bcd")) == ["a", "bc"]
    assert list(stream(says("abca"), PROMPT, max_new_tokens=4, stop="bcd")) == ["a", "bca"]


def test_a_character_is_never_given_out_half() -> None:
    text = "é世🙂 ç🇫🇷 e\u0301"
    model = says(text)
    pieces = list(stream(model, PROMPT, max_new_tokens=size(model)))
    assert pieces == list(text)
    for count in range(1, size(model)):
        cut_short = "".join(stream(model, PROMPT, max_new_tokens=count))
        assert cut_short == generate(model, PROMPT, max_new_tokens=count)
        assert text.startswith(cut_short.rstrip(HALF))


def test_bytes_that_are_no_text() -> None:
    """What torn bytes look like is the tokenizer's affair; that nothing after them is lost is ours."""
    for torn in (b"a\xe4b", b"\xff\xfe ok", b"\xe4\xb8a\xad\xade", b"x\xf0\x9f\x99", b"\x80\x80\x80"):
        model = says(torn)
        expected = torn.decode(errors="replace")
        assert generate(model, PROMPT, max_new_tokens=len(torn)) == expected
        assert "".join(stream(model, PROMPT, max_new_tokens=len(torn))) == expected


def stopped_ref(tokenizer: Tokenizer, tokens: list[int], stops: list[str]) -> tuple[str, int]:
    """The text before the first stop text that comes about, and how many tokens it took."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], count
    return tokenizer.decode(tokens), len(tokens)


letters = st.sampled_from(["a", "b", "c", "é", "世", " "])
MERGES = [("a", "b"), ("ab", "c"), ("b", "c"), ("Ġ", "a")]


@given(
    st.lists(letters, min_size=1, max_size=24).map("".join),
    st.lists(st.text(letters, min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_end_the_text_before_themselves(text: str, stops: list[str]) -> None:
    """They may straddle tokens, begin or end inside one, and overlap each other."""
    tokenizer = byte_tokenizer(*MERGES)
    model = says(text, tokenizer)
    tokens = tokenizer.encode(text).ids
    expected, count = stopped_ref(tokenizer, tokens, stops)
    options: dict[str, Any] = {"max_new_tokens": len(tokens), "stop": stops}
    for more in ({}, {"prompt_lookup_tokens": 2}, {"draft": model, "draft_tokens": 3}):
        found = generate(model, PROMPT, details=True, **options, **more)
        assert (found.text, found.tokens) == (expected, tokens[:count])
        assert len(found.log_probabilities) == count
        given_out = ""
        for piece in stream(model, PROMPT, **options, **more):
            assert piece
            given_out += piece
            assert expected.startswith(given_out)  # so no stop text, and no part of one, ever shows
        assert given_out == expected


def test_of_stop_texts_that_come_with_one_token_the_first_counts() -> None:
    model = says("xabc", byte_tokenizer(*MERGES))
    for stops in (["c", "b"], ["b", "c"], ["bc", "c", "xyz"]):
        assert generate(model, PROMPT, max_new_tokens=2, stop=stops) == "xa"
        assert "".join(stream(model, PROMPT, max_new_tokens=2, stop=stops)) == "xa"


def test_a_stop_text_ends_only_its_own_row() -> None:
    model = speaker(vocab_size=300)
    model.tokenizer = byte_tokenizer()
    prompts = ["a", "Hello there", "xyz"]
    whole = generate(model, prompts, max_new_tokens=30)
    stop = next(c for c in whole[0][3:] if c not in whole[1])
    found = generate(model, prompts, max_new_tokens=30, stop=stop)
    assert found == [text.partition(stop)[0] for text in whole]
    assert len(found[0]) < len(whole[0])
    assert found[1] == whole[1]


def test_stop_tokens_are_not_in_the_text() -> None:
    tokenizer = byte_tokenizer()
    model = says("one.two.", tokenizer)
    stop = tokenizer.token_to_id(".")
    for options in ({"stop": stop}, {"stop": [stop, "xyz"]}):
        assert generate(model, PROMPT, max_new_tokens=8, **options) == "one"
        assert "".join(stream(model, PROMPT, max_new_tokens=8, **options)) == "one"
    found = generate(model, PROMPT, max_new_tokens=8, stop=stop, details=True)
    assert found.tokens == tokenizer.encode("one.").ids
    model.special = SpecialTokens(stop=(stop,))
    assert generate(model, PROMPT, max_new_tokens=8) == "one"
    assert generate(model, PROMPT, max_new_tokens=8, num_beams=2) == "one"
    assert generate(model, PROMPT, max_new_tokens=8, stop=["t"]) == "one."


def test_a_special_token_stops_by_its_name() -> None:
    tokenizer = byte_tokenizer(special=("<end>", "<other>"))
    model = says("one<end>two", tokenizer)
    assert generate(model, PROMPT, max_new_tokens=7) == "onetwo"  # texts leave special tokens out
    assert generate(model, PROMPT, max_new_tokens=7, stop=["<end>", "w"]) == "one"
    assert generate(model, PROMPT, max_new_tokens=7, stop=["<other>", "w"]) == "onet"


def test_spaces_between_prompt_and_text_are_kept() -> None:
    """Tokenizers that write spaces as part of the next word drop the first one of a text, but not in its middle."""
    words = ["▁good", "▁morning", "▁all", "<unk>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = reciter(tokenizer.encode("morning all").ids, tokenizer, 1)
    assert generate(model, "good", max_new_tokens=2) == " morning all"
    assert list(stream(model, "good", max_new_tokens=2)) == [" morning", " all"]


def test_bytes_as_a_fallback_lose_nothing() -> None:
    """Llama 2's tokenizer turns a run of byte tokens into text together, so later ones change earlier ones."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁end": 256}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [*"世".encode(), 0xFF, 256, *"界".encode(), 256]
    assert tokenizer.decode(tokens) == HALF * 4 + " end界 end"
    decoder = TextDecoder(tokenizer)
    text = "".join(decoder.add(token) for token in tokens) + decoder.flush()
    assert text.replace(HALF, "") == "世 end界 end"


def test_text_as_it_arrives_takes_no_memory() -> None:
    tokenizer = byte_tokenizer()
    decoder = TextDecoder(tokenizer, ["END"])
    for token in itertools.islice(itertools.cycle(tokenizer.encode("some text 世界, EN and so on ").ids), 3000):
        decoder.add(token)
        assert len(decoder.before) + len(decoder.pending) + len(decoder.held) < 16


def test_streams_of_text_without_end() -> None:
    model = speaker(vocab_size=300, attention={"window": 8})
    model.tokenizer = byte_tokenizer()
    pieces = stream(model, "abc", max_new_tokens=None, temperature=1.0, seed=1)
    text = "".join(itertools.islice(pieces, 100))
    assert generate(model, "abc", max_new_tokens=300, temperature=1.0, seed=1).startswith(text)


def test_bad_input() -> None:
    model = says("text")
    for call in (generate, stream):
        with pytest.raises(ValueError, match="prompt is empty"):
            call(model, "")
        with pytest.raises(ValueError, match="a stop text is empty"):
            call(model, PROMPT, max_new_tokens=2, stop=["x", ""])
        with pytest.raises(ValueError, match="'x' needs a text prompt"):
            call(model, [1, 2], stop="x")
        with pytest.raises(ValueError, match="needs a tokenizer"):
            call(speaker(), "text")
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, ["a", ""])
    with pytest.raises(ValueError, match="not at stop texts"):
        generate(model, PROMPT, max_new_tokens=2, stop="x", num_beams=2)
    with pytest.raises(ValueError, match="stream takes one prompt"):
        stream(model, ["a", "b"], max_new_tokens=2)
    large = says("text")
    large.tokenizer = byte_tokenizer(("a", "b"), ("ab", "c"))
    with pytest.raises(ValueError, match="257 is outside the vocabulary of 257"):
        generate(large, "abc", max_new_tokens=1)


LIMITS = {
    "truncation": lambda tokenizer: tokenizer.enable_truncation(8),
    "fixed padding": lambda tokenizer: tokenizer.enable_padding(length=64),
    "padding to a multiple": lambda tokenizer: tokenizer.enable_padding(pad_to_multiple_of=32),
}


@pytest.mark.parametrize("format", ["phasor", "hf"])
@pytest.mark.parametrize("limit", LIMITS)
def test_prompts_are_neither_cut_nor_padded(limit: str, format: str, tmp_path: Path) -> None:
    """A tokenizer.json may hold the truncation and padding that its last user had set."""
    model, prompt = speaker(vocab_size=300), "A prompt of 21 tokens"
    model.tokenizer = byte_tokenizer()
    expected = generate(model, prompt, max_new_tokens=6)
    assert expected != generate(model, prompt[:8], max_new_tokens=6)
    LIMITS[limit](model.tokenizer)
    assert generate(model, prompt, max_new_tokens=6) == expected
    assert generate(model, ["A", prompt], max_new_tokens=6)[1] == expected
    assert "".join(stream(model, prompt, max_new_tokens=6)) == expected
    save(model, tmp_path / "first", format=format)
    stored = (tmp_path / "first/tokenizer.json").read_bytes()
    assert json.loads(stored)["truncation" if limit == "truncation" else "padding"]
    loaded = load(tmp_path / "first")
    assert generate(loaded, prompt, max_new_tokens=6) == expected
    assert len(loaded.tokenizer.encode(prompt).ids) == 21
    save(loaded, tmp_path / "again", format=format)
    assert (tmp_path / "again/tokenizer.json").read_bytes() == stored  # as it was, with its limits
    loaded.tokenizer.add_tokens(["prompt"])
    save(loaded, tmp_path / "changed", format=format)
    assert load(tmp_path / "changed").tokenizer.token_to_id("prompt") == 257


def test_sources_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 300}
    model = build(preset("transformer-base", **sizes), 0)
    model.special = SpecialTokens(start=1, stop=(2,))
    model.tokenizer, model.source_tokenizer = byte_tokenizer(), byte_tokenizer()
    texts, options = ["A text of 20 tokens.", "Short"], {"num_beams": 2, "max_new_tokens": 6}
    expected = translate(model, texts, **options)
    model.source_tokenizer.enable_truncation(8)
    model.source_tokenizer.enable_padding(length=40)
    assert translate(model, texts, **options) == expected
    save(model, tmp_path)
    assert translate(tmp_path, texts, **options) == expected


def test_an_encoder_keeps_the_truncation_of_its_tokenizer(tmp_path: Path) -> None:
    """Texts of sentence embeddings are cut where transformers and sentence-transformers cut them."""
    model = build(preset("bert", dim=16, num_heads=2, num_layers=1, vocab_size=300), 0)
    model.tokenizer = byte_tokenizer()
    model.tokenizer.enable_truncation(8)
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert len(loaded.tokenizer.encode("more than eight tokens").ids) == 8
    assert loaded.tokenizer.to_str() == model.tokenizer.to_str()


@pytest.mark.parametrize("prompt", ["\ud800", ["a", "b\udc80"]])
def test_half_a_character_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"the prompt: character [01] is half a character"):
        generate(says("text"), prompt, max_new_tokens=2)
