"""The schemes of a comparison, by name: kinds of the registry, several in one layer, or with coupled positions.

A kind of attention whose layers keep a state stands beside positions, or in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasor.config import AttentionConfig, Extension, PositionConfig
from phasor.config.schema import fields, has_no_default, unknown
from phasor.data.tasks import COUPLED, RANDOMIZED
from phasor.evaluation.variants import NONE, OWN, SINKS

ALL, JOIN = "all", "+"


@dataclass(frozen=True)
class ComparedScheme:
    """A scheme by the name that was typed, with `positions` that a task gives: "coupled", "randomized" or counted.

    `fields` are those of its one kind that are not the default. With a `method` of `extend_config` it is the trained
    scheme after fine-tuning at the largest length, and `fields` are those of the extension.
    """

    name: str
    kind: str
    positions: str | None = None
    method: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    def position(self, trained: int, largest: int) -> dict[str, Any]:
        """The position of a model that is trained at one length and tested up to another.

        A table has a row for every position that is tested, and distances in two pieces fit the trained length.

        >>> ComparedScheme("learned", "learned").position(64, 1024)["max_length"]
        1024
        >>> [part["kind"] for part in ComparedScheme("rotary+alibi", "rotary+alibi").position(64, 1024)["schemes"]]
        ['rotary', 'alibi']
        >>> ComparedScheme("gated-delta", "gated-delta").position(64, 1024)
        {'kind': 'none'}
        >>> ComparedScheme("slow", "rotary", fields=(("base", 500000),)).position(64, 1024)["base"]
        500000.0
        """
        parts = [part.to_dict() for part in self.parts(trained, largest)] or [{"kind": "none"}]
        return parts[0] if len(parts) == 1 else {"kind": "combined", "schemes": parts}

    @property
    def attention(self) -> str:
        """The kind of attention: one with a state that the name has, or the usual one."""
        with_state = (kind for kind in self.kind.split(JOIN) if kind in state_kinds())
        return next(with_state, str(AttentionConfig.default_kind))

    @property
    def keeps_state(self) -> bool:
        """Whether attention keeps a state, which has no window."""
        return self.attention in state_kinds()

    def parts(self, trained: int, largest: int) -> list[PositionConfig]:
        """The schemes in the layers of a model that is trained at one length and tested up to another."""
        kinds = (kind for kind in self.kind.split(JOIN) if kind in PositionConfig.kinds)
        given = dict(self.fields) if self.method is None else {}
        return [PositionConfig.kinds[kind].for_lengths(trained, largest).replace(**given) for kind in kinds]

    def table_rows(self, trained: int, largest: int) -> int | None:
        """How many positions have a learned vector on the input; None of a scheme without such a table.

        >>> ComparedScheme("learned", "learned").table_rows(64, 1024), ComparedScheme("t5", "t5").table_rows(64, 1024)
        (1024, None)
        """
        tables = (part.max_positions for part in self.parts(trained, largest) if "input" in part.acts_on)
        return next(tables, None)

    @property
    def has_extensions(self) -> bool:
        """Whether the scheme is measured with every extension, and its window is what others are compared with."""
        kind = PositionConfig.kinds.get(self.kind)  # None where there are several in the same layers
        changed = self.method is not None or bool(self.fields)
        return not changed and kind is not None and kind().compares_extensions

    def extensions(self) -> list[str]:
        """The models to measure beside a window, by the names of `evaluate_lengths`.

        >>> ComparedScheme("rotary", "rotary").extensions()[:3], ComparedScheme("t5", "t5").extensions()
        (['none', 'linear', 'ntk'], ['own'])
        """
        if not self.has_extensions:
            return [OWN]
        return [NONE, *(kind for kind, cls in Extension.kinds.items() if applies(cls)), SINKS]

    def label(self, extension: str) -> str:
        """What a model of this scheme is called in reports.

        >>> ComparedScheme("rotary", "rotary").label("yarn"), ComparedScheme("rotary", "rotary").label("none")
        ('rotary (yarn)', 'rotary')
        """
        return self.name if extension in (OWN, NONE) else f"{self.name} ({extension})"


def model_fields(
    sizes: dict[str, int], scheme: ComparedScheme, max_length: int, trained: int, largest: int
) -> dict[str, Any]:
    """The model of a recipe: that of Llama 2, small, with another scheme; all else is the same.

    Token embeddings begin with variance 1, as in the Transformer of 2017: sines that are added to smaller ones would
    hide them. Beside learned vectors they begin as small as these, as in GPT-2: larger ones would hide the vectors.
    """
    return {
        "preset": "llama-2",
        **sizes,
        "max_length": max_length,
        "position": scheme.position(trained, largest),
        "attention": scheme.attention,
        "embedding": {"tied": True, "scale": "sqrt" if scheme.table_rows(trained, largest) is None else 1.0},
        "init": "xavier",
    }


def applies(extension: type[Extension]) -> bool:
    """Whether an extension follows from the two lengths alone."""
    given = ("factor", "original_length", "short_factor", "long_factor")
    return all(field.name in given for field in fields(extension) if has_no_default(field))


def comparable_kinds() -> list[str]:
    """The kinds of positions that rows of text can have."""
    return [kind for kind, cls in PositionConfig.kinds.items() if comparison_why_not(cls) is None]


def state_kinds() -> dict[str, type[AttentionConfig]]:
    """The kinds of attention whose layers keep a state.

    >>> sorted(state_kinds())
    ['gated-delta', 'mamba2', 'retention', 'short-convolution']
    """
    return {kind: cls for kind, cls in AttentionConfig.kinds.items() if cls.keeps_state and cls.present}


def comparison_why_not(cls: type[PositionConfig]) -> str | None:
    """Why a kind of positions cannot be compared, in words; None where it can be."""
    missing = [field.name for field in fields(cls) if has_no_default(field)]
    if missing:
        return f"it needs the field {missing[0]!r}"
    return None if cls().axes == 1 else f"its tokens have {cls().axes} positions each, and those of a text have one"


def parse_schemes(given: str | Sequence[str], task: str | None) -> tuple[ComparedScheme, ...]:
    """Schemes by their names, each once. `all` is every kind there is, and `rotary+alibi` both in the same layers.

    >>> [scheme.name for scheme in parse_schemes("alibi, rotary,alibi", None)]
    ['alibi', 'rotary']
    """
    listed = given.split(",") if isinstance(given, str) else list(given)
    typed = [name.strip() for name in listed]
    typed = [kind for name in typed for kind in (comparable_kinds() if name == ALL else [name])]
    return tuple(parse_scheme(name, task) for name in dict.fromkeys(typed))


def parse_scheme(name: str, task: str | None) -> ComparedScheme:
    kind, mark, option = name.partition(":")
    parts = kind.split(JOIN)
    if ALL in parts:
        raise ValueError(f"{ALL!r} stands alone, and not in {name!r}: name the schemes")
    for part in (part for part in parts if part not in state_kinds()):
        if part not in PositionConfig.kinds:
            raise unknown("scheme", part, [*PositionConfig.kinds, *state_kinds(), ALL], PositionConfig.former_kinds)
        reason = comparison_why_not(PositionConfig.kinds[part])
        if reason is not None:
            raise ValueError(f"the scheme {part!r} cannot be compared: {reason}")
    kept = [part for part in parts if part in state_kinds()]
    if len(kept) > 1:
        raise ValueError(f"the scheme {name!r} names two kinds of attention, {kept[0]} and {kept[1]}: give one")
    taken = [part for part in parts if part not in kept]
    if taken and kept and not state_kinds()[kept[0]].takes_positions:
        raise ValueError(f"the scheme {name!r} has positions, and {kept[0]} attention takes none: give {kept[0]}")
    if not mark:
        return ComparedScheme(name, kind)
    if option not in (COUPLED, RANDOMIZED):
        raise ValueError(f"a scheme is NAME, NAME:{COUPLED} or NAME:{RANDOMIZED}, not {name!r}")
    if task is None or (option == COUPLED and task != "addition"):
        takes = "the task addition" if option == COUPLED else "tasks"
        what = "text" if task is None else f"the task {task!r}"
        raise ValueError(f"the scheme {name!r} has {option} positions, which are for {takes}, not for {what}")
    if all(not PositionConfig.kinds[part]().acts_on for part in taken):
        raise ValueError(f"the scheme {name!r} has no positions that could be {option}")
    return ComparedScheme(name, kind, option)
