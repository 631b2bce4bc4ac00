"""Tiny Hugging Face folders with a tokenizer and a chat template, written by transformers, and rows to train on."""

import json
import random

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phasor.config.recipe import Recipe
from phasor.data.tokenizers import SPECIALS, byte_letters
from phasor.training import train

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
}


def write_tokenizer(folder):
    """Bytes, our special tokens and those of ChatML, as a folder that transformers reads."""
    vocabulary = {name: i for i, name in enumerate(SPECIALS)}
    vocabulary |= {letter: len(SPECIALS) + byte for byte, letter in byte_letters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIALS, "<|im_start|>", "<|im_end|>")])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>"
    )
    wrapped.save_pretrained(folder)
    return wrapped


def write_model(family, folder, seed=0):
    """A model of random weights, large enough that losses differ from one step to the next."""
    config, kind, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = kind(
        config(
            vocab_size=263, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=3, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=262,
            pad_token_id=0, **fields,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer = write_tokenizer(folder)
    return model, tokenizer


def conversation_rows(count, seed=0):
    """Sums and differences, asked for in one conversation."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        turns = [
            ("user", f"{a}+{b}?"),
            ("assistant", f"{a + b}"),
            ("user", f"{a}-{b}?"),
            ("assistant", f"It is {a - b}"),
        ]
        rows.append({"messages": [{"role": r, "content": t} for r, t in turns[: draw.choice((2, 4))]]})
    return rows


def preference_rows(count, seed=0):
    """Questions with an answer and a wrong one, in conversations of one turn or two."""
    draw = random.Random(seed)
    rows = []
    for row in conversation_rows(count, seed):
        *prompt, last = row["messages"]
        wrong = {"role": "assistant", "content": f"It is {draw.randrange(1000)}, or so it seems"}
        rows.append({"prompt": prompt, "chosen": [last], "rejected": [wrong]})
    return rows


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe(out, **fields):
    """A run of a few steps at a constant learning rate; `fields` are merged over it."""
    data = {
        "data": {"sequence_length": 96},
        "train": {"steps": 20, "log_every": 1, "evaluate_every": 100, "batch_tokens": 192, "max_grad_norm": None}
        | {"device": "cpu"},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup": 0},
        "save": {"best": False},
        "out": str(out),
    }
    for name, value in fields.items():
        data[name] = data[name] | value if isinstance(data.get(name), dict) else value
    return Recipe.from_dict(data)


def run(out, **fields):
    """Train, and the lines of metrics of its steps."""
    made = recipe(out, **fields)
    result = train(made)
    assert result.status == "finished"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return made, [line for line in lines if "loss" in line]
