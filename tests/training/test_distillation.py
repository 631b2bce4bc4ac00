"""Distillation: the divergence from a teacher by its formula in float64, what is refused, resuming."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from fine_tuning import datasets_of, fine_tuning, losses, save_body, save_tokenizer, sentences
from safetensors.torch import load_file
from training_runs import Notes, StopAt

import phasor
from phasor.training.build import build_model
from phasor.training.loop import train
from phasor.training.objectives import objective_of

SMALL = {"dim": 16, "num_heads": 2, "num_layers": 1, "position": "rotary"}


def teacher(folder):
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(save_body("llama", folder))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def distillation(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "data.txt").write_text("\n".join(sentences(60)))
    if not (folder / "teacher").exists():
        teacher(folder / "teacher")
    return fine_tuning(
        folder,
        "distill",
        str(folder / "data.txt"),
        model=SMALL,
        distill={"teacher": str(folder / "teacher"), **fields},
        data={
            **dict.fromkeys(("train", "valid"), str(folder / "data.txt")),
            "document": "line",
            "tokenizer": str(folder / "teacher"),
            "sequence_length": 32,
        },
    )


def log_softmax(row):
    total = math.log(sum(map(math.exp, row)))
    return [x - total for x in row]


@pytest.mark.parametrize(
    ("temperature", "alpha", "top_k"), [(1.0, 0.5, None), (2.5, 0.0, None), (2.0, 0.3, 4), (1.0, 1.0, 3)]
)
def test_the_loss_is_that_of_hinton(temperature, alpha, top_k, tmp_path):
    recipe = distillation(tmp_path, temperature=temperature, alpha=alpha, top_k=top_k)
    datasets = datasets_of(recipe, tmp_path / "same")
    student, batch = build_model(recipe, datasets).double(), datasets.train[0]
    objective = objective_of(recipe)
    objective.prepare(SimpleNamespace(device=torch.device("cpu")), datasets, None, print, None)
    objective.teacher = objective.teacher.double()
    found = objective.loss(student, batch)
    theirs = phasor.load(recipe.distill.teacher, dtype=torch.float64)
    with torch.no_grad():
        ours, wanted = (m(batch.tokens, **batch.sequence_args) for m in (student, theirs))
    hard = soft = 0.0
    for place in batch.weights.nonzero().tolist():
        at, target = tuple(place), int(batch.targets[tuple(place)])
        hard -= log_softmax(ours[at].tolist())[target]
        q = log_softmax([x / temperature for x in ours[at].tolist()])
        best = sorted(range(len(q)), key=lambda i, row=wanted[at]: -float(row[i]))[: top_k or len(q)]
        p = log_softmax([float(wanted[at][i]) / temperature for i in best])
        soft += sum(math.exp(x) * (x - q[i]) for x, i in zip(p, best, strict=True))
    expected = (alpha * hard + (1 - alpha) * temperature**2 * soft) / batch.count
    assert float(found) == pytest.approx(expected, abs=1e-12)
    found.backward()
    assert all(weight.grad is not None for weight in student.parameters())
    assert all(weight.grad is None for weight in objective.teacher.parameters())


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path):
    recipes = [distillation(tmp_path / name, top_k=5) for name in ("whole", "parts")]
    train(recipes[0])
    train(recipes[1], progress=Notes(each=StopAt(9)))
    train(recipes[1], resume=True)
    whole, parts = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], weight) for name, weight in parts.items())
    assert losses(tmp_path / "whole/run") == losses(tmp_path / "parts/run")


def test_a_teacher_that_changed_is_refused(tmp_path):
    recipe = distillation(tmp_path)
    train(recipe, progress=Notes(each=StopAt(9)))
    torch.manual_seed(2)
    config = transformers.AutoConfig.from_pretrained(recipe.distill.teacher)
    transformers.LlamaForCausalLM(config).save_pretrained(recipe.distill.teacher)
    with pytest.raises(ValueError, match=r"cannot be resumed with another recipe: teacher was"):
        train(recipe, resume=True)


def test_another_tokenizer_is_refused(tmp_path):
    recipe = distillation(tmp_path)
    other = recipe.replace(data=recipe.data.replace(tokenizer="bytes"))
    with pytest.raises(ValueError, match=r"the tokenizer of the teacher .* is not that of the data: set"):
        train(other)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_teacher_is_a_decoder_with_logits(tmp_path):
    save_tokenizer(save_body("bert", tmp_path / "body"))
    recipe = distillation(tmp_path)
    with pytest.raises(ValueError, match="is not a decoder with logits"):
        train(recipe.replace(distill={"teacher": str(tmp_path / "body")}))
