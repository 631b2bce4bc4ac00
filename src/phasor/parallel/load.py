"""Models that are cut over processes as they are loaded: each process reads its parts of the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from phasor.adapters import attach
from phasor.checkpoints.load import load, open_folder, pause_gc
from phasor.checkpoints.stored_adapters import Adapters
from phasor.parallel.processes import AXES, JoinedProcesses
from phasor.parallel.shards import Shards
from phasor.transformer import Transformer


def load_shards(
    folder: str | Path,
    processes: JoinedProcesses,
    dtype: torch.dtype | None = None,
    part: str | None = None,
    adapter: Adapters | None = None,
) -> Transformer:
    """The model of a folder of any format, cut over the mesh of some processes, in evaluation mode.

    The first process compares the folder with its manifest. All of them have to run the model, and in the same order:
    a block is gathered while it runs. What stands outside of blocks is gathered once and stays whole. Where all
    processes replicate each other, each of them loads the whole model. `part` and `adapter` are as for `load`.
    """
    if processes.mesh["context"].size() * processes.mesh["tensor"].size() > 1:
        raise ValueError("MeshConfig.context and MeshConfig.tensor are for training: leave them out here")
    if processes.mesh["shard"].size() == 1:
        return load(folder, processes.device, dtype, adapter=adapter, part=part, verify=processes.is_first)
    with pause_gc(), open_folder(folder, dtype, adapter=adapter, part=part, verify=processes.is_first) as opened:
        model = opened.model.to(opened.dtype)
        Shards(model, processes.mesh).shard().load(opened.weights())
    return prepare_inference(model)


def sharded_copy(shards: Shards) -> Transformer:
    """A copy of a model that is cut over tensor or context axes, in evaluation mode, cut by FSDP alone."""
    source = shards.model
    with torch.device("meta"):
        model = Transformer(source.config).to(source.tokens.dtype)
        for name, adapter in source.adapters.items():
            attach(model, adapter, name, dtype=torch.float32)
    mesh = init_device_mesh(shards.mesh.device_type, (1, dist.get_world_size(), 1, 1), mesh_dim_names=AXES)
    Shards(model, mesh).shard().load((name, shards.gather(name, part)) for name, part in shards.parts.items())
    for name in ("tokenizer", "source_tokenizer", "chat_template", "special", "generation_settings", "origin"):
        setattr(model, name, getattr(source, name))
    return prepare_inference(model)


def prepare_inference(model: Transformer) -> Transformer:
    """Have a model that is cut gather its weights where it encodes and decodes, as it does in a forward."""
    for method in ("encode", "decode"):
        register_fsdp_forward_method(model, method)
    table = cast(DTensor, model.tokens.weight)
    if table.to_local().shape == table.shape:  # memory that FSDP first copies it to in inference mode is not used again
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
    return model.eval()
