"""Where the pages say what differs from a paper, or what a refusal says, that is what is computed."""

from pathlib import Path

import pytest
import torch
from test_pages import prose

import phasor
from phasor.nn.positions.base import build_position
from phasor.nn.sequence import SequenceInfo

NUM_HEADS, HIDDEN_DIM = 4, 5
# What one set has: a scale per head; r1 and r2 per head; FIRE's network from 1 to 5 to a bias per head, and c and L.
LEARNED = {
    "temperature": (phasor.TemperatureConfig(learned=True), NUM_HEADS),
    "kerple": (phasor.KERPLEConfig(), 2 * NUM_HEADS),
    "fire": (phasor.FIREConfig(hidden_dim=HIDDEN_DIM), 2 * HIDDEN_DIM + (HIDDEN_DIM + 1) * NUM_HEADS + 2),
}
SAID = {
    "temperature": "A learned `s` (Scalable-Softmax) is one per head for all layers that use the scheme; the paper has "
    "one per head and layer.",
    "kerple": "`r1` and `r2` are learned, one pair for all layers that use the scheme",
    "fire": "The network, `c` and `L` are learned, one set for all layers that use the scheme: the paper's FIRE-S, "
    "whose FIRE has a set for each layer.",
}


def make_config(position: object, num_layers: int = 1) -> phasor.ModelConfig:
    return phasor.ModelConfig(vocab_size=7, dim=8, num_layers=num_layers, num_heads=NUM_HEADS, position=position)


def count(position: object, num_layers: int) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in phasor.Transformer(make_config(position, num_layers)).parameters())


@pytest.mark.parametrize("kind", LEARNED)
def test_layers_share_what_a_scheme_learns(kind: str) -> None:
    position, one_set = LEARNED[kind]
    assert [count(position, layers) - count("none", layers) for layers in (1, 3)] == [one_set, one_set]
    assert SAID[kind] in prose("docs/positions.md")


def test_dual_chunk_clamps_at_the_last_trained_distance() -> None:
    """A head with one rotation of 1 radian per position: the score of equal vectors is the cosine of the distance."""
    trained = 3  # below pi, so that the cosine has one distance
    config = phasor.DualChunkConfig(chunk_length=2, trained_length=trained)
    module = build_position(config, make_config(config), "decoder")
    positions, ones = torch.arange(6), torch.tensor([1.0, 0.0]).double().expand(1, 6, NUM_HEADS, 2)
    q, k, _ = module.on_heads(ones, ones, ones, module.prepare(SequenceInfo(positions, 6), ones))
    earlier = module.pieces(q, k, positions[None], positions[None], True)[-1]  # keys at least two chunks behind
    distances = torch.einsum("qd,kd->qk", earlier.queries[0, :, 0], earlier.keys[0, :, 0]).acos()
    assert distances[4:, 0].tolist() == pytest.approx([trained - 1] * 2)  # 3 with ChunkLlama's clamp
    assert "ChunkLlama, clamps at `c`; the paper, and phasor, at `c - 1`." in prose("docs/positions.md")


def test_an_empty_configuration_is_neither_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for read_folder in (phasor.load, phasor.explain):
        with pytest.raises(ValueError, match=r"config\.json is empty: it has neither Hugging Face's model_type nor"):
            read_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"dim": 8}')
    for read_folder in (phasor.load, phasor.explain):
        with pytest.raises(ValueError, match=r"config\.json: ModelConfig needs vocab_size, num_layers, num_heads$"):
            read_folder(tmp_path)
    said = (
        "A `config.json` without `model_type` is read as phasor's own, which needs `vocab_size`, `dim`, `num_layers` "
        "and `num_heads`; an empty one is refused as neither."
    )
    assert said in prose("docs/checkpoints.md")
