"""Exact rotary angles inside a loaded `transformers` model, and the way back.

Rotary modules are known by what they have, not by their family: frequencies and a configuration. What stands in for
one has to give the same shapes, types and values near position 0, or the model is refused and left as it was.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from phasor.models.fields import Fields
from phasor.models.rope import read_rotary
from phasor.nn.checks import describe_tensor
from phasor.nn.positions import LongRoPE, RotaryConfig
from phasor.nn.positions.phase import cos_sin_of
from phasor.nn.positions.rotary.module import Table, table_of

# How a module lays out the cosines of its pairs, `[..., pairs]`, in what it returns.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat((x, x), dim=-1),
    "interleaved": lambda x: x.repeat_interleave(2, dim=-1),
    "once": lambda x: x,
}
KEPT = "table_before_exact"  # where the owner of a swapped table keeps the one it had: (name, table)


def exact_rotary(hf_model: nn.Module) -> ExactSwap:
    """Give a loaded `transformers` model exact rotary angles, at any position; its weights are not touched.

    Each rotary module gives way to one with the same frequencies, extension, layout and types, whose cosines and
    sines are rounded once. Extensions that depend on the length go by the largest position of each call, and on
    nothing that was called before. A table (GPT-J, RoFormer) is filled with exact values and keeps its length:
    positions beyond it raise as they did. Parameters, their names and `state_dict` stay as they are, but for the
    values of RoFormer's table, which is a weight.

    Undo it with `undo()`, or use it in a `with`, which leaves the model as it found it. Called again, it changes
    nothing, and the handle it returns can undo the swap, that of a copied model too. Raises ValueError, before
    anything is changed, for a model without rotary positions or with a scheme that phasor does not know.

    >>> import transformers
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()
    >>> tokens, near = torch.arange(8)[None], torch.arange(8)[None]
    >>> def moved():
    ...     with torch.no_grad():
    ...         return (model(tokens, position_ids=near + 2**22).logits - model(tokens).logits).abs().max()
    >>> before = moved()
    >>> with exact_rotary(model) as swap:
    ...     bool(moved() < before / 50), swap.names
    (True, ('model.rotary_emb',))
    >>> bool(moved() == before)
    True
    """
    if not isinstance(hf_model, nn.Module):
        raise ValueError(f"exact_rotary takes a loaded transformers model, not a {type(hf_model).__name__}")
    modules = {id(old): exact_module(old, hf_model) for old in rotary_modules(hf_model)}
    tables = [(owner, name, exact_table(owner, name, hf_model)) for owner, name in rotary_tables(hf_model)]
    for owner in list(hf_model.modules()):
        for name, child in list(owner._modules.items()):
            if id(child) in modules:
                setattr(owner, name, modules[id(child)])
    for owner, name, values in tables:
        table = getattr(owner, name)
        setattr(owner, KEPT, (name, table.data))
        table.data = values
    swap = ExactSwap(hf_model, new=bool(modules or tables))
    if not swap.names:
        raise ValueError(f"{type(hf_model).__name__} has no rotary positions of transformers' making")
    return swap


class ExactSwap:
    """A model with exact angles, and the way back, which leaving a `with` takes unless they were exact before."""

    def __init__(self, model: nn.Module, new: bool) -> None:
        self.model, self.new = model, new

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that have exact angles now."""
        named = self.model.named_modules()
        return tuple(name for name, module in named if isinstance(module, ExactRotary) or hasattr(module, KEPT))

    def undo(self) -> None:
        """Put back what was there; nothing happens where that was done already."""
        for owner in list(self.model.modules()):
            for name, child in list(owner._modules.items()):
                if isinstance(child, ExactRotary):
                    setattr(owner, name, child.original.train(child.training))
            if hasattr(owner, KEPT):
                name, before = getattr(owner, KEPT)
                table = getattr(owner, name)
                table.data = before.to(table)  # the model may have moved since
                delattr(owner, KEPT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.new:
            self.undo()

    def __repr__(self) -> str:
        return f"ExactSwap({type(self.model).__name__}: {', '.join(self.names) or 'undone'})"


class Scheme(NamedTuple):
    """The frequencies of one layer type: a fixed table, two to choose from by the length, or none for any length."""

    config: RotaryConfig
    width: int
    fixed: tuple[Table, ...]

    @classmethod
    def of(cls, config: RotaryConfig, width: int) -> Self:
        lengths: tuple[int | None, ...] = () if config.depends_on_length else (None,)
        if isinstance(config.extension, LongRoPE):
            lengths = (config.extension.original_length, config.extension.original_length + 1)
        return cls(config, width, tuple(table_of(config, width, length) for length in lengths))

    def increments(self, positions: Tensor) -> tuple[Tensor, float]:
        """The phase increment of each pair, and the attention factor; the length is the largest position plus 1."""
        tables = self.fixed or (table_of(self.config, self.width, max(int(positions.max()) + 1, 1)),)
        chosen, *beyond = (torch.tensor(table.increments, device=positions.device) for table in tables)
        if isinstance(self.config.extension, LongRoPE):  # on the device, so that a compiler sees one graph
            chosen = torch.where(positions.max() < self.config.extension.original_length, chosen, beyond[0])
        return chosen, tables[0].factor


class ExactRotary(nn.Module):
    """Stands in for a rotary module of `transformers`: called alike, the same shapes and types, exact angles.

    `schemes` has one entry per layer type, or one under None; `dtype` is None where the result has that of `x`.
    """

    def __init__(
        self, original: nn.Module, schemes: dict[str | None, Scheme], layout: str, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.kept = (original,)  # in a tuple it is no submodule, and adds no name to the model
        self.schemes, self.layout, self.dtype = schemes, layout, dtype
        self.config = getattr(original, "config", None)  # which some models ask it for
        for name, buffer in original.named_buffers(recurse=False):
            if name not in original._non_persistent_buffers_set:  # part of the model's state_dict
                self.register_buffer(name, buffer)
        self.train(original.training)

    @property
    def original(self) -> nn.Module:
        return self.kept[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.original._apply(fn, recurse)  # so that it comes back where the model is by then
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{type(self.original).__name__}, {self.layout}"

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        if position_ids.is_floating_point() or position_ids.dim() > 2:
            raise ValueError(
                f"exact angles need integer positions [B, T], one per token, not {describe_tensor(position_ids)}"
            )
        positions = position_ids.to(x.device)
        increments, factor = self.schemes[layer_type].increments(positions)
        cos, sin = cos_sin_of(positions[..., None], increments, torch.float64)
        lay_out, dtype = LAYOUTS[self.layout], self.dtype or x.dtype
        return lay_out((cos * factor).to(dtype)), lay_out((sin * factor).to(dtype))


def rotary_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with rotary frequencies that a model makes use of."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        unused = getattr(getattr(module, "config", None), "alibi", False)  # Falcon has the module all the same
        if any(name.endswith("inv_freq") for name in names) and not unused and not isinstance(module, ExactRotary):
            yield module


def exact_module(module: nn.Module, model: nn.Module) -> ExactRotary:
    """What stands in for a rotary module, or an error where nothing phasor knows gives the same."""
    refuse_unloaded(module.buffers(), model)
    config: Any = getattr(module, "config", None)
    try:
        known = all(hasattr(config, name) for name in ("to_dict", "hidden_size", "num_attention_heads"))
        getattr(config, "head_dim", None)
    except Exception:  # where layers differ in it, a configuration refuses to be asked, in its own way
        known = False
    if known and not hasattr(module, "mrope_section"):  # which is for several positions a token
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds) if isinstance(kinds, dict) and kinds else [None]
        schemes = {kind: read_scheme(config, kind, model) for kind in kinds}
        for layout, dtype in itertools.product(LAYOUTS, (None, torch.float32)):
            exact = ExactRotary(module, schemes, layout, dtype)
            if outputs_agree(exact, module):
                return exact
    raise ValueError(
        f"phasor cannot give {type(model).__name__} exact angles: its {type(module).__name__} does not compute what "
        "phasor reads in its configuration"
    )


def read_scheme(config: Any, layer_type: str | None, model: nn.Module) -> Scheme:
    """What a configuration of `transformers` says about one layer type, or about all where that is None."""
    fields = Fields(config.to_dict(), Path(f"{type(model).__name__}.config"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = fields.get("max_position_embeddings", 1)

    def read() -> Scheme:
        rotary = read_rotary(fields, head_dim, longest, partial=1.0, layer_type=layer_type)
        return Scheme.of(rotary, rotary.rotary_dim_of(head_dim))

    return fields.build(read)


@torch.no_grad()
def outputs_agree(exact: ExactRotary, original: nn.Module) -> bool:
    """Whether two modules give the same at position 1, which shows every frequency, at short and long lengths."""
    original = copy.deepcopy(original)  # calling it may change its frequencies
    buffer = next(original.buffers())
    for (layer_type, scheme), dtype in itertools.product(exact.schemes.items(), (torch.float32, torch.bfloat16)):
        lengths = (2, 2 * getattr(scheme.config.extension, "original_length", 1))
        for length in lengths[: 1 + scheme.config.depends_on_length]:
            x = torch.zeros(1, dtype=dtype, device=buffer.device)
            positions = torch.tensor([[1, length - 1]], device=buffer.device)
            by_type = {} if layer_type is None else {"layer_type": layer_type}
            try:
                theirs = original(x, positions, **by_type)
            except Exception:  # a module of another kind fails in its own way
                return False
            if not isinstance(theirs, tuple) or len(theirs) != 2:
                return False
            for a, b in zip(exact(x, positions, **by_type), theirs, strict=True):
                if a.shape != b.shape or a.dtype != b.dtype or not nearly_equal(a[:, 0], b[:, 0]):
                    return False
    return True


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, even where frequencies went through bfloat16 or float16 and back."""
    return torch.allclose(a, b, rtol=1e-2, atol=1e-7)


def rotary_tables(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their tables of sines and cosines that rotate queries and keys."""
    for module in model.modules():
        table = getattr(module, "embed_positions", None)
        if isinstance(table, nn.Embedding) and hasattr(getattr(module, "config", None), "rotary_value"):
            found: tuple[nn.Module, str] = table, "weight"
        elif isinstance(table, Tensor) and table.dim() == 2:
            found = module, "embed_positions"
        else:
            continue
        if not hasattr(found[0], KEPT):
            yield found


def exact_table(owner: nn.Module, name: str, model: nn.Module) -> Tensor:
    """The exact values of a table, sines then cosines, as its type and on its device."""
    table: Tensor = getattr(owner, name)
    refuse_unloaded([table], model)
    rows, width = table.shape
    increments = torch.tensor(table_of(RotaryConfig(), width, None).increments, device=table.device)
    positions = torch.arange(rows, device=table.device)[:, None]
    exact = torch.cat(cos_sin_of(positions, increments, torch.float64)[::-1], dim=-1).to(table.dtype)
    if not nearly_equal(table[:2], exact[:2]):
        raise ValueError(
            f"phasor cannot give {type(model).__name__} exact angles: the table of its {type(owner).__name__} is not "
            "that of rotary positions with base 10000"
        )
    return exact


def refuse_unloaded(tensors: Any, model: nn.Module) -> None:
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(f"{type(model).__name__} is not loaded: its rotary frequencies are on the meta device")
