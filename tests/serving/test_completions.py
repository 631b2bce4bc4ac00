"""Completions and replies by OpenAI's own client equal `generate`."""

import concurrent.futures
import json
import re
import sys

import httpx
import openai
import pytest

import phasor
from phasor.checkpoints.chat_template import ChatTemplate

from .conftest import TEMPLATE, running, small_model


def test_a_completion_is_that_of_generate(client, model):
    answer = client.completions.create(model="small", prompt="Once upon", max_tokens=12, temperature=0)
    assert answer.choices[0].text == phasor.generate(model, "Once upon", max_new_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 12, 21)


def test_sampling_by_seed_penalties_and_filters(client, model):
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    answer = client.completions.create(
        model="small", prompt="Once", max_tokens=12, **options, extra_body={"top_k": 20, "repetition_penalty": 1.1}
    )
    assert answer.choices[0].text == phasor.generate(
        model, "Once", max_new_tokens=12, **options, top_k=20, repetition_penalty=1.1
    )


def test_without_a_temperature_openais_default_holds(client, model):
    answer = client.completions.create(model="small", prompt="Once", max_tokens=12, seed=5)
    assert answer.choices[0].text == phasor.generate(model, "Once", max_new_tokens=12, temperature=1.0, seed=5)


def test_no_top_k_as_in_vllm(client, model):
    expected = phasor.generate(model, "Once", max_new_tokens=12, temperature=1.0, seed=5)
    for top_k in (-1, 0):
        answer = client.completions.create(
            model="small", prompt="Once", max_tokens=12, seed=5, extra_body={"top_k": top_k}
        )
        assert answer.choices[0].text == expected


def test_the_temperature_of_the_folder_holds():
    model = small_model()
    model.generation_settings = {"temperature": 0.3}
    expected = phasor.generate(model, "Once", max_new_tokens=12, temperature=0.3, seed=5)
    with running(model) as (address, _):
        answer = httpx.post(
            f"{address}/v1/completions", json={"prompt": "Once", "max_tokens": 12, "seed": 5}, timeout=60
        )
        assert answer.json()["choices"][0]["text"] == expected


def test_several_prompts_and_choices_are_counted_as_openai_does(client, model):
    prompts = ["one", "another", "a third"]
    answer = client.completions.create(model="small", prompt=prompts, n=2, max_tokens=6, temperature=1, seed=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = phasor.generate(model, prompts, max_new_tokens=6, temperature=1.0, num_return_sequences=2, seed=3)
    separate = [
        text
        for prompt in prompts
        for text in phasor.generate(model, prompt, max_new_tokens=6, temperature=1.0, num_return_sequences=2, seed=3)
    ]
    assert [choice.text for choice in answer.choices] == separate
    assert len(expected) == 3


def test_token_ids_as_a_prompt_give_text_and_ids(client, model):
    ids = model.tokenizer.encode("Once").ids
    answer = client.completions.create(
        model="small", prompt=ids, max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
    )
    new = phasor.generate(model, ids, max_new_tokens=5)
    assert answer.choices[0].token_ids == new
    assert answer.choices[0].text == phasor.generate(model, "Once", max_new_tokens=5)


def test_streams_are_the_whole_in_pieces(client, model):
    chunks = list(
        client.completions.create(
            model="small",
            prompt="Once upon",
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == phasor.generate(model, "Once upon", max_new_tokens=12)
    assert chunks[-1].usage.completion_tokens == 12
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])


def test_log_probabilities_are_those_of_generate(client, model):
    answer = client.completions.create(model="small", prompt="Once", max_tokens=5, temperature=0, logprobs=3)
    expected = phasor.generate(model, "Once", max_new_tokens=5, details=True)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected.log_probabilities, abs=1e-5)
    assert all(
        len(top) == 3 and max(top.values()) == pytest.approx(own, abs=1e-5)
        for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )
    ids = [model.tokenizer.token_to_id(text) or model.tokenizer.encode(text).ids[0] for text in found.tokens]
    assert ids == expected.tokens


def test_stop_texts_and_end_tokens(client, model):
    whole = phasor.generate(model, "Once upon", max_new_tokens=24)
    stop = whole[6:8]
    answer = client.completions.create(model="small", prompt="Once upon", max_tokens=24, temperature=0, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logit_bias(client, model):
    token = model.tokenizer.encode("Q").ids[0]
    answer = client.completions.create(
        model="small", prompt="Once", max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == "QQQQ"


def test_a_reply_is_what_follows_the_template(client, model):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=10, temperature=0)
    prompt = ChatTemplate({"default": TEMPLATE}).encode(model.tokenizer, messages, add_generation_prompt=True)
    new = phasor.generate(model, prompt, max_new_tokens=10)
    assert answer.choices[0].message.content == model.tokenizer.decode(new)
    assert answer.usage.prompt_tokens == len(prompt)
    parts = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    again = client.chat.completions.create(
        model="small", messages=parts, max_completion_tokens=10, temperature=0, logprobs=True, top_logprobs=2
    )
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert len(again.choices[0].logprobs.content) == 10
    assert len(again.choices[0].logprobs.content[0].top_logprobs) == 2


def test_a_reply_ends_at_the_end_of_a_turn(model, client):
    end = model.tokenizer.token_to_id("<|end|>")
    answer = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Hi"}], temperature=0, logit_bias={str(end): 100}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""


def test_a_stream_of_a_reply(client):
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 1, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_replies_keep_to_a_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Who?"}],
            max_tokens=60,
            seed=seed,
            n=2,
            response_format=form,
            stream=stream,
        )
        texts = ["", ""]
        if stream:
            for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [choice.message.content for choice in answer.choices]
        for text in texts:
            found = json.loads(text)
            assert found["name"] in ("ada", "bob")
            assert isinstance(found["old"], bool)


def test_completions_keep_to_a_regular_expression(client):
    answer = client.completions.create(
        model="small",
        prompt="A number: ",
        max_tokens=20,
        seed=1,
        extra_body={"response_format": {"type": "regex", "regex": "[0-9]{2}-[ab]+c"}},
    )
    text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert "llguidance.torch" not in sys.modules  # which loads torch's compiler, and all answers would wait for it
    assert re.fullmatch("[0-9]{2}-[ab]+c", text) or (reason == "length" and re.fullmatch("[0-9]{2}-[ab]*", text))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_what_a_form_allows(server, stream):
    """Tokens that cannot come have none: minus infinity is no number of JSON."""
    body = {"prompt": "A", "max_tokens": 4, "logprobs": 5, "response_format": {"type": "regex", "regex": "ab|ac"}}
    answer = httpx.post(f"{server[0]}/v1/completions", json={**body, "stream": stream}, timeout=60)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    found = [json.loads(line, parse_constant=pytest.fail)["choices"][0]["logprobs"] for line in lines]
    tops = [top for each in found for top in each["top_logprobs"]]
    assert [set(top) for top in tops[:2]] == [{"a"}, {"b", "c"}]
    assert tops[0]["a"] == 0.0


def test_many_at_once_get_what_each_would_alone(client, model):
    prompts = [f"number {i} " * (1 + i % 5) for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda i: client.completions.create(
                    model="small", prompt=prompts[i], max_tokens=4 + i % 9, temperature=0.8, seed=i
                ),
                range(24),
            )
        )
    for i, answer in enumerate(answers):
        expected = phasor.generate(model, prompts[i], max_new_tokens=4 + i % 9, temperature=0.8, seed=i)
        assert answer.choices[0].text == expected


def test_models_are_listed(client):
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
