"""The forward kernel of long blocks for Hopper GPUs, as Python runs it: Triton's interpreter does not run Gluon."""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace

import pytest
import torch
from references import normal

from phasor.ops.attention import Mask, ScoreMod
from phasor.ops.sparse_attention import TopBlocks, sparse_attention_ref
from phasor.ops.sparse_attention.selection import mean_keys, select_blocks
from phasor.ops.sparse_attention.tile_lists import selected_block_lists

kernel = pytest.importorskip("phasor.ops.sparse_attention.list_hopper_kernel")
HEADS, KV_HEADS, DIM = 4, 2, 16


class Pointer:
    """An address in a flat tensor, as kernels add to it."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


class Shared:
    """Shared memory: tiles by stage, or rows."""

    dtype, layout = torch.float64, None

    def __init__(self, data):
        self.data = data

    def index(self, stage):
        return Shared(self.data[stage])

    def slice(self, first, count):
        return Shared(self.data[first : first + count])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def store(self, x):
        self.data.copy_(x)


def in_torch(kernel, program):
    """The kernel's functions as Python runs them, one warp after the other, in float64; tensors are given flat."""

    def load(ptr, mask=None, other=0):
        offset = torch.as_tensor(ptr.offset)
        if mask is None:
            return ptr.memory[offset] if offset.dim() else int(ptr.memory[offset])
        return torch.where(mask, ptr.memory[torch.where(mask, offset, 0)], other)

    def store(ptr, x, mask):
        shape = torch.broadcast_shapes(ptr.offset.shape, mask.shape)
        mask, offset, x = (y.expand(shape) for y in (mask, ptr.offset, x))
        ptr.memory[offset[mask]] = x[mask]

    def load_by_tma(desc, place, bar, tile):
        (batch, start, column), (rows, width) = place, tile.data.shape[-2:]
        block = desc.data[batch, start : start + rows, column : column + width]
        tile.data.zero_()
        tile.data.view(rows, width)[: len(block)] = block

    def specialize(warps, *_):
        for function, args in (warps[-1], *warps[:-1]):
            names[function.__name__](*args)

    def product(a, b, acc, use_acc=True, is_async=True):
        a, b = (x.data if isinstance(x, Shared) else x for x in (a, b))
        return acc * use_acc + a @ b

    def waited(count, deps):
        return deps if len(deps) > 1 else deps[0]

    language = SimpleNamespace(
        NVMMADistributedLayout=lambda *args: None, DotOperandLayout=lambda *args: None, SliceLayout=lambda *args: None,
        BlockedLayout=lambda *args: None, NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *args: None),
        float32=torch.float64, int64=torch.int64, int32=torch.int32, load=load, store=store,
        arange=lambda first, last, layout: torch.arange(first, last), convert_layout=lambda x, layout: x,
        zeros=lambda shape, dtype, layout: torch.zeros(shape).double(),
        full=lambda shape, x, dtype, layout: torch.full(shape, x).double(),
        where=lambda c, x, y: torch.where(c, x, torch.as_tensor(y, dtype=x.dtype)), exp2=torch.exp2, log2=torch.log2,
        maximum=torch.maximum, max=lambda x, dim: x.max(dim).values, sum=torch.sum, warp_specialize=specialize,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.zeros(shape).double()),
    )  # fmt: skip
    nothing = SimpleNamespace(wait=lambda *a, **b: None, expect=lambda *a: None, arrive=lambda *a, **b: None)
    names = {
        "gl": language, "LOG2E": math.log2(math.e), "mbarrier": nothing, "warpgroup_mma": product,
        "warpgroup_mma_wait": waited, "fence_async_shared": lambda: None, "load_by_tma": load_by_tma,
        "barriers": lambda count, arrivals: Shared(torch.zeros(count)), "tile_of_program": program,
    }  # fmt: skip
    for name in ("load_keys", "tile_weights", "attend", "block_hopper_kernel"):
        names[name] = FunctionType(getattr(kernel, name).fn.__code__, names, name)
    return names["block_hopper_kernel"]


@pytest.mark.parametrize(("queries", "offset", "top_k"), [(1000, 0, 2), (700, 333, 3)])
def test_slots_of_the_kernel_are_merged_to_the_reference(queries, offset, top_k):
    """Where a block has three tiles of keys, and the last one fewer."""
    block, keys = 384, queries + offset
    sizes = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    q, k, v = (normal(1, t, h, DIM, seed=i) for i, (t, h) in enumerate(sizes))
    scale = DIM**-0.5
    own = (torch.arange(queries)[None] + offset) // block
    chosen = select_blocks(q, mean_keys(k, block), own, own * 0, top_k).to(torch.int32)
    lists = selected_block_lists(chosen, -(-keys // block), 128)
    out = torch.full((HEADS, queries, top_k, DIM), float("nan")).double()
    lse = torch.full((HEADS, queries, top_k), float("-inf")).double()
    descs = [
        SimpleNamespace(data=x.flatten(2), layout=None, dtype=None, block_type=SimpleNamespace(nbytes=0))
        for x in (k, v)
    ]
    flat_q, flat_out, flat_lse, pairs, entries = (
        Pointer(x.reshape(-1)) for x in (q, out, lse, lists.pairs.long(), lists.entries)
    )
    given = {
        "q_ptr": flat_q, "out_ptr": flat_out, "lse_ptr": flat_lse, "pairs_ptr": pairs, "entries_ptr": entries,
        "num_queries": queries, "num_heads": HEADS, "group_size": HEADS // KV_HEADS, "offset": offset, "scale": scale,
        "stride_qb": q.stride(0), "stride_qt": q.stride(1), "stride_qh": DIM, "stride_kh": DIM, "stride_vh": DIM,
        "stride_ob": 0, "stride_oh": out.stride(0), "stride_ot": out.stride(1), "stride_os": out.stride(2),
        "stride_pairs": lists.pairs.stride(0), "stride_spans": 0, "stride_entries": lists.entries.stride(0),
        "spans_ptr": None, "num_tiles": 0, "HEAD_DIM": DIM, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK": block,
        "SLOTS": top_k, "NUM_STAGES": 4,
    }  # fmt: skip
    for head in range(HEADS):
        for bounds in lists.spans[head].tolist():
            first = torch.tensor(head), torch.tensor(0), head, *bounds
            in_torch(kernel, lambda *_, first=first: first)(*descs, **given)
    weights = (lse * math.log(2)).softmax(-1)
    merged = torch.where(weights[..., None] > 0, out, 0).mul(weights[..., None]).sum(2).transpose(0, 1)
    mask = Mask(causal=True, offset=offset, pattern=TopBlocks(block, top_k))
    expected, _ = sparse_attention_ref(q, k, v, mask, ScoreMod(scale=scale))
    torch.testing.assert_close(merged, expected[0])
