"""Read the config.json of a Hugging Face folder: every field is understood, harmless, named in a warning or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phasor.config.schema import MOST_LAYERS, MOST_LENGTH, MOST_WIDTH, name_some, quote

REQUIRED: Any = object()
KINDS: dict[tuple[type, ...], str] = {
    (bool,): "true or false",
    (int, float): "a number",
    (str,): "text",
    (list,): "a list",
    (dict,): "an object",
}

# Fields that say nothing about what a model computes: how it was saved, trained, or is to be used.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _from_model_config _name_or_path _num_labels
    add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size custom_pipelines decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length max_new_tokens
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)

# Fields that count layers, and those that name a width or a number of heads: what tensors have to go with.
LAYER_NAMES = frozenset(
    {"decoder_layers", "encoder_layers", "n_layer", "n_layers", "num_decoder_layers", "num_hidden_layers", "num_layers"}
)
SIZE_NAMES = frozenset(
    """
    d_kv d_model dim head_dim hidden_size n_embd n_head n_heads num_attention_heads num_experts num_heads
    num_key_value_heads num_kv_heads num_local_experts rotary_dim vocab_size
    """.split()  # noqa: SIM905
)

# Fields that transformers reads for every model, and phasor only where a family takes them: masks, caches, weights.
UNSUPPORTED = frozenset(
    """
    attention_chunk_size compression_config is_causal layer_types num_kv_shared_layers per_layer_config
    quantization_config sliding_window
    """.split()  # noqa: SIM905
)


class Fields:
    """A config.json being read: every field a family takes is marked, and `finish` goes through the rest.

    What is left without effect in transformers has none here: it is collected in `ignored`, or refused by a `strict`
    reader. `tensors` are the names in the checkpoint, for families whose parts show only there, and `equal` says
    whether two of them hold the same values, `largest` is the largest size of any; `prefix` goes before names in error
    messages, for a nested object.

    >>> fields = Fields({"hidden_size": 64, "mlp_bias": True}, Path("config.json"), strict=True)
    >>> fields.get("hidden_size"), fields.get("head_dim", None)
    (64, None)
    >>> fields.finish()
    Traceback (most recent call last):
        ...
    ValueError: config.json: phasor does not honor mlp_bias (true)
    """

    def __init__(
        self,
        data: dict[str, Any],
        file: Path,
        tensors: Iterable[str] = (),
        prefix: str = "",
        equal: Callable[[str, str], bool] = lambda one, other: False,
        strict: bool = False,
        largest: int | None = None,
    ) -> None:
        self.data, self.file, self.tensors, self.prefix = data, file, frozenset(tensors), prefix
        self.equal, self.strict, self.largest = equal, strict, largest
        self.ignored: dict[str, Any] = {}
        self.notes: list[str] = []
        self.taken: set[str] = set()
        self.unread_inside: dict[str, dict[str, Any]] = {}  # what nobody took of objects inside
        self.defaults: dict[str, Any] = {}  # of fields that the file does not have, where not everyone gives one

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """A field's value, or the default where the file has none (or null); it has to be of the default's kind."""
        value = self.raw(name, default)
        for kinds, words in KINDS.items():
            fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
            if type(default) in kinds and not fits:
                raise ValueError(f"{self.file}: {self.prefix}{name} must be {words}, not {json_repr(value)}")
        return value

    def raw(self, name: str, default: Any) -> Any:
        """The same, of any kind."""
        self.taken.add(name)
        value = self.data.get(name, self.defaults.get(name))
        if isinstance(value, int | float) and not abs(value) < MOST_LENGTH:
            raise ValueError(f"{self.file}: {self.prefix}{name} is out of range: {json_repr(value)}")
        if value is not None:
            self.check_size(name, value)
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.file}: {self.prefix}{name} is missing")
        return default

    def check_size(self, name: str, value: Any) -> None:
        """Refuse a number of layers or a width that the folder's tensors cannot have, before it costs anything."""
        if name in LAYER_NAMES:
            most, why = MOST_LAYERS, "the most there may be"
            if self.tensors:
                most, why = min(most, len(self.tensors)), "as many as there are tensors in the folder"
        elif name in SIZE_NAMES:
            most, why = (
                MOST_WIDTH if self.largest is None else self.largest,
                "the largest size of a tensor in the folder",
            )
        else:
            return
        if isinstance(value, int) and value > most:
            raise ValueError(f"{self.file}: {self.prefix}{name} is {value:,}, which is more than {most:,}, {why}")

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null is false, where transformers takes the file's value as it is."""
        return self.get(name, default if name not in self.data else False)

    def positive(self, name: str, default: float) -> Any:
        """A number greater than 0."""
        value = self.get(name, default)
        if not value > 0:
            raise ValueError(f"{self.file}: {self.prefix}{name} must be greater than 0, not {json_repr(value)}")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Take a field that may only have these values; the first is the default."""
        value = self.raw(name, allowed[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            known = ", ".join(map(json_repr, allowed))
            raise ValueError(
                f"{self.file}: phasor does not honor {self.prefix}{name} = {json_repr(value)}; it must be {known}"
            )

    def choose(self, name: str, known: dict[str, Any], default: str) -> Any:
        """The value of `known` under the word that a field has."""
        word = self.get(name, default)
        if not isinstance(word, str) or word not in known:
            raise ValueError(f"{self.file}: phasor does not know {name} = {json_repr(word)}; known: {', '.join(known)}")
        return known[word]

    def same(self, one: str, other: str) -> bool:
        """Whether two names stand for one tensor: the file lacks one of them, or they hold the same."""
        return not {one, other} <= self.tensors or self.equal(one, other)

    def build(self, make: Callable[[], Any]) -> Any:
        """Call `make`; an error it raises is prefixed with the file."""
        try:
            return make()
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(self.file)) else f"{self.file}: {text}") from None

    def inside(self, data: dict[str, Any], prefix: str = "") -> Fields:
        """The fields of an object inside; what is ignored there is collected here."""
        inner = Fields(data, self.file, self.tensors, prefix, self.equal, self.strict, self.largest)
        inner.ignored, inner.notes = self.ignored, self.notes
        return inner

    def unread_fields(self) -> dict[str, Any]:
        """Fields nobody took; once `finish` let them pass, they say nothing about the computation."""
        return {n: v for n, v in self.data.items() if n not in self.taken} | self.unread_inside

    def finish(self, harmless: Iterable[str] = (), unsupported: Iterable[str] = ()) -> None:
        """Refuse fields that transformers honors and nobody took; null, false, zero and nothing say nothing."""
        honored = (UNSUPPORTED | set(unsupported)) - set(harmless)
        left = {n: v for n, v in sorted(self.data.items()) if n not in self.taken and v is not None}
        refused = {n: v for n, v in left.items() if n in honored and (v is not True if n == "is_causal" else v)}
        unknown = {n: v for n, v in left.items() if n not in HARMLESS | honored | set(harmless)}
        refused |= unknown if self.strict else {}
        if refused:
            raise ValueError(f"{self.file}: phasor does not honor {list_fields(refused, self.prefix)}")
        self.ignored |= {f"{self.prefix}{n}": v for n, v in unknown.items()}

    def note(self, text: str) -> None:
        """Say something about a field when the model is loaded, in a warning."""
        self.notes.append(f"{self.file}: {text}")

    def warn(self) -> None:
        """Name the fields that have no effect, in one warning, and say what was noted."""
        for text in self.notes:
            warnings.warn(text, stacklevel=4)
        if self.ignored:
            text = (
                f"{self.file}: phasor ignores fields that have no effect in transformers: {list_fields(self.ignored)}"
            )
            warnings.warn(text, stacklevel=4)


def list_fields(fields: dict[str, Any], prefix: str = "") -> str:
    """Names and values for a sentence, as many as it can hold."""
    return name_some([f"{prefix}{n} ({json_repr(v)})" for n, v in fields.items()])


def json_repr(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else quote(value)
    )
