"""Fresh weights that are drawn part by part have the bits of a model that is built whole."""

import pytest
import torch
from parallel_cases import MODELS, config

from phasor.parallel.fresh import fresh_weights
from phasor.transformer import Transformer


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_a_whole_model(name):
    torch.manual_seed(7)
    whole = dict(Transformer(config(name)).named_parameters())
    after = torch.rand(3)
    drawn = dict(fresh_weights(config(name), 7))
    assert torch.equal(torch.rand(3), after)  # generators are where they would be
    assert drawn.keys() == whole.keys()
    assert all(torch.equal(drawn[name], weight) for name, weight in whole.items())
