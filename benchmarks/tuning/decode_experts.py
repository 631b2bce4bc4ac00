"""Decoding steps of a mixture of experts for one row, timed on a GPU: tiles of its kernels, and of whole steps.

python benchmarks/tuning/decode_experts.py [experts step]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from decode_layers import KV_TILES
from sweep import DEVICE, TIMER, check, copy_speed, drawn, graph_us, rank

import phasor
from phasor.bench.sizes import GPU
from phasor.bench.studies.decode_gpu import random_prompts, replace_attribute
from phasor.generation.runners import RETAINED, fused
from phasor.generation.runners.cuda_graph import StepBuffers
from phasor.kv_cache.static import StaticKVCache
from phasor.ops.decode import (
    ExpertsArgs,
    NormArgs,
    Tiles,
    decode_attention,
    experts,
    experts_one_row,
    experts_ref,
    gemv,
    project_ref,
)
from phasor.ops.decode.tiles import SMALL_N

UP_TILES = (
    *((32, 128, 4, 4), (32, 256, 8, 3), (32, 128, 8), (32, 128, 4), (32, 256, 8), (32, 256, 4), (32, 512, 8)),
    *((16, 256, 4), (16, 256, 8), (16, 512, 8), (64, 256, 8), (16, 1024, 8)),
)
DOWN_TILES = (  # with the number of programs
    *(((32, 512, 8), 264), ((32, 512, 4), 264), ((32, 256, 4), 528), ((32, 256, 8), 264)),
    *(((64, 256, 8), 264), ((64, 256, 4), 264), ((64, 512, 8), 132), ((32, 1024, 8), 132)),
)


class Mixture:
    """Mixtures of experts for one row, as in the workload families, with so many weights that L2 serves none."""

    def __init__(self, layers: int = 8) -> None:
        size = GPU.families
        self.dim, self.hidden, self.count, self.top_k = size.dim, 2 * size.dim, size.experts, 2

        def layer() -> ExpertsArgs:
            up = drawn(self.count, self.dim, 2 * self.hidden, scale=self.dim**-0.5)
            down = drawn(self.count, self.hidden, self.dim, scale=self.hidden**-0.5)
            return ExpertsArgs(up, down, None, None, "silu", True, self.top_k, True)

        torch.manual_seed(0)
        self.layers = [layer() for _ in range(layers)]
        self.routers = [drawn(self.count, self.dim, scale=self.dim**-0.5) for _ in range(layers)]
        self.x, self.norm = drawn(1, self.dim), NormArgs(drawn(self.dim), 0.0, 1e-5)
        self.out, self.logits = torch.empty_like(self.x), self.x.new_empty(1, self.count)
        self.bytes = self.top_k * 3 * self.dim * self.hidden * 2
        norm, args = self.norm._replace(weight=self.norm.weight.double()), self.layers[0]
        wide, x = args._replace(up=args.up.double(), down=args.down.double()), self.x.double()
        logits = project_ref(x, self.routers[0].double(), norm=norm)
        self.expected = experts_ref(x, logits, wide, norm=norm, residual=x)

    def by_four_kernels(self) -> Callable[[int], torch.Tensor]:
        """Router, choice, up and down, one kernel each."""
        space = experts.ExpertsWorkspace(1, self.layers[0], torch.bfloat16, DEVICE)
        given: dict[str, Any] = {"norm": self.norm, "pdl": True}

        def run(i: int) -> torch.Tensor:
            logits = gemv.project(self.x, self.routers[i], self.logits, **given)
            return experts.experts(self.x, logits, self.layers[i], self.out, space, residual=self.x, **given)

        return run

    def by_two_kernels(self) -> Callable[[int], torch.Tensor]:
        """Router, choice and up in one kernel, and down."""
        space = experts_one_row.OneRowWorkspace(self.layers[0], torch.bfloat16, DEVICE)
        given: dict[str, Any] = {"norm": self.norm, "residual": self.x, "pdl": True}
        return lambda i: experts_one_row.experts_one_row(
            self.x, self.routers[i], self.layers[i], self.out, space, **given
        )

    def microseconds(self, build: Callable[[], Callable[[int], torch.Tensor]], **tiles: Any) -> float:
        """Of one layer, with other constants of `experts_one_row`."""
        before = {name: getattr(experts_one_row, name) for name in tiles}
        try:
            for name, value in tiles.items():
                setattr(experts_one_row, name, value)
            run = build()
            results = [run(0).clone() for _ in range(3)]
            check(results[0], self.expected)
            if not all(torch.equal(results[0], each) for each in results):
                raise ValueError("not the same bits in every run")
            return graph_us(lambda: [run(i) for i in range(len(self.layers))], repeats=10) / len(self.layers)
        finally:
            for name, value in before.items():
                setattr(experts_one_row, name, value)


def sweep_experts() -> None:
    """Router and choice in kernels of their own or not, tiles, and whole steps."""
    mixture = Mixture()
    limit = 1e6 * mixture.bytes / copy_speed()
    two = partial(mixture.microseconds, mixture.by_two_kernels)
    ways = {"four kernels": partial(mixture.microseconds, mixture.by_four_kernels), "two kernels": two}
    rank("experts of one row", ways, lambda measured: measured(), "us", limit=limit)
    ups = {size: partial(two, UP_TILES=Tiles(*size)) for size in UP_TILES}
    used = tuple(experts_one_row.UP_TILES)
    best = rank("up: outputs x inputs, warps, stages", ups, lambda measured: measured(), "us", used, limit)[0][1]
    downs = {
        (size, programs): partial(two, UP_TILES=Tiles(*best), DOWN_TILES=Tiles(*size), DOWN_PROGRAMS=programs)
        for size, programs in DOWN_TILES
    }
    rank(f"down, and up {best}: tiles, programs", downs, lambda measured: measured(), "us", limit=limit)
    del mixture, two, ways, ups, downs
    torch.cuda.empty_cache()
    model = mixture_model()
    step_by_kernel(model, "two kernels")
    with replace_attribute(experts_one_row, "router_is_small", lambda router: False):
        step_by_kernel(model, "four kernels")


def mixture_model() -> phasor.Transformer:
    """Mixtral as in the workload families."""
    size = GPU.families
    torch.manual_seed(0)
    config = phasor.preset(
        "llama-2",
        dim=size.dim,
        hidden_dim=2 * size.dim,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        embedding={"tied": False},
        feedforward={"activation": "swiglu", "experts": {"num_experts": size.experts, "top_k": 2}},
        init="fan-in",
    )
    with DEVICE:
        return phasor.Transformer(config).to(torch.bfloat16).eval()


def sweep_step() -> None:
    """Microseconds of a token of Mixtral, by the step in a graph and by the host's clock, with one change at a time."""
    model, by_hand = mixture_model(), gemv.choose_tiles

    def tiles_for(few: Tiles | None = None, many: Tiles | None = None) -> Callable[..., Tiles]:
        """These tiles for few outputs and for many, those of a layer's projections and of the head."""
        return lambda rows, outputs, inputs, **kind: (
            (few if outputs <= SMALL_N else many) or by_hand(rows, outputs, inputs, **kind)
        )

    changes: dict[str, tuple[Any, str, Any]] = {"as it is": (gemv, "choose_tiles", by_hand)}
    for tiles in (KV_TILES[0], KV_TILES[3], KV_TILES[5]):
        changes[f"attention {tuple(tiles)}"] = (decode_attention, "SPLIT_TILES", tiles)
    for size in ((1, 1024, 1), (2, 1024, 1), (2, 1024, 2), (4, 1024, 2), (8, 1024, 4)):
        changes[f"projections {size}"] = (gemv, "choose_tiles", tiles_for(few=Tiles(*size)))
    for size in ((2, 1024, 1), (4, 1024, 1), (4, 1024, 2), (8, 1024, 4), (16, 1024, 8)):
        changes[f"head {size}"] = (gemv, "choose_tiles", tiles_for(many=Tiles(*size)))
    for name, change in changes.items():
        RETAINED.clear()
        with replace_attribute(*change):
            (step, off), token = step_microseconds(model), token_microseconds(model)
            print(f"  {step:6.1f} us of a step, {token:6.1f} a token, logits off by {off:.1e}: {name}", flush=True)
    RETAINED.clear()


@torch.inference_mode()
def step_microseconds(model: phasor.Transformer) -> tuple[float, float]:
    """Of one of four steps in a graph, after 96 tokens; and how far the first one's logits are from plain ones."""
    cache, ids = model.new_cache(1, 128), torch.tensor(random_prompts(1, 97, model.config.vocab_size), device=DEVICE)
    plain = model(ids)[0, -1].float()
    model(ids[:, :-1], cache=cache)
    buffers = StepBuffers(StaticKVCache(cache))
    step = fused.FusedStep(model, buffers)
    buffers.tokens.copy_(ids[:, -1])
    logits = step()[0].float()
    check(logits, plain, 0.2)  # an undecided router may choose another expert
    return graph_us(step, calls=4), float((logits - plain).norm() / plain.norm())


def token_microseconds(model: phasor.Transformer) -> float:
    """Of a token by the host's clock, the prefill not included."""
    size = GPU.families
    prompts = random_prompts(1, size.prompt, size.vocabulary)

    def wall(count: int) -> float:
        return TIMER.wall(lambda: phasor.generate(model, prompts, max_new_tokens=count, stop=()), warmups=1)

    return 1e6 * (wall(size.new) - wall(1)) / (size.new - 1)


@torch.inference_mode()
def step_by_kernel(model: phasor.Transformer, name: str) -> None:
    """Microseconds of a step in a graph, and of its kernels when each waits for the one before."""
    cache = model.new_cache(1, 256)
    model(torch.tensor(random_prompts(1, 64, model.config.vocab_size), device=DEVICE), cache=cache)
    step = fused.FusedStep(model, StepBuffers(StaticKVCache(cache)))
    print(f"a step of {model.config.num_layers} layers, {name}: {graph_us(step, repeats=20):.1f} us")
    step.pdl = False
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in record.key_averages() if event.device_time_total > 0]
    for event in sorted(kernels, key=lambda event: -event.device_time_total)[:12]:
        print(f"  {event.device_time_total:7.1f} us  {event.count:3} x {event.device_time:6.2f}  {event.key[:60]}")


SWEEPS = {"experts": sweep_experts, "step": sweep_step}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=", ".join(SWEEPS))
    for name in parser.parse_args().sweeps or SWEEPS:
        SWEEPS[name]()
