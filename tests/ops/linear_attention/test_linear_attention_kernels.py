"""The Triton kernels of linear attention, under the interpreter on a CPU, against the recurrence in float64."""

import pytest
import torch
from decode_kernels import bfloat16_in_the_interpreter  # noqa: F401
from test_linear_attention import assert_close, draw, gradients, run
from torch._subclasses import FakeTensorMode

from phasor.config import ModelConfig, recurrent
from phasor.config.recurrent import RecurrentAttentionConfig
from phasor.ops.dispatch import force_path
from phasor.ops.linear_attention import (
    GATED_DELTA,
    LINEAR_ATTENTION_STEP,
    LinearAttentionArgs,
    gated_delta,
    gated_delta_ref,
    linear_attention_step,
    retention,
    retention_ref,
)
from phasor.ops.linear_attention.kernel_op import linear_attention_op

kernel_launch = pytest.importorskip("phasor.ops.linear_attention.kernel_launch")

# Sums of some 50 rounded terms: sqrt(50) half units in the last place of float32, 2^-24, and several sums in a row. The
# gradient of a log decay is a sum over all later tokens of a chunk, of terms that cancel.
SINGLE = 5e-6
# Matrix products round their operands to bfloat16, half a unit of which is 2^-9: several products in a row.
HALF = 0.03
PAIRS = [(gated_delta, gated_delta_ref), (retention, retention_ref)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch, request):
    """Chunks of sixteen tokens, so that a few dozen are several; not in tests that use `full_chunks`."""
    if "full_chunks" not in request.fixturenames:
        for name in ("DELTA_CHUNK", "RETENTION_CHUNK"):
            monkeypatch.setattr(recurrent, name, 16)


@pytest.fixture
def full_chunks():
    """Chunks as long as they are outside of tests."""


def check(operation, reference, arguments, dtype, tolerance):
    """The kernels on arguments rounded to `dtype`, against float64 on the same; gates and states are float32."""
    dtypes = [dtype] * 3 + [torch.float32] * 3
    rounded = [
        None if x is None else x.detach().to(t).requires_grad_() for x, t in zip(arguments[:6], dtypes, strict=True)
    ]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in rounded]
    with force_path("triton"):
        given = run(operation, [*rounded, arguments[6]])
        grads = gradients(given, rounded)
    expected = run(reference, [*exact, arguments[6]])
    assert given[0].dtype == dtype
    assert given[1].dtype == torch.float32
    assert_close(given, expected, tolerance)
    assert_close(grads, gradients(expected, exact), tolerance)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("operation", "reference"), PAIRS)
@pytest.mark.parametrize(
    ("length", "starts", "dims"),
    [(33, (), (16, 16)), (47, (0, 5, 16, 31, 46), (20, 7)), (1, (), (5, 33)), (16, (15,), (80, 40))],
)
def test_kernels_equal_the_recurrence(operation, reference, length, starts, dims):
    arguments = draw(length, batch=1, key_heads=1, heads=2, key_dim=dims[0], value_dim=dims[1], starts=starts)
    check(operation, reference, arguments, torch.float32, SINGLE)


@pytest.mark.usefixtures("full_chunks")
@pytest.mark.parametrize(("operation", "reference"), PAIRS)
def test_kernels_in_full_chunks_without_a_state(operation, reference):
    arguments = draw(70, batch=1, key_heads=2, heads=2, key_dim=16, value_dim=16, starts=(66,))
    check(operation, reference, [*arguments[:5], None, arguments[6]], torch.float32, SINGLE)


@pytest.mark.parametrize(("operation", "reference"), PAIRS)
@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
def test_kernels_in_bfloat16(operation, reference):
    arguments = draw(40, batch=1, key_heads=1, heads=2, key_dim=16, value_dim=16, starts=(20,))
    check(operation, reference, arguments, torch.bfloat16, HALF)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("starts", "has_state"), [((), True), ((40,), True), ((50,), False)])
@pytest.mark.parametrize(("operation", "reference"), PAIRS)
def test_segments_at_the_same_time_equal_one_pass(operation, reference, starts, has_state, monkeypatch):
    for name, value in (("SEGMENT_CHUNKS", 2), ("MIN_SEGMENTS", 2)):
        monkeypatch.setattr(kernel_launch, name, value)
    arguments = draw(67, batch=1, key_heads=1, heads=2, key_dim=16, value_dim=7, starts=starts)
    arguments[5] = arguments[5] if has_state else None  # five chunks, two segments
    check(operation, reference, arguments, torch.float32, SINGLE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("starts", [(), (20, 40, 66)])
def test_outputs_of_several_parts_of_a_chunk(parts, starts, monkeypatch):
    """Retention keeps a state for longer chunks than those whose outputs a program computes."""
    monkeypatch.setattr(recurrent, "RETENTION_CHUNK", 64)
    monkeypatch.setattr(recurrent, "LONG_CHUNK_DTYPES", ("float32",))
    monkeypatch.setattr(kernel_launch, "OUTPUT_CHUNK", 64 // parts)
    arguments = draw(150, batch=1, key_heads=1, heads=2, key_dim=16, value_dim=7, starts=starts)
    check(retention, retention_ref, arguments, torch.float32, SINGLE)


def test_kernels_with_decays_below_underflow():
    arguments = draw(20, batch=1, key_heads=1, heads=1, key_dim=16, value_dim=16, decay=50.0)
    arguments[3].data[..., 3], arguments[3].data[..., 9] = -1e5, -torch.inf
    check(gated_delta, gated_delta_ref, arguments, torch.float32, SINGLE)


@pytest.mark.usefixtures("full_chunks")
def test_kernels_with_one_key_again_and_again():
    """Powers of the system of a chunk then grow as binomial coefficients; its inverse does not."""
    arguments = draw(64, batch=1, key_heads=1, heads=1, key_dim=16, value_dim=16, decay=1e-3)
    arguments[1].data[:] = arguments[1].data[:, :, :1]
    arguments[4].data[:] = 1.0
    check(gated_delta, gated_delta_ref, arguments, torch.float32, SINGLE)


def test_kernels_read_transposed_tensors():
    arguments = draw(20, batch=2, key_heads=1, heads=2, key_dim=16, value_dim=16)
    expected = gated_delta_ref(*arguments)
    single = [x.detach().float() for x in arguments[:6]]
    single = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in single[:5]] + single[5:]
    with force_path("triton"):
        assert_close(gated_delta(*single), expected, SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operation", "reference"), PAIRS)
@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
def test_one_token_updates_the_state_in_place(operation, reference, dtype):
    arguments = draw(1, key_dim=20, value_dim=33, starts=(0,))
    rounded = [x.detach().to(t) for x, t in zip(arguments[:6], [dtype] * 3 + [torch.float32] * 3, strict=True)]
    expected = run(reference, [*(x.double() for x in rounded), arguments[6]])
    strength, state = rounded[4] if operation is gated_delta else None, rounded[5].clone()
    tolerance = SINGLE if dtype == torch.float32 else 2**-8  # the output is rounded once
    with force_path("triton"):
        args = LinearAttentionArgs(*rounded[:4], strength, state)
        assert LINEAR_ATTENTION_STEP.explain(args)[0] == "Triton kernel of one token"
        assert_close(run(operation, [*rounded, arguments[6]]), expected, tolerance)
        y = linear_attention_step(*rounded[:4], strength, state, arguments[6])
    assert_close([y, state], expected, tolerance)
    state = rounded[5].clone()
    with force_path("reference"):
        y = linear_attention_step(*rounded[:4], strength, state, arguments[6])
    assert_close([y, state], expected, tolerance)


def test_a_step_takes_one_token():
    arguments = draw(2)
    with pytest.raises(ValueError, match="a step takes one token, not 2"):
        linear_attention_step(*arguments)


def test_float16_and_mixed_dtypes_take_torch():
    arguments = [x.detach().half() for x in draw(3)[:5]]
    with force_path("triton"):
        path, reasons = GATED_DELTA.explain(LinearAttentionArgs(*arguments))
    assert path == "torch, in chunks"
    assert "float16, float16, float16" in reasons["Triton kernels, in chunks"]


@pytest.mark.usefixtures("full_chunks")
def test_kernels_compile_with_their_gradient():
    arguments = draw(18, batch=1, key_heads=1, heads=1, key_dim=16, value_dim=16)
    leaves = [x.detach().float().requires_grad_() for x in arguments[:6]]
    with force_path("triton"):
        compiled = torch.compile(lambda *x: gated_delta(*x), fullgraph=True, backend="aot_eager")
        given = compiled(*leaves)
        assert_close(gradients(given, leaves), gradients(gated_delta(*leaves), leaves), 1e-6)


@pytest.mark.parametrize("key_dim", [64, 256])
@pytest.mark.parametrize("kind", ["retention", "gated-delta", "mamba2"])
def test_plans_count_what_the_kernels_keep(kind, key_dim, full_chunks):
    model = ModelConfig(vocab_size=9, dim=256, num_layers=1, num_heads=4, attention={"kind": kind, "key_dim": key_dim})
    config, tokens = model.attention, 512
    assert isinstance(config, RecurrentAttentionConfig)
    heads, key_heads, key, value = config.sizes(model)
    with FakeTensorMode():
        q, k = torch.empty(2, 1, key_heads, tokens, key, dtype=torch.bfloat16)
        v, gates = torch.empty(1, heads, tokens, value, dtype=torch.bfloat16), torch.empty(1, heads, tokens)
        kept = linear_attention_op(LinearAttentionArgs(q, k, v, gates, gates if config.is_delta else None, None, None))
    assert sum(x.nbytes for x in kept[2:]) == 2 * tokens * config.kept_by_kernels(model)
