"""The generation settings of a model's folder, as options: what `generation_config.json` says, read as `transformers`
reads it.
"""

from __future__ import annotations

import warnings
from typing import Any

from phasor.config.generation import GenerationConfig
from phasor.config.schema import coerce, field_types, quote

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
# Settings with the name and the meaning of an option.
SAME = (
    *("repetition_penalty", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "length_penalty"),
    *(
        "early_stopping",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "penalty_alpha",
        "renormalize_logits",
    ),
    *("min_new_tokens", "max_new_tokens"),
)
DEFAULT_TOP_K = 50  # of transformers, where a folder samples and does not say
# Settings that change what transformers generates and not what phasor does, with the values that change nothing.
NOT_HONORED: dict[str, tuple[Any, ...]] = {
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "remove_invalid_values": (False,),
    "sequence_bias": (),
    "stop_strings": (),
    "token_healing": (False,),
    "top_h": (),
    "watermarking_config": (),
}
SETTINGS = frozenset({*SAMPLING, *SAME, *NOT_HONORED, "do_sample", "max_length", "min_length"})


def merge_options(
    settings: dict[str, Any],
    options: GenerationConfig | None,
    fields: dict[str, Any],
    *,
    prompt_length: int = 1,
    streams: bool = False,
    drafts: bool = False,
) -> GenerationConfig:
    """The options of a request: the caller's fields, and for what they leave open the settings of the model's folder.

    `options` are complete: with them, the folder's settings do not apply. `prompt_length` is that of the longest
    prompt (of a decoder), from which `max_length` and `min_length` count. `streams` and `drafts` say whether tokens
    are streamed, and whether there is a draft model.

    >>> folder = {"do_sample": True, "top_p": 0.9, "max_length": 30}
    >>> merged = merge_options(folder, None, {"top_k": 5}, prompt_length=10)
    >>> merged.temperature, merged.top_k, merged.top_p, merged.max_new_tokens
    (1.0, 5, 0.9, 20)
    """
    if not isinstance(options, GenerationConfig | None):
        raise ValueError(f"options must be a GenerationConfig, or its fields by name, not {quote(options)}")
    if isinstance(fields.get("stop"), str | int):
        fields = fields | {"stop": (fields["stop"],)}
    if options is not None:
        return options.replace(**fields)
    settings = {name: value for name, value in settings.items() if value is not None}
    if not settings:
        return GenerationConfig(**fields)
    # Refuses what is wrong with the caller's own; whether there may be several results depends on the folder too.
    given = GenerationConfig(**{name: value for name, value in fields.items() if name != "num_return_sequences"})
    warn_about_settings(settings)
    try:
        check_types(settings)
        defaults = {name: settings[name] for name in SAME if name in settings} | length_options(settings, prompt_length)
        defaults |= sampling_options(settings, given, defaults)
        defaults = {name: value for name, value in defaults.items() if name not in fields}
        return GenerationConfig(**without_conflicts(defaults, given, streams, drafts) | fields)
    except ValueError as error:
        raise ValueError(f"the generation settings of the model's folder do not fit: {error}") from None


def check_types(settings: dict[str, Any]) -> None:
    """Refuse settings of a wrong type, each by its name."""
    types = field_types(GenerationConfig) | {"max_length": int, "min_length": int, "do_sample": bool}
    for name in (*SAME, *SAMPLING, "max_length", "min_length", "do_sample"):
        if name in settings:
            coerce(settings[name], types[name], name)


def length_options(settings: dict[str, Any], prompt_length: int) -> dict[str, int]:
    """`max_length` and `min_length`, which count the prompt, as numbers of new tokens, which take precedence."""
    lengths = {}
    for side, least in (("max", 1), ("min", 0)):
        total = settings.get(f"{side}_length")
        if total is not None and f"{side}_new_tokens" not in settings:
            lengths[f"{side}_new_tokens"] = max(least, total - prompt_length)
    return lengths


def sampling_options(
    settings: dict[str, Any], given: GenerationConfig, defaults: dict[str, Any]
) -> dict[str, float | int]:
    """A folder's sampling settings: all of them where it samples by default, else only where the caller samples."""
    named = {name: settings[name] for name in SAMPLING if name in settings}
    by_default = settings.get("do_sample") is True
    filters = ({"temperature": 1.0, "top_k": DEFAULT_TOP_K} if by_default else {}) | named
    if filters.get("top_k") == 0:  # which is none, in transformers
        del filters["top_k"]
    if given.samples:
        return filters
    searches = given.num_beams > 1 or given.penalty_alpha > 0
    if given.temperature == 0 or searches or not by_default:
        contrasts = not searches and "penalty_alpha" in defaults and "top_k" in filters
        return {"top_k": filters["top_k"]} if contrasts else {}
    if defaults.get("num_beams", 1) != 1:
        warn_about("do_sample with num_beams above 1 (beams are searched, not sampled)")
        return {}
    return filters


def without_conflicts(defaults: dict[str, Any], given: GenerationConfig, streams: bool, drafts: bool) -> dict[str, Any]:
    """A folder's settings without the decoding strategies that cannot go with what the caller asks for."""
    other = drafts or given.compile or given.prompt_lookup_tokens > 0
    samples = given.samples or "temperature" in defaults
    left_out: set[str] = set()
    if other or samples or streams or given.penalty_alpha > 0:
        left_out |= {"num_beams"}
    if other or samples or given.num_beams > 1 or defaults.get("num_beams", 1) != 1 or "top_k" not in defaults:
        left_out |= {"penalty_alpha"}
    kept = {name: value for name, value in defaults.items() if name not in left_out}
    most = max(given.num_beams, kept.get("num_beams", 1)) if not samples else None
    if streams or (most is not None and kept.get("num_return_sequences", 1) > most):
        kept.pop("num_return_sequences", None)
    return kept


def warn_about_settings(settings: dict[str, Any]) -> None:
    """One warning that names the settings of a folder that phasor does not honor."""
    names = [name for name, idle in NOT_HONORED.items() if name in settings and settings[name] not in idle]
    if names:
        warn_about(", ".join(names))


def warn_about(names: str) -> None:
    warnings.warn(f"generation settings of the model's folder that phasor does not honor: {names}", stacklevel=2)
