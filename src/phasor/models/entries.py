"""Entries of a family's table: each reads a field of config.json into a ModelConfig, and writes it back.

Paths in a ModelConfig are dotted, such as `attention.window`. Entries are read in the order of the table: one
that depends on another stands below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from phasor.config import ActivationConfig, HeadConfig, LayerConfig, LogitsConfig, ModelConfig, SequenceClassifierConfig
from phasor.config.schema import Choice, Config, names
from phasor.models.fields import REQUIRED, Fields
from phasor.nn.attention.softmax.config import Projection

# Activations by their usual names, plain and as the gate of a gated network, and the names that are written.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
GATES = {"gelu": "geglu", "gelu_new": "geglu-tanh", "gelu_pytorch_tanh": "geglu-tanh", "relu": "reglu"}
GATES |= {"silu": "swiglu", "swish": "swiglu", "sigmoid": "glu"}
WRITTEN_NAMES = {"gelu-tanh": "gelu_pytorch_tanh", "geglu-tanh": "gelu_pytorch_tanh", "geglu": "gelu"}
WRITTEN_NAMES |= {"swiglu": "silu", "reglu": "relu", "glu": "sigmoid"}

ALL_PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "out")

# What values stand for that are None in a ModelConfig.
DERIVED: dict[str, Callable[[ModelConfig], Any]] = {
    "attention.scale": lambda config: config.head_dim**-0.5,
    "feedforward.experts.hidden_dim": lambda config: config.hidden_dim,
    "num_encoder_layers": lambda config: config.num_layers,
    "position.rotary_dim": lambda config: config.attention.rotated_width(config),
}

C = TypeVar("C", bound=Config)


def require_kind(part: Config, kind: type[C]) -> C:
    """A part, which must be of this kind for the family to support it."""
    if not isinstance(part, kind):
        raise unsupported_part(part)
    return part


def unsupported_part(part: Config) -> ValueError:
    """The error for a part that a family does not have."""
    what = f"{part.what} {part.kind!r}" if isinstance(part, Choice) else type(part).__name__
    return ValueError(f"it has no {what}")


def get_path(config: ModelConfig, path: str) -> Any:
    """The value at a path; attention is the first layer's of those that have it, and networks those with experts.

    Attention with a state comes after any other: families take its fields together.

    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=2, norm="rmsnorm")
    >>> get_path(config, "norm.eps"), get_path(config, "num_encoder_layers"), get_path(config, "attention.window")
    (1e-06, None, None)
    >>> get_path(config, "norm.bias")
    Traceback (most recent call last):
    ValueError: it has no norm 'rmsnorm'
    """
    first, *rest = path.split(".")
    if first == "attention":
        attentions = [*(config.layer(i).attention for i in range(config.num_layers)), config.attention]
        attentions.sort(key=lambda attention: (not attention.present, attention.keeps_state))
        part: Any = next((one for one in attentions if hasattr(one, "".join(rest[:1]))), attentions[0])
    elif first == "feedforward":
        networks = [config.layer(i).feedforward for i in range(config.num_layers)]
        part = max(networks, key=lambda network: (network.experts is not None, network.present))
    else:
        part = getattr(config, first)
    for name in rest:
        if part is None:
            raise ValueError(f"its models have {path.split('.')[-2]}, and this one has none")
        if not hasattr(part, name):
            raise unsupported_part(part)
        part = getattr(part, name)
    return part


def vary_layers(config: ModelConfig, **parts: Sequence[Any]) -> ModelConfig:
    """A configuration with these parts, one per layer, as the shortest pattern that repeats to them.

    >>> from phasor.nn.attention import SoftmaxAttentionConfig
    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=4, num_heads=1)
    >>> local = vary_layers(config, attention=[SoftmaxAttentionConfig(window=5), SoftmaxAttentionConfig()] * 2)
    >>> len(local.layers), [local.layer(i).attention.window for i in range(4)]
    (2, [5, None, 5, None])
    """
    layers = [
        LayerConfig(**{name: given[i] for name, given in parts.items() if given[i] != getattr(config, name)})
        for i in range(config.num_layers)
    ]
    period = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return config.replace(layers=() if layers[:period] == [LayerConfig()] else tuple(layers[:period]))


class Draft:
    """A ModelConfig while it is read: values by path, and in `layers` those of every layer, where layers differ.

    >>> draft = Draft({"vocab_size": 9, "dim": 8, "num_layers": 2, "num_heads": 1, "norm": "rmsnorm", "norm.eps": 0.1})
    >>> draft.layers["attention.window"] = [5, None]
    >>> config = draft.build()
    >>> draft["head_dim"], config.norm.eps, [config.layer(i).attention.window for i in range(2)]
    (8, 0.1, [5, None])
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.layers: dict[str, Sequence[Any]] = {}

    def __setitem__(self, path: str, value: Any) -> None:
        self.values[path] = value

    def __getitem__(self, path: str) -> Any:
        """The value at a path, as it was read or as it follows from what was read."""
        return self.values[path] if path in self.values else get_path(self.config(), path)

    @property
    def head(self) -> type[HeadConfig]:
        """The kind of head."""
        head: type[HeadConfig] = HeadConfig.kinds[self.values.get("head", "lm")]
        return head

    @property
    def has_logits(self) -> bool:
        return issubclass(self.head, LogitsConfig)

    def has(self, path: str) -> bool:
        """Whether a path leads anywhere: each kind of head has its own fields."""
        part, _, name = path.partition(".")
        return part != "head" or not name or name in names(self.head)

    def config(self) -> ModelConfig:
        """The configuration so far, the same in every layer."""
        tree: dict[str, Any] = {}
        for path in sorted(self.values):  # a part's kind stands before its fields
            *parents, name = path.split(".")
            inner = tree
            for parent in parents:
                if isinstance(inner.setdefault(parent, {}), str):
                    inner[parent] = {"kind": inner[parent]}
                inner = inner[parent]
            inner[name] = self.values[path]
        return ModelConfig(**tree)

    def build(self) -> ModelConfig:
        """The whole configuration."""
        config = self.config()
        parts: dict[str, list[Any]] = {}
        for path, values in self.layers.items():
            name, _, field = path.partition(".")
            before = parts.get(name, [getattr(config, name)] * config.num_layers)
            parts[name] = [
                part.replace(**{field: value}) if field else value for part, value in zip(before, values, strict=True)
            ]
        return vary_layers(config, **parts) if parts else config


class SameAs:
    """A default: the value at another path."""

    def __init__(self, path: str) -> None:
        self.path = path


def fill_in(value: Any, draft: Draft) -> Any:
    return draft[value.path] if isinstance(value, SameAs) else value


class FieldEntry:
    """One field of config.json, or a few that belong together, in both directions."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        """Put what the file says into the draft."""
        raise NotImplementedError(f"{type(self).__name__} does not read")

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError for a configuration whose positions the family does not have."""

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        """The fields that `read` reads back as this configuration."""
        return {}


class Field(FieldEntry):
    """A field that is one value of a ModelConfig, or several that are equal; the first that the model has is written.

    Where the file has null, or nothing, it is `default`, and required without one; `absent` is for nothing alone. A
    field with an `alias` has two names, which agree where a file has both; a `fallback` is read where the field is
    missing. `positive` numbers are greater than 0. One that may be `omitted` is written only where it is not the
    default. Fields of the head are those that its kind has.

    Subclasses convert values: `decode` theirs to ours, and `encode` ours to theirs.
    """

    def __init__(
        self,
        *paths: str,
        default: Any = REQUIRED,
        absent: Any = REQUIRED,
        alias: str | None = None,
        fallback: str | None = None,
        positive: bool = False,
        omitted: bool = False,
    ) -> None:
        self.paths, self.default, self.absent = paths, default, absent
        self.alias, self.fallback, self.positive, self.omitted = alias, fallback, positive, omitted

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        paths = [path for path in self.paths if draft.has(path)]
        if paths:
            value = self.decode(self.value(f, name, draft), draft)
            draft.values |= dict.fromkeys(paths, value)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        path = next((path for path in self.paths if self.applies(path, config)), None)
        if path is None:
            return {}
        value = get_path(config, path)
        if value is None and self.default is not None and path in DERIVED:
            value = DERIVED[path](config)
        value = self.encode(value, config)
        return {} if self.omitted and value == self.default else {name: value}

    def applies(self, path: str, config: ModelConfig) -> bool:
        """Whether a model has what the field says."""
        return not path.startswith("head.") or hasattr(config.head, path[5:])

    def value(self, f: Fields, name: str, draft: Draft) -> Any:
        """The field's value in the file, or what its absence means."""
        if self.alias is not None:
            value = f.get(self.alias if self.alias in f and name not in f else name)
            f.expect(self.alias, value)
            return value
        default = fill_in(self.default if self.absent is REQUIRED or name in f.data else self.absent, draft)
        if self.fallback is not None:
            found = f.get(self.fallback, None if default is REQUIRED else default)
            default = default if found is None else found
        return f.positive(name, default) if self.positive else f.get(name, default)

    def decode(self, value: Any, draft: Draft) -> Any:
        return value

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return value


class Scale(Field):
    """A factor; ours may be the root of the width, or one over it."""

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return {"sqrt": config.dim**0.5, "rsqrt": config.dim**-0.5}[value] if isinstance(value, str) else value


class InitStd(Field):
    """The standard deviation of initial weights; the default where they are drawn in another way."""

    def __init__(self) -> None:
        super().__init__("init.std", default=0.02)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: getattr(config.init, "std", self.default)}


class TableLength(Field):
    """The model's length, which is the number of positions in a learned table."""

    def __init__(self, **options: Any) -> None:
        super().__init__("max_length", **options)

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return config.input_position.max_positions


class HeadDim(Field):
    """`head_dim` where transformers' configuration takes it without having it: written where it has to be."""

    def __init__(self) -> None:
        super().__init__("head_dim", default=None)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {} if config.head_dim * config.num_heads == config.dim else super().write(name, config)


class EmbeddingWidth(Field):
    """The width of a token embedding that is projected where it is not the model's; `project` says when."""

    def __init__(self, project: str = "tokens", absent: Any = REQUIRED) -> None:
        super().__init__("embedding.width", default=None, absent=absent)
        self.project = project

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        width = self.value(f, name, draft)
        if width not in (None, draft["dim"]):
            draft.values |= {"embedding.width": width, "embedding.project": self.project}

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return value or config.dim


class Repeated(Field):
    """A required field that repeats the value at a path."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.get(name)
        f.expect(name, draft[self.paths[0]])


class Switch(Field):
    """True or false for one of two values; of a part, for its kind."""

    def __init__(self, path: str, *, on: Any, off: Any, default: bool, absent: Any = REQUIRED) -> None:
        super().__init__(path, default=default, absent=absent)
        self.on, self.off = on, off

    def decode(self, value: Any, draft: Draft) -> Any:
        return self.on if value else self.off

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return isinstance(value, type(self.on)) if isinstance(self.on, Config) else value == self.on


class Bias(Field):
    """Whether some projections of attention have a bias, and with `feedforward` those of the network too."""

    def __init__(
        self, default: bool, of: tuple[Projection, ...] = ALL_PROJECTIONS, *, feedforward: bool = False
    ) -> None:
        super().__init__("attention.bias", default=default)
        self.of, self.feedforward = of, feedforward

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        value = self.value(f, name, draft)
        draft["attention.bias"] = draft.values.get("attention.bias", ()) + (self.of if value else ())
        if self.feedforward:
            draft["feedforward.bias"] = value

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return isinstance(value, tuple) and set(self.of) <= set(value)  # attention with a state has one for all


class Activation(Field):
    """An activation by its name; `written` are names that differ from the usual ones.

    >>> from phasor.models.presets import preset
    >>> Activation("silu", GATES).write("hidden_act", preset("llama-2"))
    {'hidden_act': 'silu'}
    """

    def __init__(
        self,
        default: str,
        known: dict[str, str],
        *paths: str,
        written: dict[str, str] | None = None,
    ) -> None:
        super().__init__(*(paths or ("feedforward.activation",)), default=default)
        self.known, self.written = known, WRITTEN_NAMES | (written or {})

    def value(self, f: Fields, name: str, draft: Draft) -> Any:
        return f.choose(name, self.known, self.default)

    def applies(self, path: str, config: ModelConfig) -> bool:
        return super().applies(path, config) and isinstance(get_path(config, path), ActivationConfig)

    def encode(self, value: Any, config: ModelConfig) -> Any:
        return self.written.get(value.kind, value.kind)


class ClassifierPooling(FieldEntry):
    """How a sequence classifier pools: our poolers by their names."""

    def __init__(self, default: str, known: dict[str, str]) -> None:
        self.default, self.known = default, known

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if issubclass(draft.head, SequenceClassifierConfig):
            draft["head.pooler"] = f.choose(name, self.known, self.default)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if not isinstance(config.head, SequenceClassifierConfig):
            return {}
        return {name: next((theirs for theirs, ours in self.known.items() if ours == config.head.pooler), None)}


class Pinned(FieldEntry):
    """A field that may only have these values, the first where it is left out; `written` where it has to be."""

    def __init__(self, *allowed: Any, written: bool = False) -> None:
        self.allowed, self.written = allowed, written

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        f.expect(name, *(fill_in(value, draft) for value in self.allowed))

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        return {name: self.allowed[0]} if self.written else {}


class Nested(FieldEntry):
    """An object inside config.json, with its own table and harmless fields."""

    def __init__(self, fields: dict[str, FieldEntry], harmless: Iterable[str] = ()) -> None:
        self.fields, self.harmless = fields, harmless

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        inside = f.inside(f.get(name, {}), f"{name}.")
        read_table(self.fields, inside, draft)
        inside.finish(self.harmless)
        if unread := inside.unread_fields():
            f.unread_inside[name] = unread

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        inside = write_table(self.fields, config)
        return {name: inside} if inside else {}


def read_table(fields: dict[str, FieldEntry], f: Fields, draft: Draft) -> None:
    for name, entry in fields.items():
        entry.read(f, name, draft)


def write_table(fields: dict[str, FieldEntry], config: ModelConfig) -> dict[str, Any]:
    return {field: value for name, entry in fields.items() for field, value in entry.write(name, config).items()}
