"""A model folder that is open: its model without weights, and the weights one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phasor.adapters import set_adapters
from phasor.device import check_memory
from phasor.nn.quantized import Quantization, QuantizedEmbedding
from phasor.progress import Progress
from phasor.quantization import base_weights
from phasor.transformer import Transformer


@dataclass(frozen=True)
class OpenedModel:
    """The model of a folder, on the meta device, and how its weights are read.

    `read(name, device)` gives a weight, in `dtype`: mapped from its file where it lies there as it is used, and
    otherwise put together. `release()` unmaps the files; tensors in use keep what they are mapped from. Buffers keep
    their own dtype, those of `quantized` weights among them. `adapters` are to be put in use, with these weights.

    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(2, 3)
    >>> opened = OpenedModel(model, torch.float32, lambda name, device: torch.ones(model.get_parameter(name).shape))
    >>> [(name, weight.shape) for name, weight in opened.weights()]
    [('weight', torch.Size([3, 2])), ('bias', torch.Size([3]))]
    """

    model: Transformer
    dtype: torch.dtype
    read: Callable[[str, torch.device], Tensor]
    release: Callable[[], None] = lambda: None
    quantized: Collection[str] = ()
    adapters: Mapping[str, float] = field(default_factory=dict)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights one after another, whole; none but the last one takes memory."""
        if self.quantized:
            raise ValueError(
                "a model with quantized weights is neither trained nor cut over processes: take the original"
            )
        whole = {key: x for name in self.adapters for key, x in self.model.adapters[name].saved.items()}
        for name in list(self.model.state_dict()):
            yield name, whole[name] if name in whole else self.read(name, torch.device("cpu"))
            self.release()

    def load(
        self, device: torch.device, progress: Progress | None = None, quantization: Quantization | None = None
    ) -> Transformer:
        """The model with all of its weights on a device.

        With a `quantization`, each weight of a frozen base that it is for is quantized when it is read.
        """
        chosen = {} if quantization is None else base_weights(self.model)
        like, buffers = self.model.state_dict(), dict(self.model.named_buffers())
        total, done = sum(weight.numel() for weight in like.values()), 0
        weights: dict[str, Tensor] = {}
        sizes = {n: w.nbytes if n in buffers else w.numel() * self.dtype.itemsize for n, w in like.items()}
        model_size = sum(sizes.values())
        for name, weight in like.items():
            # One by one: what is mapped from a file takes no memory.
            check_memory(sizes[name], device, model_size)
            weights[name] = self.read(name, device).to(device, weight.dtype if name in buffers else self.dtype)
            if name in chosen and quantization is not None:
                held = chosen[name].quantize(weights.pop(name), quantization)
                weights |= {f"{chosen[name].place}.{own}": x for own, x in held.named_buffers()}
            done += weight.numel()
            if progress is not None:
                progress(done, total)
        self.model.load_state_dict(weights, assign=True)
        if isinstance(self.model.tokens, QuantizedEmbedding):
            self.model.tokens.like = torch.empty(0, device=device, dtype=self.dtype)
        if self.adapters:
            set_adapters(self.model, self.adapters)
        return self.model.requires_grad_(not self.quantized).eval()
