"""`phasor plan`: what a training step on many devices takes, computed without running it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from phasor.cli.options import ON_HUB, add_checkpoint, add_part, boolean, choose_weights, declare_options
from phasor.cli.output import print_json, show_table, show_text
from phasor.parallel.hardware import GIB, HARDWARE

if TYPE_CHECKING:
    from phasor.parallel import ParallelPlan

CAUSES = {
    "compute": "matrix products and attention",
    "optimizer": "reading and writing weights, gradients and moments",
    "tensor": "tokens gathered before each part of a block, sums scattered after",
    "context": "keys and values of whole rows gathered",
    "shard": "weights gathered, gradients summed; as far as computation does not hide it",
    "replicate": "gradients summed between replicas; as far as computation does not hide it",
}
KINDS = {
    "weights": "this device's shard",
    "gradients": "their sums, sharded the same",
    "moments": "AdamW's two",
    "activations": "at the start of the backward pass",
    "buffers": "copies of weights for blocks at work, gradients on their way",
}

OPTIONS = {
    "--context LENGTH": "tokens of a row, such as 8k or 1m (the model's max_length)",
    "--mesh AXIS=N,...": "sizes of the axes replicate, shard, context and tensor; what is left over is shard",
    "--batch-tokens TOKENS": "tokens of a step on all devices together (4m)",
    "--rows N": "rows at once on each device (the most that fit)",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plan a training step on many devices, on paper: the mesh, memory by kind, bytes exchanged, seconds and what "
        "binds. Without --mesh the fastest mesh that fits is suggested. Nothing is run."
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"preset:NAME, a configuration file, a model folder, a run, or {ON_HUB}",
    )
    add_checkpoint(parser)
    add_part(parser)
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices (default: %(default)s)")
    declare_options(parser, OPTIONS)
    parser.add_argument(
        "--activation-checkpointing",
        type=boolean,
        metavar="TRUE|FALSE",
        help="whether blocks recompute their activations (where the step is faster or fits only so)",
    )
    parser.add_argument("--param-dtype", default="float32", metavar="NAME", help="float32 (the default) or bfloat16")
    parser.add_argument(
        "--gradient-sync",
        default="every",
        metavar="every|last",
        help="sum gradients over devices in every backward pass of a step, or in the last alone (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="h200", metavar="NAME", help=f"{', '.join(HARDWARE)} (default: %(default)s)"
    )
    parser.add_argument(
        "--devices-per-node",
        type=int,
        default=8,
        metavar="N",
        help="devices that NVLink connects (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    from phasor.inspect.explain import resolve_model
    from phasor.parallel import plan

    if isinstance(given.activation_checkpointing, str):
        raise ValueError(f"--activation-checkpointing takes true or false, not {given.activation_checkpointing!r}")
    name, model = resolve_model(choose_weights(given.model, given.checkpoint), given.part)
    found = plan(
        model,
        devices=given.devices,
        context=given.context,
        mesh=given.mesh,
        batch_tokens=given.batch_tokens,
        rows=given.rows,
        activation_checkpointing=given.activation_checkpointing,
        param_dtype=given.param_dtype,
        gradient_sync=given.gradient_sync,
        device=given.device,
        devices_per_node=given.devices_per_node,
    )
    if given.json:
        print_json(found.to_dict())
        return
    show_text(f"{name}: {found.parameters:,} parameters on {found.mesh.devices:,} {found.hardware.name}", lines(found))
    show_memory(found)
    show_time(found)


def lines(found: ParallelPlan) -> list[str]:
    """The plan and its results, as lines."""
    usable = f"{found.memory.peak / GIB:,.1f} of {found.hardware.usable / GIB:,.1f} GiB"
    share = getattr(found.seconds, found.seconds.largest) / found.seconds.total
    bound = f"{found.bound_by} ({share:.0%} of the step)" if found.fits else f"memory, most of which is {most(found)}"
    together = found.mesh.devices // found.mesh.data
    group = "device" if together == 1 else f"group of {together:,} devices"
    return [
        f"mesh {found.mesh}{' (suggested)' if found.suggested else ''}",
        f"{found.batch_tokens:,} tokens per step in rows of {found.length:,}",
        f"rows at once on each {group}: {found.rows:,}; backward passes: {found.accumulation:,}; "
        f"activation checkpointing: {'yes' if found.activation_checkpointing else 'no'}",
        f"{'fits' if found.fits else 'does not fit'}: {usable}",
        f"{found.seconds.total:,.3g} s per step, {found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%}",
        f"bound by {bound}",
        *([] if found.note is None else [f"note: {found.note}"]),
    ]


def most(found: ParallelPlan) -> str:
    """The largest kind of memory."""
    return max(KINDS, key=lambda kind: int(getattr(found.memory, kind)))


def show_memory(found: ParallelPlan) -> None:
    kinds = {**KINDS, "peak": "of all together"}
    rows = [[kind, f"{getattr(found.memory, kind) / GIB:,.2f}", line] for kind, line in kinds.items()]
    show_table("memory of one device", ["kind", "GiB", "what it is"], rows)


def show_time(found: ParallelPlan) -> None:
    rows = []
    for cause, line in CAUSES.items():
        bytes_ = getattr(found.exchange, cause, 0)
        seconds = getattr(found.seconds, cause)
        if bytes_ or seconds:
            rows.append([cause, f"{seconds:,.4f}", f"{bytes_ / GIB:,.2f}" if bytes_ else "", line])
    show_table("a step of one device", ["cause", "seconds", "GiB received", "what it is"], rows)
