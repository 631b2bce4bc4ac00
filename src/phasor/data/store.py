"""Prepared data: tokens written once, and again only when their sources have changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from phasor.artifacts import ArtifactFolder
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.checkpoints.folder import (
    CHAT_TEMPLATE,
    CONFIG,
    SOURCE_TOKENIZER,
    SPECIAL,
    TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_json,
    write_json,
)
from phasor.config.recipe import Recipe
from phasor.data.dates import Split
from phasor.data.encoding import Tokenizers, encode_examples, given_tokenizer, tokenizers_for
from phasor.data.examples import Examples, examples_of
from phasor.data.sources import describe_left_out, source_files
from phasor.data.split import Example, plan_split, split
from phasor.data.templates import end_of_turn
from phasor.data.token_files import TokenStore as TokenStore
from phasor.data.token_files import TokenWriter
from phasor.data.tokenizers import SpecialIds
from phasor.files import lock_folder, write_errors
from phasor.manifest import MANIFEST, DamagedError, fingerprints

Progress = Callable[[str, int, int | None], None]  # what is done, how far it is, and out of how much
DESCRIPTION, VALID_TEXTS = "data.json", "valid.jsonl"
TEXT_FILES = (
    DESCRIPTION,
    VALID_TEXTS,
    TOKENIZER,
    SOURCE_TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
)  # what evaluation needs
OWN_FILES = re.compile(rf"(train|valid)\.\d\.(tokens|ends)|{'|'.join(map(re.escape, (*TEXT_FILES, MANIFEST)))}")
VERSION = 4
HASH = "[0-9a-f]" * 16  # what folders in a cache are called
REPORT_EVERY = 1000  # examples


class PreparedData(NamedTuple):
    """What training reads: tokenizers, special tokens, and the examples of both splits.

    `left_out` says which examples were skipped. Conversations also have a chat template and the token that ends a
    reply, if one does.
    """

    folder: Path
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer
    special: SpecialIds
    train: TokenStore
    valid: TokenStore
    left_out: tuple[str, ...]
    summary: dict[str, Any]  # of the examples
    template: ChatTemplate | None = None
    end_of_turn: int | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens a model needs for this text."""
        return self.tokenizer.get_vocab_size()

    @property
    def source_vocab_size(self) -> int:
        """The same for an encoder-decoder's source."""
        return self.source_tokenizer.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens of both splits: the same for the same texts in the same tokens."""
        return hashlib.sha256(f"{self.train.sha256} {self.valid.sha256}".encode()).hexdigest()

    def valid_texts(self) -> list[Example]:
        """The held-out texts, as they were before they became tokens."""
        with (self.folder / VALID_TEXTS).open(encoding="utf-8") as lines:
            return [tuple(json.loads(line)) for line in lines]


def prepare(
    recipe: Recipe,
    folder: str | Path,
    progress: Progress | None = None,
    fingerprint: str | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """The tokens of a recipe, from `folder` (or a place in the recipe's `data.cache`) or prepared there now.

    A folder that was prepared from the same sources in the same way is used as it is. Otherwise a new one is written
    beside it and put in its place when it is whole. With a `fingerprint`, tokens that have another one are refused.

    >>> import tempfile
    >>> from phasor.config.recipe import DataConfig
    >>> recipe = Recipe(data=DataConfig(train=__file__, tokenizer="bytes", validation_fraction=0.1))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     prepared = prepare(recipe, Path(place) / "data")
    >>> prepared.tokenizer.decode(prepared.train[0][0].tolist())[3:11]
    'Prepared'
    """
    origin = data_origin(recipe)
    folder = Path(folder)
    if recipe.data.cache is not None:
        folder = Path(recipe.data.cache) / hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:16]
    if (found := open_prepared_data(folder, origin)) is not None:
        return check_fingerprint(found, recipe, fingerprint)
    for source in (*recipe.data.sources, recipe.data.valid):
        if (left_out := describe_left_out(source, recipe.data)) is not None:
            notify(left_out)
    artifact = data_folder(folder)
    with artifact.stage(HASH if recipe.data.cache is not None else None) as staged:
        with write_errors(folder):
            write(recipe, staged, origin, progress or (lambda what, done, total: None))
            ArtifactFolder(staged, "data").write_manifest()
        check_fingerprint(read_prepared_data(staged), recipe, fingerprint)
        with lock_folder(artifact.path.parent):
            if (found := open_prepared_data(folder, origin)) is None:  # else another process was quicker
                artifact.publish(staged)
                found = read_prepared_data(folder)
    return found


def check_fingerprint(prepared: PreparedData, recipe: Recipe, fingerprint: str | None) -> PreparedData:
    """The prepared data, if their fingerprint is the expected one."""
    if fingerprint is not None and prepared.fingerprint != fingerprint:
        name = ", ".join(filter(None, recipe.data.sources)) or f"data.format {recipe.data.format!r}"
        raise ValueError(f"{name} gives other tokens than those the run was trained on, so it cannot be resumed")
    return prepared


def find_prepared_data(recipe: Recipe, folder: Path, fingerprint: str) -> tuple[PreparedData, bool] | None:
    """Data prepared earlier that have this fingerprint, and whether their sources still are as they were then."""
    found = load_prepared_data(folder)
    if found is None or found.fingerprint != fingerprint:
        return None
    try:
        return found, is_current(folder, data_origin(recipe))
    except (ValueError, OSError):  # they are gone
        return found, False


def data_origin(recipe: Recipe) -> dict[str, Any]:
    """Everything that the tokens depend on: the fields, the files, the tokenizer."""
    data = recipe.data
    kind = examples_of(recipe)
    unrelated = {"mixture", "cache", "workers", "positions", "positions_to"} | kind.unrelated
    fields = {name: value for name, value in data.to_dict().items() if name not in unrelated}
    if data.mixture:  # their weights are not those of tokens
        fields["sources"] = list(data.sources)
    paths = (data.train_target, data.valid, data.valid_target)
    files = [file for path in data.sources for file in source_files(path, data)]
    files += [file for path in paths if path for file in source_files(path, data)]
    stats = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    given, read = given_tokenizer(recipe), (CONFIG, SPECIAL, *TOKENIZER_FILES)
    tokenizer = None if given is None else hashes([given / name for name in read if (given / name).exists()])
    origin = {"version": VERSION, "task": recipe.task, "data": fields, "files": stats, "tokenizer": tokenizer}
    return origin | kind.origin()


def is_current(folder: Path, origin: dict[str, Any]) -> bool:
    """Whether data were prepared from what there is now.

    A file with the name, size and time it had, but another inode or time of change, may have been replaced by one that
    was given the same time (as `rsync -t` does): its content decides. Others are not read.
    """
    before = read_json(folder / DESCRIPTION).get("origin", {})
    contents = before.pop("contents", None)
    if contents is None or before != origin:
        return False
    files = [Path(name) for name, _, _ in origin["files"]]
    touched = {file: sha256 for file, (*state, sha256) in zip(files, contents, strict=True) if state != inode(file)}
    return hashes(touched) == [*touched.values()]


def inode(file: Path) -> list[int]:
    """What changes when a file is replaced or written, whichever time it is given: its inode and time of change."""
    found = file.stat()
    return [found.st_ino, found.st_ctime_ns]


def hashes(files: Iterable[Path]) -> list[str | None]:
    """The SHA-256 of files, several at a time."""
    return [None if found is None else found.sha256 for found in fingerprints(Path(), map(str, files))]


def open_prepared_data(folder: Path, origin: dict[str, Any]) -> PreparedData | None:
    """A folder as it was prepared, if it was prepared from the same and every byte of it is as it was written."""
    try:
        if not ArtifactFolder(folder, "data").verify([DESCRIPTION]):
            return None
        if not is_current(folder, origin):
            return None
        return load_prepared_data(folder)
    except DamagedError:  # it is prepared again
        return None


def load_prepared_data(folder: Path, names: Iterable[str] | None = None) -> PreparedData | None:
    """The data of a folder after its files, or those that are named, were compared with its manifest.

    None where there are no prepared data, a `DamagedError` where a file is not as it was written.
    """
    return read_prepared_data(folder) if ArtifactFolder(folder, "data").verify(names) else None


def read_prepared_data(folder: Path) -> PreparedData:
    """The prepared data of a folder, without comparing its manifest."""
    try:
        description = read_json(folder / DESCRIPTION)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        own = folder / SOURCE_TOKENIZER
        source = Tokenizer.from_file(str(own)) if own.is_file() else tokenizer
        train, valid = (TokenStore(folder, name, description[name]) for name in ("train", "valid"))
        special = SpecialIds.from_dict(description["special"])
        left_out, summary = tuple(description["left_out"]), description["summary"]
        template, end = ChatTemplate.read(folder), description["end_of_turn"]
        return PreparedData(folder, tokenizer, source, special, train, valid, left_out, summary, template, end)
    except OSError:
        raise
    except Exception as error:  # of the tokenizers library, too
        raise DamagedError(f"{folder} does not hold prepared data: {' '.join(str(error).split())[:200]}") from None


def data_folder(folder: Path) -> ArtifactFolder:
    """A folder to prepare data in. A link at its place is replaced, and not what it points to."""
    folder = folder.parent.resolve() / folder.name
    if (folder.exists() or folder.is_symlink()) and not holds_only_data(folder):
        raise ValueError(f"{folder} exists and does not hold prepared data: it is left alone")
    return ArtifactFolder(folder, "data")


def holds_only_data(folder: Path) -> bool:
    """Whether a folder is empty, or has a manifest and nothing besides the files of prepared data."""
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    files = [file for file in entries if file.name != TEMPLATES]
    own = all(OWN_FILES.fullmatch(file.name) and file.is_file() and not file.is_symlink() for file in files)
    return not entries or (own and (folder / MANIFEST).is_file())


def write(recipe: Recipe, folder: Path, origin: dict[str, Any], report: Progress) -> None:
    """Prepare a recipe's data in a folder."""
    report("reading", 0, None)
    files = [Path(name) for name, _, _ in origin["files"]]
    states = [inode(file) for file in files]  # before their content, so that a change in between is seen
    origin = origin | {"contents": [[*state, sha256] for state, sha256 in zip(states, hashes(files), strict=True)]}
    data, kind = recipe.data, examples_of(recipe)
    own_valid = data.valid is not None or data.format == "dates"
    name = ", ".join(filter(None, data.sources)) or data.format

    def read(which: Split) -> Iterable[Example]:
        if which == "valid":
            return kind.read(data.valid, data.valid_target, which)
        return itertools.chain.from_iterable(kind.read(path, data.train_target, which) for path in data.sources)

    plan = plan_split(lambda: with_progress(read("train"), report), data.validation_fraction, name, not own_valid)
    total, done = plan.characters, 0
    if own_valid:
        total += plan_split(
            lambda: read("valid"), data.validation_fraction, data.valid or name, holds_out=False
        ).characters

    def train_texts() -> Iterable[Example]:
        return (example for side, example in split(read("train"), plan) if side == "train")

    report("learning the tokenizer", 0, None)
    tokenizers = tokenizers_for(kind, train_texts, plan.characters)

    parts = [split(kind.read(path, data.train_target), plan) for path in data.sources]
    if own_valid:
        parts.append(("valid", example) for example in read("valid"))

    def count_characters(characters: int) -> None:
        nonlocal done
        done += characters
        report("tokenizing", done, total)

    report("tokenizing", 0, total)
    write_tokens(kind, folder, origin, tokenizers, parts, count_characters)
    report("tokenizing", total, total)


def write_tokens(
    kind: Examples,
    folder: Path,
    origin: dict[str, Any],
    tokenizers: Tokenizers,
    parts: Iterable[Iterator[tuple[Split, Example]]],
    count_characters: Callable[[int], None],
) -> None:
    """The files of both splits, of one source after another, the tokenizers, and what has to be known to read them."""
    vocab_size = max(tokenizers.target.get_vocab_size(), tokenizers.source.get_vocab_size())
    kind.skipped.clear()  # files are read more than once
    splits: tuple[Split, Split] = ("train", "valid")
    with ExitStack() as stack:
        writers = {name: stack.enter_context(TokenWriter(folder, name, kind.sides, vocab_size)) for name in splits}
        texts = stack.enter_context((folder / VALID_TEXTS).open("w", encoding="utf-8"))
        for number, part in enumerate(parts):
            for side, example, tokens in encode_examples(part, tokenizers, kind, count_characters):
                fitting = kind.fit(example, tokens)
                if fitting is None:
                    continue
                writers[side].add(fitting, len(example[-1].encode("utf-8", "replace")))
                if side == "valid":
                    texts.write(json.dumps(example, ensure_ascii=False) + "\n")
            if number < len(kind.recipe.data.sources):  # the last part may be data.valid
                writers["train"].end_source()
    for side, writer in writers.items():
        if writer.examples == 0:
            nothing = f"nothing is left to {'train on' if side == 'train' else 'validate with'}"
            skipped = ", ".join(kind.left_out())
            raise ValueError(f"{nothing}: {f'{skipped} are left out' if skipped else 'give data.valid'}")
    tokenizers.target.save(str(folder / TOKENIZER))
    if tokenizers.source is not tokenizers.target:
        tokenizers.source.save(str(folder / SOURCE_TOKENIZER))
    described: dict[str, Any] = {name: writer.describe() for name, writer in writers.items()}
    described |= {"special": tokenizers.special.to_dict(), "left_out": kind.left_out(), "summary": kind.summary()}
    described["end_of_turn"] = None
    if (template := tokenizers.template) is not None:
        template.write(folder)
        write_json(folder / TOKENIZER_CONFIG, dict(template.special))
        described["end_of_turn"] = end_of_turn(template, tokenizers.target)
    write_json(folder / DESCRIPTION, {"origin": origin, **described})


def with_progress(examples: Iterable[Example], report: Progress) -> Iterator[Example]:
    """Examples as they are read, reported now and then."""
    for number, example in enumerate(examples):
        if number % REPORT_EVERY == 0:
            report("reading", number, None)
        yield example
