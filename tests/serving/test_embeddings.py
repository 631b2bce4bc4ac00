"""Embeddings by OpenAI's client are the vectors of the model."""

import openai
import pytest
import torch

import phasor

from .conftest import byte_level_tokenizer, running


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(5)
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 2, "hidden_dim": 48, "vocab_size": 261, "max_length": 64}
    head = {"kind": "pooled", "pooler": "mean", "normalize": True}
    model = phasor.Transformer(phasor.preset("bert", **sizes, head=head)).eval()
    model.tokenizer = byte_level_tokenizer()
    return model


def test_vectors_are_those_of_the_model(encoder):
    texts = ["a", "a longer text than the first", "中文"]
    with (
        running(encoder) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        for encoding in ("float", openai.NOT_GIVEN):  # without one the client asks for base64
            found = client.embeddings.create(model="small", input=texts, encoding_format=encoding)
            for text, one in zip(texts, found.data, strict=True):
                with torch.no_grad():
                    expected = encoder(torch.tensor([encoder.tokenizer.encode(text).ids]))[0]
                assert torch.tensor(one.embedding) == pytest.approx(expected, abs=1e-6)
        assert found.usage.prompt_tokens == sum(len(encoder.tokenizer.encode(text).ids) for text in texts)
        single = client.embeddings.create(model="small", input="a")
        assert single.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="reads up to 64"):
            client.embeddings.create(model="small", input="x" * 100)
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            client.completions.create(model="small", prompt="a")
