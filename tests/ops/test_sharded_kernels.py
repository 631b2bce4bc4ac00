"""The kernels under FSDP2: weights sharded over two processes give the gradients of one."""

import os
import tempfile

import pytest
import torch
import torch.multiprocessing as mp

import phasor
from phasor.nn.block import Block
from phasor.ops import dispatch

SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}


def model():
    torch.manual_seed(3)
    return phasor.Transformer(phasor.preset("llama-2", **SHAPE, embedding={"tied": True}))


def batch(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = torch.randint(0, 61, (1, 14), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss(network, rank):
    tokens, targets = batch(rank)
    with dispatch.force_path("triton"):
        return network.loss(tokens, targets=targets).total


def operations(node, seen=None):
    """The names of the steps of a backward pass."""
    seen = {} if seen is None else seen
    if node is not None and node not in seen:
        seen[node] = node.name()
        for before, _ in node.next_functions:
            operations(before, seen)
    return " ".join(seen.values())


def run_sharded(rank, folder):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    network = model()
    for part in network.modules():
        if isinstance(part, Block):
            fully_shard(part)
    fully_shard(network)
    result = loss(network, rank)
    steps = operations(result.grad_fn)
    for kernel in ("rope_qkv", "glu_linear", "norm", "linear_cross_entropy"):
        assert f"phasor_{kernel}" in steps, steps
    result.backward()
    gradients = {}
    for name, weight in network.named_parameters():
        assert isinstance(weight.grad, DTensor), name
        gradients[name] = weight.grad.full_tensor()
    if rank == 0:
        torch.save(gradients, f"{folder}/gradients.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.cpu_only("its processes talk over the CPU's backend")
def test_two_processes_with_sharded_weights_have_the_gradients_of_one():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_sharded, (folder,), nprocs=2, start_method="spawn")
        result = torch.load(os.path.join(folder, "gradients.pt"))
    whole = model()
    (sum(loss(whole, rank) for rank in range(2)) / 2).backward()
    assert result.keys() == {name for name, _ in whole.named_parameters()}
    for name, weight in whole.named_parameters():
        assert weight.grad.abs().max() > 1e-4  # of a size that the comparison can see
        torch.testing.assert_close(result[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)
