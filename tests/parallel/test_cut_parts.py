"""Modules cut over the tensor axis and queries of cut rows, without other processes: kernels against float64."""

import copy
import itertools

import pytest
import torch
from device import DEVICE
from parallel_cases import MODELS, config
from references import normal

from phasor.adapters import add_adapter
from phasor.config.lora import LoRAConfig
from phasor.config.parameters import parameters_of
from phasor.nn.record import Record
from phasor.nn.sequence import sequence_info
from phasor.ops import dispatch
from phasor.ops.attention import Mask, ScoreMod, attention, attention_ref
from phasor.parallel.cuts import Place, WeightSlices, tensor_cuts
from phasor.parallel.tensor import cut_weights
from phasor.parallel.tokens import chunk_order
from phasor.transformer import Transformer

COUNT = 2
FAST = ("biases and sinks",)  # the interpreter is slow
ROUTED = {"experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 16, "shared_dim": 24, "shared_gate": True}}
CASES = {
    "rotary": config("tied llama"),
    "biases and sinks": config("windows and sinks"),
    "alibi": config("alibi"),
    "t5": config("encoder-decoder"),
    "experts": config("deepnorm").replace(feedforward=ROUTED | {"bias": True, "activation": "swiglu"}),
    "learned activation": config("tied llama").replace(feedforward={"activation": "xielu"}),
}
FEEDFORWARD = {"experts": ("feedforward", "experts")}


def results(model, x, positions_like):
    """What attention and the feed-forward network of the first block make of an input."""
    stack, block = model.decoder, model.decoder.blocks[0]
    seq = sequence_info(len(x), x.shape[1], x.device, document_ids=positions_like, needs_length=stack.needs_length)
    ctx = stack._self_attention_contexts(x, seq, None, None, [Record()] * 9)[0]
    return block.attention(x, ctx), block.feedforward(x)


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapted"])
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_parts_of_modules_add_up_with_their_gradients(case, adapted):
    """Results, the gradient of the input, and those of weights: a part's are its part of the whole weight's."""
    torch.manual_seed(0)
    whole = Transformer(CASES[case])
    if adapted:
        add_adapter(whole, LoRAConfig(rank=2, targets=("attention", *FEEDFORWARD.get(case, ("feedforward",)))))
    whole.to(DEVICE).train()
    for weight in whole.parameters():
        weight.data += 0.1 * torch.randn_like(weight)  # biases and sink logits begin as zeros
    x, *seeds = (normal(1, 12, 32, seed=n).detach().to(DEVICE) for n in (1, 2, 3))
    documents = (torch.arange(12, device=DEVICE) >= 4).long()[None]
    parts = [copy.deepcopy(whole) for _ in range(COUNT)]
    cuts = tensor_cuts(whole)
    for index, part in enumerate(parts):
        cut_weights(part, index, COUNT)
    exact = copy.deepcopy(whole).double()
    given = x.double().clone().requires_grad_()
    expected = results(exact, given, documents)
    sum((y * s).sum() for y, s in zip(expected, seeds, strict=True)).backward()
    inputs, found = [x.float().requires_grad_() for _ in parts], []
    with dispatch.force_path("triton"):
        for part, own in zip(parts, inputs, strict=True):
            found.append(results(part, own, documents))
            sum((y * s.float()).sum() for y, s in zip(found[-1], seeds, strict=True)).backward()
    for ys, y in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(sum(ys).double(), y, rtol=1e-4, atol=1e-5 * float(y.detach().abs().max()))
    weights = {name: w.grad for name, w in exact.decoder.blocks[0].named_parameters(prefix="decoder.blocks.0")}
    for name, gradient in ({"input": given.grad} | weights).items():
        if gradient is None:  # the norms around the parts
            continue
        grads = [i.grad if name == "input" else p.get_parameter(name).grad for p, i in zip(parts, inputs, strict=True)]
        grads = [torch.zeros_like(gradient) if g is None else g.double() for g in grads]
        total = cuts[name].join(grads) if name in cuts else sum(grads)
        torch.testing.assert_close(total, gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()) + 1e-7, msg=name)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, window=5, sink_tokens=2)])
def test_queries_of_two_chunks_see_what_they_see_in_whole_rows(mask):
    """The kernel for the tokens that a process takes, over the keys of whole rows: results and gradients."""
    q, k, v, seed = (normal(1, 16, heads, 8, seed=n).detach().to(DEVICE) for n, heads in enumerate((4, 2, 2, 4)))
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected, _ = attention_ref(*wide, mask, ScoreMod(scale=0.3))
    gradients = torch.autograd.grad((expected * seed).sum(), wide)
    total = [torch.zeros_like(x) for x in gradients]
    for own in chunk_order(16, 2, torch.device(DEVICE)).chunk(2):
        narrow = [x.float().requires_grad_() for x in (q[:, own], k, v)]
        ours = Mask(**{n: getattr(mask, n) for n in ("causal", "window", "sink_tokens")}, query_index=own[None])
        with dispatch.force_path("triton"):
            y = attention(*narrow, ours, ScoreMod(scale=0.3))
            found = torch.autograd.grad((y * seed[:, own].float()).sum(), narrow)
        torch.testing.assert_close(y.double(), expected[:, own], rtol=1e-4, atol=1e-5)
        total[0][:, own] += found[0].double()
        total[1:] = [t + g.double() for t, g in zip(total[1:], found[1:], strict=True)]
    for ours, theirs in zip(total, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.cpu_only("no device takes part")
@pytest.mark.parametrize("name", ["tied llama", "encoder-decoder", "windows and sinks", "experts"])
def test_slices_of_all_processes_are_every_element_once(name):
    """And the sizes of the first process are those that plans compute."""
    with torch.device("meta"):
        model = Transformer(config(name))
    sizes = (3, 2, 2)
    places = [Place(*zip(at, sizes, strict=True)) for at in itertools.product(*map(range, sizes))]
    slices = [WeightSlices(model, place) for place in places]
    for weight, shape in slices[0].shapes.items():
        seen = torch.zeros(shape, device="cpu")
        for each in slices:
            for part in each.slices_of(weight):
                seen[part] += 1
        assert bool((seen == (2 if slices[0].is_copied(weight) else 1)).all()), weight
    taken = sum(slices[0].take(n, torch.empty(s, device="meta")).numel() for n, s in slices[0].shapes.items())
    assert taken == parameters_of(config(name)).local(tensor=2, shards=6)


@pytest.mark.cpu_only("no device takes part")
@pytest.mark.parametrize("name", MODELS)
def test_plans_cut_the_weights_that_are_cut(name):
    with torch.device("meta"):
        model = Transformer(config(name))
    cuts = tensor_cuts(model)
    ours = sorted((tuple(w.shape), cuts[n].dim) for n, w in model.named_parameters() if n in cuts)
    blocks = parameters_of(config(name)).blocks
    planned = [(w.shape, w.cut) for block, count in blocks for w in block * count if w.cut is not None]
    assert ours == sorted(planned)
