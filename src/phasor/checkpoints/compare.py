"""Compare a model with what transformers computes from a Hugging Face folder."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from phasor.checkpoints.exact_rotary import exact_rotary, rotary_tables
from phasor.checkpoints.folder import CONFIG, SOURCE_TOKENIZER, TOKENIZER, read_json, remove_limits
from phasor.checkpoints.hf import family_of
from phasor.config import ModelConfig
from phasor.config.schema import MOST_LENGTH
from phasor.transformer import Transformer

TOLERANCE = 1e-4  # of the logits' standard deviation: float32 sums through a deep model leave less
SHORT = 32  # tokens of the texts that are always compared
BUDGET = 2e12  # multiplications that both models may take for the long text: a minute or so on a CPU
MOST_SCORES = 1 << 28  # attention scores of one layer, which transformers may hold at once
TEXTS = ("The cat sat on 12 mats.", "naïve  北京 🙂\n\tdef f(x):")  # what both tokenize
BEYOND = 16  # tokens past what is crossed


@dataclass(frozen=True)
class Comparison:
    """phasor's logits compared with those of transformers, on random tokens, both in float32."""

    tokens: int
    largest: float  # the largest difference
    size: float  # the logits' standard deviation
    length: int  # of the longest text
    missed: tuple[str, ...] = ()  # what no text was long enough for
    note: str | None = None  # where transformers is known to compute something else
    tokenizer: str | None = None  # what transformers' tokenizer of the folder lacks


def compare(model: Transformer, folder: Path, length: int | None = None, seed: int = 0) -> Comparison:
    """Compare a model with what `transformers` computes from a Hugging Face folder; raises if they differ.

    Of text its tokenizer must give the same token ids, and of tokens its model the same logits.

    Two short texts, and one of `length` tokens: by default so long that it goes past every window and length that
    changes what is computed, as far as that is affordable. In the long one transformers gets exact rotary angles, since
    the rounding of its own angles grows with the position.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("a check needs the package transformers: pip install transformers") from None
    config = model.config
    family = family_of(read_json(folder / CONFIG), folder / CONFIG)
    loaded = getattr(transformers, family.body or family.architecture(config))
    try:
        theirs = loaded.from_pretrained(folder, dtype=torch.float32).eval()
    except ImportError as error:  # of a package for quantized weights
        raise ValueError(
            f"transformers cannot load {folder} for the check: {str(error).splitlines()[0]}; "
            "written in the format hf (--format hf), the model is checked unquantized"
        ) from None
    ours = model if model.tokens.weight.dtype == torch.float32 else copy.deepcopy(model).float()
    ours.eval()
    marks = lengths_that_matter(config)
    most = longest_text(config, theirs)
    long = min(choose_length(config, ours, marks) if length is None else length, most)
    largest = size = 0.0
    # Without a padding token, transformers does not know the last token of more than one text.
    several = 1 if config.head.of_sequence and config.shape == "decoder" and model.special.pad is None else 2
    for rows, count, exact in ((several, min(SHORT, most), False), (1, long, True)):
        inputs = random_inputs(model, rows, count, seed)
        named = dict(zip(("decoder_input_ids",), inputs[1:], strict=False)) | family.source_inputs(inputs[0])
        found, expected = logits(ours, theirs, inputs, named, exact)
        difference, deviation = float((found - expected).abs().max()), float(expected.std(correction=0))
        largest, size = max(largest, difference), max(size, deviation)
        allowed = TOLERANCE if family.differs_from_transformers(config) is None else 0.5
        if not difference <= allowed * max(deviation, 1.0):
            raise ValueError(
                f"transformers computes other logits of {folder}: the largest difference is {difference:.2g} "
                f"in {count:,} tokens, where their standard deviation is {deviation:.2g}; nothing is written"
            )
    missed = tuple(what for what, at in marks.items() if at >= long)
    note, lacks = family.differs_from_transformers(config), compare_tokenizers(model, folder)
    return Comparison(several * SHORT + long, largest, size, long, missed, note, lacks)


def compare_tokenizers(model: Transformer, folder: Path) -> str | None:
    """What transformers' tokenizer of a folder lacks, None where it has all; raises where its token ids are others."""
    from transformers import AutoTokenizer

    if model.source_tokenizer is not None and (folder / SOURCE_TOKENIZER).exists():
        return "transformers has one tokenizer for both sides: it does not read that of the source"
    if model.tokenizer is None or not (folder / TOKENIZER).exists():
        return None
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        found = [list(theirs(text)["input_ids"]) for text in TEXTS]
    except Exception as error:  # of any type that a tokenizer's class raises
        raise ValueError(f"transformers does not read the tokenizer of {folder}: {error}; nothing is written") from None
    ours = remove_limits(Tokenizer.from_str(model.tokenizer.to_str()))  # transformers has its own
    for text, ids in zip(TEXTS, found, strict=True):
        expected = ours.encode(text).ids
        if ids != expected:
            raise ValueError(
                f"transformers tokenizes {text!r} as {ids} from {folder}, and not as {expected}; nothing is written"
            )
    special = {"bos": model.special.bos, "eos": next(iter(model.special.stop), None), "pad": model.special.pad}
    lost = [f"{n}_token" for n, i in special.items() if i is not None and getattr(theirs, f"{n}_token_id") is None]
    return f"the tokenizer of transformers has no {' and no '.join(lost)}" if lost else None


def lengths_that_matter(config: ModelConfig) -> dict[str, int]:
    """What changes with the length of a text, and where: windows, lengths that extensions begin at, the trained length.

    >>> from phasor import preset
    >>> lengths_that_matter(preset("llama-3.1"))
    {'the original length of 8,192 tokens': 8192, 'the trained length of 131,072 tokens': 131072}
    """
    marks: dict[str, int] = {}
    for i in range(max(config.depth("encoder"), config.depth("decoder"))):
        layer = config.layer(i)
        if layer.attention.window is not None:
            marks[f"the window of {layer.attention.window:,} tokens"] = layer.attention.window
        for part in layer.position.parts:
            marks |= {f"the original length of {mark:,} tokens": mark for mark in part.marked_lengths()}
    if config.input_position.max_positions is None:  # a table cannot be passed
        trained = config.trained_length or config.max_length
        marks[f"the trained length of {trained:,} tokens"] = trained
    return dict(sorted(marks.items(), key=lambda mark: mark[1]))


def choose_length(config: ModelConfig, model: Transformer, marks: dict[str, int]) -> int:
    """The length of the long text: past as many marks as can be afforded."""
    weights = sum(p.numel() for p in model.parameters())
    affordable = min(BUDGET / (2 * weights), (MOST_SCORES / config.num_heads) ** 0.5)
    wanted = [at + BEYOND for at in marks.values() if at + BEYOND <= affordable]
    return max([SHORT, *wanted])


def longest_text(config: ModelConfig, theirs: nn.Module) -> int:
    """How many tokens a learned table of positions has, or one of angles (GPT-J) or sinusoids (Marian) in theirs."""
    learned = config.input_position.max_positions
    tables = [len(getattr(owner, name)) for owner, name in rotary_tables(theirs)]
    sinusoids = (getattr(module, "embed_positions", None) for module in theirs.modules())
    tables += [table.num_embeddings for table in sinusoids if isinstance(table, nn.Embedding)]
    return min([MOST_LENGTH if learned is None else learned, *tables])


def random_inputs(model: Transformer, rows: int, count: int, seed: int) -> list[Tensor]:
    """Random tokens, and before them those of a source, none of them padding, which transformers masks or zeroes.

    A source of features is as long as the encoder's table of positions, which transformers asks for, or as the tokens.
    One that an encoder-decoder classifies ends in the end token, which is nowhere else in it, and has no target.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    sizes = [config.vocab_size]
    if config.shape == "encoder-decoder":
        sizes = [config.embedding.source_vocab_size or config.vocab_size, config.vocab_size]
    pad = model.special.pad
    inputs = [torch.randint(0, size, (rows, count), generator=generator) for size in sizes]
    inputs = inputs if pad is None else [x.masked_fill(x == pad, 0 if pad else 1) for x in inputs]
    if (front_end := config.embedding.front_end) is not None:
        table = config.for_side("encoder").input_position.max_positions
        frames = front_end.least + (count - 1) * front_end.hop if table is None else table * front_end.hop
        inputs[0] = torch.randn(rows, frames, front_end.features, generator=generator)
    if config.shape == "encoder-decoder" and config.head.of_sequence:
        if not model.special.stop:
            raise ValueError("transformers finds the scores by the token that ends a text, and the model names none")
        end = model.special.stop[0]
        source = inputs[0].where(inputs[0] != end, (end + 1) % config.vocab_size)
        source[:, -1] = end
        return [source if pad is None or pad == end else source.where(source != pad, (end + 2) % config.vocab_size)]
    return inputs


@torch.no_grad()
def logits(
    ours: Transformer, theirs: Any, inputs: list[Tensor], named: dict[str, Tensor], exact: bool
) -> tuple[Tensor, Tensor]:
    """What both compute of inputs, `named` as theirs has them.

    Theirs has exact rotary angles where it has any and they are asked for.
    """
    with ExitStack() as stack:
        with suppress(ValueError):  # where it has none, or of a kind that is not known
            stack.enter_context(exact_rotary(theirs) if exact else nullcontext())
        out = theirs(**named)
    expected = next(out[n] for n in ("logits", "last_hidden_state") if n in out)
    if "logits" not in out and ours.head is not None and ours.config.has_logits:  # their class has no head
        expected = ours.head(expected, ours.tokens.table)
    return ours(*inputs, head=ours.config.head.kind != "pooled"), expected
