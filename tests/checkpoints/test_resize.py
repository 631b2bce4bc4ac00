"""A vocabulary that grows gives the logits of a model of transformers whose embeddings were resized."""

import pytest
import torch
import transformers

import phasor
from phasor.checkpoints.resize import grow_vocabulary


@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_vocabulary_equals_resized_embeddings(tied, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        tie_word_embeddings=tied, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = grow_vocabulary(phasor.load(tmp_path), 67).eval()
    theirs.resize_token_embeddings(67, mean_resizing=False)
    with torch.no_grad():  # their new rows are drawn around the mean; here they are the mean
        for table in (theirs.get_input_embeddings(), theirs.get_output_embeddings()):
            table.weight[61:] = table.weight[:61].mean(0)
    tokens = torch.randint(0, 67, (2, 9))
    with torch.no_grad():
        # float32 sums in another order: about 2^-24 of logits near 1
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 2e-6


def test_a_vocabulary_does_not_shrink():
    model = phasor.Transformer(phasor.ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1))
    with pytest.raises(ValueError, match="the vocabulary has 9 tokens, and can only grow, not to 7"):
        grow_vocabulary(model, 7)


def test_biases_and_other_tables_of_tokens_grow_too():
    torch.manual_seed(0)
    config = phasor.ModelConfig(
        vocab_size=9,
        dim=8,
        num_layers=2,
        num_heads=1,
        head={"kind": "lm", "bias": True},
        embedding={"per_layer_width": 4, "tied": False},
        feedforward={"activation": "swiglu"},
    )
    model = phasor.Transformer(config)
    with torch.no_grad():
        model.head.bias.copy_(torch.randn(9))
    grown = grow_vocabulary(model, 11)
    before, after = model.state_dict(), grown.state_dict()
    larger = {name for name in before if before[name].shape != after[name].shape}
    assert {"tokens.weight", "head.weight", "head.bias"} < larger
    for name in before:
        if name in larger:
            assert torch.equal(after[name][:9], before[name])
            assert torch.equal(after[name][10], before[name].mean(0))
        else:
            assert torch.equal(after[name], before[name])
