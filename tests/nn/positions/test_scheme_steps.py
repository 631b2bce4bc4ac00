"""Every scheme that acts in layers, token by token through a static cache, as generation reads it."""

import pytest
import torch
from schemes import SCHEMES, build, relative_change, tiny, tokens

from phasor.kv_cache.static import StaticKVCache

IN_LAYERS = [name for name, scheme in SCHEMES.items() if "scores" in scheme.acts_on or len(scheme.parts) > 1]
IN_LAYERS += [name for name in SCHEMES if name.startswith(("temperature", "selfextend", "dualchunk"))]


@pytest.mark.sample(20)
@torch.no_grad()
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", IN_LAYERS)
def test_steps_of_a_static_cache_equal_the_whole(name, window):
    model, ids = build(tiny(name, attention={"window": window})), tokens(2, 21)
    cache = model.new_cache(2, 32)
    parts = [model(ids[:, :4], cache=cache), model(ids[:, 4:13], cache=cache)]
    static = StaticKVCache(cache)
    parts += [model(ids[:, i : i + 1], cache=static) for i in range(13, 21)]
    assert relative_change(torch.cat(parts, dim=1), model(ids, length=32)) < 1e-5
