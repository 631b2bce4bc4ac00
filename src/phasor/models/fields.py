"""Reading other people's config.json: what is not understood is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phasor.config.schema import quote

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

    `tensors` are the names in the checkpoint, for families whose parts show in their files alone, and `equal` says
    whether two of them hold the same; `within` is what complaints put before a name, for an object inside the file's.

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
        within: str = "",
        equal: Callable[[str, str], bool] = lambda one, other: False,
    ) -> None:
        self.data, self.file, self.tensors, self.within = data, file, frozenset(tensors), within
        self.equal = equal
        self.taken: set[str] = set()
        self.absent: dict[str, Any] = {}

    def assume(self, absent: dict[str, Any]) -> None:
        """What fields mean that the file does not have, where that is not what null means.

        >>> fields = Fields({"sliding_window": None}, Path("config.json"))
        >>> fields.assume({"sliding_window": 4096, "num_key_value_heads": 8})
        >>> fields.get("sliding_window", "none"), fields.get("num_key_value_heads", 32)
        ('none', 8)
        """
        self.absent = absent

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """A field's value, or the default where the file has none (or null); it has to be of the default's kind."""
        value = self.raw(name, default)
        for kinds, words in KINDS.items():
            fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
            if type(default) in kinds and not fits:
                raise ValueError(f"{self.file}: {self.within}{name} must be {words}, not {spelled(value)}")
        return value

    def raw(self, name: str, default: Any) -> Any:
        """The same, of any kind."""
        self.taken.add(name)
        value = self.data.get(name, self.absent.get(name))
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.file}: {self.within}{name} is missing")
        return default

    def positive(self, name: str, default: float) -> Any:
        """A number greater than 0."""
        value = self.get(name, default)
        if not value > 0:
            raise ValueError(f"{self.file}: {self.within}{name} must be greater than 0, not {spelled(value)}")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Take a field that may only have these values; the first is what it means to be absent."""
        value = self.raw(name, allowed[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            known = ", ".join(map(spelled, allowed))
            raise ValueError(
                f"{self.file}: phasor does not honor {self.within}{name} = {spelled(value)}; it must be {known}"
            )

    def choose(self, name: str, known: dict[str, Any], default: str) -> Any:
        """What one of several known words means."""
        word = self.get(name, default)
        if not isinstance(word, str) or word not in known:
            raise ValueError(f"{self.file}: phasor does not know {name} = {spelled(word)}; known: {', '.join(known)}")
        return known[word]

    def same(self, one: str, other: str) -> bool:
        """Whether two names stand for one tensor: the file lacks one of them, or they hold the same."""
        return not {one, other} <= self.tensors or self.equal(one, other)

    def made(self, make: Callable[[], Any]) -> Any:
        """What is made of these fields; a complaint about it names the file."""
        try:
            return make()
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(self.file)) else f"{self.file}: {text}") from None

    def unused(self, harmless: Iterable[str] = ()) -> dict[str, Any]:
        """Fields nobody took that say nothing about the computation."""
        return {n: v for n, v in self.data.items() if n not in self.taken and (n in HARMLESS | IDLE or n in harmless)}

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse every field that was neither taken nor harmless; null says nothing."""
        known = HARMLESS | self.taken | set(harmless)
        idle = {name for name in IDLE if not self.data.get(name)}
        left = [
            f"{self.within}{n} ({spelled(v)})"
            for n, v in sorted(self.data.items())
            if n not in known | idle and v is not None
        ]
        if left:
            raise ValueError(f"{self.file}: phasor does not honor {', '.join(left)}")


def spelled(value: Any) -> str:
    """A value as the file spells it, shortly."""
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else quote(value)
    )
