"""Read the config.json of a Hugging Face folder: a field that is not understood is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phasor.config.schema import name_some, quote

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
    architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id custom_pipelines
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_encoder_decoder label2id length_penalty max_length max_new_tokens
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tie_word_embeddings tokenizer_class top_k top_p torch_dtype
    transformers_version typical_p unk_token_id use_cache
    """.split()  # noqa: SIM905
)

# Fields that say nothing as long as they are false, zero or empty.
IDLE = frozenset(
    """
    add_cross_attention chunk_size_feed_forward cross_attention_hidden_size is_decoder pruned_heads
    tie_encoder_decoder torchscript use_bfloat16
    """.split()  # noqa: SIM905
)


class Fields:
    """A config.json being read: every field a family takes is marked, and `finish` refuses the rest.

    `tensors` are the names in the checkpoint, for families whose parts show only there, and `equal` says
    whether two of them hold the same values; `prefix` goes before names in error messages, for a nested object.

    >>> fields = Fields({"hidden_size": 64, "mlp_bias": True}, Path("config.json"))
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
    ) -> None:
        self.data, self.file, self.tensors, self.prefix = data, file, frozenset(tensors), prefix
        self.equal = equal
        self.taken: set[str] = set()
        self.defaults: dict[str, Any] = {}

    def set_defaults(self, defaults: dict[str, Any]) -> None:
        """Set the values of fields that the file does not have, where these differ from null.

        >>> fields = Fields({"sliding_window": None}, Path("config.json"))
        >>> fields.set_defaults({"sliding_window": 4096, "num_key_value_heads": 8})
        >>> fields.get("sliding_window", "none"), fields.get("num_key_value_heads", 32)
        ('none', 8)
        """
        self.defaults = defaults

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
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.file}: {self.prefix}{name} is missing")
        return default

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

    def unread_fields(self, harmless: Iterable[str] = ()) -> dict[str, Any]:
        """Fields nobody took that say nothing about the computation."""
        return {n: v for n, v in self.data.items() if n not in self.taken and (n in HARMLESS | IDLE or n in harmless)}

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse every field that was neither taken nor harmless; null says nothing."""
        known = HARMLESS | self.taken | set(harmless)
        idle = {name for name in IDLE if not self.data.get(name)}
        left = [
            f"{self.prefix}{n} ({json_repr(v)})"
            for n, v in sorted(self.data.items())
            if n not in known | idle and v is not None
        ]
        if left:
            raise ValueError(f"{self.file}: phasor does not honor {name_some(left)}")


def json_repr(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else quote(value)
    )
