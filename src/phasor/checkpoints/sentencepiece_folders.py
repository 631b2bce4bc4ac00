"""Which SentencePiece files a family's folders have, and what its tokenizers add to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from phasor.checkpoints.folder import CONFIG, SOURCE_TOKENIZER, TOKENIZER, TOKENIZER_CONFIG, read_json
from phasor.checkpoints.sentencepiece import add_ends, add_tokens, build_tokenizer, read_sentencepiece
from phasor.checkpoints.tokenizer_errors import check_growth, tokenizer_errors
from phasor.config.schema import quote

# The languages of M2M-100 and of WMT21's models, in the order of their tokens.
LANGUAGES = {
    "m2m100": """
        af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu
        hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt
        ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
    """.split(),  # noqa: SIM905
    "wmt21": ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"],
}


class FolderTokenizers(NamedTuple):
    """The tokenizer of a model, and that of its source where it is a different one."""

    tokenizer: Tokenizer
    source: Tokenizer | None = None


def read_sentencepiece_tokenizers(folder: Path) -> FolderTokenizers | None:
    """The tokenizers of a Hugging Face folder that has SentencePiece files; None where it has none that are known."""
    config = read_json(folder / CONFIG)
    reader = READERS.get(str(config.get("model_type")))
    if reader is None:
        return None
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    files, read = reader
    if not all((folder / file).exists() for file in files):
        return None
    with tokenizer_errors(f"the SentencePiece files of {folder} are not a tokenizer"):
        found = read(folder, config, settings)
    for tokenizer in found:
        if tokenizer is not None:
            check_growth(tokenizer, str(folder))
    return found


def load_sentencepiece(model: Any, folder: Path) -> None:
    """Give a model without tokenizers those of the folder's SentencePiece files; a warning says why it cannot be."""
    if model.tokenizer is not None:
        return
    try:
        found = read_sentencepiece_tokenizers(folder)
    except ValueError as error:
        warnings.warn(f"the model of {folder} takes token ids and no text: {error}", stacklevel=5)
        return
    if found is not None:
        model.tokenizer, model.source_tokenizer = found


def remove_copies(model: Any, folder: Path) -> None:
    """Remove tokenizers from a folder that follow from its SentencePiece files, which transformers reads."""
    found = None if model.tokenizer is None else read_sentencepiece_tokenizers(folder)
    texts = [None if tokenizer is None else tokenizer.to_str() for tokenizer in found or ()]
    own = [None if t is None else t.to_str() for t in (model.tokenizer, model.source_tokenizer)]
    if texts == own:
        for name in (TOKENIZER, SOURCE_TOKENIZER):
            (folder / name).unlink(missing_ok=True)


def read_vocabulary(file: Path, size: int) -> dict[str, int]:
    vocabulary = read_json(file)
    for text, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < size:
            raise ValueError(f"{file}: the id of {quote(text)} is {quote(i)}, and the model has {size} tokens")
    return vocabulary


def read_marian(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> FolderTokenizers:
    """Marian: a SentencePiece model for each side, and one vocabulary for both or one each."""
    size = int(config.get("decoder_vocab_size") or config["vocab_size"])
    separate = bool(settings.get("separate_vocabs", False))
    source = read_vocabulary(folder / "vocab.json", int(config["vocab_size"]))
    target = read_vocabulary(folder / "target_vocab.json", size) if separate else source
    named = [str(settings.get(name, usual)) for name, usual in (("eos_token", "</s>"), ("pad_token", "<pad>"))]
    both = []
    for side, vocabulary, count in (("source", source, int(config["vocab_size"])), ("target", target, size)):
        special = [*named, *(text for text in vocabulary if text.startswith(">>") and text.endswith("<<"))]
        model = read_sentencepiece(folder / f"{side}.spm")
        tokenizer = build_tokenizer(model, vocabulary, count, special=special, readable=side == "target")
        both.append(add_ends(tokenizer, None, "</s>"))
    return FolderTokenizers(both[1], both[0])


def read_m2m(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> FolderTokenizers:
    """M2M-100: one SentencePiece model, a vocabulary, and behind it a token for every language.

    A source begins with the token of its language, `src_lang` of the settings, else English.
    """
    size = int(config["vocab_size"])
    vocabulary = read_vocabulary(folder / "vocab.json", size)
    codes = LANGUAGES.get(str(settings.get("language_codes", "m2m100")), [])
    languages = [f"__{code}__" for code in codes]
    everything = vocabulary | {token: len(vocabulary) + i for i, token in enumerate(languages)}
    model = read_sentencepiece(folder / "sentencepiece.bpe.model")
    special, first = ["<s>", "<pad>", "</s>", "<unk>", *languages], f"__{settings.get('src_lang') or 'en'}__"
    reader, writer = (
        add_ends(build_tokenizer(model, everything, size, special=special, readable=readable), first, "</s>")
        for readable in (False, True)
    )
    return FolderTokenizers(writer, reader)


def read_t5(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> FolderTokenizers:
    """T5: the pieces of the file, and behind them the sentinels of masked spans, the first one last."""
    model = read_sentencepiece(folder / "spiece.model")
    count = int(settings.get("extra_ids", 100))
    if count > int(config["vocab_size"]):
        raise ValueError(f"extra_ids is {count}, and the model has {config['vocab_size']} tokens")
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(count))]
    tokenizer = build_tokenizer(model)
    add_tokens(tokenizer, sentinels, special=True)
    return FolderTokenizers(add_ends(tokenizer, None, "</s>"))


def read_llama(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> FolderTokenizers:
    """Llama and its relatives: the pieces of the file; the folder's settings say whether `<s>` and `</s>` are added."""
    model = read_sentencepiece(folder / "tokenizer.model")
    tokenizer = build_tokenizer(model, first_only=not settings.get("legacy", False))
    added = settings.get("added_tokens_decoder") or {}
    for i in sorted(added, key=int):
        token = added[i]
        add_tokens(tokenizer, [str(token["content"])], special=bool(token.get("special", False)))
    first = "<s>" if settings.get("add_bos_token", True) else None
    return FolderTokenizers(add_ends(tokenizer, first, "</s>" if settings.get("add_eos_token", False) else None))


Reader = Callable[[Path, dict[str, Any], dict[str, Any]], FolderTokenizers]
READERS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "marian": (("source.spm", "target.spm", "vocab.json"), read_marian),
    "m2m_100": (("sentencepiece.bpe.model", "vocab.json"), read_m2m),
    "t5": (("spiece.model",), read_t5),
    "llama": (("tokenizer.model",), read_llama),
    "mistral": (("tokenizer.model",), read_llama),
    "mixtral": (("tokenizer.model",), read_llama),
}
