"""Meshes of devices: the sizes of their axes, and which of them a model can be cut by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Self

from phasor.config import ModelConfig
from phasor.config.model import Layer
from phasor.config.schema import check_integer, quote, unknown


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many devices stand along each axis.

    `replicate`: groups of devices with the same weights. `shard`: weights, gradients and moments cut over the devices,
    and gathered block by block (FSDP). `context`: each row of tokens cut over the devices. `tensor`: the heads, hidden
    features and experts of each block cut over the devices. `tensor` is innermost, within a node; then come `context`,
    `shard` and `replicate`.

    >>> Mesh.parse("tensor=4", devices=64)
    Mesh(replicate=1, shard=16, context=1, tensor=4)
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            check_integer(f"mesh: {axis}", size)

    @classmethod
    def parse(cls, axes: str | Mapping[str, int], devices: int) -> Self:
        """A mesh of some devices from its axes, such as "shard=16,tensor=4"; `shard` is what is left over."""
        sizes = dict(parse_axes(axes) if isinstance(axes, str) else axes)
        known = list(cls.__dataclass_fields__)
        for axis, size in sizes.items():
            if axis not in known:
                raise unknown("axis of a mesh", axis, known)
            check_integer(f"mesh: {axis}", size)
        given = prod(sizes.values())
        text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        if "shard" not in sizes:
            if devices % given:
                raise ValueError(f"mesh {text} takes a multiple of {given} devices, and there are {devices}")
            return cls(**sizes, shard=devices // given)
        if given != devices:
            raise ValueError(f"mesh {text} has {given} devices, and there are {devices}: leave shard out to fit them")
        return cls(**sizes)

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def shards(self) -> int:
        """How many devices share the weights of a block: those along the context axis share them too."""
        return self.shard * self.context

    @property
    def data(self) -> int:
        """How many groups of devices there are that read different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in asdict(self).items() if size > 1]
        return ",".join(named) or "shard=1"


def parse_axes(text: str) -> dict[str, int]:
    """The axes of a mesh with their sizes, as they are typed.

    >>> parse_axes("shard=16,tensor=4")
    {'shard': 16, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal() or len(size) > 18:
            raise ValueError(f"mesh takes axes with their sizes such as shard=16,tensor=4, not {quote(text)}")
        if axis in sizes:
            raise ValueError(f"mesh names the axis {axis} twice")
        sizes[axis] = int(size)
    return sizes


def mesh_why_not(
    model: ModelConfig, mesh: Mesh, length: int, *, prefix: str = "", row: str = "a row of {:,} tokens"
) -> str | None:
    """Why a model cannot be cut by a mesh, with what would fit; None where it can.

    `prefix` stands before the names of axes, and `row` says what is as long as a row.

    >>> from phasor.models.presets import preset
    >>> mesh_why_not(preset("llama-3.1"), Mesh(tensor=16), 8192)
    'tensor=16 does not divide the 8 key/value heads: tensor can be 1, 2, 4 or 8'
    """
    if model.encoder is not None and mesh.devices > 1:
        return "an encoder that differs from the decoder (ModelConfig.encoder) is trained on one device"
    if model.embedding.front_end is not None and mesh.devices > 1:
        return "a model whose source are features (front_end) is trained on one device"
    if model.layers_per_block > 1 and mesh.devices > 1:
        return "layers that share their weights (num_blocks) are trained on one device"
    if model.embedding.mask_token is not None and mesh.context * mesh.tensor > 1:
        return "a share of masked tokens (mask_token) is of whole rows, which context and tensor cut: they can be 1"
    cut = 2 * mesh.context * mesh.tensor
    if mesh.context * mesh.tensor > 1 and length % cut:
        return (
            f"{row.format(length)} is not divisible by 2 x {prefix}context x {prefix}tensor = {cut}: "
            f"{length // cut * cut or cut:,} would be"
        )
    if mesh.tensor == 1:
        return None
    if model.embedding.per_layer_width is not None:
        return f"vectors of tokens for every layer (per_layer_width) cannot be cut: {prefix}tensor can be 1"
    for layer in dict.fromkeys(map(model.layer, range(max(1, len(model.layers))))):
        if layer.feedforward.branch_norms:
            return f"norms of the results of experts (branch_norms) cannot be cut: {prefix}tensor can be 1"
        if (reason := layer.attention.uncuttable_reason) is not None:
            return f"{reason}: {prefix}tensor can be 1"
        for count, what in widths(model, layer):
            if count % mesh.tensor:
                return (
                    f"{prefix}tensor={mesh.tensor} does not divide the {count:,} {what}: "
                    f"{prefix}tensor can be {divisors_text(count)}"
                )
    return None


def widths(model: ModelConfig, layer: Layer) -> Iterator[tuple[int, str]]:
    """What the tensor axis cuts in a layer."""
    yield layer.attention.heads_to_cut(model)
    experts = layer.feedforward.experts
    if experts is None:
        yield layer.feedforward.hidden_dim_of(model), "features of the hidden width"
        return
    yield experts.num_experts, "experts"
    if experts.shared_dim is not None:
        yield experts.shared_dim, "hidden features of the shared expert"


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def divisors_text(number: int) -> str:
    """
    >>> divisors_text(8), divisors_text(1)
    ('1, 2, 4 or 8', '1')
    """
    shown = [str(n) for n in divisors(number) if n <= 16] or ["1"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def meshes(devices: int, most_tensor: int) -> Iterator[Mesh]:
    """All meshes of some devices whose tensor axis stays within a node."""
    for tensor in divisors(devices):
        if tensor > most_tensor:
            return
        for context in divisors(devices // tensor):
            for shard in divisors(devices // tensor // context):
                replicate = devices // tensor // context // shard
                yield Mesh(replicate=replicate, shard=shard, context=context, tensor=tensor)
