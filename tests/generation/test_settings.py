"""The generation settings of a folder: those of transformers, with the same tokens; what the caller passes wins."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import phasor
from phasor import GenerationConfig, generate
from phasor.config.generation_settings import NOT_HONORED, merge_options

pytestmark = pytest.mark.cpu_only("the models of both libraries are built once, on the host")

PROMPTS = [[5, 17, 30, 8, 17], [44], [3, 3, 9, 21, 33, 2, 11]]
COUNT = 12


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.4,
        )
    )


def bart() -> Any:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=48, d_model=16, max_position_embeddings=64, init_std=0.6, **sizes, **heads
    )
    return transformers.BartForConditionalGeneration(config)


class Case:
    """A folder, and the models of both libraries in it."""

    def __init__(self, build: Callable[[], Any], folder: Path) -> None:
        torch.manual_seed(3)
        self.folder, self.theirs, self.stop = folder, build().eval(), [0]
        self.theirs.save_pretrained(folder)
        self.write({})
        free = generate(phasor.load(folder), PROMPTS, max_new_tokens=COUNT, stop=())
        self.stop = sorted({free[0][4], free[2][6]})  # texts end in the middle

    def write(self, settings: dict[str, Any]) -> None:
        special = {"eos_token_id": self.stop, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2}
        lengths = {} if "max_length" in settings else {"max_new_tokens": COUNT}
        (self.folder / "generation_config.json").write_text(json.dumps(special | lengths | settings))
        self.theirs.generation_config = transformers.GenerationConfig.from_pretrained(self.folder)

    def their_tokens(self, prompt: list[int], **options: Any) -> list[list[int]]:
        """What transformers generates with the folder's settings, up to and with the first stop token."""
        given = torch.tensor([prompt])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = self.theirs.generate(given, attention_mask=torch.ones_like(given), **options).tolist()
        texts = []
        for row in rows:
            new = row[1 if self.theirs.config.is_encoder_decoder else len(prompt) :]
            end = next((i + 1 for i, token in enumerate(new) if token in self.stop), len(new))
            texts.append(new[:end])
        return texts


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    both = {"decoder": llama, "encoder-decoder": bart}
    return {name: Case(build, tmp_path_factory.mktemp(name)) for name, build in both.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition penalty": {"repetition_penalty": 1.6},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "no repeated tokens": {"no_repeat_ngram_size": 1},
    "suppressed tokens": {"suppress_tokens": list(range(3, 30, 2)), "begin_suppress_tokens": [36, 40, 41, 42, 44]},
    "bad words": {"bad_words_ids": [[4], [30, 8], [17, 20, 31], [7], *[[n, n] for n in range(48)]]},
    "a minimum": {"min_new_tokens": 9},
    "a minimum of all": {"min_length": 11},
    "a maximum of all": {"max_length": 14},
    "forced tokens": {"forced_bos_token_id": 31, "forced_eos_token_id": 9, "begin_suppress_tokens": [31, 40]},
    "sampling settings without sampling": {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 0},
    "beams": {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True},
    "beams, penalized": {"num_beams": 4, "repetition_penalty": 1.3, "length_penalty": 2.0},
    "beams, all": {
        "num_beams": 3,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [4, 9],
        "min_new_tokens": 4,
        "early_stopping": "never",
        "num_return_sequences": 2,
    },
    "beams, normalized again": {"num_beams": 3, "suppress_tokens": list(range(0, 48, 3)), "renormalize_logits": True},
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_tokens_are_those_of_transformers(shape: str, name: str, cases: dict[str, Case]) -> None:
    case, changed = cases[shape], False
    case.write(SETTINGS[name])
    model = phasor.load(case.folder)
    for prompt in PROMPTS:
        expected = case.their_tokens(prompt)
        found = generate(model, prompt)
        assert found == (expected if len(expected) > 1 else expected[0])
        plain = generate(model, prompt, GenerationConfig(max_new_tokens=COUNT, bad_words_ids=()))
        changed |= found != plain
    assert changed or name in ("nothing", "forced tokens", "sampling settings without sampling")


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_streams_and_copies_of_a_folder_keep_the_settings(shape: str, cases: dict[str, Case], tmp_path: Path) -> None:
    case, prompt = cases[shape], PROMPTS[0]
    case.write(SETTINGS["beams, all"] | SETTINGS["bad words"] | {"guidance_scale": 1.0, "transformers_version": "4.4"})
    model = phasor.load(case.folder)
    assert [*phasor.stream(model, prompt)] == case.their_tokens(prompt, num_beams=1, num_return_sequences=1)[0]
    phasor.save(model, tmp_path / "ours")
    phasor.save(phasor.load(tmp_path / "ours"), tmp_path / "theirs", format="hf")
    written = json.loads((case.folder / "generation_config.json").read_text())
    for name in ("ours", "theirs"):
        found = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {field: found[field] for field in written} == written
        assert generate(phasor.load(tmp_path / name), prompt) == case.their_tokens(prompt)


def test_settings_in_an_older_config(cases: dict[str, Case], tmp_path: Path) -> None:
    """Folders without generation_config.json may have the settings in config.json."""
    for file in cases["decoder"].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_beams": 3, "no_repeat_ngram_size": 2, "max_length": 20, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    expected = theirs.generate(torch.tensor([PROMPTS[0]]), do_sample=False)[0, len(PROMPTS[0]) :].tolist()
    assert generate(phasor.load(tmp_path), PROMPTS[0]) == expected


def test_what_the_caller_passes_wins(cases: dict[str, Case]) -> None:
    case = cases["decoder"]
    case.write({"repetition_penalty": 1.6, "num_beams": 3, "bad_words_ids": [[4]]})
    model = phasor.load(case.folder)
    own = {"repetition_penalty": 1.2, "num_beams": 1, "max_new_tokens": 8}
    for prompt in PROMPTS:
        assert generate(model, prompt, **own) == case.their_tokens(prompt, **own)[0]
    free = generate(model, PROMPTS[0], GenerationConfig(max_new_tokens=COUNT), stop=())
    model.generation_settings = {}
    assert free == generate(model, PROMPTS[0], max_new_tokens=COUNT, stop=())


def test_several_samples() -> None:
    torch.manual_seed(0)
    model = phasor.Transformer(phasor.preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=40))
    options = {"temperature": 1.5, "max_new_tokens": 6}
    found = generate(model, [[1, 2], [3]], num_return_sequences=3, seed=5, **options)
    assert found[0] == [generate(model, [1, 2], seed=5 + i, **options) for i in range(3)]
    assert found[1] == [generate(model, [3], seed=5 + i, **options) for i in range(3)]
    assert len({tuple(new) for new in found[0]}) > 1
    each = generate(model, [[1, 2], [3]], num_return_sequences=2, seed=(5, 9), **options)
    assert each[1] == [generate(model, [3], seed=9 + i, **options) for i in range(2)]
    details = generate(model, [1, 2], num_return_sequences=2, details=True, **options)
    assert [type(one) for one in details] == [phasor.Generated] * 2
    drafted = generate(model, [1, 2], draft=model, num_return_sequences=2, seed=1, **options)
    assert [len(new) for new in drafted] == [6, 6]
    with pytest.raises(ValueError, match="several samples need a temperature"):
        generate(model, [1, 2], num_return_sequences=2)
    with pytest.raises(ValueError, match="stream gives one continuation"):
        phasor.stream(model, [1, 2], num_return_sequences=2, **options)


MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sampling": ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50}),
    "sampling with settings": (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "typical_p": 0.8},
        {},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "typical_p": 0.8},
    ),
    "no top_k": ({"do_sample": True, "top_k": 0}, {}, {"temperature": 1.0, "top_k": None}),
    "the caller is greedy": ({"do_sample": True, "top_p": 0.9}, {"temperature": 0.0}, {"temperature": 0.0}),
    "the caller samples": ({"top_p": 0.9, "num_beams": 4}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}),
    "the caller searches": ({"do_sample": True, "top_p": 0.9}, {"num_beams": 2}, {"num_beams": 2}),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, {}, {"penalty_alpha": 0.6, "top_k": 4}),
    "beams and lookup": ({"num_beams": 4}, {"prompt_lookup_tokens": 3}, {"prompt_lookup_tokens": 3}),
    "beams and compile": ({"num_beams": 4}, {"compile": True}, {"compile": True}),
    "more results than beams": ({"num_return_sequences": 3, "num_beams": 3}, {"num_beams": 1}, {}),
    "a maximum that is reached": ({"max_length": 3}, {}, {"max_new_tokens": 1}),
    "new tokens before all": ({"max_length": 9, "max_new_tokens": 7}, {}, {"max_new_tokens": 7}),
    "nulls": ({"top_k": None, "num_beams": None, "max_length": None}, {}, {}),
}


@pytest.mark.parametrize("name", MERGED)
def test_how_settings_and_options_merge(name: str) -> None:
    settings, fields, expected = MERGED[name]
    assert merge_options(settings, None, fields, prompt_length=5) == GenerationConfig(**expected)


def test_what_is_not_honored_is_named_in_one_warning() -> None:
    settings = {"guidance_scale": 2.0, "diversity_penalty": 0.5, "epsilon_cutoff": 0.0, "use_cache": True}
    with pytest.warns(UserWarning, match="does not honor: diversity_penalty, guidance_scale$") as seen:
        merge_options(settings, None, {})
    assert len(seen) == 1
    merge_options({name: idle[0] for name, idle in NOT_HONORED.items() if idle}, None, {})
    with pytest.warns(UserWarning, match="do_sample with num_beams"):
        assert merge_options({"do_sample": True, "num_beams": 2}, None, {}).num_beams == 2


def test_settings_that_cannot_be() -> None:
    for settings in (
        {"num_beams": "four"},
        {"top_p": 3, "do_sample": True},
        {"bad_words_ids": [[]]},
        {"max_new_tokens": 0},
    ):
        with pytest.raises(ValueError, match="the generation settings of the model's folder do not fit: "):
            merge_options(settings, None, {})
    with pytest.raises(ValueError, match=r"^num_beams must be at least 1"):
        merge_options({"num_beams": 2}, None, {"num_beams": 0})
