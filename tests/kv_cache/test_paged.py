"""The paged cache equals the full forward: rows of different lengths that come and go, for every scheme and kind."""

from __future__ import annotations

import random

import pytest
import torch
from device import DEVICE
from schemes import SCHEMES, VIEWS, build, tiny, tokens
from torch import Tensor

from phasor import Transformer
from phasor.config import AttentionConfig
from phasor.kv_cache.paged import PagedKVCache, PagedRow
from phasor.kv_cache.pages import PagePool

TOLERANCE = 1e-4  # float32, logits of order 1: the order of summation differs between the two ways
LENGTH, SIZES = 40, [29, 7, 18, 1, 12]
KINDS = {
    f"{kind}-{name}": example for kind, cls in AttentionConfig.kinds.items() for name, example in cls.examples().items()
}


def paged(model: Transformer, **sizes: int) -> PagedKVCache:
    return PagedKVCache(
        model.config, **{"max_rows": 4, "pages": 64, "page_size": 4, "most_new": 8, "device": DEVICE, **sizes}
    )


def read(model: Transformer, cache: PagedKVCache, rows: list[PagedRow], pieces: list[Tensor]) -> list[Tensor]:
    """The logits of the next tokens of rows, of as many as each is given."""
    width = max(map(len, pieces))
    padded = torch.zeros(len(pieces), width, dtype=torch.int64)
    real = torch.zeros(len(pieces), width, dtype=torch.bool)
    for i, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
        assert cache.room_for(row, len(piece))
        cache.reserve(row, len(piece))
        padded[i, width - len(piece) :], real[i, width - len(piece) :] = piece, True
    with torch.no_grad():
        logits = model(padded, attention_mask=None if bool(real.all()) else real, cache=cache.call(rows))
    return [logits[i, width - len(piece) :] for i, piece in enumerate(pieces)]


def check_rows(model: Transformer, cache: PagedKVCache, seed: int = 0) -> None:
    """Texts of several lengths in chunks of several sizes, some rows at a time; a text follows another in its row."""
    draw = random.Random(seed)
    texts = [tokens(size, seed=i) for i, size in enumerate(SIZES)]
    with torch.no_grad():
        expected = [model(text[None], length=LENGTH)[0] for text in texts]
    waiting, running = list(range(len(texts))), {}
    while waiting or running:
        while waiting and cache.free:
            running[waiting.pop(0)] = cache.new_row(length=LENGTH)
        chosen = draw.sample(sorted(running), draw.randint(1, len(running)))
        most = draw.choice([1, 1, 3, 8])
        pieces = []
        for i in chosen:
            start = running[i].count
            pieces.append(texts[i][start : start + draw.randint(1, most)])
        starts = [running[i].count for i in chosen]
        for i, start, logits in zip(
            chosen, starts, read(model, cache, [running[i] for i in chosen], pieces), strict=True
        ):
            difference = float((logits - expected[i][start : start + len(logits)]).abs().max())
            assert difference < TOLERANCE, f"logits of text {i} from {start} differ by {difference:.1e}"
            if start + len(logits) == len(texts[i]):
                cache.release(running.pop(i))
    assert all(table.pool.held == 0 for table in cache.tables.values())


@pytest.mark.sample(24)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_equal_the_full_forward(scheme: str, view: str) -> None:
    model = build(tiny(scheme, attention=VIEWS[view]))
    check_rows(model, paged(model))


@pytest.mark.sample(14)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention(kind: str) -> None:
    position = "rotary" if KINDS[kind].takes_positions else "none"
    try:
        config = tiny(position, attention=KINDS[kind])
    except ValueError:
        config = tiny({"kind": "rotary", "rotary_dim": 4}, attention=KINDS[kind])
    model = build(config)
    check_rows(model, paged(model))


def test_a_prompt_that_nobody_has_read_is_looked_up_in_as_many_steps_as_it_has_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where all layers have a window, so that no page has to be there for a longer prefix to be found."""
    lookups = []
    monkeypatch.setattr(PagePool, "find", lambda pool, key: lookups.append(key))
    cache = PagedKVCache(tiny("rotary", attention={"window": 64}), max_rows=2, pages=300, page_size=2, device=DEVICE)
    assert cache.find_prefix(cache.new_row(), list(range(401))) == 0
    assert len(lookups) == 200
