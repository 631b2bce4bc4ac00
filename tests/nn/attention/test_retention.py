"""Retention and Mamba-2: their formulas, and that documents, padding, chunks and caches change nothing."""

import pytest
import torch
import torch.nn.functional as F
from schemes import build, tiny, tokens

import phasor
from phasor.config import LayerConfig
from phasor.evaluation.stream import evaluate_stream
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info

SAME = 1e-12  # float64, of the largest value: the same sums in another order
CLOSE = 1e-6  # float32, of the largest value: the rounding of sums over rows of 11 tokens
COUNT = 11
RETENTION = phasor.RetentionAttentionConfig(num_heads=6, num_key_heads=2, key_dim=6, value_dim=7, norm_eps=1e-2)
MAMBA2 = phasor.Mamba2AttentionConfig(num_heads=6, num_key_heads=2, key_dim=5, value_dim=7, conv_width=3, norm_eps=1e-2)


@pytest.fixture(params=[RETENTION, MAMBA2], ids=lambda attention: attention.kind)
def hybrid(request):
    """Two layers with a state, one with softmax attention."""
    other = type(request.param)()
    layers = (LayerConfig(attention=request.param), LayerConfig(attention=other), LayerConfig())
    return build(tiny("rotary", layers=layers, num_layers=3))


def assert_close(found, expected, limit=SAME):
    assert (found - expected).abs().max() <= limit * expected.abs().max()


def one_layer(attention, scheme):
    """A layer with random weights in float64, its input, and what it gives."""
    model = build(tiny(scheme, attention=attention, num_layers=1)).double()
    module, x = model.decoder.blocks[0].attention, torch.randn(1, COUNT, 32, dtype=torch.float64)
    for name, weight in module.named_parameters():
        if name == "D" or name.startswith("norm"):
            torch.nn.init.normal_(weight)
    ctx = model.decoder._self_attention_contexts(x, sequence_info(1, COUNT, x.device), None, None, [Record()])[0]
    return module, x[0], module(x, ctx)[0]


@torch.no_grad()
def test_it_is_the_formula_of_retnet():
    """The parallel form of the paper, `(Q K^T * D) V`, with complex queries and keys, head by head."""
    module, x, found = one_layer(RETENTION, "rotary")
    rows, results = module.qkvz.weight.view(2, 2 * 6 + 2 * 21, 32), []
    n = torch.arange(COUNT, dtype=torch.float64)
    angles = torch.exp(1j * n[:, None] * 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3))  # pairs (i, i + 3)
    for head in range(6):
        group, own = divmod(head, 3)
        q, k = (x @ rows[group, part].T for part in (slice(0, 6), slice(6, 12)))
        q, k = (torch.complex(*y.chunk(2, -1)) * angles for y in (q, k))
        v, z = (x @ rows[group, first + 7 * own : first + 7 + 7 * own].T for first in (12, 33))
        gamma = 1 - 2.0 ** (-5 - head)
        decay = torch.where(n[:, None] >= n, gamma ** (n[:, None] - n), 0.0)
        y = ((q @ k.mH).real * 6**-0.5 * decay) @ v
        y = F.group_norm(y, 1, module.norm.weight[head], module.norm.bias[head], eps=1e-2)
        results.append(y * F.silu(z))
    assert_close(found, torch.cat(results, -1) @ module.out.weight.T)


@torch.no_grad()
def test_it_is_the_formula_of_mamba_2():
    """The recurrence of the paper, head by head and token by token: h = exp(A dt) h + dt B x, y = C h + D x."""
    module, x, found = one_layer(MAMBA2, "none")
    rows, weights = module.qkvz.weight.view(2, 2 * 5 + 2 * 21 + 3, 32), module.convolution.view(2, 31, 3)
    bias, groups = module.convolution_bias.view(2, 31), []
    for group in range(2):
        gated = []
        projected = F.pad(x @ rows[group, :31].T, (0, 0, 2, 0))
        windows = torch.stack([projected[t : t + 3] for t in range(COUNT)])  # [T, W, features]
        mixed = F.silu(torch.einsum("twf,fw->tf", windows, weights[group]) + bias[group])
        c, b = mixed[:, :5], mixed[:, 5:10]
        for own in range(3):
            head = 3 * group + own
            v, z = mixed[:, 10 + 7 * own : 17 + 7 * own], x @ rows[group, 31 + 7 * own : 38 + 7 * own].T
            dt = F.softplus(x @ rows[group, 52 + own] + module.dt_bias[head])
            state, outputs = torch.zeros(5, 7, dtype=torch.float64), []
            for t in range(COUNT):
                state = torch.exp(-module.A_log[head].exp() * dt[t]) * state + dt[t] * torch.outer(b[t], v[t])
                outputs.append(c[t] @ state + module.D[head] * v[t])
            gated.append(torch.stack(outputs) * F.silu(z))
        y = torch.cat(gated, -1)
        groups.append(y / (y.square().mean(-1, keepdim=True) + 1e-2).sqrt() * module.norm.weight[group])
    assert_close(found, torch.cat(groups, -1) @ module.out.weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_documents_are_those_alone_gradients_too(hybrid, dtype):
    ids, sizes = tokens(1, COUNT), [4, 1, 6]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]

    def results(dtype):
        """Outputs and gradients, packed and alone."""
        model = hybrid.to(dtype)
        weight = model.decoder.blocks[0].attention.qkvz.weight
        alone = torch.cat([model(piece) for piece in ids.split(sizes, dim=1)], dim=1)
        both = model(ids, document_ids=documents), alone
        return [*both, *(torch.autograd.grad(y.square().sum(), weight)[0] for y in both)]

    packed, alone, packed_grad, alone_grad = results(dtype)
    limit = CLOSE if dtype == torch.float32 else SAME
    assert_close(packed, alone, limit)
    rounding = (alone_grad - results(torch.float64)[3]).abs().max() / alone_grad.abs().max()
    assert_close(packed_grad, alone_grad, max(limit, 2 * float(rounding)))  # what float32 costs documents alone


@pytest.mark.parametrize("real", [slice(4, None), slice(0, 5), [0, 2, 3, 7]], ids=["left", "right", "between"])
def test_padding_is_as_if_it_were_not_there(hybrid, real):
    model, ids = hybrid.double(), tokens(2, COUNT)
    mask = torch.ones(2, COUNT, dtype=torch.bool)
    mask[1] = False
    mask[1, real] = True
    padded = model(ids, attention_mask=mask)
    assert_close(padded[1][mask[1]], model(ids[1, mask[1]][None])[0])
    assert_close(padded[0], model(ids[:1])[0])


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * COUNT, [5, 6], [2, 1, 8]], ids=str)
def test_chunks_of_padded_rows_equal_one_pass(hybrid, sizes):
    """Rows padded in every chunk on another side, with documents that begin inside and between."""
    model, ids = hybrid.double(), tokens(2, COUNT)
    documents = torch.tensor([[3] * 5 + [7] * 6, [2] * 9 + [4] * 2])
    expected = model(ids, document_ids=documents)
    cache, pieces = model.new_cache(2, 3 * COUNT), []
    for number, (piece, own) in enumerate(zip(ids.split(sizes, 1), documents.split(sizes, 1), strict=True)):
        pad = (2, 1) if number % 2 else (0, 3)
        mask = F.pad(torch.ones_like(piece, dtype=torch.bool), pad)
        around = [torch.full((2, count), value) for count, value in zip(pad, (8, 9), strict=True)]
        given = {"document_ids": torch.cat((around[0], own, around[1]), dim=1), "attention_mask": mask}
        pieces.append(model(F.pad(piece, pad), cache=cache, **given)[mask].view(2, piece.shape[1], -1))
    assert_close(torch.cat(pieces, dim=1), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "scheme"), [(RETENTION, "rotary"), (MAMBA2, "none")], ids=["retention", "mamba2"]
)
def test_a_stream_has_no_end(attention, scheme, tmp_path):
    model, ids = build(tiny(scheme, attention=attention, max_length=8)), tokens(1, 64)
    cache = model.new_cache(1, 1)
    size = cache.nbytes
    found = torch.cat([model(piece, cache=cache) for piece in ids.split(7, dim=1)], dim=1)
    assert (cache.nbytes, cache.used, cache.endless) == (size, 64, True)
    assert_close(found, model(ids), 1e-5)
    (tmp_path / "tokens.bin").write_bytes(ids[0].cpu().numpy().astype("uint16").tobytes())
    streamed = evaluate_stream(model, tmp_path / "tokens.bin", token_dtype="uint16", chunk=5, device=str(ids.device))
    assert streamed["loss"] == pytest.approx(float(F.cross_entropy(found[0, :-1], ids[0, 1:])), rel=1e-5)


@torch.no_grad()
def test_speculative_decoding_goes_back_to_earlier_states(hybrid):
    prompt = [5, 7, 5, 9, 5, 7, 5, 9, 5, 7]
    greedy = list(phasor.generate(hybrid, prompt, max_new_tokens=20))
    assert list(phasor.generate(hybrid, prompt, max_new_tokens=20, draft=build(tiny("rotary"), seed=3))) == greedy


@pytest.mark.parametrize("scheme", ["alibi", "xpos", "accumulated", "selfextend", "shaw", "forget"])
def test_positions_that_need_the_keys_are_refused(scheme):
    with pytest.raises(ValueError, match=f"each by its own alone, and not '{scheme}'"):
        tiny(scheme, attention="retention")


def test_what_they_cannot_do_is_refused():
    with pytest.raises(ValueError, match="retention attention is for decoders, and this is an encoder"):
        tiny("none", attention="retention", shape="encoder")
    with pytest.raises(ValueError, match="mamba2 attention takes no positions: leave it out"):
        tiny("none", layers=(LayerConfig(attention=MAMBA2, position="rotary"), {}))
    with pytest.raises(ValueError, match="conv_bias needs conv_width: there is no convolution"):
        phasor.Mamba2AttentionConfig(conv_width=None)


def test_their_cost_does_not_grow_with_the_keys():
    config = tiny("none", attention=MAMBA2)
    flops = MAMBA2.flops_per_token(config, 10)
    assert flops == MAMBA2.flops_per_token(config, 10**6) == 4 * 6 * 5 * 7 + 2 * 3 * (2 * 2 * 5 + 6 * 7)
