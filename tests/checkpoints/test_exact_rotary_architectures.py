"""`exact_rotary` on the rotary modules of all of transformers' architectures: exact angles, or a sentence."""

import importlib
import inspect
import pkgutil

import pytest
import torch
import transformers
from torch import nn

import phasor

transformers.logging.set_verbosity_error()

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SWA = SIZES | SPECIAL | {"num_key_value_heads": 2, "sliding_window": 4}
MODELS = {
    "esm": lambda: transformers.EsmModel(
        transformers.EsmConfig(
            **SIZES | SPECIAL | {"pad_token_id": 1}, mask_token_id=2, position_embedding_type="rotary"
        )
    ),
    "granite_swa": lambda: transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**SWA)),
    "granitemoe_swa": lambda: transformers.GraniteMoeSWAForCausalLM(
        transformers.GraniteMoeSWAConfig(**SWA, num_local_experts=2, num_experts_per_tok=1)
    ),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_that_treat_their_rotary_module_in_their_own_way(name):
    model = MODELS[name]().eval()
    text, keys = torch.arange(4, 16)[None], list(model.state_dict())
    before = model(text)[0]
    with phasor.exact_rotary(model):
        assert list(model.state_dict()) == keys
        assert (model(text)[0] - before).abs().max() < 1e-4
        with phasor.exact_rotary(model) as again:  # nothing is left to do
            assert not again.new
    assert torch.equal(model(text)[0], before)


class Holder(nn.Module):
    """A model that is nothing but a rotary module."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary


def rotary_modules_of(name):
    """The rotary modules of an architecture that its configuration's defaults can make."""
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        return
    for cls in vars(module).values():
        own = inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__
        if not own or "Rotary" not in cls.__name__ or "config" not in inspect.signature(cls.__init__).parameters:
            continue
        try:
            rotary = cls(inspect.signature(cls.__init__).parameters["config"].annotation())
        except Exception:
            continue
        yield rotary


def swaps_or_refuses(name):
    """How many rotary modules of an architecture got exact angles, the same at small positions, and how many not."""
    exact, refused = 0, []
    for rotary in rotary_modules_of(name):
        positions = torch.tensor([[0, 1]])
        try:
            with phasor.exact_rotary(Holder(rotary)) as swap:
                types = rotary.rope_type if isinstance(getattr(rotary, "rope_type", None), dict) else {}
                for more in [{"layer_type": kind} for kind in types] or [{}]:
                    found, expected = (
                        swap.model.rotary(torch.zeros(1), positions, **more),
                        rotary(torch.zeros(1), positions, **more),
                    )
                    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
            exact += 1
        except ValueError as error:
            refused.append(str(error))
    known = ("phasor cannot give", "Holder.config: ", "Holder has no rotary positions")
    assert [text for text in refused if not text.startswith(known)] == []
    return exact, len(refused)


@pytest.mark.parametrize("name", ["evolla", "gemma4", "diffusion_gemma", "embedding_gemma2", "gemma3", "llama"])
def test_architectures_get_exact_angles_or_a_sentence(name):
    exact, refused = swaps_or_refuses(name)
    assert exact + refused > 0
    assert exact > 0 or name in ("gemma4", "diffusion_gemma", "embedding_gemma2")


@pytest.mark.slow
def test_every_architecture_of_transformers_gets_exact_angles_or_a_sentence():
    names = sorted(module.name for module in pkgutil.iter_modules(transformers.models.__path__))
    found = [swaps_or_refuses(name) for name in names]
    assert sum(exact for exact, _ in found) > 100
