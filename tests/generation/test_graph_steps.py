"""Steps of fixed shapes give the tokens of eager steps for every family; on a GPU they are CUDA graphs.

On the CPU the runner of CUDA graphs runs its step without one, over the same buffers.
"""

from __future__ import annotations

import pytest
import torch
from decode_kernels import bfloat16_in_the_interpreter, randn  # noqa: F401
from decoding import speaker
from device import ON_GPU
from schemes import BY_LENGTH, VIEWS, tiny
from transformers_pairs import CASES, make

import phasor
from phasor.generation import runners
from phasor.generation.runners import RETAINED, STEP_RUNNERS, StepSpec, cuda_graph
from phasor.generation.runners.cuda_graph import CudaGraphRunner, spec_why_not
from phasor.generation.runners.fused import FusedRunner
from phasor.kv_cache.static import StaticKVCache
from phasor.ops import dispatch
from phasor.ops.decode import reorder_cache, reorder_cache_ref

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 2]]
RUNNERS = {  # on a GPU
    "mixtral": FusedRunner,
    "qwen3_moe": FusedRunner,
    "gpt_oss": FusedRunner,
    "qwen2_moe": FusedRunner,
    "marian": CudaGraphRunner,
    "t5_10": CudaGraphRunner,
    "t5_11": CudaGraphRunner,
}


@pytest.fixture
def graph_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner of CUDA graphs on the CPU too, where it has no graph."""
    if not ON_GPU:
        monkeypatch.setattr(runners, "STEP_RUNNERS", dispatch.Dispatch(dispatch.Path("CUDA graph", CudaGraphRunner)))


def eager(model, prompts, **options):
    with dispatch.force_path("reference"):
        assert STEP_RUNNERS.choose(StepSpec(model)).name == "eager"
        path, runners.STEP_RUNNERS = runners.STEP_RUNNERS, STEP_RUNNERS
        try:
            return phasor.generate(model, prompts, **options)
        finally:
            runners.STEP_RUNNERS = path


def assert_same_tokens(model, prompts=PROMPTS, runner=CudaGraphRunner, **options):
    expected = eager(model, prompts, **options)
    assert phasor.generate(model, prompts, **options) == expected
    assert type(RETAINED[model].latest) is (runner if ON_GPU else CudaGraphRunner)
    return expected


def family(name):
    _, model = make(CASES[name])
    return model, {"start": 1} if model.encoder is not None else {}


@pytest.mark.sample(4)
@pytest.mark.usefixtures("graph_steps")
@pytest.mark.parametrize("name", RUNNERS)
def test_families(name):
    model, start = family(name)
    assert_same_tokens(model, runner=RUNNERS[name], max_new_tokens=12, **start)
    assert_same_tokens(model, runner=RUNNERS[name], max_new_tokens=6, temperature=0.9, seed=3, **start)


@pytest.mark.usefixtures("graph_steps")
@pytest.mark.parametrize("name", ["marian", "t5_11", "mixtral", "gpt_2"])
def test_beams(name):
    model, start = family(name)
    options = {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 2, "stop": (11, 30, 7), **start}
    assert_same_tokens(model, runner=RUNNERS.get(name, CudaGraphRunner), **options)


@pytest.mark.usefixtures("graph_steps")
def test_beams_under_constraints_windows_and_paddings_of_the_batch():
    model = speaker(attention=VIEWS["sinks"])
    prompts = [[i + 1, 2, 3] for i in range(9)]  # one more prompt fills the rows of the graph
    options = {"num_beams": 3, "max_new_tokens": 9, "stop": (5, 9), "suppress_tokens": (3,), "min_new_tokens": 4}
    assert len(assert_same_tokens(model, prompts, FusedRunner, **options)) == 9
    assert RETAINED[model].latest.buffers.tokens.shape == (30,)
    assert_same_tokens(model, prompts, FusedRunner, **options, no_repeat_ngram_size=2)
    assert_same_tokens(model, prompts, FusedRunner, **options, repetition_penalty=1.3)


@pytest.mark.usefixtures("graph_steps")
def test_sources_of_similar_length_share_a_graph():
    model, start = family("marian")
    sources = [[[5, 9, 2], [7]], [[8] * 16, [1, 2]], [[3], [4]]]
    for source in sources:
        assert_same_tokens(model, source, max_new_tokens=5, **start)
    phasor.generate(model, sources[0], max_new_tokens=5, **start)
    kept = RETAINED[model].latest
    for source in sources[1:]:
        phasor.generate(model, source, max_new_tokens=5, **start)
        assert RETAINED[model].latest is kept
    phasor.generate(model, [[8] * 17, [1]], max_new_tokens=5, **start)
    assert RETAINED[model].latest is not kept


@pytest.mark.usefixtures("graph_steps")
@pytest.mark.parametrize("name", [name for name in BY_LENGTH if "rotary" in name])
def test_frequencies_of_a_planned_length(name):
    model = speaker(name)
    for prompt, options in (([5, 9, 2], {"max_new_tokens": 9}), ([1, 2], {"max_new_tokens": 5, "planned_length": 90})):
        assert_same_tokens(model, prompt, FusedRunner, **options)
    assert_same_tokens(model, [[1, 2], [3, 4, 5]], max_new_tokens=6, planned_length=60, runner=FusedRunner)
    assert_same_tokens(model, [[1, 2], [3, 4, 5]], max_new_tokens=6, planned_length=60, num_beams=2, runner=FusedRunner)


def test_rows_planned_for_different_lengths():
    model = speaker("rotary-dynamic-ntk")
    assert spec_why_not(StepSpec(model, 2, 64, lengths=[50, 50])) is None
    reason = "rows are planned for different lengths, which frequencies depend on"
    assert spec_why_not(StepSpec(model, 2, 64, lengths=[50, 60])) == reason
    assert spec_why_not(StepSpec(model, 2, 8, lengths=[4, 5])) is None  # before the extension acts they are the same
    assert spec_why_not(StepSpec(speaker("rotary-longrope"), 2, 64, lengths=[50, 60])) is None
    assert spec_why_not(StepSpec(speaker(), 2, 64, lengths=[50, 60])) is None
    assert len(phasor.generate(model, [[1, 2], [3]], max_new_tokens=20)[0]) == 20
    with pytest.raises(ValueError, match="one length for all rows"):
        StaticKVCache(model.new_cache(2, 64, length=[50, 60]))


def test_experts_that_wait_for_the_router():
    network = {"activation": "swiglu", "experts": {"num_experts": 4}}
    model = speaker(feedforward=network)
    assert spec_why_not(StepSpec(model, 64)) is None
    assert spec_why_not(StepSpec(model, 65)) == "the experts of 65 rows are grouped on the host"
    assert len(phasor.generate(model, [[1]] * 65, max_new_tokens=2)) == 65


@pytest.mark.parametrize("kind", ["mixtral-8x7b", "gpt-oss", "marian", "t5"])
def test_backends_name_the_runner(kind):
    expected = {"mixtral-8x7b": "fused kernels in one CUDA graph", "gpt-oss": "fused kernels in one CUDA graph"}
    configs = {
        "mixtral-8x7b": tiny("rotary", feedforward={"activation": "swiglu", "experts": {"num_experts": 4}}),
        "gpt-oss": tiny("rotary-yarn", attention={"sink_logits": True}),
        "marian": tiny("sinusoidal", shape="encoder-decoder"),
        "t5": tiny("t5", shape="encoder-decoder"),
    }
    paths = phasor.backends(configs[kind], device="cuda")
    step = next(one for one in paths.ops if one.op == "decoding step")
    assert step.path == expected.get(kind, "CUDA graph")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("beams", "slots", "heads", "dim"), [(1, 4, 1, 8), (3, 5, 2, 12), (4, 3, 3, 64)])
def test_the_kernel_that_reorders_a_cache(beams, slots, heads, dim, dtype):
    keys, values = (randn(2 * beams, slots, heads, dim, dtype=dtype) for _ in range(2))
    sums = torch.randint(-(2**63), 2**63 - 1, (2 * beams, slots, heads))  # what a scheme may keep besides
    order = torch.randint(0, beams, (2 * beams,)) + beams * torch.tensor([0, 1]).repeat_interleave(beams)
    counts = torch.tensor([slots + 2, slots - 1]).repeat_interleave(beams)
    expected = keys.clone(), values.clone(), sums.clone()
    reorder_cache_ref(expected, order, counts, beams)
    before = keys.clone()
    reorder_cache.reorder_cache((keys, values, sums), order, counts, beams)
    for found, ref in zip((keys, values, sums), expected, strict=True):
        assert torch.equal(found[:beams], ref[:beams])
        assert torch.equal(found[beams:, : slots - 1], ref[beams:, : slots - 1])
    assert torch.equal(keys[beams:, slots - 1], before[beams:, slots - 1])  # a slot that holds nothing


@pytest.mark.usefixtures("graph_steps")
def test_a_graph_with_a_large_cache_is_not_retained(monkeypatch):
    model, start = family("marian")
    phasor.generate(model, PROMPTS, max_new_tokens=3, **start)
    kept = RETAINED[model].latest
    source = sum(x.nbytes for layer in kept.buffers.cache.cross for x in layer.values())
    logits = len(PROMPTS) * model.config.vocab_size * model.tokens.dtype.itemsize
    assert kept.nbytes == kept.empty_cache.nbytes + source + logits > kept.empty_cache.nbytes
    monkeypatch.setattr(cuda_graph, "max_retained_bytes", lambda device: kept.nbytes - 1)
    phasor.generate(model, PROMPTS, max_new_tokens=3, **start)
    assert not RETAINED[model].runners


@pytest.mark.usefixtures("graph_steps")
def test_several_graphs_are_retained_within_their_bounds(monkeypatch):
    model, start = family("marian")

    def graph_of(rows):
        phasor.generate(model, PROMPTS[:rows], max_new_tokens=3, **start)
        return RETAINED[model].latest

    one, two, three = graph_of(1), graph_of(2), graph_of(3)
    assert graph_of(1) is one
    assert list(RETAINED[model].runners.values()) == [two, three, one]
    monkeypatch.setattr(runners, "MAX_RETAINED", 3)
    phasor.generate(model, PROMPTS, max_new_tokens=3, num_beams=2, **start)  # the one not used for longest goes
    assert list(RETAINED[model].runners.values())[:2] == [three, one]
    monkeypatch.setattr(cuda_graph, "max_retained_bytes", lambda device: 2 * three.nbytes)
    assert graph_of(3) is three
    new = graph_of(2)
    assert list(RETAINED[model].runners.values()) == [three, new]
    model.tokens.weight = torch.nn.Parameter(model.tokens.weight.detach().clone())
    assert graph_of(1) is not one
    assert len(RETAINED[model].runners) == 1


def test_rounding():
    assert cuda_graph.round_source(512) == 512
    assert [runners.protocol.round_up(n) for n in (0, 1, 64, 100)] == [0, 1, 64, 112]
