"""What holds for every registered position scheme, each stated once and run over all it applies to.

Where one computation is compared in two arrangements, both run in float64: rounding is then near 1e-15, and a
wrong angle, bias or mask shows at any size.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from schemes import BY_LENGTH, EXTENSIONS, FIXED, SCHEMES, SHORT, VIEWS, build, relative_change, tiny, tokens
from torch import Tensor

import phasor
from phasor import LayerConfig, ModelConfig, RotaryConfig, Transformer

EXACT = 1e-12  # relative, in float64: hundreds of roundings of 1e-16 each, with a margin

# Layers that differ: local and global attention with two rotary bases, layers without positions, two schemes at once.
MIXED = {
    "local-global": tiny(
        "rotary",
        num_layers=3,
        layers=(LayerConfig(attention={"window": 4}), LayerConfig(position=RotaryConfig(base=1e6))),
    ),
    "nope-layers": tiny("rotary-dynamic-yarn", num_layers=3, layers=(LayerConfig(), LayerConfig(position="none"))),
    "input-and-scores": tiny("learned", layers=(LayerConfig(position="alibi"), LayerConfig(position="t5"))),
}
MODELS = {name: tiny(name) for name in SCHEMES} | MIXED


def test_the_table_of_schemes_is_complete():
    assert {scheme.kind for scheme in SCHEMES.values()} == set(phasor.kinds("positions"))
    assert {extension.kind for extension in EXTENSIONS.values()} == set(phasor.kinds("extensions"))


SIZES = {"dim": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 211, "max_length": 64}
NAMES = ("llama-2", "llama-3.1", "palm", "grok-1", "bloom", "mpt", "roformer", "t5", "t5-1.1")
PRESETS = {name: phasor.preset(name, **SIZES) for name in NAMES}
PRESETS |= {f"llama-2 with {n}": phasor.preset("llama-2", **SIZES, head_dim=8, position=SCHEMES[n]) for n in SCHEMES}
RELATIVE = [name for name, config in PRESETS.items() if config.position.shift_invariant]


class TestRelative:
    """Shifting all positions changes nothing where a scheme says that only distances matter."""

    def model(self, name: str) -> Transformer:
        torch.manual_seed(0)
        return Transformer(PRESETS[name]).eval()

    @torch.no_grad()
    def logits_at(self, model: Transformer, offset: int) -> Tensor:
        """Schemes of several axes get different positions on each."""
        count, axes = 24, model.config.position.axes
        ids = torch.randint(0, 211, (2, count), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(count) + offset
        if axes > 1:
            positions = torch.stack([torch.arange(count).expand(2, -1) // (axis + 1) for axis in range(axes)]) + offset
        if model.config.shape == "encoder-decoder":
            return model(ids, ids, positions=positions, target_positions=positions)
        return model(ids, positions=positions, length=64)

    @pytest.mark.sample(30)
    @pytest.mark.parametrize("name", RELATIVE)
    def test_shifts_up_to_2_to_the_30_change_nothing(self, name):
        model = self.model(name)
        still = self.logits_at(model, 0)
        changes = {by: relative_change(self.logits_at(model, by), still) for by in (1, 2**10, 2**20, 2**30)}
        # Biases on whole distances do not change in one bit, and 4 times 0 is 0: a rounding is the floor.
        rounding = torch.finfo(torch.float32).eps
        assert max(changes.values()) < 1e-5, changes
        assert max(changes.values()) <= 4 * max(changes[1], rounding), changes

    @pytest.mark.parametrize("name", [name for name in PRESETS if name not in RELATIVE])
    def test_schemes_that_do_not_claim_it_do_change(self, name):
        model = self.model(name)
        assert relative_change(self.logits_at(model, 1), self.logits_at(model, 0)) > 1e-4


class Batch:
    """Sequences combined into one batch, and the location of each: `slices` are (row, slice)."""

    def __init__(self, parts: tuple[Tensor, ...], arrangement: str) -> None:
        total, longest = sum(map(len, parts)), max(map(len, parts))
        if arrangement in ("left", "right"):
            starts = [longest + 2 - len(part) if arrangement == "left" else 0 for part in parts]
            self.parts, width = parts, longest + 2
            self.slices = [(row, slice(s, s + len(p))) for row, (s, p) in enumerate(zip(starts, parts, strict=True))]
        else:  # the parts in one row, and in the other order in a second row
            self.parts, width, self.slices = (*parts, *parts[::-1]), total, []
            for row, order in enumerate((parts, parts[::-1])):
                ends = torch.tensor([len(part) for part in order]).cumsum(0).tolist()
                self.slices += [(row, slice(end - len(p), end)) for end, p in zip(ends, order, strict=True)]
        width += 3 if arrangement == "packed, then padded" else 0
        rows = 1 + self.slices[-1][0]
        self.tokens, real = tokens(rows, width, seed=9), torch.zeros(rows, width, dtype=torch.bool)  # noise in padding
        ids = torch.full((rows, width), -1)
        for number, (part, place) in enumerate(zip(self.parts, self.slices, strict=True)):
            self.tokens[place], real[place], ids[place] = part, True, number
        self.attention_mask = None if arrangement == "packed" else real
        self.document_ids = None if arrangement in ("left", "right") else ids

    def check(self, together: Tensor, alone: list[Tensor]) -> None:
        for place, expected in zip(self.slices, alone, strict=True):
            assert relative_change(together[place], expected) < EXACT


ARRANGEMENTS = ("left", "right", "packed", "packed, then padded")


class TestPaddingAndPacking:
    """A sequence gives the same alone, in a padded batch, and packed with others."""

    PARTS = tuple(tokens(length, seed=length) for length in (5, 11, 14))

    def check(self, config: ModelConfig, arrangement: str, **given: int) -> None:
        model = build(config).double()
        batch = Batch(self.PARTS, arrangement)
        with torch.no_grad():
            alone = [model(part[None], **given)[0] for part in batch.parts]
            for block in (512, 4):  # queries at a time: all at once, and windows, sinks and prefixes across blocks
                with mock.patch("phasor.ops.attention.blocks.BLOCK", block):
                    together = model(
                        batch.tokens, attention_mask=batch.attention_mask, document_ids=batch.document_ids, **given
                    )
                batch.check(together, alone)

    @pytest.mark.sample(80)
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("shape", ["decoder", "encoder"])
    @pytest.mark.parametrize("name", MODELS)
    def test_schemes(self, name, shape, arrangement):
        self.check(MODELS[name].replace(shape=shape), arrangement)

    @pytest.mark.sample(30)
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("shape", ["decoder", "encoder"])
    @pytest.mark.parametrize("view", ["window", "sinks"])
    @pytest.mark.parametrize("name", ["none", "learned", "t5", "alibi", "rotary", "xpos", "rotary-dynamic-ntk"])
    def test_windows(self, name, view, shape, arrangement):
        self.check(tiny(name, attention=VIEWS[view], shape=shape), arrangement)

    @pytest.mark.sample(36)
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("name", ["none", "learned", "t5", "alibi", "rotary", "rotary-longrope"])
    def test_prefixes(self, name, view, arrangement):
        self.check(tiny(name, attention=VIEWS[view]), arrangement, prefix_length=3)

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_a_stated_length_is_every_ones(self, arrangement):
        self.check(tiny("rotary-dynamic-ntk"), arrangement, length=50)

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_score_extras(self, arrangement):
        extras = {"softcap": 5.0, "sink_logits": True, "qk_norm": "head", "bias": ("q", "out"), "clip": 2.0}
        self.check(tiny("alibi", attention=extras), arrangement)

    @pytest.mark.sample(36)
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("name", SCHEMES)
    def test_encoder_decoders(self, name, arrangement):
        model = build(tiny(name, shape="encoder-decoder")).double()
        targets = tuple(tokens(length, seed=20 + length) for length in (9, 4, 12))
        source, target = Batch(self.PARTS, arrangement), Batch(targets, arrangement)
        with torch.no_grad():
            together = model(
                source.tokens,
                target.tokens,
                attention_mask=source.attention_mask,
                document_ids=source.document_ids,
                target_attention_mask=target.attention_mask,
                target_document_ids=target.document_ids,
            )
            pairs = zip(source.parts, target.parts, strict=True)
            target.check(together, [model(s[None], t[None])[0] for s, t in pairs])

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    @pytest.mark.parametrize("name", ["axial", "mrope", "mrope-interleaved"])
    def test_positions_of_several_axes(self, name, arrangement):
        model, batch = build(tiny(name)).double(), Batch(self.PARTS, arrangement)
        axes = model.config.position.axes
        positions = torch.randint(0, 50, (axes, *batch.tokens.shape), generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            together = model(
                batch.tokens, positions=positions, attention_mask=batch.attention_mask, document_ids=batch.document_ids
            )
            own = [positions[:, row, where][:, None] for row, where in batch.slices]
            pairs = zip(batch.parts, own, strict=True)
            batch.check(together, [model(part[None], positions=p)[0] for part, p in pairs])

    @pytest.mark.parametrize("name", BY_LENGTH)
    def test_lengths_of_their_own(self, name):
        model, stated = build(tiny(name)).double(), (20, 30, 40)
        batch, pack = Batch(self.PARTS, "left"), Batch(self.PARTS, "packed")
        with torch.no_grad():
            alone = [model(part[None], length=n)[0] for part, n in zip(self.PARTS, stated, strict=True)]
            batch.check(model(batch.tokens, attention_mask=batch.attention_mask, length=list(stated)), alone)
            by_document = [list(stated), list(stated[::-1])]
            pack.check(model(pack.tokens, document_ids=pack.document_ids, length=by_document), alone + alone[::-1])


class TestLength:
    """A stated length matters to the schemes that say so, and to no other."""

    @pytest.mark.parametrize("name", FIXED)
    def test_it_is_nothing_to_fixed_schemes(self, name):
        model, ids = build(tiny(name)), tokens(2, 12)
        assert torch.equal(model(ids, length=100), model(ids))

    @pytest.mark.parametrize("name", BY_LENGTH)
    def test_it_matters_to_the_others(self, name):
        model, ids = build(tiny(name)), tokens(2, SHORT)
        assert relative_change(model(ids, length=100), model(ids)) > 1e-3

    @pytest.mark.parametrize("name", MODELS)
    def test_what_stands_later_is_nothing_to_a_beginning(self, name):
        model, ids = build(MODELS[name]).double(), tokens(2, 20)
        whole, beginning = model(ids, length=30), model(ids[:, :13], length=30)
        assert relative_change(beginning, whole[:, :13]) < EXACT


class TestCausality:
    """A change at one position changes no logit before it: not one bit, for those rows are computed alike."""

    def changed_at(self, ids: Tensor, position: int) -> Tensor:
        changed = ids.clone()
        changed[:, position] = (ids[:, position] + 1) % 61
        return changed

    @pytest.mark.sample(40)
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("name", MODELS)
    def test_nothing_before_a_change_changes(self, name, view):
        config = MODELS[name] if name in MIXED else tiny(name, attention=VIEWS[view])
        model, ids = build(config), tokens(2, 16)
        before = model(ids, length=24)
        for position in (1, 7, 15):
            after = model(self.changed_at(ids, position), length=24)
            assert torch.equal(after[:, :position], before[:, :position])
            assert not torch.equal(after[:, position], before[:, position])

    def test_a_windows_reach_ends(self):
        model, ids = build(tiny("rotary", attention=VIEWS["window"], num_layers=1)), tokens(2, 16)
        before, after = model(ids), model(self.changed_at(ids, 5))
        reached = (before != after).any(-1).any(0)
        assert reached.nonzero().flatten().tolist() == [5, 6, 7, 8]

    def test_sink_tokens_are_seen_from_everywhere(self):
        model, ids = build(tiny("rotary", attention=VIEWS["sinks"], num_layers=1)), tokens(2, 16)
        before = model(ids)
        from_sink, from_other = (
            (before != model(self.changed_at(ids, position))).any(-1).any(0) for position in (1, 2)
        )
        assert from_sink.nonzero().flatten().tolist() == list(range(1, 16))
        assert from_other.nonzero().flatten().tolist() == [2, 3, 4, 5]

    @pytest.mark.sample(36)
    @pytest.mark.parametrize("name", MODELS)
    def test_a_prefix_sees_itself_and_nothing_after(self, name):
        model, ids = build(MODELS[name]), tokens(2, 16)
        before = model(ids, prefix_length=6)
        inside, behind = (model(self.changed_at(ids, position), prefix_length=6) for position in (5, 6))
        assert (before != inside).any(-1).all()
        assert torch.equal(before[:, :6], behind[:, :6])

    def test_rows_may_have_prefixes_of_their_own(self):
        model, ids = build(tiny("rotary")).double(), tokens(3, 16)
        together = model(ids, prefix_length=[0, 6, 16])
        alone = torch.cat([model(ids[row : row + 1], prefix_length=n) for row, n in enumerate((0, 6, 16))])
        assert relative_change(together, alone) < EXACT
        assert torch.equal(model(ids, prefix_length=[0, 0, 0]), model(ids, prefix_length=0))
        assert relative_change(model(ids, prefix_length=0), model(ids)) < EXACT

    def test_experts_route_each_token_by_itself(self):
        experts = {"activation": "swiglu", "experts": {"num_experts": 4, "shared_dim": 16}}
        model, ids = build(tiny("rotary", feedforward=experts)).double(), tokens(2, 16)
        before, after = model(ids), model(self.changed_at(ids, 7))
        # Sorting tokens by expert changes the sizes of matrix products, and with them their last bits.
        assert relative_change(after[:, :7], before[:, :7]) < EXACT

    @pytest.mark.parametrize("name", ["t5", "alibi", "rotary"])
    def test_a_target_sees_all_of_its_source(self, name):
        model, source, target = build(tiny(name, shape="encoder-decoder")), tokens(2, 9), tokens(2, 7, seed=2)
        before = model(source, target)
        assert (before != model(self.changed_at(source, 8), target)).any(-1).all()
        assert torch.equal(model(source, self.changed_at(target, 4))[:, :4], before[:, :4])


class TestOrder:
    """Without positions an encoder's first token is blind to order; with any scheme it is not."""

    THERE, BACK = (
        torch.tensor([[("[CLS]", "from", "Beijing", "to", "Shanghai").index(word) for word in words.split()]])
        for words in ("[CLS] from Beijing to Shanghai", "[CLS] from Shanghai to Beijing")
    )

    def change(self, name: str) -> float:
        model = build(tiny(name, shape="encoder", head="none")).double()
        return relative_change(model(self.THERE)[:, 0], model(self.BACK)[:, 0])

    def test_without_positions(self):
        assert self.change("none") < EXACT

    @pytest.mark.parametrize("name", [name for name in SCHEMES if name != "none"])
    def test_with_positions(self, name):
        assert self.change(name) > 1e-3
