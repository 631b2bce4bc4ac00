"""Our weights, read from the tensors of a Hugging Face folder by the rules of a family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phasor.checkpoints.tensors import Tensors
from phasor.config import ModelConfig
from phasor.models.layout import Assignment, in_memory_order


class WeightReader:
    """What reads our tensors: mapped where the file has the same memory, and otherwise copied piece by piece.

    `names` are the file's names by those of the family's rules; `shapes` has our tensors, on the meta device.
    """

    def __init__(
        self,
        tensors: Tensors,
        names: dict[str, str],
        wanted: list[Assignment],
        shapes: dict[str, Tensor],
        config: ModelConfig,
    ) -> None:
        self.tensors, self.names, self.shapes, self.config = tensors, names, shapes, config
        self.parts: dict[str, list[Assignment]] = {}
        for assignment in wanted:
            self.parts.setdefault(assignment.ours, []).append(assignment)

    def sources(self, name: str) -> list[str]:
        """The tensors of the file that make one of ours."""
        return [self.names[assignment.theirs] for assignment in self.parts[name]]

    def read(self, name: str, device: torch.device) -> Tensor:
        """One of our tensors."""
        like = self.shapes[name]
        same_order = in_memory_order(self.parts[name], like, self.config)
        whole = self.tensors.get_adjacent(self.sources(name)) if same_order else None
        if whole is not None:
            return whole.view(like.shape)
        return self.assemble(name, torch.empty(like.shape, dtype=like.dtype, device=device), self.tensors.get)

    @torch.no_grad()
    def assemble(self, name: str, out: Tensor, get: Callable[[str], Tensor]) -> Tensor:
        """Fill a tensor of the shape of one of ours with what `get` gives for each tensor of the file."""
        for assignment, found in zip(self.parts[name], self.sources(name), strict=True):
            assignment.layout.load(assignment.slice(out), get(found), self.config)
        return out
