"""Conversations: the tokens of a `generate` over the whole text, with the turns before computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE
from tokenizers import AddedToken

import phasor
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.data.tokenizers import byte_tokenizer
from phasor.generation import ChatSession

CHATML = ChatTemplate(
    {
        "default": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    }
)
TURNS = ("Hello there", "Why?", "And then?")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"position": "rotary"},
    "window": {"position": "rotary", "attention": {"window": 20}},
    "dynamic": {
        "position": phasor.RotaryConfig(extension=phasor.DynamicNTKScaling(factor=2.0, original_length=16)),
    },
    "state": {"position": "none", "attention": "gated-delta"},
}


def make_model(**fields: Any) -> phasor.Transformer:
    torch.manual_seed(1)
    config = phasor.ModelConfig(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_length=512, **fields)
    with torch.device("cpu"):  # the same replies on every device
        model = phasor.Transformer(config).double().eval()
        for weight in model.parameters():  # so large that every token matters
            torch.nn.init.normal_(weight, std=0.3)
    model.to(DEVICE)
    model.tokenizer = byte_tokenizer()
    model.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    model.chat_template = CHATML
    return model


def count_reads(model: phasor.Transformer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of all calls of the decoder from now on."""
    reads: list[int] = []
    decode = model.decode

    def counted(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        reads.append(tokens.shape[1])
        return decode(tokens, *args, **options)

    monkeypatch.setattr(model, "decode", counted)
    return reads


@pytest.mark.sample(5)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 40, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_turns_equal_a_generate_over_the_whole_text(name: str, sampling: dict[str, Any]) -> None:
    model = make_model(**MODELS[name])
    talk = ChatSession(model, system="Be kind.", max_new_tokens=12, **sampling)
    end = model.tokenizer.token_to_id("<|im_end|>")
    for turn in TURNS:
        prompt = CHATML.encode(model.tokenizer, [*talk.messages, {"role": "user", "content": turn}], None, True)
        expected = phasor.generate(model, prompt, max_new_tokens=12, stop=[end], **sampling)
        said = talk.reply(turn)
        assert said == model.tokenizer.decode([token for token in expected if token != end])
        assert talk.messages[-2:] == [{"role": "user", "content": turn}, {"role": "assistant", "content": said}]


def test_turns_before_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(position="rotary")
    talk = ChatSession(model, system="Be kind. " * 40, max_new_tokens=12)
    reads = count_reads(model, monkeypatch)
    first = len(CHATML.encode(model.tokenizer, [*talk.messages, {"role": "user", "content": "a"}], None, True))
    for turn in "abc":
        talk.reply(turn)
    assert max(reads) == first == reads[0] > 350  # the system turn is read once, in the first call
    assert sum(reads) < first + 3 * 60


def test_a_cache_grows_by_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole text is read again each time it outgrows the cache, which twenty turns do four times."""
    model = make_model(position="rotary")
    talk = ChatSession(model, max_new_tokens=2)
    reads = count_reads(model, monkeypatch)
    for _ in range(20):
        talk.reply("Hello")
    total = len(CHATML.encode(model.tokenizer, talk.messages))
    assert 512 < total < 1024
    assert sum(reads) < 3 * total


def test_reasoning_that_the_template_drops_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the template writes a turn otherwise than the model did, the text from there on is computed again."""
    model = make_model(position="rotary")
    text = CHATML.texts["default"].replace("{{ m.content }}", "{{ m.content[:3] }}")
    model.chat_template = ChatTemplate({"default": text})
    talk = ChatSession(model, max_new_tokens=12)
    for turn in TURNS:
        prompt = model.chat_template.encode(
            model.tokenizer, [*talk.messages, {"role": "user", "content": turn}], None, True
        )
        expected = phasor.generate(model, prompt, max_new_tokens=12, stop=[262])
        assert talk.reply(turn) == model.tokenizer.decode([token for token in expected if token != 262])


def test_a_reply_ends_at_the_end_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(position="rotary")
    talk = ChatSession(model, max_new_tokens=30, stop="q")
    assert talk.fields["stop"] == ("q", 262)
    model.special = model.special.replace(stop=(2,))
    assert ChatSession(model).fields["stop"] == (2, 262)
    with torch.no_grad():
        head = model.head.weight if model.head.weight is not None else model.tokens.weight
        head[262] = 100 * head[262].sign()  # likely soon
    reply = ChatSession(model, max_new_tokens=400).reply("Hello")
    assert len(reply) < 400
    assert "<|im_end|>" not in reply


def test_a_reply_that_is_stopped_is_kept_so_far() -> None:
    model = make_model(position="rotary")
    talk = ChatSession(model, max_new_tokens=50)
    pieces = talk.stream("Hello")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": said}
    prompt = CHATML.encode(model.tokenizer, [*talk.messages, {"role": "user", "content": "Go on"}], None, True)
    expected = model.tokenizer.decode(phasor.generate(model, prompt, max_new_tokens=50, stop=[262]))
    assert talk.reply("Go on") == expected


def test_an_interrupted_step_costs_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(position="rotary")
    talk, block = ChatSession(model, max_new_tokens=20), model.decoder.blocks[1]
    forward, calls = block.forward, []

    def stop(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(*args, **options)

    monkeypatch.setattr(block, "forward", stop)
    with pytest.raises(KeyboardInterrupt):
        talk.reply("Hello")
    monkeypatch.undo()
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    prompt = CHATML.encode(model.tokenizer, [*talk.messages, {"role": "user", "content": "Go on"}], None, True)
    assert talk.reply("Go on") == model.tokenizer.decode(phasor.generate(model, prompt, max_new_tokens=20, stop=[262]))


def test_chat_is_one_reply() -> None:
    model = make_model(position="rotary")
    talk = ChatSession(model, system="Be kind.", max_new_tokens=9)
    first = talk.reply("Hello")
    assert phasor.chat(model, "Hello", system="Be kind.", max_new_tokens=9) == first
    messages = [*talk.messages, {"role": "user", "content": "Why?"}]
    assert phasor.chat(model, messages, max_new_tokens=9) == talk.reply("Why?")
    with pytest.raises(ValueError, match="leave system out"):
        phasor.chat(model, messages, system="Be kind.")


def test_save_writes_a_line_of_json(tmp_path: Path) -> None:
    model = make_model(position="rotary")
    tools = [{"type": "function", "function": {"name": "f"}}]
    talk = ChatSession(model, tools=tools, max_new_tokens=5)
    talk.reply("Grüezi")
    talk.save(tmp_path / "talk.jsonl")
    (line,) = (tmp_path / "talk.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"messages": talk.messages, "tools": tools}
    with pytest.raises(ValueError, match=r"talk\.jsonl exists: name another file"):
        talk.save(tmp_path / "talk.jsonl")
    talk.reset()
    assert talk.messages == []


def test_what_cannot_talk_is_said() -> None:
    model = make_model(position="rotary")
    for fields, message in {
        ("num_beams", 2): "one reply to a turn",
        ("prompt_lookup_tokens", 2): "keeps its own cache",
        ("stop", 1.5): "stop must be token ids and texts",
        ("temperature", -1.0): "temperature must not be negative",
    }.items():
        with pytest.raises(ValueError, match=message):
            ChatSession(model, **{fields[0]: fields[1]}).reply("Hello")
    talk = ChatSession(model, template=ChatTemplate({"default": "{{ raise_exception('no') }}"}))
    with pytest.raises(ValueError, match="refuses this conversation: no"):
        talk.reply("Hello")
    assert talk.messages == []
    model.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatSession(model)
    model.tokenizer = None
    with pytest.raises(ValueError, match="needs a tokenizer"):
        ChatSession(model, template=CHATML)
    encoder = phasor.Transformer(phasor.preset("bert", dim=16, num_heads=2, num_layers=1, vocab_size=50))
    with pytest.raises(ValueError, match="needs a decoder"):
        ChatSession(encoder, template=CHATML)


def make_encoder_decoder() -> phasor.Transformer:
    model = make_model(shape="encoder-decoder", position="rotary")
    model.special = phasor.SpecialTokens(start=1, stop=(2,))
    return model


def test_an_encoder_reads_the_conversation_and_the_decoder_replies() -> None:
    model = make_encoder_decoder()
    talk = ChatSession(model, system="Be kind.", max_new_tokens=12)
    end = model.tokenizer.token_to_id("<|im_end|>")
    for turn in TURNS:
        source = CHATML.encode(model.tokenizer, [*talk.messages, {"role": "user", "content": turn}], None, True)
        expected = phasor.generate(model, source, max_new_tokens=12, stop=[2, end])
        assert talk.reply(turn) == model.tokenizer.decode([token for token in expected if token not in (2, end)])
    assert phasor.chat(model, talk.messages[:-1], max_new_tokens=12) == talk.messages[-1]["content"]


def test_an_encoder_without_a_template_reads_plain_text() -> None:
    model = make_encoder_decoder()
    model.chat_template = None
    talk = ChatSession(model, max_new_tokens=12)
    first = talk.reply("Hello")
    assert first == phasor.generate(model, "Hello", max_new_tokens=12)
    assert talk.reply("Why?") == phasor.generate(model, f"Hello\n{first}\nWhy?", max_new_tokens=12)
    with pytest.raises(ValueError, match="tools and their calls need a template"):
        ChatSession(model, tools=[{"type": "function"}]).reply("Hello")
    audio = {"front_end": {"features": 8, "convolutions": [{"features": 32, "width": 3}]}}
    listener = make_model(shape="encoder-decoder", position="rotary", embedding=audio)
    with pytest.raises(ValueError, match="the source of this model are features"):
        ChatSession(listener)


def test_a_conversation_as_long_as_the_model_says_so() -> None:
    """Without a length of replies, which would else end after one token."""
    model = make_model(position="rotary")
    talk = ChatSession(model)
    with pytest.raises(ValueError, match=r"the conversation has 519 tokens, and the model reads 512: begin again"):
        talk.reply("x" * 500)
    assert talk.messages == []
    assert isinstance(ChatSession(model, max_new_tokens=3).reply("x" * 500), str)
