"""Tiny folders and data for the tests of tasks that fine-tune, and the Trainer of transformers on our batches."""

from __future__ import annotations

import json
import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from phasor.config.recipe import Recipe
from phasor.training.datasets import load_datasets
from phasor.training.run import RunFolder

transformers.logging.set_verbosity_error()
WORDS = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "sang",
    "on",
    "under",
    "mat",
    "hat",
]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5_SIZES = {
    "vocab_size": len(WORDS),
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "dropout_rate": 0.0,
}
BART_SIZES = {
    "vocab_size": len(WORDS),
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
STEPS = 20
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SIZES, **NO_DROPOUT),
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=3, eos_token_id=2, bos_token_id=1),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, num_key_value_heads=1, head_dim=8, eos_token_id=2, bos_token_id=1
    ),
}


def save_tokenizer(folder):
    """Words as tokens, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_body(name, folder):
    """A model of theirs without a head, with random weights, and a tokenizer."""
    torch.manual_seed(0)
    transformers.AutoModel.from_config(CONFIGS[name]()).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def sentences(count, seed=0):
    """Random sentences of other lengths."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS[4:], k=rng.randint(2, 9))) for _ in range(count)]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def fine_tuning(folder, task, train, **changes):
    """A recipe of 20 steps in float32, with settings that transformers' Trainer has as well."""
    return Recipe.from_dict({
        "task": task,
        "data": {"train": train, "valid": train, "sequence_length": 32},
        "train": {"steps": STEPS, "batch_tokens": 64, "log_every": 1, "evaluate_every": 99, "device": "cpu"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"every": 7, "best": False},
        "out": str(folder / "run"),
    } | changes)  # fmt: skip


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def datasets_of(recipe, place):
    with RunFolder(place, recipe, resume=False) as run:
        return load_datasets(recipe, run, lambda *_: None)


def their_losses(model, batches, inputs, place):
    """The losses of transformers' Trainer on the first batches, each made of its `inputs`."""
    kept = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            kept.append(float(loss.detach()))
            return loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(range(STEPS))

    settings = transformers.TrainingArguments(
        output_dir=str(place), max_steps=STEPS, per_device_train_batch_size=1, learning_rate=1e-3, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, lr_scheduler_type="constant",
        optim="adamw_torch", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    rows = [inputs(batches[step]) for step in range(STEPS)]
    Trainer(model, settings, data_collator=lambda given: given[0], train_dataset=rows).train()
    return kept
