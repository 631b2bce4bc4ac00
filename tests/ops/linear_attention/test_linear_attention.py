"""Linear attention in chunks against its recurrence, which is written out in float64 by itself here."""

import pytest
import torch
from device import DEVICE

from phasor.ops.linear_attention import (
    gated_delta,
    gated_delta_ref,
    retention,
    retention_ref,
)


def draw(length, batch=2, key_heads=2, heads=4, key_dim=7, value_dim=5, dtype=torch.float64, decay=1.0, starts=()):
    """Random arguments of `gated_delta` with unit keys; a new document begins at each of `starts`, in row 0."""
    random = torch.Generator().manual_seed(length)
    q, k = torch.randn(2, batch, key_heads, length, key_dim, generator=random, dtype=torch.float64)
    v = torch.randn(batch, heads, length, value_dim, generator=random, dtype=torch.float64)
    gates = torch.rand(2, batch, heads, length, generator=random, dtype=torch.float64)
    state = torch.randn(batch, heads, key_dim, value_dim, generator=random, dtype=torch.float64)
    begins = torch.zeros(batch, length, dtype=torch.bool)
    begins[0, list(starts)] = True
    k = torch.nn.functional.normalize(k, dim=-1)
    tensors = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, -decay * gates[0], gates[1], state)]
    return [*tensors, begins.to(DEVICE) if starts else None]


def written_out(q, k, v, g, beta, state, starts):
    """The equations with plain matrices, for each row and head alone; `beta` is None for retention."""
    rows = []
    for b in range(v.shape[0]):
        for h in range(v.shape[1]):
            kh, S, outputs = h // (v.shape[1] // k.shape[1]), state[b, h], []
            for t in range(v.shape[2]):
                S = torch.zeros_like(S) if starts is not None and starts[b, t] else g[b, h, t].exp() * S
                kt, vt = k[b, kh, t], v[b, h, t]
                S = S + (torch.outer(kt, vt) if beta is None else beta[b, h, t] * torch.outer(kt, vt - S.T @ kt))
                outputs.append(S.T @ q[b, kh, t])
            rows.append((torch.stack(outputs), S))
    outputs, states = (torch.stack(x).unflatten(0, v.shape[:2]) for x in zip(*rows, strict=True))
    return outputs, states


def run(operation, arguments):
    """Retention takes no strength."""
    is_delta = operation in (gated_delta, gated_delta_ref)
    return operation(*arguments) if is_delta else operation(*arguments[:4], *arguments[5:])


def gradients(outputs, arguments):
    """Gradients of a sum with random weights; None for what was not used."""
    random = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=random, dtype=torch.float64).to(x)).sum() for x in outputs)
    return torch.autograd.grad(loss, [x for x in arguments[:6] if x is not None], allow_unused=True)


def assert_close(given, expected, tolerance):
    """The largest difference, relative to the largest element."""
    for x, y in zip(given, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert x.isfinite().all()
            error = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-3)
            assert error <= tolerance, float(error)


@pytest.mark.parametrize("operation", [gated_delta_ref, retention_ref])
def test_reference_is_the_equation(operation):
    arguments = draw(9, starts=(0, 4))
    beta = arguments[4] if operation is gated_delta_ref else None
    expected = written_out(*arguments[:4], beta, *arguments[5:])
    assert_close(run(operation, arguments), expected, 1e-14)  # float64, sums of at most 9 terms


@pytest.mark.sample(20)
@pytest.mark.parametrize("starts", [(), (0,), (63, 64, 70), (5, 6, 129)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize(("operation", "reference"), [(gated_delta, gated_delta_ref), (retention, retention_ref)])
def test_chunks_equal_the_recurrence(operation, reference, length, starts):
    arguments = draw(length, starts=[t for t in starts if t < length])
    given, expected = run(operation, arguments), run(reference, arguments)
    assert_close(given, expected, 1e-12)
    assert_close(gradients(given, arguments), gradients(expected, arguments), 1e-12)


@pytest.mark.parametrize(("operation", "reference"), [(gated_delta, gated_delta_ref), (retention, retention_ref)])
@pytest.mark.parametrize("decay", [50.0, 1e4])
def test_decays_below_underflow_are_zeros(operation, reference, decay):
    arguments = draw(70, decay=decay)
    given, expected = run(operation, arguments), run(reference, arguments)
    assert_close(given, expected, 1e-12)
    assert_close(gradients(given, arguments), gradients(expected, arguments), 1e-12)


def test_small_decays_keep_their_digits_behind_a_large_one():
    arguments = draw(64)
    g = arguments[3].detach().clone()
    g[:, :, 1] = -1e4
    single = [None if x is None else x.float() for x in arguments]
    expected = gated_delta_ref(*arguments[:3], g, *arguments[4:])
    # Each of up to 64 writes is off by some units of float32's last place, 2^-24 = 6e-8. A running sum near 1e4 has
    # steps of 1e-3.
    assert_close(gated_delta(*single[:3], g.float(), *single[4:]), expected, 2e-6)


@pytest.mark.parametrize("operation", [gated_delta, retention])
def test_gradcheck(operation):
    arguments = draw(5, batch=1, key_heads=1, heads=2, key_dim=3, value_dim=2, starts=(2,))
    tensors, starts = arguments[:6], arguments[6]
    used = tensors if operation is gated_delta else tensors[:4] + tensors[5:]
    assert torch.autograd.gradcheck(lambda *x: operation(*x, starts), used)


@pytest.mark.parametrize("operation", [gated_delta, retention])
def test_packed_documents_equal_separate_ones(operation):
    arguments = draw(150, batch=1, dtype=torch.float32, starts=(0, 40, 100))
    packed = run(operation, arguments)
    packed_grads = gradients(packed[:1], arguments)
    outputs = []
    for first, last in ((0, 40), (40, 100), (100, 150)):
        part = [x[:, :, first:last] for x in arguments[:5]]
        outputs.append(run(operation, [*part, None, None])[0])
    assert_close(packed[:1], [torch.cat(outputs, 2)], 1e-6)
    separate = gradients([torch.cat(outputs, 2)], arguments)
    assert_close(packed_grads[:5], separate[:5], 1e-6)
    assert not packed_grads[5].any()  # no document goes on from the state


@pytest.mark.parametrize("operation", [gated_delta, retention])
@pytest.mark.parametrize("sizes", [[1] * 70, [3, 64, 1, 2], [69, 1]])
def test_pieces_of_any_length_equal_one_pass(operation, sizes):
    arguments = draw(70, starts=(20,))
    expected = run(operation, arguments)
    state, outputs, first = arguments[5], [], 0
    for size in sizes:
        part = [x[:, :, first : first + size] for x in arguments[:5]]
        y, state = run(operation, [*part, state, arguments[6][:, first : first + size]])
        outputs.append(y)
        first += size
    assert_close([torch.cat(outputs, 2), state], expected, 1e-12)


@pytest.mark.parametrize("operation", [gated_delta, retention])
def test_padding_leaves_the_state(operation):
    arguments = draw(20)
    padded = [torch.nn.functional.pad(x, (0, 0, 9, 4)) for x in arguments[:3]]
    padded += [torch.nn.functional.pad(x, (9, 4)) for x in arguments[3:5]]
    y, state = run(operation, [*padded, *arguments[5:]])
    assert_close([y[:, :, 9:29], state], run(operation, arguments), 1e-12)


@pytest.mark.parametrize("operation", [gated_delta, retention])
def test_no_tokens_return_the_state(operation):
    arguments = draw(0)
    y, state = run(operation, arguments)
    assert y.shape == arguments[2].shape
    assert torch.equal(state, arguments[5])


@pytest.mark.parametrize(
    ("name", "index", "shape"), [("query", 0, (2, 2, 8, 7)), ("strength", 4, (2, 2, 9)), ("state", 5, (2, 4, 5, 7))]
)
def test_wrong_shapes_are_named(name, index, shape):
    arguments = draw(9)
    arguments[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"{name} has the shape \[{', '.join(map(str, shape))}\], but \["):
        gated_delta(*arguments)


def test_heads_are_a_multiple_of_key_heads():
    arguments = draw(9)
    arguments[2] = arguments[2][:, :3]
    with pytest.raises(ValueError, match="3 heads are not a multiple of 2 key heads"):
        gated_delta(*arguments)
