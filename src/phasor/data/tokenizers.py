"""Tokenizers: bytes, BPE and unigram with our five special tokens, or that of a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from phasor.checkpoints.folder import CONFIG, SPECIAL, TOKENIZER, read_json, read_special, read_tokenizer
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.run_checkpoint import tokenizer_folder
from phasor.config.generation import SpecialTokens
from phasor.config.recipe import DataConfig
from phasor.config.schema import Config

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")  # with the ids 0 to 4
NAMES = {  # how other tokenizers call theirs
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]"),
}
BYTE_VOCABULARY = len(SPECIALS) + 256
ENDS = "<bos> $A"  # what a tokenizer puts around a text, of a language model


class SpecialIds(Config):
    """The ids of the special tokens in batches: padding, both ends of a text, the mask, and a decoder's first one."""

    pad: int = 0
    bos: int | None = 1
    eos: int = 2
    mask: int | None = 4
    start: int = 1


def train_tokenizer(texts: Iterable[str], config: DataConfig, ends: str = ENDS) -> Tokenizer:
    """A tokenizer learned from texts. It works on bytes, so that no text is unknown to it and none is changed.

    >>> tokenizer = train_tokenizer(["low lower lowest"] * 9, DataConfig(tokenizer="bpe", vocab_size=270))
    >>> tokenizer.decode(tokenizer.encode("lowest 最低").ids)
    'lowest 最低'
    """
    if config.vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"data.vocab_size must be at least {BYTE_VOCABULARY}, every byte and the special tokens, "
            f"not {config.vocab_size}"
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "special_tokens": list(SPECIALS),
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    if config.tokenizer == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(unk_token="<unk>", **shared)
    else:
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(min_frequency=2, **shared)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wait_for(lambda: tokenizer.train_from_iterator(texts, trainer))
    return configure(tokenizer, ends)


def wait_for(call: Callable[[], object]) -> None:
    """Call in another thread what looks at no signal for a long time, so that Ctrl-C ends the wait for it at once."""
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    done.result()


def byte_tokenizer(ends: str = ENDS) -> Tokenizer:
    """Bytes as tokens: the byte `b` has the id `5 + b`.

    >>> byte_tokenizer().encode("A", add_special_tokens=False).ids
    [70]
    """
    vocabulary = {name: i for i, name in enumerate(SPECIALS)}
    vocabulary |= {letter: len(SPECIALS) + byte for byte, letter in byte_letters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return configure(tokenizer, ends)


def byte_letters() -> dict[int, str]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def configure(tokenizer: Tokenizer, ends: str) -> Tokenizer:
    """Have the tokenizer decode what it encodes, and add the ends of text that the model was trained with."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=ends, pair=f"{ends} $B:1 <eos>:1", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer


def find_tokenizer(name: str) -> Path:
    """The folder of a tokenizer: one that is given by its path, or the files of a name on the Hugging Face hub."""
    try:
        return tokenizer_folder(resolve_folder(name, files="tokenizer"))
    except ValueError as error:
        raise ValueError(f"a tokenizer is 'bytes', 'bpe', 'unigram' or a folder with one: {error}") from None


def load_tokenizer(folder: str | Path) -> tuple[Tokenizer, SpecialIds]:
    """The tokenizer of a model's folder, and the special tokens it and the folder name."""
    folder = Path(folder)
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no {TOKENIZER}: a tokenizer is 'bytes', 'bpe', 'unigram' or a folder with one")
    return tokenizer, special_of(tokenizer, folder)


def special_of(tokenizer: Tokenizer, folder: Path) -> SpecialIds:
    """The special tokens that the folder's files name, or else those with the usual names."""
    named = {}
    for role, candidates in NAMES.items():
        ids = (tokenizer.token_to_id(name) for name in candidates)
        named[role] = next((i for i in ids if i is not None), None)
    stated = SpecialTokens()
    for file in (folder / CONFIG, folder / SPECIAL):
        if file.is_file():
            read = read_special(read_json(file), file)
            stated = stated.replace(
                **{name: value for name, value in read.to_dict().items() if value not in (None, [])}
            )
    eos = stated.stop[0] if stated.stop else named["eos"]
    if eos is None:
        raise ValueError(f"{folder} names no token that ends a text, as eos_token_id in {SPECIAL} would")
    bos = named["bos"] if stated.bos is None else stated.bos
    pad = next(i for i in (stated.pad, named["pad"], eos) if i is not None)
    start = next(i for i in (stated.start, bos, pad) if i is not None)
    return SpecialIds(pad=pad, bos=bos, eos=eos, mask=named["mask"], start=start)


def is_bytes(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is that of bytes, which numpy encodes faster."""
    return tokenizer.get_vocab_size() == BYTE_VOCABULARY and all(
        tokenizer.token_to_id(letter) == len(SPECIALS) + byte for byte, letter in byte_letters().items()
    )
