"""`evaluate_lengths`: the loss of a model by length, with its positions extended in several ways, beside a window."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasor.config.schema import with_article
from phasor.evaluation.intervals import compare_lengths, paired_interval
from phasor.evaluation.length_losses import Key, Measured, measure
from phasor.evaluation.length_settings import BATCH_TOKENS, STRIDE, LengthSettings, check_settings
from phasor.evaluation.report import Text, check_out, chinese, provenance, write_report
from phasor.evaluation.rows import (
    MANY_DOCUMENTS,
    EvaluatedModel,
    LongRows,
    cut_rows,
    open_evaluated_model,
    read_documents,
)
from phasor.evaluation.run import known_limits
from phasor.evaluation.variants import BASELINE, LARGEST, OWN, Variant, make_variant, variant_names
from phasor.generation.translation import Progress
from phasor.models.extensions import original_length, trained_length
from phasor.transformer import Transformer

DATA, PAGE = "lengths.json", "lengths.html"
FILES = (DATA, PAGE, "loss-by-length.png", "loss-by-position.png")


def evaluate_lengths(
    model: str | Path | Transformer,
    data: str | Path | None = None,
    *,
    lengths: Sequence[int | str] | str,
    extensions: Sequence[str] = (OWN,),
    protocol: str = "last",
    factor: float | str = LARGEST,
    targets: int | None = None,
    stride: int = STRIDE,
    join: bool = False,
    limit: int | None = None,
    checkpoint: str | int | None = None,
    part: str | None = None,
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    out: str | Path | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The loss of a decoder at several lengths, with each of several extensions, in nats per token.

    `model` is any folder that `phasor.load` reads (or its `part`), a run, or a model. `data` is a text, JSON lines, a
    folder of texts or a token file; without it a run is evaluated on its validation texts. Documents shorter than the
    largest length are left out, and the result says how many remain; `join` reads all of them end to end as one.
    `limit` takes the first rows of the largest length only.

    - `lengths`: integers, or texts such as "8k", where 1k is 1,024.
    - `extensions`: "own" (the model as it was saved), "none", "linear", "ntk", "yarn" and the other methods of
      `phasor extend`, and "sinks". Beside them there is always "window": the model as saved, every layer of which
      attends to as many tokens as the model was trained at.
    - `factor`: "largest" gives an extension one factor for all lengths, that of the largest: one model, as it would be
      shipped. "per-length" gives it another factor at every length, which is another model at every point; a
      number is the factor itself. Where the factor would be below 1, the extension leaves the positions as they are.
    - `protocol`: "last", "sliding" or "truncated", as `phasor.evaluation.protocols` describes them. Under each the
      targets are the same at every length. Contexts begin with `bos`, in place of their first token, where the model
      has such a token.

    Intervals have the level 95 %. They are over documents where there are ten or more, and over rows otherwise, which
    are taken to be independent. `difference` is the paired one to "window"; `orders` states "a < b" where the
    interval of the paired difference excludes 0, and "not shown" elsewhere. `positions` is the curve of the loss by
    position at the largest length. The `losses` of a row are those of the units, with `unit_weights`, for comparisons
    with other reports on the same data. `out` is a folder for a page, charts and JSON.

    >>> from phasor import preset
    >>> import tempfile, numpy as np
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=50, max_length=16))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/ids.npy", np.random.default_rng(0).integers(0, 50, 200))
    ...     report = evaluate_lengths(model, f"{folder}/ids.npy", lengths="16,64", extensions=["none", "yarn"])
    >>> [(row["extension"], row["length"], row["factor"]) for row in report["rows"]][2:4]
    [('yarn', 16, 4.0), ('yarn', 64, 4.0)]
    >>> report["targets"]  # 3 rows with 8 targets each
    24
    """
    settings = check_settings(lengths, extensions, protocol, factor, targets, stride, limit, batch_tokens)
    folder = check_out(out, FILES)
    evaluated = open_evaluated_model(model, device, checkpoint, part)
    variants = make_variants(evaluated.model, settings)
    documents, where = read_documents(evaluated, data)
    rows = cut_rows(documents, settings.largest, limit, join, where)
    needed = [(variant.config, length) for (_, length), variant in variants.items()]
    measured = measure(evaluated, rows, needed, settings, progress or (lambda done, total: None))
    result = describe(evaluated, rows, variants, measured, settings, where, command)
    if folder is not None:
        from phasor.evaluation.lengths_report import charts, page

        figures = charts(result)
        pictures = {f"{name}.png": png for name, (png, _) in figures.items()}
        html = page(result, {name: svg for name, (_, svg) in figures.items()})
        write_report(folder, {DATA: json.dumps(result, indent=2), **pictures, PAGE: html})
    return result


def make_variants(model: Transformer, settings: LengthSettings) -> dict[tuple[str, int], Variant]:
    """The configuration under each name at each length; what the model cannot be or read is refused."""
    config = model.config
    if config.shape != "decoder" or not config.has_logits:
        what = (
            with_article(config.shape) if config.shape != "decoder" else f"a model whose head is {config.head.kind!r}"
        )
        raise ValueError(f"the loss by length is that of a decoder with a language head, and this is {what}")
    limit = min(known_limits(model), default=settings.largest)
    if settings.largest > limit:
        raise ValueError(
            f"--lengths {settings.largest:,} is beyond this model's table of {limit:,} positions, which has no more"
        )
    original = original_length(config)
    return {
        (name, length): make_variant(config, name, settings.reach(length, original))
        for name in settings.names
        for length in settings.lengths
    }


def describe(
    evaluated: EvaluatedModel,
    rows: LongRows,
    variants: dict[tuple[str, int], Variant],
    measured: dict[Key, Measured],
    settings: LengthSettings,
    where: str,
    command: str | None,
) -> dict[str, Any]:
    """The result as JSON has it."""
    config = evaluated.model.config
    found = {key: measured[variant.config, key[1]] for key, variant in variants.items()}
    units = {key: rows.by_unit(each.losses) for key, each in found.items()}
    table = []
    for (name, length), values in units.items():
        loss = paired_interval(values, rows.weights)
        against = [a - b for a, b in zip(values, units[BASELINE, length], strict=True)]
        difference = None if name == BASELINE else paired_interval(against, rows.weights).to_dict()
        means = {"loss": loss.to_dict(), "perplexity": finite(math.exp(min(loss.estimate, 700)))}
        factor = variants[name, length].factor
        table.append(
            {"extension": name, "length": length, "factor": factor, **means, "difference": difference, "losses": values}
        )
    said = notes(rows, variants, settings, trained_length(config), original_length(config))
    per_row = settings.targets if settings.protocol == "last" else settings.largest
    return {
        "model": evaluated.name,
        "data": where,
        "protocol": settings.protocol,
        "lengths": list(settings.lengths),
        "trained_length": trained_length(config),
        "original_length": original_length(config),
        "factor": settings.factor,
        "targets_per_row": per_row,
        "stride": settings.stride if settings.protocol == "sliding" else None,
        "bos": evaluated.bos,
        "documents": {"found": rows.found, "used": len(rows.documents), "longest": rows.longest},
        "row_count": sum(rows.counts),
        "targets": per_row * sum(rows.counts),
        "unit": rows.unit,
        "units": len(rows.weights),
        "unit_weights": rows.weights,
        "baseline": BASELINE,
        "names": {name: variant_names()[name] for name in settings.names},
        "names_zh": {name: chinese.MODELS.get(name, variant_names()[name]) for name in settings.names},
        "rows": table,
        "orders": compare_lengths(units, settings.names, settings.lengths, rows.weights),
        "positions": describe_positions(found, settings),
        "notes": [note.en for note in said],
        "notes_zh": [note.zh for note in said],
        "provenance": provenance(
            command,
            evaluated.model.tokens.weight.device,
            dtype=str(evaluated.model.tokens.dtype).removeprefix("torch."),
        ),
    }


def describe_positions(found: dict[tuple[str, int], Measured], settings: LengthSettings) -> dict[str, Any]:
    """The curves of loss by position at the largest length: means over rows, in bins of equally many positions."""
    curves = {}
    for name in settings.names:
        means = found[name, settings.largest].by_position.mean(0)
        curves[name] = [finite(value) for value in means.tolist()]
    bins = len(next(iter(curves.values())))
    edges = [math.ceil(bin * settings.largest / bins) for bin in range(bins + 1)]
    return {"length": settings.largest, "edges": edges, "loss": curves}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def notes(
    rows: LongRows, variants: dict[tuple[str, int], Variant], settings: LengthSettings, trained: int, original: int
) -> list[Text]:
    """What a reader must know beside the numbers."""
    said = []
    if len(rows.documents) < rows.found:
        said.append(
            Text(
                f"{len(rows.documents):,} of {rows.found:,} documents are used: the others have fewer than the "
                f"{rows.length + 1:,} tokens that a length of {rows.length:,} needs, or are beyond --limit",
                f"使用了 {rows.found:,} 篇文档中的 {len(rows.documents):,} 篇：其余的不足长度 {rows.length:,} 所需的 "
                f"{rows.length + 1:,} 个词元，或超出 --limit",
            )
        )
    if len(rows.weights) == 1:
        said.append(Text("one row gives no interval and shows no order", "只有一行，没有区间，也不能证明次序"))
    elif rows.unit == "row":
        said.append(
            Text(
                f"with fewer than {MANY_DOCUMENTS} documents, the intervals take the {sum(rows.counts):,} rows to be "
                "independent",
                f"文档不足 {MANY_DOCUMENTS} 篇，区间把 {sum(rows.counts):,} 行视为相互独立",
            )
        )
    same = sorted({length for (_, length), variant in variants.items() if variant.factor == 1.0})
    if same:
        at = ", ".join(f"{length:,}" for length in same)
        said.append(
            Text(
                f"at {at} the factor would be 1 or less: an extension leaves the positions of a model trained at "
                f"{original:,} as they are",
                f"在长度 {at} 上因子不大于 1：扩展不改变在 {original:,} 个词元上训练的模型的位置",
            )
        )
    if settings.largest <= trained:
        said.append(
            Text(
                f"no length is beyond the {trained:,} tokens the model was trained at",
                f"没有长度超过模型的训练长度 {trained:,} 个词元",
            )
        )
    return said
