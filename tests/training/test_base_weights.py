"""Adapters over a frozen base in 8 bits or NF4: the same training as over its dequantized weights, in less memory."""

import json
import subprocess
import sys
import weakref

import pytest
import torch
from device import DEVICE
from safetensors.torch import load_file
from training_runs import SMALL, VOCABULARY, Documents, Notes, StopAt, recipe, run, stand_in

import phasor
from phasor.adapters import adapter_tensors
from phasor.checkpoints.load import open_folder
from phasor.checkpoints.opened import OpenedModel
from phasor.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from phasor.nn.quantized import Quantization, QuantizedLinear
from phasor.quantization import base_weights, quantize_base
from phasor.training.build import build_model, outline_model
from phasor.training.trainer import Trainer

LORA = {"rank": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with random weights."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("base") / "model"
    phasor.save(phasor.Transformer(ModelConfig.from_dict(SMALL | {"vocab_size": VOCABULARY})), folder)
    return folder


def dequantized(base, folder, kind):
    """The same model with the values that its quantized weights stand for."""
    plain, held = phasor.load(base), phasor.load(base)
    quantize_base(held, Quantization(8 if kind == "int8" else kind))
    for name, each in base_weights(plain).items():
        plain.get_parameter(name).data = held.get_submodule(each.place).full_weight()
    phasor.save(plain, folder)
    return folder


def make(base, out, kind, **changes):
    return recipe(out, **{"init_from": str(base), "lora": LORA, "train__base_weights": kind} | changes)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A folder of a model with routed experts, in the format of transformers."""
    torch.manual_seed(4)
    sizes = {"dim": 24, "num_heads": 3, "num_layers": 1, "hidden_dim": 40, "vocab_size": VOCABULARY}
    mixture = ExpertsConfig(num_experts=3, top_k=2)
    config = phasor.preset("llama-2", **sizes, feedforward=FeedForwardConfig(activation="swiglu", experts=mixture))
    folder = tmp_path_factory.mktemp("experts") / "model"
    phasor.save(phasor.Transformer(config), folder, format="hf")
    return folder


ADAPTERS = {
    "nf4": ("base", LORA),
    "int8": ("base", LORA | {"kind": "dora"}),
    "nf4, experts": ("experts", LORA | {"targets": ["attention"]}),
    "int8, experts": ("experts", LORA | {"targets": ["attention", "experts"]}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ADAPTERS)
def test_training_is_that_over_the_dequantized_weights(request, tmp_path, case):
    kind, (fixture, lora) = case.partition(",")[0], ADAPTERS[case]
    folder, notes, expected = request.getfixturevalue(fixture), Notes(), Notes()
    changes = {"lora": lora} | ({} if fixture == "base" else {"model": {}})
    run(make(folder, tmp_path / "small", kind, **changes), notes=notes)
    plain = dequantized(folder, tmp_path / "plain", kind)
    run(make(plain, tmp_path / "large", None, **changes), notes=expected)
    assert len(notes.losses) == 12
    assert notes.losses[12] < notes.losses[1]
    # The same float32 products and sums in another order.
    assert notes.losses == pytest.approx(expected.losses, rel=1e-5)
    # Without gradients, rows are rounded to 8 bits for int8 weights on some processors.
    assert notes.validations[12] == pytest.approx(expected.validations[12], rel=1e-2 if kind == "int8" else 1e-5)


def test_a_run_goes_on_bit_by_bit_and_its_checkpoints_hold_the_adapter_alone(base, tmp_path):
    run(make(base, tmp_path / "whole", "nf4"))
    stopped = make(base, tmp_path / "stopped", "nf4")
    run(stopped, notes=Notes(each=StopAt(5)))
    saved = load_file(max((tmp_path / "stopped" / "checkpoints").glob("step-*")) / "model.safetensors")
    assert saved
    assert all(".lora." in name for name in saved)
    run(stopped, resume=True)
    one, other = (load_file(max((tmp_path / name / "model").glob("*.safetensors"))) for name in ("whole", "stopped"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_adapter_is_used_with_the_unquantized_base_and_merged_into_it(base, tmp_path):
    run(make(base, tmp_path / "run", "nf4"))
    model = phasor.load(base, adapter=tmp_path / "run" / "model")
    assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
    phasor.merge(base, tmp_path / "run" / "model", tmp_path / "merged")
    tokens = torch.randint(VOCABULARY, (2, 9))
    # sums of float32 in another order
    torch.testing.assert_close(phasor.load(tmp_path / "merged")(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_another_base_is_refused_where_it_is_no_adapters_or_was_not_the_runs(base, tmp_path):
    with pytest.raises(ValueError, match=r"TrainConfig.base_weights 'nf4' is for the frozen base of an adapter: set"):
        recipe(tmp_path / "run", init_from=str(base), train__base_weights="nf4")
    run(make(base, tmp_path / "run", "nf4", train__steps=4))
    with pytest.raises(ValueError, match=r'base_weights was "nf4" and is "int8"'):
        run(make(base, tmp_path / "run", "int8", train__steps=4), resume=True)


def test_no_two_unquantized_projections_are_held_while_a_base_is_read(base, monkeypatch):
    alive, most, load = weakref.WeakSet(), [0], OpenedModel.load

    def counting(opened, *given, **options):
        chosen, read = base_weights(opened.model), opened.read

        def read_one(name, device):
            weight = read(name, device).clone()
            if name in chosen:
                most[0] = max(most[0], len(alive))
                alive.add(weight)
            return weight

        return load(OpenedModel(opened.model, opened.dtype, read_one), *given, **options)

    with open_folder(base, torch.float32) as opened:
        count = len(base_weights(opened.model))
        model = counting(opened, torch.device("cpu"), quantization=Quantization("nf4"))
    assert count == 8
    assert most[0] <= 1
    assert not alive
    assert sum(isinstance(part, QuantizedLinear) for part in model.modules()) == count


@pytest.mark.parametrize("case", ADAPTERS)
def test_weights_one_after_another_are_those_of_a_model_in_memory(request, tmp_path, case):
    fixture, lora = ADAPTERS[case]
    folder, changes = request.getfixturevalue(fixture), {} if fixture == "base" else {"model": {}}
    made = make(folder, tmp_path, case.partition(",")[0], lora=lora, train__param_dtype="bfloat16", **changes)
    datasets = stand_in(made, tmp_path, None)
    model, given = outline_model(made, datasets, None, verify=True)
    whole = build_model(made, datasets).state_dict()
    found = dict(given)
    assert found.keys() == whole.keys() == model.state_dict().keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor.cpu()), name


def trainer_of(base, tmp_path, kind, **changes):
    made = make(base, tmp_path, kind, train__param_dtype="bfloat16", **changes)
    return Trainer(build_model(made, stand_in(made, tmp_path, None)), made, 12)


def test_frozen_weights_have_no_state_and_no_copy_in_float32(base, tmp_path):
    trainer = trainer_of(base, tmp_path, "nf4", train__precision="bfloat16")
    batch = Documents()[0]
    trainer.train_step(0, [batch.to(DEVICE)], batch.count).result()
    adapter = {id(w) for name, w in trainer.model.named_parameters() if ".lora." in name}
    assert {id(w) for w in trainer.optimizer.state} == adapter
    frozen = {name: w for name, w in trainer.model.named_parameters() if id(w) not in adapter}
    assert {w.dtype for w in frozen.values()} == {torch.bfloat16}
    assert all(w.grad is None for w in frozen.values())
    assert not any("attention" in name or "feedforward" in name for name in frozen)
    assert {w.dtype for w in adapter_tensors(trainer.model, "default").values() if w.is_floating_point()} == {
        torch.float32
    }


@pytest.mark.parametrize("targets", [("attention",), ("attention", "feedforward")], ids=str)
@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
def test_what_is_kept_for_the_backward_pass_is_what_gradients_need(base, tmp_path, kind, targets):
    """By the layer: features that adapters or nonlinear functions read, and no weight."""
    fields = {"dropout": {"residual": 0.0, "attention": 0.0}, "feedforward": {"activation": {"kind": "gelu"}}}
    changes = {"model": fields, "lora": LORA | {"targets": list(targets)}}
    model = trainer_of(base, tmp_path, kind, train__precision="float32", **changes).model.float()
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    block = model.decoder.blocks[0].feedforward
    x = torch.randn(3, 17, SMALL["dim"], device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x)
    rows, (up, down) = x[..., 0].numel(), (block.up, block.down)
    expected = rows * up.out_features  # of the activation's derivative
    if "feedforward" in targets:
        expected += rows * (up.in_features + down.in_features)  # which the gradients of A are products of
        expected += (2 * rows + up.out_features + down.out_features) * LORA["rank"]  # A x, and B times its scale
    assert sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values()) == expected


@pytest.mark.slow
@pytest.mark.cpu_only("processes of gloo")
def test_two_processes_train_what_one_does(base, tmp_path):
    (tmp_path / "data.txt").write_text("".join(f"{i} plus {i + 1} is {2 * i + 1}.\n" for i in range(900)))
    torch.manual_seed(0)
    sizes = {"dim": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 300}
    phasor.save(phasor.Transformer(phasor.preset("llama-2", **sizes)), tmp_path / "base")
    options = ["--data.tokenizer", "bytes", "--data.replace-tokenizer", "true", "--data.sequence_length", "32"]
    options += ["--train.batch_tokens", "256", "--train.steps", "4", "--train.log_every", "1", "--train.device", "cpu"]
    options += ["--lora.rank", "4", "--train.base_weights", "nf4", "--init-from", str(tmp_path / "base")]
    losses = []
    for count in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        out = tmp_path / str(count)
        given = ["-m", "phasor", "train", "--data.train", str(tmp_path / "data.txt"), "--out", str(out), *options]
        subprocess.run([sys.executable, *launch, *given], check=True, capture_output=True)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # sums of float32 in another order
