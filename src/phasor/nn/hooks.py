"""Whether a module can be fused with its neighbors, or has hooks that have to see it called."""

from __future__ import annotations

from torch import nn


def calls_own_forward(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class alone: no hooks, and no replaced forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__
