"""Randomized and coupled positions: as published, a function of the step, through training and caches."""

import itertools

import numpy as np
import pytest
import torch
from test_batches import documents, recipe, write_store

import phasor
from phasor.config.recipe import Recipe
from phasor.data.batches import Batches
from phasor.data.positions import DigitTokens, coupled_positions, randomized_positions
from phasor.data.tokenizers import byte_tokenizer
from phasor.training.build import check_config

TO = 64
BYTES = byte_tokenizer()
DIGITS = DigitTokens.of(BYTES)


def encode(text):
    return BYTES.encode(text).ids


def published_positions(a, b, result, start):
    """Position coupling by its definition (Cho et al., 2024): a sum with its result reversed, after a first token.

    The sign is above the number before it, where the paper has it beside the equals sign.
    """
    operands = [list(range(start + len(number), start, -1)) for number in (a, b)]
    sign = start + len(a) + 1
    return [0, *operands[0], sign, *operands[1], start, *range(start + 1, start + 1 + len(result))]


def test_every_set_of_positions_is_as_likely():
    drawn = [tuple(randomized_positions(np.zeros((1, 2)), 4, [0, step])[0]) for step in range(3000)]
    counts = np.array([drawn.count(pair) for pair in itertools.combinations(range(4), 2)])
    assert counts.sum() == 3000
    assert (abs(counts - 500) < 5 * 500**0.5).all()  # five standard deviations


def test_randomized_positions_increase_within_documents():
    ids = np.cumsum(np.random.default_rng(0).random((50, 40)) < 0.1, axis=1)
    positions = randomized_positions(ids, 1000, [0, 1])
    steps, same = np.diff(positions), np.diff(ids) == 0
    assert (steps[same] > 0).all()
    assert 0 <= positions.min() < 20
    assert 980 < positions.max() < 1000


@pytest.mark.parametrize("training", [False, True])
def test_coupled_positions_are_those_of_the_paper(training):
    draw, sums = np.random.default_rng(0), []
    for _ in range(200):
        a, b = (int(draw.integers(10 ** int(draw.integers(1, 12)))) for _ in range(2))
        sums.append((str(a), str(b), str(a + b)[::-1]))
    texts = [encode(f"{a}+{b}={result}") for a, b, result in sums]
    ids = np.repeat(np.arange(len(texts)), list(map(len, texts)))[None]
    rows = np.concatenate(texts)[None]
    positions = coupled_positions(rows, DIGITS, ids, TO, [0, 1] if training else None)
    starts = set()
    for number, (a, b, result) in enumerate(sums):
        own = positions[ids == number].tolist()
        start = own[2 + len(a) + len(b)]
        starts.add(start)
        assert own == published_positions(a, b, result, start)
    assert positions.max() < TO
    assert min(starts) == 1
    assert (max(starts) > 50) == training


def test_what_follows_a_result_is_no_sign():
    found = coupled_positions(np.array([encode("12+34=640\n7+8=51")]), DIGITS)
    assert found.tolist() == [[0, 3, 2, 4, 3, 2, 1, 2, 3, 4, 1, 2, 3, 2, 1, 2, 3]]


def test_no_coupled_position_is_rare():
    rows = np.array([encode("123+456=9750")] * 4000)
    ids = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)
    drawn = coupled_positions(rows, DIGITS, ids, 30, [0, 1])
    met = [int(np.any(drawn == position, axis=1).sum()) for position in range(1, 30)]
    assert drawn.max() == 29
    assert min(met) > 0.75 * np.median(met)


@pytest.mark.parametrize("kind", ["randomized", "coupled"])
def test_batches_depend_on_their_step_alone_and_do_not_cut_numbers(tmp_path, kind):
    texts = [[*encode(f"{a}+{7 * a}={str(8 * a)[::-1]}"), 2] for a in (3, 91, 12345, 777777, 20, 8008)]
    store = write_store(tmp_path, [(text,) for text in texts])

    def make(**options):
        data = {"positions": kind, "positions_to": TO, "tokenizer": "bytes"}
        return Batches(store, recipe(length=9, **data), seed=3, tokenizer=BYTES, **options)

    train, valid = make(training=True), make()
    assert all(torch.equal(make(training=True)[step].positions, train[step].positions) for step in (4, 0, 4))
    assert not torch.equal(train[0].positions, train[train.per_epoch].positions)
    whole = {tuple(text[:-1]): coupled_positions(np.array([text]), DIGITS)[0] for text in texts}
    for batch in (valid[step] for step in range(valid.per_epoch)):
        assert batch.positions.shape == batch.tokens.shape
        assert batch.length == (TO if kind == "randomized" else None)
        for row, own in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
            if kind == "coupled" and row[0] == 1:  # the row begins with a document, and may end within a number
                size = next((i for i, token in enumerate(row[1:], 1) if token in (0, 1)), len(row))
                begun = [positions for text, positions in whole.items() if list(text[:size]) == row[:size]]
                assert begun[0][:size].tolist() == own[:size]


def test_a_recipe_trains_and_evaluates_with_coupled_positions(tmp_path):
    """The loss that `evaluate` reports is that of the positions a caller would give."""
    sums = [f"{a}+{b}={str(a + b)[::-1]}" for a in range(20, 40) for b in range(95, 105)]
    (tmp_path / "sums.txt").write_text("\n".join(sums))
    data = {"train": "sums.txt", "valid": "sums.txt", "document": "line", "tokenizer": "bytes", "sequence_length": 64}
    data |= {name: str(tmp_path / data[name]) for name in ("train", "valid")}
    fields = {
        "model": {"preset": "gpt-2", "dim": 16, "num_heads": 2, "num_layers": 1, "max_length": 12},
        "data": {**data, "positions": "coupled", "positions_to": 12},
        "train": {"steps": 2, "batch_tokens": 256, "device": "cpu"},
        "out": str(tmp_path / "run"),
    }
    assert phasor.train(Recipe.from_dict(fields)).status == "finished"
    metrics = phasor.evaluate(tmp_path / "run", device="cpu", limit=9)
    model, nats, count = phasor.load(tmp_path / "run").eval(), 0.0, 0
    for text in sums[:9]:
        a, b, result = text.replace("=", "+").split("+")
        read = torch.tensor([encode(text)])
        with torch.no_grad():
            logits = model(read, positions=torch.tensor([published_positions(a, b, result, 1)]))
        targets = torch.tensor([*encode(text)[1:], 2])
        nats += float(torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum"))
        count += len(targets)
    assert metrics["loss"] == pytest.approx(nats / count, rel=1e-5)


@pytest.mark.parametrize("scheme", ["rotary", "learned", "alibi"])
def test_generation_continues_the_positions_of_the_prompt(scheme):
    """Greedy decoding, compiled and by beams, of prompts of several lengths: as whole forwards choose their tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": BYTES.get_vocab_size(), "dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 24}
    model = phasor.Transformer(phasor.ModelConfig(position=scheme, init="fan-in", **sizes)).eval()
    prompts = [encode(text) for text in ("653+49=", "1+2=", "123456789+987654321=")]
    positions = [coupled_positions(np.array([prompt]), DIGITS)[0].tolist() for prompt in prompts]
    new = phasor.generate(model, prompts, positions=positions, max_new_tokens=8)
    alone = [
        phasor.generate(model, p, positions=own, max_new_tokens=8) for p, own in zip(prompts, positions, strict=True)
    ]
    assert new == alone
    for prompt, own, result in zip(prompts, positions, new, strict=True):
        with torch.no_grad():
            read = torch.tensor([prompt + result[:-1]])
            logits = model(read, positions=torch.tensor([own + list(range(2, 9))]))
            assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == result
            assert not torch.equal(logits, model(read[:, :24], positions=torch.arange(24)[: read.shape[1]])[:, :24])
    beams = phasor.generate(model, prompts, positions=positions, max_new_tokens=3, num_beams=2)
    assert beams[0] == phasor.generate(model, prompts[0], positions=positions[0], max_new_tokens=3, num_beams=2)
    with pytest.raises(ValueError, match="one for each of its tokens"):
        phasor.generate(model, prompts, positions=positions[:2], max_new_tokens=8)
    with pytest.raises(ValueError, match="not 'far'"):
        phasor.generate(model, prompts, positions="far", max_new_tokens=8)
    with pytest.raises(ValueError, match="from 0 to"):
        phasor.generate(model, [5, 6], positions=[0, -1], max_new_tokens=8)
    with pytest.raises(ValueError, match="greedy decoding, sampling or beam search"):
        phasor.generate(model, [5, 6], positions=[0, 1], max_new_tokens=8, prompt_lookup_tokens=2)
    if scheme == "learned":
        with pytest.raises(ValueError, match="the positions of prompts and new tokens reach past the 24"):
            phasor.generate(model, [5, 6], positions=[0, 17], max_new_tokens=8)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"data": {"positions": "randomized"}}, "needs DataConfig.positions_to"),
        ({"data": {"positions_to": 512}}, "is for DataConfig.positions 'skipped', 'randomized' or 'coupled'"),
        ({"data": {"positions": "randomized", "positions_to": 256}}, "must be greater than DataConfig.sequence_length"),
        ({"data": {"positions": "couple"}}, "coupled"),
        ({"data": {"positions": "coupled"}}, "one token per digit: set DataConfig.tokenizer to 'bytes'"),
        ({"data": {"positions": "coupled", "tokenizer": "bytes"}, "task": "translation"}, "for rows of text"),
    ],
)
def test_positions_that_cannot_be(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recipe.from_dict(fields)


def test_numbers_that_do_not_fit_and_tokenizers_that_join_digits(tmp_path):
    with pytest.raises(ValueError, match=r"a number of 12 digits reaches the coupled position 13, .* below 13"):
        coupled_positions(np.array([encode("1+123456789012=")]), DIGITS, to=13)
    with pytest.raises(ValueError, match=r"a number of 12 digits reaches the coupled position 14, .* below 14"):
        coupled_positions(np.array([encode("123456789012+1=")]), DIGITS, to=14)
    from phasor.config.recipe import DataConfig
    from phasor.data.tokenizers import train_tokenizer

    learned = train_tokenizer(["12 12 12 12"] * 9, DataConfig(tokenizer="bpe", vocab_size=270))
    with pytest.raises(ValueError, match="one token per digit, and this tokenizer has"):
        DigitTokens.of(learned)
    store = write_store(tmp_path, documents(3))
    with pytest.raises(ValueError, match="need the tokenizer"):
        Batches(store, recipe(positions="coupled", tokenizer="bytes"))
    config = phasor.preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=300, max_length=64)
    coupled = {"positions": "coupled", "tokenizer": "bytes"}
    assert check_config(config, recipe(length=90, batch_tokens=90, positions_to=64, **coupled), 50) == config
    with pytest.raises(ValueError, match=r"data\.positions_to is 65"):
        check_config(config, recipe(length=9, positions_to=65, **coupled), 50)
