"""Scores of continuations against a model of transformers, and against its greedy decoding."""

import pytest
import torch
import transformers

import phasor
from phasor.evaluation.continuations import score_continuations

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
# Two layers in float32 with log-probabilities of order 10, against the same in another order of operations.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.mul_(6.0 if weight.dim() == 2 else 1.0)
    theirs.eval().save_pretrained(folder)
    return theirs, phasor.load(folder)


def draw_pairs():
    draw = torch.Generator().manual_seed(1)

    def ids(count):
        return torch.randint(0, 40, (count,), generator=draw).tolist()

    return [(ids(context), ids(continuation)) for context, continuation in ((9, 3), (1, 1), (4, 7), (17, 2), (9, 3))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_not_finite_are_an_error(value):
    model = phasor.Transformer(phasor.preset("gpt-2", dim=32, num_heads=2, num_layers=2, vocab_size=40, max_length=64))
    with torch.no_grad():
        model.get_parameter("decoder.blocks.0.attention.out.weight")[0, 0] = value
    with pytest.raises(ValueError, match="the log-probability of a continuation is nan"):
        score_continuations(model, draw_pairs())


@pytest.mark.parametrize("batch", [{}, {"batch_rows": 1}, {"batch_rows": 2}, {"batch_tokens": 24}], ids=str)
def test_equal_those_of_transformers(both, batch):
    theirs, ours = both
    pairs = draw_pairs()
    for (context, continuation), score in zip(pairs, score_continuations(ours, pairs, **batch), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        assert score.log_probability == pytest.approx(float(logits[range(len(wanted)), wanted].sum()), abs=CLOSE)
        assert score.greedy == bool((logits.argmax(-1) == wanted).all())


def test_greedy_is_what_greedy_decoding_writes(both):
    """The continuation that transformers generates is greedy, and with any token of it changed it is not."""
    theirs, ours = both
    for context, _ in draw_pairs():
        text = theirs.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
        new = text[len(context) :]
        others = [[*new[:i], (new[i] + 1) % 40, *new[i + 1 :]] for i in range(6)]
        scores = score_continuations(ours, [(context, each) for each in (new, *others)])
        assert [score.greedy for score in scores] == [True] + [False] * 6


def test_a_model_that_depends_on_the_length_is_planned_for_all_tokens():
    """As in generation: frequencies are those of context and continuation together, in a batch too."""
    config = phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=40, max_length=8)
    torch.manual_seed(0)
    model = phasor.Transformer(config.with_extension(phasor.DynamicNTKScaling(factor=1.0, original_length=8))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6.0 if weight.dim() == 2 else 1.0)
    pairs = draw_pairs()
    for (context, continuation), score in zip(pairs, score_continuations(model, pairs), strict=True):
        size = len(context) + len(continuation)
        with torch.no_grad():
            tokens = torch.tensor([context + continuation[:-1]])
            logits = model(tokens, length=size)[0, len(context) - 1 :].log_softmax(-1)
        wanted = torch.tensor(continuation)
        assert score.log_probability == pytest.approx(float(logits[range(len(wanted)), wanted].sum()), abs=CLOSE)


def test_bad_input(both):
    with pytest.raises(ValueError, match="each has at least one token"):
        score_continuations(both[1], [([1], [])])
    encoder = phasor.Transformer(phasor.preset("bert", dim=32, num_heads=2, num_layers=1, vocab_size=40))
    with pytest.raises(ValueError, match="scored by a decoder with a language-model head, not by this encoder"):
        score_continuations(encoder, [([1], [2])])
    assert score_continuations(both[1], []) == []
