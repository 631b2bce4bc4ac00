"""Schemes that accumulate over the input: the formulas in float64, exact after 10^9 tokens, the same through caches."""

from __future__ import annotations

import math
from unittest import mock

import mpmath
import pytest
import torch
from device import DEVICE
from schemes import build, relative_change, tiny, tokens
from torch import Tensor

import phasor
from phasor.bench.studies.decode_schemes import DecodeSchemesSettings
from phasor.bench.studies.schemes import SchemesSettings
from phasor.evaluation.compare.schemes import parse_schemes
from phasor.kv_cache.static import StaticKVCache
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.sums import Steps, running_sums
from phasor.ops.attention import Mask, SumBias

SUMS = ["forget", "combined-forget", "accumulated", "accumulated-adjacent"]
# Sums after 10^9 tokens, near the end of 64 bits so that they wrap around, and anywhere.
FAR = (-(10**9) * 2**32, 2**63 - 2**33, -(2**63) + 5, 123456789123456789)


class After(LayerStep):
    """A call after tokens whose sums are known, `[B, sums]`."""

    def __init__(self, before: Tensor) -> None:
        super().__init__(Mask(), None)
        self.before = before

    def last(self, name: str) -> Tensor:
        return self.before


def forgetting_attention(x: Tensor, model: phasor.Transformer, layer: int = 0) -> Tensor:
    """The Forgetting Transformer's attention of one layer by its formula: weights by products of gates, in float64."""
    attention, scheme = model.decoder.blocks[layer].attention, model.decoder.positions[0]
    heads, groups, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    projected = (x @ attention.qkv.weight.T).view(*x.shape[:2], groups, heads // groups + 2, dim)
    q, k, v = projected[..., :-2, :].flatten(2, 3), projected[..., -2, :], projected[..., -1, :]
    gates = torch.sigmoid(x @ scheme.weight[layer].T + scheme.bias[layer])  # [B, T, H]
    out = torch.zeros_like(q)
    for row in range(len(x)):
        for head in range(heads):
            for i in range(x.shape[1]):
                kv = head // (heads // groups)
                scores = [math.exp(float(q[row, i, head] @ k[row, j, kv]) / dim**0.5) for j in range(i + 1)]
                kept = [float(gates[row, j + 1 : i + 1, head].prod()) for j in range(i + 1)]
                weights = torch.tensor([s * f for s, f in zip(scores, kept, strict=True)], dtype=x.dtype)
                out[row, i, head] = (weights / weights.sum()) @ v[row, : i + 1, kv]
    return out.flatten(2) @ attention.out.weight.T


def test_forget_gates_are_those_of_the_paper():
    model = build(tiny("forget", num_layers=1)).double()
    hidden = []
    block = model.decoder.blocks[0]
    block.attention.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    block.attention.register_forward_hook(lambda module, args, kwargs, y: hidden.append(y), with_kwargs=True)
    with torch.no_grad():
        model(tokens(2, 9))
        expected, mirrored = (forgetting_attention(x, model) for x in (hidden[0], hidden[0].flip(1)))
    # Gates are rounded to 2^-33 nats.
    assert torch.allclose(hidden[1], expected, rtol=0, atol=1e-8)
    assert not torch.allclose(hidden[1], mirrored.flip(1), atol=1e-2)


def test_accumulated_angles_are_sums_of_steps():
    """Against float64 sums of radians, written out; and plain rotary where nothing is learned."""
    model = build(tiny("accumulated", num_layers=1)).double()
    scheme, x = model.decoder.positions[0], torch.randn(2, 9, 32, dtype=torch.float64)
    steps = scheme.steps(x, scheme.layer_weights(0), None)
    rotations = scheme.rotations(running_sums("angle_sums", steps, LayerStep(Mask(), None))[0])
    theta = torch.tensor([10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    for head in range(2):
        own = scheme.weight[0][4 * head : 4 * head + 4]
        angle = torch.stack([sum(theta + x[:, s] @ own.T for s in range(t + 1)) for t in range(9)], dim=1)
        for got, expected in zip(rotations.key, (angle.cos(), angle.sin()), strict=True):
            assert torch.allclose(got[:, :, head], expected, rtol=0, atol=1e-13)
            assert torch.equal(rotations.query[0][:, :, 2 * head + 1], rotations.key[0][:, :, head])
    plain = build(tiny("rotary", num_layers=1)).double()
    torch.nn.init.zeros_(scheme.weight[0])
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".positions." not in k})
    with torch.no_grad():
        assert torch.allclose(model(tokens(2, 9)), plain(tokens(2, 9)), rtol=0, atol=1e-12)


def test_accumulated_angles_after_a_billion_tokens_are_exact():
    """Sums of 10^9 equal steps, by mpmath: the phase that is left of all rotations."""
    scheme = build(tiny("accumulated", num_layers=1)).decoder.positions[0]
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(3))
    step = scheme.steps(x, scheme.layer_weights(0), None).fixed
    sums, _ = running_sums("angle_sums", Steps(step, step.float()), After(step[:, 0] * 10**9))
    cos, sin = scheme.rotations(sums).key
    with mpmath.workdps(60):
        for number, fixed in enumerate(step.flatten().tolist()):
            turns = mpmath.mpf(fixed) * (10**9 + 1) / 2**64
            for got, function in ((cos, mpmath.cos), (sin, mpmath.sin)):
                assert abs(float(got.flatten()[number]) - float(function(2 * mpmath.pi * turns))) < 1e-14
            radians = mpmath.mpf(10000) ** (-mpmath.mpf(number % 4) / 4) + mpmath.mpf(
                float(x.flatten() @ scheme.weight[0][number].detach())
            )
            difference = mpmath.mpf(fixed) / 2**64 - radians / (2 * mpmath.pi)
            assert abs(difference - mpmath.nint(difference)) < 1e-7  # the learned part is a float32 product


@pytest.mark.parametrize("start", FAR)
def test_sums_are_integers_that_wrap_around(start):
    """Against Python's integers: differences over 10^5 steps after any sum, to the last bit."""
    fixed = torch.randint(-(2**34), 0, (1, 100_000, 1), generator=torch.Generator().manual_seed(0))
    sums = running_sums("sums", Steps(fixed, fixed.double()), After(torch.tensor([[start]])))[0].fixed[0, :, 0]
    exact = [start]
    for step in fixed[0, :, 0].tolist():
        exact.append(exact[-1] + step)
    bias = SumBias(sums[None, :, None], sums[None, :, None], 2.0**-32)
    for i, j in ((99_999, 0), (99_999, 99_998), (5, 5), (70_000, 1)):
        got = bias.block(torch.tensor([i]), torch.tensor([j]), torch.float64).item()
        assert got == (exact[i + 1] - exact[j + 1]) / 2**32
        assert bias.block(torch.tensor([i]), torch.tensor([j])).item() == pytest.approx(got, rel=2**-24)


@pytest.mark.parametrize("view", [{}, {"window": 4}, {"window": 4, "sink_tokens": 2}], ids=["whole", "window", "sinks"])
@pytest.mark.parametrize("name", SUMS)
def test_a_cache_in_any_chunks_from_any_sum_is_the_whole(name, view):
    model, ids = build(tiny(name, attention=view)), tokens(2, 24)
    with torch.no_grad():
        whole = model(ids)
        assert 0.1 < whole.abs().max() < 100
        for start in (0, *FAR) if "forget" in name else (0,):
            cache = model.new_cache(2, 24, spare=4)
            pieces, first = [], 0
            for size in (5, 1, 9, 1, 1, 7):
                pieces.append(model(ids[:, first : first + size], cache=cache))
                first += size
                if first == 5:  # as if so much had been added up before
                    for layer in cache.layers:
                        layer["gate_sums" if "forget" in name else "angle_sums"] += start
            assert torch.allclose(torch.cat(pieces, 1), whole, rtol=0, atol=1e-4)
            if start == 0:
                near = torch.cat(pieces, 1)
            assert torch.equal(torch.cat(pieces, 1), near)  # exact: not one bit depends on the sums before
        cache.crop(3)
        assert torch.allclose(model(ids[:, 21:], cache=cache), whole[:, 21:], rtol=0, atol=1e-4)
        cache.crop([2, 1])
        cache.reorder([1])
        static = StaticKVCache(cache)
        assert torch.allclose(model(ids[1:, 23:], cache=static), whole[1:, 23:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("start", FAR)
def test_accumulated_rotary_starts_from_any_sum(start):
    """Keys hold their angles, so that the first token brings the sum along; only differences of angles matter."""
    model, ids = build(tiny("accumulated", num_layers=1)).double(), tokens(2, 24)
    scheme = model.decoder.positions[0]
    steps = scheme.steps

    def started(x, weights, prepared):
        own = steps(x, weights, prepared)
        return Steps(torch.cat((own.fixed[:, :1] + start, own.fixed[:, 1:]), dim=1), own.values)

    with torch.no_grad():
        expected = model(ids)
        with mock.patch.object(scheme, "steps", started):
            assert relative_change(model(ids), expected) < 1e-12


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_tokens_that_a_pattern_gathers(name):
    """Rows gathered by a dilation, against one query at a time through a cache."""
    model, ids = build(tiny(name, attention={"sparse": {"kind": "dilated", "dilation": 3}})), tokens(2, 24)
    cache = model.new_cache(2, 24)
    with torch.no_grad():
        steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(24)], dim=1)
        assert torch.allclose(model(ids), steps, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_padding_and_documents_in_a_cache_add_nothing(name):
    model, ids = build(tiny(name)).double(), tokens(2, 20)
    with torch.no_grad():
        whole = model(ids)
        cache = model.new_cache(2, 24)
        model(ids[:, :6], cache=cache)
        real = torch.ones(2, 10, dtype=torch.bool)
        real[0, :3] = False  # the row goes on after padding
        padded = torch.cat((tokens(1, 3, seed=8), ids[:1, 6:13]), 1)
        logits = model(torch.cat((padded, ids[1:, 6:16])), cache=cache, attention_mask=real)
        assert torch.allclose(logits[0, 3:], whole[0, 6:13], rtol=0, atol=1e-8)
        assert torch.allclose(logits[1], whole[1, 6:16], rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_those_of_float64_differences(name, shape):
    """By central differences of the loss in float64, along random directions of every weight; blocks of 4 queries."""
    model, ids = build(tiny(name, shape=shape)).double(), tokens(2, 11)
    scheme = getattr(model, shape).positions[0]
    direction = torch.randn(model(ids).shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with mock.patch("phasor.ops.attention.blocks.BLOCK", 4):
        (model(ids) * direction).sum().backward()
    for weight in scheme.parameters():
        change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * 1e-4 * change
                losses.append(float((model(ids) * direction).sum()))
                weight -= sign * 1e-4 * change
        expected = (losses[0] - losses[1]) / 2e-4
        # Fixed point moves sums in steps of 2^-32, which is 1e-6 of a change of 1e-4.
        assert float((weight.grad * change).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", SUMS)
def test_generation_and_files_of_caches(name, tmp_path):
    model, ids = build(tiny(name)), tokens(2, 9)
    new = phasor.generate(model, ids.tolist(), max_new_tokens=6)
    with torch.no_grad():
        for row, result in zip(ids.tolist(), new, strict=True):
            assert model(torch.tensor([row + result]))[0, 8:-1].argmax(-1).tolist() == result
        cache = model.new_cache(2, 16)
        model(ids[:, :7], cache=cache)
        cache.save(tmp_path / "cache.safetensors")
        again = phasor.KVCache.load(tmp_path / "cache.safetensors", DEVICE)
        assert torch.equal(model(ids[:, 7:], cache=again), model(ids[:, 7:], cache=cache))
    beams = phasor.generate(model, ids.tolist(), max_new_tokens=4, num_beams=3)
    alone = [phasor.generate(model, row, max_new_tokens=4, num_beams=3) for row in ids.tolist()]
    assert beams == alone


@pytest.mark.parametrize("name", SUMS)
def test_capped_sinks_and_sums_of_biases_are_refused(name):
    with pytest.raises(ValueError, match="does not add up with that of another scheme"):
        tiny(phasor.CombinedConfig(schemes=("alibi", "forget")))
    with pytest.raises(ValueError, match="caps the distance to sink tokens, and the positions"):
        tiny(name, attention={"window": 4, "sink_tokens": 2, "cap_sinks": True})


@pytest.mark.sample(1)
@pytest.mark.cpu_only("Dynamo does not trace Tensor.unflatten under torch.set_default_device")
@pytest.mark.parametrize("name", SUMS)
def test_compiled_forward_and_backward_are_one_graph(name):
    torch.compiler.reset()
    model, ids = build(tiny(name, num_layers=1)), tokens(2, 12)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        logits = run(ids)
        logits.logsumexp(-1).mean().backward()
        results.append((logits.detach(), *(weight.grad for weight in model.parameters())))
        model.zero_grad()
    torch.compiler.reset()
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_backends_show_the_kernel_of_attention():
    paths = {one.op: one for one in phasor.backends(tiny("forget"), device="cuda").ops}
    assert paths["attention"].path == "Triton kernel over key intervals"


def test_the_former_name_is_refused_with_the_present_one():
    with pytest.raises(ValueError, match="'selective' is called 'accumulated' now"):
        phasor.ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1, position="selective")
    with pytest.raises(ValueError, match="'selective' is called 'accumulated' now"):
        parse_schemes("rotary+selective", None)
    with pytest.raises(ValueError, match="'selective' is called 'accumulated' now"):
        SchemesSettings(schemes=("selective",))
    with pytest.raises(ValueError, match="'selective' is called 'accumulated' now"):
        DecodeSchemesSettings(schemes=("selective",))
