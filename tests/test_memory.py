"""Attention never allocates a queries-by-keys tensor, and long sequences fit in little memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from schemes import build, tiny, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import phasor
from phasor import ModelConfig, Record

COUNT = 1200  # tokens: three blocks of queries
NARROW = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_length": COUNT}  # a block of scores is below n x n


class NothingSquare(TorchDispatchMode):
    """Fails when an operation of the forward or the backward pass allocates a tensor as large as queries by keys."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                square = sum(size >= COUNT for size in x.shape) > 1 or x.numel() >= COUNT * COUNT
                assert not square, f"{func} made {list(x.shape)}"
        return made


AT = torch.arange(COUNT)[None]
GIVEN: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "left padding": {"attention_mask": AT >= 100},
    "right padding": {"attention_mask": AT < COUNT - 100},
    "document_ids": {"document_ids": AT // 500},
    "documents and padding": {"document_ids": AT // 500, "attention_mask": AT < COUNT - 100},
}


def check_nothing_square(config: ModelConfig, **given: Any) -> None:
    model = build(config)
    with NothingSquare():
        model(tokens(1, COUNT), **given).square().mean().backward()


def test_the_check_notices_a_square_tensor():
    model, ids = build(tiny("rotary", **NARROW)), tokens(1, COUNT)
    with pytest.raises(AssertionError, match="made"), NothingSquare():
        model(ids, record=Record("attention"))


@pytest.mark.sample(8)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("name", ["rotary", "t5", "alibi"])
def test_masks_and_biases_are_never_square(name, shape, window, given):
    check_nothing_square(tiny(name, **NARROW, shape=shape, attention={"window": window}), **GIVEN[given])


@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("name", ["shaw", "shaw-bert", "disentangled", "transformerxl", "cope", "profiles"])
def test_products_with_vectors_of_the_distance_are_never_square(name, shape):
    check_nothing_square(tiny(name, **NARROW, shape=shape), **GIVEN["left padding"])
    model = build(tiny(name, **NARROW, shape=shape))
    with NothingSquare(), torch.no_grad():
        model(tokens(1, COUNT))


@pytest.mark.sample(4)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["rotary", "t5"])
def test_masks_of_cross_attention_are_never_square(name, given):
    model, ids = build(tiny(name, **NARROW, shape="encoder-decoder")), tokens(1, COUNT)
    of_target = {f"target_{key}": value for key, value in GIVEN[given].items()}
    with NothingSquare():
        model(ids, ids, **GIVEN[given], **of_target).square().mean().backward()


@pytest.mark.parametrize(
    ("attention", "given"),
    [
        ({"window": 300, "sink_tokens": 4}, {}),
        ({"window": 300, "sink_tokens": 4}, {"document_ids": AT // 500}),
        ({}, {"prefix_length": 700}),
        ({"softcap": 30.0, "sink_logits": True}, {"attention_mask": AT >= 100}),
    ],
    ids=["sink tokens", "sink tokens in documents", "prefix_length", "score extras"],
)
def test_sinks_prefixes_and_score_options_are_never_square(attention, given):
    check_nothing_square(tiny("rotary", **NARROW, attention=attention), **given)


PEAK = """
import torch, phasor
sizes = dict(vocab_size=64, dim=32, num_layers=2, num_heads=4, max_length=32768)
model = phasor.Transformer(phasor.ModelConfig(**sizes, position="{position}", attention=dict(window=1024)))
{run}
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
FORWARD = "out = model(torch.randint(0, 64, (1, 32768)))"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process where Linux keeps it")
@pytest.mark.parametrize(
    ("position", "run"),
    [
        ("rotary", FORWARD),
        pytest.param("t5", FORWARD, marks=pytest.mark.slow),
        pytest.param("alibi", FORWARD, marks=pytest.mark.slow),
        pytest.param("rotary", f"{FORWARD}.mean().backward()", marks=pytest.mark.slow),
    ],
    ids=["rotary", "t5", "alibi", "rotary with gradients"],
)
def test_a_window_over_32768_tokens_stays_under_2_gib(position, run):
    """Of the whole process, with the libraries it loads."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK.format(position=position, run=run)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 2 * 2**30


LINUX = pytest.mark.skipif(not phasor.device.MEMORY.exists(), reason="only Linux says how much memory is free")


def size_of(config: ModelConfig) -> str:
    with torch.device("meta"):
        weights = phasor.Transformer(config).parameters()
    return f"need {sum(weight.nbytes for weight in weights) / 2**30:,.1f} GiB, and cpu has "


@LINUX
def test_weights_beyond_memory_are_one_sentence() -> None:
    config = phasor.preset("llama-3.1", num_layers=2, hidden_dim=2**28)
    with pytest.raises(ValueError, match=re.escape(size_of(config))):
        phasor.Transformer(config)
    with FakeTensorMode():
        phasor.Transformer(config)


@LINUX
def test_weights_are_loaded_as_far_as_memory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("rotary", num_layers=1)
    phasor.save(phasor.Transformer(config), tmp_path / "model")
    monkeypatch.setattr(phasor.device, "MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemAvailable:  4 kB\nSwapFree: 64 kB\n")
    phasor.load(tmp_path / "model")
    (tmp_path / "meminfo").write_text("MemAvailable:  0 kB\nSwapFree: 0 kB\n")
    with pytest.raises(ValueError, match=re.escape(size_of(config)) + "0.0 GiB"):
        phasor.load(tmp_path / "model")
