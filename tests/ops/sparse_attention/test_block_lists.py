"""Attention over lists of key blocks: the Triton kernels, values and gradients, against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from device import DEVICE, ON_GPU
from references import SINGLE, normal
from schemes import build, tiny, tokens

from phasor.ops import dispatch
from phasor.ops.attention import Mask, ScoreMod, flash_hopper
from phasor.ops.sparse_attention import (
    SPARSE_ATTENTION,
    KeyBlocks,
    TopBlocks,
    block_lists,
    sparse_attention,
    sparse_attention_ref,
)
from phasor.ops.sparse_attention.selection import select_blocks
from phasor.ops.sparse_attention.tile_lists import selected_block_lists

tiles = pytest.importorskip("phasor.ops.attention.flash_tiles")
list_launch = pytest.importorskip("phasor.ops.sparse_attention.list_launch")
KERNEL = "Triton kernel over lists of key blocks"
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of sixteen by sixteen, so that a few dozen tokens are several."""
    monkeypatch.setattr(list_launch, "tiling", lambda kernel, q: tiles.Tiling(16, 16, 4, 1))


def qkv(queries, keys, dtype, rows=1):
    sizes = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    return [normal(rows, t, h, DIM, seed=i).to(dtype).requires_grad_() for i, (t, h) in enumerate(sizes)]


# A pattern, the number of queries and of tokens before them, whether it is causal, and the rows of the batch.
CASES = {
    "strided and global after a cache": (KeyBlocks(16, 1, 3, 1), 18, 45, True, 1),
    "top-k after a cache": (TopBlocks(16, 2), 18, 37, True, 1),
}
MORE_CASES = {
    "strided": (KeyBlocks(16, 2, 3), 100, 0, True, 2),
    "strided and global, blocks of two tiles": (KeyBlocks(32, 1, 2, 1), 130, 0, True, 1),
    "strided encoder": (KeyBlocks(16, 1, 3, 1), 70, 0, False, 2),
    "top-k": (TopBlocks(16, 3), 100, 0, True, 2),
    "top-k, blocks of two tiles": (TopBlocks(32, 2), 90, 0, True, 1),
    "own block alone": (TopBlocks(16, 1), 60, 0, True, 1),
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CASES)])
def test_the_kernel_equals_the_reference_in_float64(name, held, monkeypatch):
    """Where a program holds the keys of a block while queries go by, and where it goes over them."""
    if not held:
        monkeypatch.setattr(list_launch, "MAX_HELD_BYTES", 0)
    pattern, queries, offset, causal, rows = (CASES | MORE_CASES)[name]
    mask, score_mod = Mask(causal=causal, offset=offset, pattern=pattern), ScoreMod(scale=DIM**-0.5)
    inputs, exact = (qkv(queries, queries + offset, dtype, rows) for dtype in (torch.float32, torch.float64))
    monkeypatch.setattr(block_lists, "MAX_SLOT_ELEMENTS", queries * DIM * 3 * HEADS // KV_HEADS)
    with dispatch.force_path("triton"):
        assert SPARSE_ATTENTION.explain(*inputs, mask, score_mod)[0] == KERNEL
        ours = sparse_attention(*inputs, mask, score_mod)
        expected = sparse_attention_ref(*exact, mask, score_mod)[0]
        torch.testing.assert_close(ours.double(), expected, atol=SINGLE, rtol=SINGLE)
        direction = normal(*expected.shape, seed=9)
        grads = torch.autograd.grad(ours, inputs, direction.float())
        for got, right in zip(grads, torch.autograd.grad(expected, exact, direction), strict=True):
            torch.testing.assert_close(got.double(), right, atol=SINGLE, rtol=SINGLE)


@pytest.mark.parametrize("held_tiles", [1, 2])
def test_slots_that_choose_no_block_are_not_read(held_tiles, monkeypatch):
    """What was in memory before does not matter; nor does how many tiles of queries go by the keys of a block."""
    monkeypatch.setattr(list_launch, "MAX_HELD_TILES", held_tiles)
    monkeypatch.setattr(list_launch, "MIN_PROGRAMS", 1)
    slot_tensor = list_launch.slot_tensor

    def filled_slots(x, slots):
        y, strides = slot_tensor(x, slots)
        return y.fill_(float("nan")), strides

    monkeypatch.setattr(list_launch, "slot_tensor", filled_slots)
    mask, score_mod = Mask(causal=True, pattern=TopBlocks(16, 3)), ScoreMod(scale=DIM**-0.5)
    inputs, exact = (qkv(40, 40, dtype) for dtype in (torch.float32, torch.float64))
    with dispatch.force_path("triton"):
        ours = sparse_attention(*inputs, mask, score_mod)
        expected = sparse_attention_ref(*exact, mask, score_mod)[0]
        torch.testing.assert_close(ours.double(), expected, atol=SINGLE, rtol=SINGLE)
        grads = torch.autograd.grad(ours.square().sum(), inputs)
    for got, right in zip(grads, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        torch.testing.assert_close(got.double(), right, atol=4 * SINGLE, rtol=SINGLE)


@pytest.mark.parametrize("at_once", [64, 16])
@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 4), (torch.float16, 2)])
def test_the_kernel_chooses_the_same_blocks_as_torch(dtype, top_k, at_once, monkeypatch):
    """In half precision too: mean keys are as precise as in float32, by the rest that their rounding leaves."""
    monkeypatch.setattr(list_launch, "MAX_ONE_TILE", at_once)
    monkeypatch.setattr(list_launch, "SELECT_TILE", {2: 16, 4: 32})
    q, k, _ = (x.detach() for x in qkv(32, 148, dtype))
    means = k.float().unflatten(1, (37, 4)).mean(2)
    chosen = list_launch.choose_blocks(q, means, 4, top_k, 115)
    own = (torch.arange(32)[None] + 115) // 4
    expected = select_blocks(q, means, own, own * 0, top_k)
    assert torch.equal(chosen[..., 0].long(), expected[..., 0])
    assert torch.equal(chosen.long().sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("at_once", [64, 16])
def test_of_equal_scores_the_lowest_block_is_chosen(at_once, monkeypatch):
    """By torch and by the kernel, over one tile of blocks or several; the oracle sorts by score and number."""
    monkeypatch.setattr(list_launch, "MAX_ONE_TILE", at_once)
    monkeypatch.setattr(list_launch, "SELECT_TILE", {2: 16, 4: 16})
    top_k = 5
    q, means = (normal(1, n, h, DIM, seed=i).sign() / 2 for i, (n, h) in enumerate(((32, HEADS), (37, KV_HEADS))))
    own = (torch.arange(32)[None] + 115) // 4
    scores = torch.einsum("tkgd,nkd->kgtn", q[0].unflatten(1, (KV_HEADS, -1)), means[0]).flatten(0, 1)
    expected = [
        [[own_block, *sorted(range(own_block), key=lambda n: (-row[n], n))[: top_k - 1]] for own_block, row in pairs]
        for pairs in ([*zip(own[0].tolist(), head.tolist(), strict=True)] for head in scores)
    ]
    assert any(len({row[n] for n in range(28)}) < 20 for row in scores[0].tolist())  # there are ties
    for chosen in (
        select_blocks(q, means, own, own * 0, top_k),
        list_launch.choose_blocks(q.float(), means.float(), 4, top_k, 115),
    ):
        assert torch.equal(chosen[0].long().sort(-1).values, torch.tensor(expected).sort(-1).values)


@pytest.mark.parametrize("tokens", [256, 512])
def test_lists_grow_with_the_choices_alone(tokens):
    """At a fixed number of keys: no table of tiles by their queries, and no more than two tiles that are not full."""
    top_k, block_m = 4, 16
    own = torch.arange(tokens) // 16
    chosen = torch.stack([own, *((own - i).clamp(min=-1) for i in range(1, top_k))], dim=-1).expand(1, 2, -1, -1)
    lists = selected_block_lists(chosen, tokens // 16, block_m)
    assert lists.pairs.shape == (2, tokens * top_k)
    assert lists.spans.shape == (2, tokens * top_k // block_m + 2 * (tokens // 16), 5)
    assert lists.block_entries is None
    for row in lists.pairs:  # every choice once, by block
        assert torch.equal(row.sort().values, torch.arange(tokens * top_k, dtype=torch.int32))
    begin, _, end = lists.block_spans[0, 3].tolist()
    queries = lists.pairs[0, begin:end] // top_k
    assert torch.equal(queries.sort().values.long(), (chosen[0, 0] == 3).any(-1).nonzero().flatten())


HOPPER = {"top-k": (TopBlocks(256, 3), 1237, 0), "after a cache": (TopBlocks(384, 2), 900, 641)}


@pytest.mark.skipif(not flash_hopper.is_available(DEVICE), reason="the kernel is for Hopper GPUs")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", HOPPER)
def test_the_kernel_for_hopper_equals_float64(name, width, monkeypatch):
    """Of long blocks, whose keys come by TMA; gradients by the kernels for all GPUs from its sums."""
    monkeypatch.undo()  # tiles of their size
    pattern, queries, offset = HOPPER[name]
    mask, score_mod = Mask(causal=True, offset=offset, pattern=pattern), ScoreMod(scale=width**-0.5)
    sizes = ((queries, HEADS), (queries + offset, KV_HEADS), (queries + offset, KV_HEADS))
    rounded = [normal(2, t, h, width, seed=i).bfloat16().to(DEVICE) for i, (t, h) in enumerate(sizes)]
    inputs, exact = ([x.to(dtype).requires_grad_() for x in rounded] for dtype in (torch.bfloat16, torch.float64))
    assert list_launch.hopper_takes(*inputs, pattern.block)
    ours = sparse_attention(*inputs, mask, score_mod)
    expected = sparse_attention_ref(*exact, mask, score_mod)[0]
    direction = normal(*expected.shape, seed=9).bfloat16().to(DEVICE)
    found = [ours, *torch.autograd.grad(ours, inputs, direction)]
    right = [expected, *torch.autograd.grad(expected, exact, direction.double())]
    for x, y in zip(found, right, strict=True):
        assert (x.double() - y).norm() < 1e-2 * y.norm()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from phasor.ops.sparse_attention.list_hopper_kernel import block_hopper_kernel as kernel

layout = gl.NVMMASharedLayout.get_default_for([1, 128, 128], gl.bfloat16)
types = {x: f"tensordesc<bf16[1, 128, 128],{layout!r}>" for x in ("k_desc", "v_desc")}
types |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32", "scale": "fp32"}
constants = {"HEAD_DIM": 128, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK": 512, "SLOTS": 16, "NUM_STAGES": 2}
signature = {
    x: "constexpr" if x in constants else types.get(x, "*i32" if x.endswith("_ptr") else "i32")
    for x in kernel.arg_names
}
source = GluonASTSource(kernel, signature, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]))
"""


@pytest.mark.cpu_only("Triton compiles for the GPU that is there")
def test_the_kernel_for_hopper_compiles(tmp_path):
    """With this version of Triton, whose interpreter does not run Gluon."""
    script = tmp_path / "compile_kernel.py"
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 1000


def test_what_the_kernel_for_hopper_takes(monkeypatch):
    """Short blocks, blocks of no whole tiles, float32 and other widths are left to the kernels for all GPUs."""
    x = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)
    assert ON_GPU or not list_launch.hopper_takes(x, x, x, 256)
    monkeypatch.setattr(flash_hopper, "is_available", lambda device: True)
    assert list_launch.hopper_takes(x, x, x, 256)
    assert not list_launch.hopper_takes(x, x, x, 128)
    assert not list_launch.hopper_takes(x, x, x, 320)
    assert not list_launch.hopper_takes(x.float(), x.float(), x.float(), 256)
    assert not list_launch.hopper_takes(x[..., :96], x[..., :96], x[..., :96], 256)
    assert not list_launch.hopper_takes(x, x.expand(3, -1, -1, -1), x, 256)


def test_the_kernel_for_hopper_is_given_its_arguments(monkeypatch):
    """By the names that it has, of those of the kernel over lists."""
    hopper_kernel = pytest.importorskip("phasor.ops.sparse_attention.list_hopper_kernel").block_hopper_kernel
    given = []

    class Launcher:
        kernel = hopper_kernel

        def __call__(self, like, tensors, grid, **scalars):
            given.append((list(tensors), grid, scalars))

    monkeypatch.setattr(list_launch, "hopper_launcher", Launcher)
    monkeypatch.setattr(flash_hopper, "is_available", lambda device: True)
    monkeypatch.setattr(list_launch, "launch_merge", lambda *args, **scalars: None)
    monkeypatch.setattr(flash_hopper, "describe_tokens", lambda x, tokens: (x.shape, tokens))
    q, k, v = (x.bfloat16() for x in (torch.zeros(1, 300, n, 64) for n in (4, 2, 2)))
    chosen = list_launch.choose_blocks(q, k[:, :2].float(), 256, 2, 0)
    args = block_lists.TopBlockArgs(256, 2, 0, 0.1).list_args("forward", q, k, chosen)
    list_launch.forward(q, k, v, args)
    ((tensors, grid, scalars),) = given
    assert tensors == list(hopper_kernel.arg_names[: len(tensors)])
    assert {*tensors, *scalars} - {"num_warps"} == {*hopper_kernel.arg_names}
    assert grid == (args.lists.spans.shape[1] * 4,)


REASONS = {
    "a block of 24 tokens is not a multiple of 16": (Mask(causal=True, pattern=KeyBlocks(24)), ScoreMod(scale=1.0)),
    "begin at any token": (
        Mask(causal=True, order=torch.arange(9)[None], pattern=TopBlocks(16, 2)),
        ScoreMod(scale=1.0),
    ),
    "the scores are soft-capped": (Mask(causal=True, pattern=TopBlocks(16, 2)), ScoreMod(scale=1.0, softcap=5.0)),
    "the scale of scores is not positive": (Mask(causal=True, pattern=TopBlocks(16, 2)), ScoreMod(scale=-1.0)),
    "dropped out": (Mask(causal=True, pattern=KeyBlocks(16)), ScoreMod(scale=1.0, dropout=0.5)),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_table_says_why_the_kernel_is_not_taken(reason):
    x = torch.zeros(1, 9, 2, 16)
    with dispatch.force_path("triton"):
        assert reason in SPARSE_ATTENTION.explain(x, x, x, *REASONS[reason])[1][KERNEL]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strided", "top-k"])
def test_torch_accepts_the_operations(name):
    """Their schemas, shapes without data and gradients, and how they are traced."""
    q, k, v = qkv(40, 56, torch.float32)
    if name == "strided":
        torch.library.opcheck(block_lists.key_block_attention.op, (q, k, v, 16, 1, 2, 1, 16, True, 0.25))
    else:
        torch.library.opcheck(block_lists.top_block_attention.op, (q, k, v, 16, 2, 16, 0.25))


@pytest.mark.slow
def test_a_model_with_the_kernels_is_one_graph_with_the_same_gradients():
    torch.compiler.reset()
    kinds = ({"kind": "strided", "block": 16, "local": 1, "stride": 2}, {"kind": "top-k", "block": 16, "top_k": 2})
    layers = [{"attention": {"sparse": kind}} for kind in kinds]
    model, ids = build(tiny("rotary", layers=layers)), tokens(1, 40)
    results = []
    with dispatch.force_path("triton"):
        for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            loss = run(ids).logsumexp(-1).mean()
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch.compiler.reset()
