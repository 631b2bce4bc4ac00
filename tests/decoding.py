"""Helpers for tests of generation: models that do not repeat themselves, and plain references of decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from schemes import build, tiny
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

import phasor
from phasor import Transformer


def speaker(scheme: str | phasor.PositionConfig = "rotary", seed: int = 0, **changes: object) -> Transformer:
    """A tiny model with untied embeddings; with tied ones the likeliest token is always the last."""
    return build(tiny(scheme, **{"embedding": phasor.EmbeddingConfig(tied=False), **changes}), seed)


def full_logits(model: Transformer, text: Sequence[int], length: int, source: Sequence[int] | None = None) -> Tensor:
    """Logits `[T, vocab]` of a text by one forward without a cache, at a stated length."""
    given = torch.tensor([list(text)])
    with torch.no_grad():
        if source is None:
            return model(given, length=length)[0]
        return model(torch.tensor([list(source)]), given, target_length=length)[0]


def greedy_ref(model: Transformer, prompt: Sequence[int], count: int, source: Sequence[int] | None = None) -> list[int]:
    """Greedy decoding, each token by a full forward over all of the text."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(full_logits(model, text, len(prompt) + count, source)[-1].argmax()))
    return text[len(prompt) :]


def continuations(vocab: int, count: int, stop: Iterable[int] = ()) -> list[tuple[int, ...]]:
    """Every text of `count` tokens, or of fewer that ends in a stop token."""
    stop = set(stop)
    found = []
    for size in range(1, count + 1):
        for text in itertools.product(range(vocab), repeat=size):
            ended = text[-1] in stop
            if not stop & set(text[:-1]) and (ended or size == count):
                found.append(text)
    return found


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def fewest(order: list[int], probabilities: list[float], mass: float) -> tuple[set[int], float]:
    """The fewest tokens, taken in this order, whose probabilities reach a mass; and the margin of that decision."""
    sums = [math.fsum(probabilities[t] for t in order[:count]) for count in range(len(order) + 1)]
    enough = next((count for count, total in enumerate(sums) if total >= mass), len(order))
    return set(order[:enough]), min(abs(total - mass) for total in sums)


def kept_ref(logits: list[float], name: str, value: float) -> tuple[set[int], float]:
    """Which tokens a filter keeps, by its definition; and the margin of that decision."""
    p, everything = softmax(logits), range(len(logits))
    if name == "top_k":
        return {t for t in everything if sum(x > logits[t] for x in logits) < value}, math.inf
    if name == "top_p":
        return fewest(sorted(everything, key=lambda t: -p[t]), p, value)
    if name == "min_p":
        return {t for t in everything if p[t] >= value * max(p)}, min(abs(x - value * max(p)) for x in p)
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    gap = [abs(-math.log(x) - entropy) if x > 0 else math.inf for x in p]
    kept, narrowly = fewest(sorted(everything, key=lambda t: gap[t]), p, value)
    finite = sorted(g for g in gap if g < math.inf)
    return kept, min([narrowly, *(b - a for a, b in itertools.pairwise(finite))])


def distribution_ref(logits: list[float], options: dict[str, float]) -> tuple[list[float], float]:
    """Temperature, then every filter on the result of the one before it; and the smallest margin of a decision."""
    logits, margin = [x / options.get("temperature", 1.0) for x in logits], math.inf
    for name in ("top_k", "top_p", "min_p", "typical_p"):
        if name in options:
            kept, narrowly = kept_ref(logits, name, options[name])
            logits = [x if t in kept else -math.inf for t, x in enumerate(logits)]
            margin = min(margin, narrowly)
    return softmax(logits), margin


def penalized_ref(logits: list[float], prompt: list[int], new: list[int], options: dict[str, float]) -> list[float]:
    """Logits with tokens that occurred already made less likely."""
    found = []
    for token, x in enumerate(logits):
        if token in prompt or token in new:
            factor = options.get("repetition_penalty", 1.0)
            x = x / factor if x > 0 else x * factor
        x -= options.get("frequency_penalty", 0.0) * new.count(token)
        found.append(x - options.get("presence_penalty", 0.0) * (token in new))
    return found


def chi_square_tail(counts: Tensor, probabilities: Tensor) -> float:
    """How likely it is to see counts at least this far from their probabilities; rare outcomes are pooled."""
    expected = probabilities.double() * counts.sum()
    assert int(counts[probabilities == 0].sum()) == 0, "something impossible happened"
    rare = expected < 5
    seen, aim = counts.double()[~rare], expected[~rare]
    if float(expected[rare].sum()) >= 5:
        seen = torch.cat([seen, counts.double()[rare].sum()[None]])
        aim = torch.cat([aim, expected[rare].sum()[None]])
    statistic = ((seen - aim) ** 2 / aim).sum()
    freedom = torch.tensor(float(len(aim) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def byte_tokenizer(*merges: tuple[str, str], special: Sequence[str] = ("<end>",)) -> Tokenizer:
    """A token for every byte, for every merge of two tokens, and for the special ones."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def reciter(script: Sequence[int], tokenizer: Tokenizer, prompt: int) -> Transformer:
    """A model that generates `script` after any prompt of that many tokens: its logits depend on positions only."""
    count = prompt + len(script)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "dim": count, "num_layers": 1, "num_heads": 1}
    embedding = phasor.EmbeddingConfig(tied=False)
    model = Transformer(phasor.ModelConfig(**sizes, max_length=count, position="learned", embedding=embedding)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.decoder.positions[0].weight.copy_(torch.eye(count))
        model.decoder.norm.weight.fill_(1.0)
        for i, token in enumerate(script):
            model.head.weight[token, prompt - 1 + i] = 30.0
    model.tokenizer = tokenizer
    return model
