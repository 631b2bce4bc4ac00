"""`evaluate`: the metrics of a run's model on its validation texts, or on others."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from phasor.config.schema import quote
from phasor.config.text_files import path_of
from phasor.data.batch import Batch
from phasor.data.batches import Batches
from phasor.data.encoding import encode_examples
from phasor.data.positions import GivenPositions
from phasor.data.sources import documents, pairs
from phasor.data.split import Example
from phasor.data.token_files import TokenStore, TokenWriter
from phasor.evaluation.document_batches import DocumentBatches
from phasor.evaluation.run import TrainedRun, open_run
from phasor.evaluation.scores import scores
from phasor.generation.translation import Progress, max_positions, translate_tokens
from phasor.nn.mode import eval_mode
from phasor.nn.norm import at_least_float32
from phasor.parallel.processes import JoinedProcesses


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    target: str | Path | None = None,
    *,
    num_beams: int = 5,
    limit: int | None = None,
    checkpoint: str | int | None = None,
    part: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    processes: JoinedProcesses | None = None,
) -> dict[str, Any]:
    """Evaluate the model of a run folder, on all of its validation texts or on `data`, read as the run read its own.

    `checkpoint` takes one of the run's checkpoints instead: "best", "last" or a step. In place of a run, a model folder
    of any format is evaluated on `data`, or of a multimodal one its `part` "text".

    `target` is the other side of a parallel text in two files. `limit` takes the first examples only.
    `progress` is called with how far the evaluation is, and out of how much. `processes` of a `join_processes` have the
    model cut over them, and compute the losses of some rows each.

    - Language models: `loss` in nats per token, `perplexity`, and `bits_per_byte`, which does not depend on the
      tokenizer: the bits of all tokens over the `bytes` of the texts in UTF-8. Every token counts once, the end of a
      document included; what a document begins with (`bos`) is not predicted. Each document is read from its
      beginning, and one of more than `data.sequence_length` tokens in pieces.
    - Encoders: `masked_accuracy` and `loss` over masked tokens, always the same ones.
    - Translation: `bleu` and `chrf` in percent by sacrebleu, with its tokenizer "zh" where most targets are Chinese,
      the share of translations that are an `exact_match`, and `loss` and `perplexity` of a target token.

    `weights` says whose weights these are: "model", or the name of a checkpoint.

    >>> from phasor.config.recipe import Recipe
    >>> from phasor.training import train
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "notes.txt").write_text("The cat sat on the mat. " * 20)
    ...     _ = train(Recipe.from_dict({
    ...         "model": {"preset": "llama-2", "dim": 16, "num_heads": 2, "num_layers": 1},
    ...         "data": {"train": f"{folder}/notes.txt", "valid": f"{folder}/notes.txt", "tokenizer": "bytes"},
    ...         "train": {"steps": 1, "device": "cpu"},
    ...         "out": f"{folder}/run",
    ...     }))
    ...     metrics = evaluate(f"{folder}/run", device="cpu")
    >>> metrics["weights"], metrics["tokens"], metrics["bytes"]
    ('model', 481, 480)
    """
    for name, value in (("limit", limit), ("num_beams", num_beams)):
        if (name, value) != ("limit", None) and (type(value) is not int or not 1 <= value < 1 << 31):
            raise ValueError(f"{name} must be an integer from 1 to 2147483647, not {quote(value)}")
    report = progress or (lambda done, total: None)
    trained = open_run(path_of(run), device, checkpoint, processes, part)
    examples = islice(evaluation_texts(trained, data, target), limit)
    with tempfile.TemporaryDirectory() as folder:
        store, references = encode_to_store(trained, examples, Path(folder))
        if len(store) == 0:
            raise ValueError(f"{data} holds no text")
        with eval_mode(trained.model), torch.inference_mode():
            if trained.recipe.task == "translation":
                metrics = translation_metrics(trained, store, references, num_beams, report)
            else:
                metrics = language_metrics(trained, store, report)
    return {"task": trained.recipe.task, "weights": trained.weights, **metrics}


def evaluation_texts(trained: TrainedRun, data: str | Path | None, target: str | Path | None) -> Iterable[Example]:
    """The examples to evaluate on."""
    config, task = trained.recipe.data, trained.recipe.task
    if target is not None and (data is None or task != "translation"):
        raise ValueError("target is the other side of data, for a run that translates")
    if data is None:
        return trained.valid_texts()
    data = path_of(data, "the data")
    if config.generates_data:
        config = config.replace(format="auto")
    if task == "translation":
        return pairs(str(data), config, None if target is None else str(target))
    return ((text,) for text in documents(str(data), config))


def encode_to_store(trained: TrainedRun, examples: Iterable[Example], folder: Path) -> tuple[TokenStore, list[str]]:
    """The tokens of examples as training has them, and the targets of pairs as texts."""
    tokenizers, task = trained.tokenizers, trained.recipe.task
    size = max(tokenizers.target.get_vocab_size(), tokenizers.source.get_vocab_size())
    references: list[str] = []
    with TokenWriter(folder, "texts", 2 if task == "translation" else 1, size) as writer:
        for _, example, tokens in encode_examples((("valid", e) for e in examples), tokenizers, task):
            writer.add(tokens, len(example[-1].encode("utf-8", "replace")))
            references += example[1:]
    return TokenStore(folder, "texts", writer.describe()), references


def language_metrics(trained: TrainedRun, store: TokenStore, report: Progress) -> dict[str, Any]:
    """The metrics of a language model, masked or not."""
    recipe, masks = trained.recipe, trained.recipe.task == "mlm"
    vocab_size = trained.tokenizers.target.get_vocab_size() if masks else None
    positions = GivenPositions.of(recipe.data, recipe.train.seed, trained.tokenizers.target, training=False)
    batches = DocumentBatches(
        store, recipe.data.sequence_length, recipe.train.batch_tokens, trained.special, vocab_size, positions
    )
    nats, tokens, correct = totals(trained, batches, lambda done: report(done, len(batches)))
    sizes = {"documents": len(store), "tokens": tokens, "bytes": store.text_bytes}
    if masks:
        return {"masked_accuracy": correct / tokens, "loss": nats / tokens, **sizes}
    bits = nats / math.log(2) / store.text_bytes
    return {"perplexity": perplexity(nats / tokens), "loss": nats / tokens, "bits_per_byte": bits, **sizes}


def translation_metrics(
    trained: TrainedRun, store: TokenStore, references: list[str], num_beams: int, report: Progress
) -> dict[str, Any]:
    """The metrics of a model that translates."""
    model = trained.model
    assert model.decoder is not None
    limit = max_positions(model.decoder)
    for number, length in enumerate((store.lengths[:, 1] - 1).tolist(), 1):
        if limit is not None and length > limit:
            raise ValueError(f"the target {number} has {length} tokens, and this model allows {limit}")
    sources = [store[i][0].tolist() for i in range(len(store))]
    batches = Batches(store, trained.recipe, special=trained.special, shuffled=False)
    work = len(store) + batches.per_epoch
    new = translate_tokens(model, sources, num_beams=num_beams, progress=lambda done, _: report(done, work))
    quality = scores(trained.tokenizers.target.decode_batch(new), references)
    nats, tokens, _ = totals(
        trained, batches.stream(0, batches.per_epoch), lambda done: report(len(store) + done, work)
    )
    sizes = {"sentences": len(store), "tokens": tokens}
    return {**quality, "perplexity": perplexity(nats / tokens), "loss": nats / tokens, **sizes}


def totals(trained: TrainedRun, batches: Iterable[Batch], report: Callable[[int], None]) -> tuple[float, int, int]:
    """The nats of all tokens that count, how many they are, and for how many the target is the most likely.

    They are added up in float64 on the device, which is waited for at the end. Of several processes each takes some of
    the rows of a batch.
    """
    processes = trained.processes
    sums = torch.zeros(3, dtype=torch.float64, device=trained.device)
    for number, batch in enumerate(batches, 1):
        rows = batch if processes.size == 1 else batch.share(*processes.share)
        here = rows.to(trained.device)
        logits = at_least_float32(trained.model(*here.inputs, **here.sequence_args))
        each = F.cross_entropy(logits.flatten(0, 1), here.targets.flatten(), reduction="none").view_as(here.targets)
        counts = here.weights > 0
        correct = counts & (logits.argmax(-1) == here.targets)
        sums += torch.stack([torch.where(counts, each.double(), 0.0).sum(), counts.sum(), correct.sum()])
        report(number)
    nats, tokens, correct_tokens = processes.sum(sums).tolist()
    return nats, int(tokens), int(correct_tokens)


def perplexity(loss: float) -> float:
    """The perplexity of a loss; infinite where no float is so large."""
    return math.exp(loss) if not loss > 700 else math.inf
