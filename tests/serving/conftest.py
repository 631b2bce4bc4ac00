"""A small model behind a real server, in a thread of this process, and OpenAI's client in front of it."""

import socket
import threading
import time
from contextlib import contextmanager

import openai
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import phasor
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.generation.engine import Engine
from phasor.serving.app import Api, build_app
from phasor.serving.server import DrainingServer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_level_tokenizer():
    """One token per byte, and the special tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def small_model(preset="llama-2", **fields):
    torch.manual_seed(3)
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 2, "hidden_dim": 48, "vocab_size": 261, "max_length": 256}
    model = phasor.Transformer(phasor.preset(preset, **{**sizes, **fields})).eval()
    model.tokenizer = byte_level_tokenizer()
    end = model.tokenizer.token_to_id("<|end|>")
    model.special = phasor.SpecialTokens(stop=(end,), start=end if model.encoder is not None else None)
    return model


@contextmanager
def running(model, key=None, most=4096, **options):
    """The address of a server, and its engine."""
    engine = Engine(model, **{"max_rows": 4, "page_size": 8, **options}) if model.config.has_logits else None
    api = Api(model, engine, name="small", template=ChatTemplate({"default": TEMPLATE}))
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    server = DrainingServer(uvicorn.Config(build_app(api, key=key), log_level="warning", ws="none"), 60, most)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    if engine is not None:
        engine.start()
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join(20)
        if engine is not None:
            engine.close()
        assert not thread.is_alive(), vars(server.server_state)  # what it waits for


@pytest.fixture(scope="session")
def model():
    return small_model()


@pytest.fixture(scope="module")
def server(model):
    with running(model) as (address, engine):
        yield address, engine


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client
