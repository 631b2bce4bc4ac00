"""`translate`: texts in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phasor.checkpoints.open_model import open_model
from phasor.checkpoints.runs import is_run
from phasor.config.schema import quote
from phasor.config.text_files import path_of
from phasor.data.encoding import encode_texts
from phasor.evaluation.run import open_run
from phasor.generation.encode import check_text, encode_prompts
from phasor.generation.translation import Progress, translate_tokens
from phasor.parallel.processes import JoinedProcesses
from phasor.transformer import Transformer


def translate(
    run: str | Path | Transformer,
    texts: Sequence[str],
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    batch_tokens: int = 4096,
    device: str = "auto",
    progress: Progress | None = None,
    processes: JoinedProcesses | None = None,
) -> list[str]:
    """The translations of texts, in their order; empty texts give empty ones.

    `run` is the folder of a run, that of an encoder-decoder with a tokenizer in any format that phasor loads, or such
    a model, which stays where it is unless a device is named. Texts of about one length are translated together, as
    many as have `batch_tokens` tokens. Without `max_new_tokens` a translation may have about twice the tokens of its
    text; without `num_beams` and `length_penalty` they are those of the model's folder, else 4 and 1. `progress` is
    called with how many texts are done, and of how many. `processes` of a `join_processes` have the model of a folder
    cut over them, and translate the same texts together.

    >>> from phasor import SpecialTokens, preset
    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> model = Transformer(preset("transformer-base", dim=16, num_heads=2, num_layers=1, vocab_size=261))
    >>> model.tokenizer, model.special = byte_tokenizer("$A <eos>"), SpecialTokens(start=1, stop=(2,))
    >>> new = translate(model, ["a text", "", "another"], num_beams=2, max_new_tokens=5)
    >>> len(new), new[1]
    (3, '')
    """
    check_texts(texts)
    trained = None
    if not isinstance(run, Transformer) and is_run(path_of(run)):
        trained = open_run(path_of(run), device, processes=processes)
    model = open_model(run, device, processes=processes)[0] if trained is None else trained.model
    if model.config.shape != "encoder-decoder":
        raise ValueError(f"translation needs an encoder-decoder, and this model is a {model.config.shape}")
    if model.front_end is not None:
        raise ValueError("translation reads texts, and the source of this model are features")
    if model.tokenizer is None:
        raise ValueError("translation needs a model with a tokenizer, and this one has none")
    reader = model.tokenizer if model.source_tokenizer is None else model.source_tokenizer
    if trained is not None:  # the names of special tokens are text, as they were in training
        read = [ids.tolist() for ids in encode_texts(texts, reader, True, trained.special)]
    else:
        read = encode_prompts(reader, texts)
    new = translate_tokens(
        model,
        [ids if text.strip() else [] for text, ids in zip(texts, read, strict=True)],
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return model.tokenizer.decode_batch(new)


def check_texts(texts: Sequence[str]) -> None:
    """Refuse what is not a list of texts, naming the text by its number."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ValueError(f"translate takes a list of texts, not {quote(texts)}")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(f"text {number} is {quote(text)}, and not text")
        check_text(text, f"text {number}")
