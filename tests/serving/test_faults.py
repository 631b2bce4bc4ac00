"""Clients that ask for what is wrong, leave, or come all at once: each gets its sentence, others their answers."""

import gzip
import json
import logging
import os
import re
import socket
import threading
import time
from contextlib import ExitStack
from logging.handlers import BufferingHandler

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import phasor
from phasor.serving import app
from phasor.serving import server as server_module
from phasor.serving.grammar import GrammarProcessor, Grammars
from phasor.serving.requests import RequestReader

from .conftest import running, small_model

FULL = os.environ.get("PHASOR_EXAMPLES") == "full"
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
PLAIN = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def regex(text):
    return {"type": "regex", "regex": text}


def schema(**fields):
    return {"type": "json_schema", "json_schema": {"schema": fields}}


def branches(count):
    return [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(count)]


TWO = regex("ab")
ENDLESS = schema(**{"$ref": "#"})  # which no text fulfills


def post(address, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(address + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"max_tokens": 4}, "prompt", "needs prompt"),
        (COMPLETIONS, {**PLAIN, "temprature": 1}, "temprature", "did you mean 'temperature'"),
        (COMPLETIONS, {**PLAIN, "temperature": "hot"}, "temperature", "must be a number, not 'hot'"),
        (COMPLETIONS, {**PLAIN, "temperature": -1}, "temperature", "temperature must not be negative"),
        (COMPLETIONS, {**PLAIN, "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        (COMPLETIONS, {**PLAIN, "max_tokens": 400}, "max_tokens", "takes up to 256 in all"),
        (COMPLETIONS, {**PLAIN, "prompt": "x" * 300}, "max_tokens", "the prompt has 300 tokens"),
        (COMPLETIONS, {**PLAIN, "prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {**PLAIN, "prompt": ["a"] * 1030}, "prompt", "up to 1028 answers at once, and these are 1030"),
        (COMPLETIONS, {**PLAIN, "prompt": []}, "prompt", "empty list"),
        (COMPLETIONS, {**PLAIN, "prompt": [1, "a"]}, "prompt", "must be text or a list, not"),
        (COMPLETIONS, {**PLAIN, "prompt": [1, 9999]}, "prompt", "outside the vocabulary of 261"),
        (COMPLETIONS, {**PLAIN, "n": 1000}, "n", "from 1 to 128"),
        (COMPLETIONS, {**PLAIN, "n": 2}, "n", "at temperature 0 all choices are the same"),
        (COMPLETIONS, {**PLAIN, "stop": ""}, "stop", "stop text is empty"),
        (COMPLETIONS, {**PLAIN, "stop": ["a"] * 1000}, "stop", "at most 128 texts, not 1,000"),
        (COMPLETIONS, {**PLAIN, "repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 100, not 1e-40"),
        (COMPLETIONS, {**PLAIN, "top_p": 1.5}, "top_p", "top_p must be in"),
        (COMPLETIONS, {**PLAIN, "logprobs": 500}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {**PLAIN, "logit_bias": {"x": 1}}, "logit_bias", "token ids below 261"),
        (COMPLETIONS, {**PLAIN, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids below 261"),
        (COMPLETIONS, {**PLAIN, "stream_options": {}}, "stream_options", "set stream to true"),
        (COMPLETIONS, {**PLAIN, "response_format": {"type": "yaml"}}, "response_format", "not 'yaml'"),
        (COMPLETIONS, {**PLAIN, "response_format": regex("(")}, "response_format", "understood"),
        (COMPLETIONS, {**PLAIN, "response_format": ENDLESS}, "response_format", "understood"),
        (COMPLETIONS, {**PLAIN, "response_format": regex("a{1000000}")}, "response_format", "too many expressions"),
        (COMPLETIONS, {**PLAIN, "response_format": regex("((a{99}){99}){99}")}, "response_format", "too many expressi"),
        (COMPLETIONS, {**PLAIN, "response_format": regex("a" * 500_000)}, "response_format", "up to 65,536"),
        (COMPLETIONS, {**PLAIN, "response_format": regex("(" * 9000)}, "response_format", "unclosed group"),
        (COMPLETIONS, {**PLAIN, "response_format": schema(enum=["x" * 70_000])}, "response_format", "up to 65,536"),
        (COMPLETIONS, {**PLAIN, "response_format": TWO, "ignore_eos": True}, "ignore_eos", "leave out ignore_eos"),
        (COMPLETIONS, {**PLAIN, "response_format": TWO, "min_tokens": 3}, "min_tokens", "leave out ignore_eos and min"),
        (COMPLETIONS, {**PLAIN, "stream": True, "stream_options": {"x": 1}}, "stream_options", "of stream_options 'x'"),
        (COMPLETIONS, {**PLAIN, "extension": "yarm"}, "extension", "did you mean 'yarn'"),
        (COMPLETIONS, b"{", None, "not JSON"),
        (COMPLETIONS, b'{"prompt": "\xff"}', None, "not UTF-8: its byte 12 is 0xff"),
        (COMPLETIONS, b'{"prompt": NaN}', None, "NaN is not a number"),
        (COMPLETIONS, b"[" * 100_000, None, "not JSON"),
        (COMPLETIONS, b"[1]", None, "must be a JSON object"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', None, "half a character"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "half a character"),
        (CHAT, {"messages": []}, "messages", "at least one message"),
        (CHAT, {"messages": ["hi"]}, "messages", "mapping"),
        (CHAT, {"messages": [{"content": "Hello"}]}, "messages", "the role of a message must be text, not None"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages", "must be text or a list of parts, not 7"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "'tools' is no variable"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self' is no variable"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "not text"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "max_tokens", "takes up to 256"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ],
)
def test_a_mistake_is_one_sentence_in_openais_form(server, path, body, param, words):
    answer = post(server[0], path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert "Fields" not in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1000
    if param is not None:
        assert error["param"] == param


def test_a_form_that_turns_out_too_large_while_a_reply_is_written_is_the_mistake_of_its_request(server, monkeypatch):
    monkeypatch.setattr(GrammarProcessor, "read_a_token", lambda self: None)
    body = {**PLAIN, "response_format": regex("a{1000000}")}
    answer = post(server[0], COMPLETIONS, body)
    assert answer.status_code == 400
    streamed = post(server[0], COMPLETIONS, {**body, "stream": True}).text
    for error in (answer.json()["error"], json.loads(streamed.splitlines()[-2][6:])["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
        assert "too many expressions" in error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"anyOf": branches(1000)}, "has 3,002 objects and lists, and may have 1,000"),
        ({"type": "object", "patternProperties": {f"^a{i}b*$": {} for i in range(300)}}, "objects and lists"),
        ({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(30)]}, "objects and lists"),
        ({"type": "integer", "multipleOf": 999_983}, "values of multipleOf whose product is above 10,000"),
        ({"anyOf": [{"type": "number", "multipleOf": 0.01 * n} for n in (37, 41, 43)]}, "values of multipleOf"),
    ],
)
def test_a_schema_for_which_all_would_wait_is_refused_before_it_is_compiled(server, fields, words, monkeypatch):
    monkeypatch.setattr(Grammars, "_tokenizer", None)
    answer = post(server[0], COMPLETIONS, {**PLAIN, "response_format": schema(**fields)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert words in error["message"]


def test_a_large_schema_is_kept(server):
    names = [f"k{i}" for i in range(300)]
    form = schema(type="object", properties={n: {"enum": [0, 1]} for n in names}, required=names)
    answer = post(server[0], COMPLETIONS, {**PLAIN, "response_format": form, "max_tokens": 9})
    assert answer.json()["choices"][0]["text"].startswith('{"k0"')


def test_each_of_several_choices_keeps_the_form(server):
    body = {"prompt": "A", "max_tokens": 9, "n": 8, "seed": 1, "response_format": regex("[0-9]{2}-[ab]+c|[xy]z")}
    choices = post(server[0], COMPLETIONS, body).json()["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    assert all(re.fullmatch("[0-9]{2}-[ab]+c|[xy]z|[0-9]{2}-[ab]{6}", choice["text"]) for choice in choices)


def test_a_huge_body_is_refused(server):
    answer = post(server[0], COMPLETIONS, b'{"prompt": "' + b"x" * (100 << 20) + b'"}')
    assert answer.status_code == 400
    assert "more than 4 MiB" in answer.json()["error"]["message"]


def test_a_body_that_is_announced_as_huge_is_not_waited_for(server):
    host, port = server[0].removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {100 << 20}\r\n\r\n".encode())
        assert connection.recv(1024).startswith(b"HTTP/1.1 400")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(server, monkeypatch):
    logger, heard = logging.getLogger("uvicorn.error"), BufferingHandler(1000)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, heard])
    host, port = server[0].removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt'.encode())
    wait_for(lambda: f'route="{COMPLETIONS}",status="499"' in httpx.get(server[0] + "/metrics").text)
    assert not any("Exception in ASGI application" in record.getMessage() for record in heard.buffer)


def test_a_body_that_does_not_come_is_not_waited_for_forever(server, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    host, port = server[0].removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt'.encode())
        assert connection.recv(1024).startswith(b"HTTP/1.1 408")


def test_a_connection_without_a_request_is_closed(server, monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.2)
    host, port = server[0].removeprefix("http://").split(":")
    body = json.dumps({**PLAIN, "max_tokens": 250, "ignore_eos": True, "stream": True})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with (
        socket.create_connection((host, int(port)), timeout=20) as busy,
        socket.create_connection((host, int(port)), timeout=20) as silent,
        socket.create_connection((host, int(port)), timeout=20) as slow,
    ):
        slow.sendall(head.encode())
        busy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for connection in (silent, slow):
            assert connection.recv(100) == b""
        answer = b""
        while b"[DONE]" not in answer:
            answer += (piece := busy.recv(1 << 16))
            assert piece


def test_connections_without_a_request_make_room_for_others(model):
    with running(model, most=8) as (address, _), ExitStack() as stack:
        host, port = address.removeprefix("http://").split(":")
        busy, *silent = (
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(60)
        )
        with httpx.Client() as client:
            for _ in range(3):
                assert client.post(address + COMPLETIONS, json=PLAIN).status_code == 200
        assert busy.recv(1) == b""
        ended = sum(is_closed(each) for each in silent)
        assert 50 <= ended < 59


def is_closed(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_a_request_beyond_the_connections_that_may_be_open_gets_503(model, monkeypatch):
    monkeypatch.setattr(server_module, "BURST", 1)
    body = {**PLAIN, "max_tokens": 250, "ignore_eos": True, "stream": True}
    with running(model, most=1) as (address, _), ExitStack() as stack:
        streams = [
            stack.enter_context(httpx.stream("POST", address + COMPLETIONS, json=body, timeout=60)) for _ in range(2)
        ]
        assert [each.status_code for each in streams] == [200, 200]
        assert post(address, COMPLETIONS, PLAIN).status_code == 503
        assert all(each.read().endswith(b"data: [DONE]\n\n") for each in streams)
        assert post(address, COMPLETIONS, PLAIN).status_code == 200


def test_a_long_answer_reaches_a_client_that_reads_it_late(monkeypatch):
    """The connection is without a request, as the server has written all of the answer."""
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.2)
    head = {"kind": "pooled", "pooler": "mean"}
    with running(small_model("bert", dim=512, max_length=64, head=head)) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({"input": ["x"] * 1000})
        sent = f"POST {EMBEDDINGS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(f"{sent}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(2.5)
            connection.settimeout(20)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["data"]) == 1000


def test_what_is_not_there(server):
    assert post(server[0], COMPLETIONS, {**PLAIN, "model": "gpt-4"}).status_code == 404
    assert post(server[0], EMBEDDINGS, {"input": "Hello"}).status_code == 404
    for path in ("/etc/passwd", "/page/../app.py", "/page/%2e%2e/app.py", "/v2"):
        answer = httpx.get(server[0] + path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(server[0] + COMPLETIONS).status_code == 405


def test_other_pages_and_names_are_refused(server):
    headers = {"Content-Type": "application/json"}
    for more in ({"Origin": "http://evil.example"}, {"Origin": "http://["}, {"Host": "evil.example"}, {"Host": "["}):
        answer = httpx.post(server[0] + COMPLETIONS, json=PLAIN, headers=headers | more)
        assert answer.status_code == 403
    for more in ({"Origin": server[0].upper()}, {"Host": "127.0.0.2:80"}, {"Host": "LOCALHOST"}, {"Host": "[::1]:80"}):
        assert httpx.get(server[0] + "/health", headers=more).status_code == 200
    answer = httpx.post(server[0] + COMPLETIONS, content=json.dumps(PLAIN), headers={"Content-Type": "text/plain"})
    assert "application/json" in answer.json()["error"]["message"]


def test_a_source_is_no_longer_than_the_model_reads():
    with running(small_model("t5", max_length=32)) as (address, _):
        assert post(address, COMPLETIONS, {**PLAIN, "prompt": "x" * 32}).status_code == 200
        answer = post(address, COMPLETIONS, {**PLAIN, "prompt": "x" * 33})
        assert answer.status_code == 400
        assert "the prompt has 33 tokens and max_tokens 4" in answer.json()["error"]["message"]


def test_the_length_of_the_folder_stays_within_that_of_the_server():
    for stated in ({"max_new_tokens": 40}, {"max_length": 400}):
        model = small_model(max_length=32)
        model.generation_settings = stated
        with running(model) as (address, _):
            body = {"prompt": "x" * 12, "temperature": 0, "ignore_eos": True}
            assert post(address, COMPLETIONS, body).json()["usage"]["completion_tokens"] == 20
            assert post(address, COMPLETIONS, {**body, "prompt": "x" * 32}).status_code == 400


def test_a_key_is_asked_for(model):
    with running(model, key="secret") as (address, _):
        assert httpx.get(address + "/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = httpx.post(address + COMPLETIONS, json=PLAIN, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(address + "/stats").status_code == 401
        answer = httpx.post(address + COMPLETIONS, json=PLAIN, headers={"Authorization": "Bearer secret"}, timeout=60)
        assert answer.status_code == 200


def test_a_key_may_have_any_letters(model):
    with running(model, key="schl\u00fcssel") as (address, _):
        for key, status in (("schl\u00fcssel", 200), ("schlussel", 401), ("schl\u00fcsse", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(address + "/v1/models", headers=headers).status_code == status


def test_a_compressed_body_is_named_as_such(server):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = httpx.post(server[0] + COMPLETIONS, content=gzip.compress(json.dumps(PLAIN).encode()), headers=headers)
    assert answer.status_code == 400
    assert "encoded as 'gzip'" in answer.json()["error"]["message"]


def test_a_full_queue_asks_to_come_again(model, monkeypatch):
    with running(model, max_rows=1, max_waiting=1) as (address, engine):
        held = [engine.submit("wait", max_new_tokens=200) for _ in range(2)]
        monkeypatch.setattr(RequestReader, "completions", None)  # what is refused costs no reading
        answer = post(address, COMPLETIONS, PLAIN)
        monkeypatch.undo()
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for handle in held:
            handle.cancel()
        wait_for(lambda: engine.stats().waiting == engine.stats().running == 0)
        assert post(address, COMPLETIONS, PLAIN).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(server, stream):
    address, engine = server
    before = engine.stats()
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "On", "max_tokens": 250, "temperature": 0, "stream": stream, "ignore_eos": True})
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: engine.stats().running)
    wait_for(lambda: engine.stats().running == 0)
    after = engine.stats()
    assert after.cancelled == before.cancelled + 1
    assert after.pages_held == before.pages_held


def test_logits_that_are_not_finite_fail_alone(model):
    broken = small_model()
    with torch.no_grad():
        broken.tokens.weight[65] = torch.nan  # of one letter
    letter = broken.tokenizer.decode([65])
    with running(broken) as (address, engine):
        found = {}

        def ask(name, prompt):
            found[name] = post(address, COMPLETIONS, {**PLAIN, "prompt": prompt, "max_tokens": 40})

        threads = [threading.Thread(target=ask, args=item) for item in (("bad", letter), ("good", "z"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found["bad"].status_code == 500
        assert "finite" in found["bad"].json()["error"]["message"]
        assert found["good"].json()["choices"][0]["text"] == phasor.generate(broken, "z", max_new_tokens=40)
        streamed = post(address, COMPLETIONS, {**PLAIN, "prompt": letter, "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["type"] == "server_error"
        assert engine.stats().failed == 2


def test_metrics_are_those_of_prometheus(server, client):
    client.completions.create(model="small", prompt="Once", max_tokens=3, temperature=0)
    text = httpx.get(server[0] + "/metrics").text
    stats = httpx.get(server[0] + "/stats").json()
    assert f"phasor_new_tokens_total {float(stats['new_tokens'])}" in text
    for name in ("phasor_running", "phasor_waiting", "phasor_pages_held", "phasor_time_to_first_token_seconds_count"):
        assert re.search(rf"^{name} [0-9.]+$", text, re.MULTILINE)
    assert 'phasor_requests_total{route="/v1/completions",status="200"}' in text


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "stream", "leave", "nonsense", "half", "chat"]),
        st.integers(0, 5),
        st.integers(1, 12),
    ),
    min_size=10,
    max_size=10,
)  # 20 times 10 behaviors, in `make test` 8 times


@settings(max_examples=20 if FULL else 8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(ACTIONS)
def test_whatever_clients_do_others_get_their_answers(server, model, actions):
    address, engine = server
    host, port = address.removeprefix("http://").split(":")
    wrong = []

    def act(kind, which, count):
        body = {**PLAIN, "prompt": f"client {which}", "max_tokens": count}
        if kind in ("leave", "half"):
            text = json.dumps({**body, "max_tokens": 200, "stream": bool(which % 2)})
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            sent = f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent[: -which - 1] if kind == "half" else sent)
                time.sleep(0.002 * count)
            return
        if kind == "nonsense":
            assert post(address, COMPLETIONS, b"\x00" * count).status_code == 400
            return
        expected = phasor.generate(model, body["prompt"], max_new_tokens=count)
        if kind == "chat":
            answer = post(address, CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": count})
            assert answer.status_code == 200
            return
        answer = post(address, COMPLETIONS, {**body, "stream": kind == "stream"})
        if kind == "ask":
            found = answer.json()["choices"][0]["text"]
        else:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            found = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            assert answer.text.endswith("data: [DONE]\n\n")
        assert found == expected

    def run(action):
        try:
            act(*action)
        except BaseException as error:
            wrong.append((action, error))

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    wait_for(lambda: engine.stats().running == engine.stats().waiting == 0)
