"""Linear layers with adapters: the layer's own product and the update as one operation, or one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from phasor.nn.lora_hook import active_adapters, add_updates, full_weight
from phasor.ops.adapted_linear import adapted_linear
from phasor.ops.dispatch import Dispatch, Path, compute_dtype, functional_transform_why_not, is_autocast, needs_grad
from phasor.ops.quantized import FrozenMatrix


class AdaptedLinear(nn.Module):
    """What makes a linear layer one with adapters; the class of the layer without them follows in the bases."""

    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ADAPTED_LINEAR(self, x)
        return y

    @property
    def held_matrix(self) -> Tensor | FrozenMatrix | None:
        """The weights as they are held; None where gradients do not pass through them."""
        raise NotImplementedError(f"{type(self).__name__} does not implement held_matrix")

    def multiply_then_add(self, x: Tensor) -> Tensor:
        """The layer's own product, and then what each adapter adds to it."""
        return add_updates(self, (x,), super().forward(x))

    def multiply_with_update(self, x: Tensor, activation: str | None = None) -> Tensor:
        """The product with the one adapter in use, of `x` or of its gated activation.

        DoRA's gain acts on the sum of both products.
        """
        (lora,) = active_adapters(self)
        matrix = self.held_matrix
        assert matrix is not None
        A, B = lora.factors()
        y = adapted_linear(x.to(compute_dtype(x)), matrix, A, lora.strength * B, activation)
        if lora.has_magnitude:
            y = lora.gain(full_weight(self)).to(y.dtype) * y
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def update_why_not(self, x: Tensor) -> str | None:
        """Why the product and the update are not one operation; None where they are."""
        used = list(active_adapters(self))
        if len(used) != 1:
            return f"{len(used)} adapters are in use, not one"
        (lora,) = used
        if lora.dropout and lora.training:
            return "the adapter has dropout"
        if lora.has_magnitude and lora.strength != 1:
            return "the magnitudes of DoRA count by another weight than 1"
        if not needs_grad(*lora.parameters()):
            return "no gradient is needed"
        matrix = self.held_matrix
        if matrix is None:
            return "the weights pass no gradients on"
        if isinstance(matrix, Tensor):
            if matrix.requires_grad:
                return "the layer's own weight is trained"
            if hasattr(matrix, "__tensor_flatten__"):
                return f"a {type(matrix).__name__} is made of other tensors"
            if matrix.dtype != x.dtype and not is_autocast(x):
                return "the layer computes in another dtype"
        return functional_transform_why_not()


class LoRALinear(AdaptedLinear, nn.Linear):
    """A linear layer with adapters."""

    @property
    def held_matrix(self) -> Tensor:
        return self.weight


# The product of a linear layer and what its adapters add, asked with the layer and its input.
ADAPTED_LINEAR = Dispatch(
    Path("one operation, which adds in place", AdaptedLinear.multiply_with_update, AdaptedLinear.update_why_not),
    Path("product, then updates", AdaptedLinear.multiply_then_add),
)
