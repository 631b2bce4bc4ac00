"""`evaluate`: the metrics of a run's model on its validation texts, or on others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from phasor.checkpoints.stored_adapters import Adapters
from phasor.config.schema import quote
from phasor.config.tasks import TASKS
from phasor.config.text_files import path_of
from phasor.data.encoding import encode_examples
from phasor.data.examples import examples_of
from phasor.data.split import Example
from phasor.data.token_files import TokenStore, TokenWriter
from phasor.evaluation.metrics import METRICS
from phasor.evaluation.metrics.texts import EncodedTexts
from phasor.evaluation.run import TrainedRun, open_run
from phasor.generation.translation import Progress
from phasor.nn.mode import eval_mode
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
    adapter: Adapters | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    processes: JoinedProcesses | None = None,
) -> dict[str, Any]:
    """Evaluate the model of a run folder, on all of its validation texts or on `data`, read as the run read its own.

    `checkpoint` takes one of the run's checkpoints instead: "best", "last" or a step. In place of a run, a model folder
    of any format is evaluated on `data`, or of a multimodal one its `part` "text"; `adapter` is one for it, or
    several, as for `load`.

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
    trained = open_run(path_of(run), device, checkpoint, processes, part, adapter)
    examples = islice(evaluation_texts(trained, data, target), limit)
    with tempfile.TemporaryDirectory() as folder:
        texts = encode_to_store(trained, examples, Path(folder))
        if len(texts.store) == 0:
            raise ValueError(f"{data} holds no text")
        with eval_mode(trained.model), torch.inference_mode():
            metrics = METRICS[trained.recipe.task](trained, texts, num_beams, report)
    return {"task": trained.recipe.task, "weights": trained.weights, **metrics}


def evaluation_texts(trained: TrainedRun, data: str | Path | None, target: str | Path | None) -> Iterable[Example]:
    """The examples to evaluate on."""
    recipe = trained.recipe
    if target is not None and (data is None or not TASKS[recipe.task].parallel):
        raise ValueError("target is the other side of data, for a run that translates")
    if data is None:
        return trained.valid_texts()
    data = path_of(data, "the data")
    if recipe.data.generates_data:
        recipe = recipe.replace(data=recipe.data.replace(format="auto"))
    return examples_of(recipe, trained.model.config.shape).read(str(data), None if target is None else str(target))


def encode_to_store(trained: TrainedRun, examples: Iterable[Example], folder: Path) -> EncodedTexts:
    """The tokens of examples as training has them."""
    tokenizers, kind = trained.tokenizers, examples_of(trained.recipe, trained.model.config.shape)
    kind.adopt(trained.model.config)
    size = max(tokenizers.target.get_vocab_size(), tokenizers.source.get_vocab_size())
    kept: list[Example] = []
    with TokenWriter(folder, "texts", kind.sides, size) as writer:
        for _, example, tokens in encode_examples((("valid", e) for e in examples), tokenizers, kind):
            if TASKS[trained.recipe.task].turns:
                fitting = kind.fit(example, tokens)
                if fitting is None:
                    continue
                tokens = fitting
            writer.add(tokens, len(example[-1].encode("utf-8", "replace")))
            if len(example) > 1:  # documents may be long, and nothing asks for their text
                kept.append(example)
    return EncodedTexts(TokenStore(folder, "texts", writer.describe()), kept)
