"""A model family: how one `model_type` of transformers writes its configuration and names its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from phasor.config import ClassifierConfig, FeedForwardConfig, ModelConfig
from phasor.config.model import Shape
from phasor.config.schema import Choice, Config, names, quote
from phasor.models.entries import Draft, Field, FieldEntry, read_table, require_kind, write_table
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, linear
from phasor.nn.positions import RotaryConfig

ORIGINAL = "original_max_position_embeddings"
TRAINED = "trained_length"  # a field of phasor's own, which transformers keeps and does not read


class Classifier(NamedTuple):
    """A class with a head that classifies: its name, its modules as ours and theirs, and its parts by path."""

    architecture: str
    modules: dict[str, str]
    parts: Mapping[str, Any] = MappingProxyType({})


class Family:
    """One `model_type` of transformers: a table of the fields of its config.json, and a table of rules for its tensors.

    - `fields`: the entries of config.json by name, in the order they are read. `parts`: what all of its models have, by
      paths in a ModelConfig; those of the head where there are logits.
    - `shapes`: of its models; what a file has that does not say which is the first.
    - `architectures`: its classes by the kind of head they have; `aliases`: kinds by the names of further classes.
      `classifiers`: those with a head that classifies.
    - `body`: its class without a head, where transformers has none with one: what it loads of any model of the family.
    - `prefix`: what tensor names begin with in a file saved with a head, and may lack in one saved without;
      `unprefixed` names never have it. `class_prefix` is what the class has in its place, where that is another.
      `embedding` and `head` are the two weights that may be tied.
    - `first_choice`: whether a model that fits several families is written as this one.
    - `harmless`: fields of config.json, beside those common to all, that do not change the computation. Those of the
      table are, where no entry takes them.
    - `unsupported`: fields, beside those common to all, that transformers honors in this family and phasor does not.
    - `renames`: old parts of names and what they are now. `copies`: names of tensors that repeat another.
    - `derived`: patterns of tensors that follow from the configuration. `passthrough`: patterns of tensors phasor
      has no use for; it keeps them and writes them back.
    - `experts_at`: the module of a layer's routed experts in transformers, under any names in files, and
      `expert_parameters` its parameters for our matrices, in its order. None where each expert is a module.
      `swaps_expert_factors`: whether PEFT takes what their matrices multiply for what they give.
    """

    model_type: ClassVar[str]
    title: ClassVar[str]  # what people call it
    fields: ClassVar[dict[str, FieldEntry]]
    parts: ClassVar[dict[str, Any]] = {"init": "normal"}
    shapes: ClassVar[tuple[Shape, ...]] = ("decoder",)
    architectures: ClassVar[dict[str, str]]
    aliases: ClassVar[dict[str, str]] = {}
    classifiers: ClassVar[dict[str, Classifier]] = {}
    body: ClassVar[str | None] = None
    prefix: ClassVar[str] = "model."
    class_prefix: ClassVar[str | None] = None
    unprefixed: ClassVar[tuple[str, ...]] = ("lm_head.",)
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    head: ClassVar[str] = "lm_head.weight"
    first_choice: ClassVar[bool] = False
    harmless: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[frozenset[str]] = frozenset()
    renames: ClassVar[dict[str, str]] = {}
    copies: ClassVar[dict[str, str]] = {}
    derived: ClassVar[tuple[str, ...]] = ()
    passthrough: ClassVar[tuple[str, ...]] = ()
    experts_at: ClassVar[str | None] = "mlp.experts"
    expert_parameters: ClassVar[Mapping[str, str]] = MappingProxyType({"up": "gate_up_proj", "down": "down_proj"})
    swaps_expert_factors: ClassVar[bool] = False

    def read(self, f: Fields) -> ModelConfig:
        """The configuration a config.json asks for, by the table."""
        draft = self.start(f)
        read_table(self.fields, f, draft)
        return draft.build()

    def start(self, f: Fields) -> Draft:
        """What is known before the table is read: the parts that all models have, and the kind of head."""
        draft = Draft({"shape": self.shapes[0], "head": self.head_kind(f)})
        draft.values |= {path: part for path, part in self.parts.items() if draft.has(path)}
        if draft["head"] in self.classifiers:
            draft.values |= {**self.classifiers[draft["head"]].parts, "head.labels": read_labels(f)}
        return draft

    def read_whole(self, f: Fields) -> ModelConfig:
        """The configuration a config.json asks for, after looking at every field of it."""
        config: ModelConfig = f.build(lambda: read_trained_length(self.read(f), f))
        f.finish(self.harmless | self.fields.keys(), self.unsupported)
        return config

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of config.json for a configuration, by the table; `read` has to give it back."""
        if config.shape not in self.shapes:
            raise ValueError(f"its shape is {' or '.join(self.shapes)}, and not {config.shape}")
        entries = self.fields.values()
        for entry in entries:
            entry.check(config)
        has_norm_fields = any(path.startswith("norm.") for e in entries if isinstance(e, Field) for path in e.paths)
        for name in ("position", "norm") if has_norm_fields else ("position",):
            part, kind = getattr(config, name), self.parts.get(name)
            if kind is not None:
                require_kind(part, part.kinds[kind])
        return write_table(self.fields, config) | write_labels(config)

    def all_rules(self, config: ModelConfig) -> Iterator[Rule]:
        """Which of their tensors is which of ours, those of a classifier among them."""
        classifier = self.classifiers.get(config.head.kind)
        modules = {} if classifier is None else classifier.modules
        yield from (rule for rule in self.rules(config) if rule.ours.rpartition(".")[0] not in modules)
        for ours, theirs in modules.items():
            yield from linear(ours, theirs)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        """Which of their tensors is which of ours."""
        raise NotImplementedError(f"{type(self).__name__} has no rules")

    def head_kind(self, f: Fields) -> str:
        """The kind of head a file's architecture has; the first known where none is named."""
        named = f.get("architectures", None) or [next(iter(self.architectures.values()))]
        kinds = {name: kind for kind, name in self.architectures.items()} | self.aliases
        kinds |= {classifier.architecture: kind for kind, classifier in self.classifiers.items()}
        if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in kinds:
            raise ValueError(
                f"{f.file}: phasor does not know the architecture {quote(named)} of {self.model_type}; "
                f"known: {', '.join(kinds)}"
            )
        return kinds[str(named[0])]

    def embedding_of(self, config: ModelConfig) -> str:
        """The name of the token embedding that the head may be tied to."""
        return self.embedding

    def source_inputs(self, source: Tensor) -> dict[str, Tensor]:
        """What transformers' class takes for tokens or a source, under its name there."""
        return {"input_ids": source}

    def duplicates(self, config: ModelConfig) -> dict[str, str]:
        """Names under which transformers expects a second copy of a tensor, and the tensor's own name."""
        return {}

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """Whether a derived tensor has the values that follow from the configuration."""
        return True

    def ignored_by_transformers(self, config: ModelConfig) -> list[str]:
        """Settings that transformers ignores in config.json; written only where the model's own file has them."""
        return []

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        """Where transformers is known to compute something else than the model was trained with, a sentence."""
        return None

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of tensors that a model of this configuration does not use."""
        return self.passthrough

    def written_name(self, name: str, config: ModelConfig) -> str:
        """A tensor's name in a file of the class that has a configuration's head."""
        return name.removeprefix(self.prefix) if config.head.kind in ("none", "pooled") else name

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        """The class that has a configuration's head; pooling is no part of it, and lies beside the model.

        `passthrough` are the names of the tensors phasor has no use for that are written along.
        """
        kind = "none" if config.head.kind == "pooled" else config.head.kind
        known = self.architectures | {kind: each.architecture for kind, each in self.classifiers.items()}
        if kind not in known:
            raise ValueError(f"{self.model_type} has no class with the head {kind!r}")
        return known[kind]


def read_labels(f: Fields) -> tuple[str, ...]:
    """The names of a classifier's labels, in their order; transformers has two where a file has none."""
    f.get("label2id", None)
    given = {str(key): name for key, name in f.get("id2label", {}).items()}
    count = f.get("num_labels", None)
    labels = tuple(given.get(str(i), f"LABEL_{i}") for i in range(len(given) or (2 if count is None else count)))
    if given and (set(given) != set(map(str, range(len(given)))) or not all(isinstance(name, str) for name in labels)):
        raise ValueError(f"{f.file}: id2label must name the labels 0 to {len(given) - 1}, not {json_repr(given)}")
    return labels


def write_labels(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that name a classifier's labels."""
    if not isinstance(config.head, ClassifierConfig):
        return {}
    labels = config.head.labels
    return {
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }


def is_plain_rotary(config: ModelConfig) -> bool:
    """Whether a configuration has rotary positions and no extension, which would say what its lengths are."""
    schemes = config.layer_positions()
    return any(p.extendable for p in schemes) and all(getattr(p, "extension", None) is None for p in schemes)


def read_trained_length(config: ModelConfig, f: Fields) -> ModelConfig:
    """The configuration with the length it was trained at, where that does not follow from its other lengths."""
    name = ORIGINAL if is_plain_rotary(config) else TRAINED
    trained = f.get(name, None)
    return config if trained in (None, implied_length(config)) else config.replace(trained_length=trained)


def trained_length_fields(config: ModelConfig) -> dict[str, int]:
    """The field of config.json for the length a model with rotary positions was trained at, where it is needed.

    Without an extension it is the original length, which transformers knows. The original length of an extension is
    part of its formula, so that fine-tuning with it has a separate field.

    >>> from phasor.models.presets import preset
    >>> trained_length_fields(preset("llama-2", trained_length=512))
    {'original_max_position_embeddings': 512}
    >>> trained_length_fields(preset("llama-3.1", trained_length=131072)), trained_length_fields(preset("llama-3.1"))
    ({'trained_length': 131072}, {})
    """
    rotary = any(position.extendable for position in config.layer_positions())
    if not rotary or config.trained_length in (None, implied_length(config)):
        return {}
    return {ORIGINAL if is_plain_rotary(config) else TRAINED: config.trained_length}


def implied_length(config: ModelConfig) -> int:
    """The trained length that a configuration has where none is recorded."""
    return config.replace(trained_length=None).original_length()


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """What two configurations compute differently; what concerns training alone is left out.

    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=2, num_heads=2)
    >>> differences(config, config.replace(num_kv_heads=2, dropout={"residual": 0.1}))
    []
    >>> differences(config, config.replace(norm="rmsnorm"))
    ["norm ('layernorm' and 'rmsnorm')"]
    >>> differences(config, config.replace(norm={"kind": "layernorm", "eps": 0.01}))
    ['norm.eps (1e-05 and 0.01)']
    >>> differences(config, config.replace(position="rotary"))
    ["position ('none' and 'rotary')"]
    """
    a, b = computation_fields(one), computation_fields(other)
    lines = [
        re.sub(r"^layer \d+ ", "layers' ", line) for name in a for line in list_differences(name, a[name], b.get(name))
    ]
    once = dict.fromkeys(lines)
    return [line for line in once if not line.startswith("layers' ") or line.removeprefix("layers' ") not in once]


def list_differences(name: str, a: Any, b: Any) -> list[str]:
    """Where two values differ, field by field where both are configurations of one class."""
    if a == b:
        return []
    if isinstance(a, Config) and type(a) is type(b):
        return [line for n in names(type(a)) for line in list_differences(f"{name}.{n}", getattr(a, n), getattr(b, n))]
    return [f"{name} ({' and '.join(quote(x.kind if isinstance(x, Choice) else x) for x in (a, b))})"]


def computation_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration that change the computation, with defaults resolved."""
    fields: dict[str, Any] = {name: getattr(config, name) for name in names(ModelConfig)}
    for name in ("init", "dropout", "layers", "attention", "feedforward", "max_length", "trained_length"):
        del fields[name]
    fields |= {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    fields |= {"hidden_dim": config.hidden_dim, "final_norm": config.ends_in_norm}
    fields |= {
        "num_blocks": config.num_blocks or config.num_layers,
        "num_encoder_layers": config.depth("encoder"),
        "position": fill_rotary(config.input_position, config),
    }
    deepest = max(config.depth("encoder"), config.depth("decoder"))
    for i in range(deepest):
        layer = config.layer(i)
        fields[f"layer {i} position"] = fill_rotary(layer.position, config.with_heads_of(layer.attention))
        fields[f"layer {i} feedforward"] = fill_hidden_dims(layer.feedforward, config)
        fields[f"layer {i} attention"] = layer.attention.resolve(config)
    return fields


def fill_rotary(position: Config, config: ModelConfig) -> Config:
    """A position scheme with its rotary dimension and sections resolved."""
    if not isinstance(position, RotaryConfig):
        return position
    return position.with_defaults(config.rotated_width(position))


def fill_hidden_dims(network: FeedForwardConfig, config: ModelConfig) -> FeedForwardConfig:
    """A feed-forward configuration with the hidden dimension of its experts resolved, and without the model's."""
    if not network.present:
        return FeedForwardConfig(hidden_dim=0)
    mixture, width = network.experts, network.hidden_dim_of(config)
    if mixture is not None and mixture.hidden_dim is None:
        network = network.replace(experts=mixture.replace(hidden_dim=width))
    return network.replace(hidden_dim=None if width == config.hidden_dim else width)
