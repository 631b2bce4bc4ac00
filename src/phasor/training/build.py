"""The model of a recipe: a preset or a checkpoint, with the recipe's own fields on top."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from phasor.checkpoints import load
from phasor.checkpoints.folder import QUANTIZATION
from phasor.checkpoints.hub import resolve_folder
from phasor.checkpoints.load import open_folder, read_config
from phasor.checkpoints.resize import grow_rows, grow_vocabulary
from phasor.checkpoints.swap_positions import carry_over
from phasor.config import ModelConfig
from phasor.config.generation import SpecialTokens
from phasor.config.recipe import Recipe
from phasor.device import resolve_device
from phasor.models import families
from phasor.models.extensions import trained_length
from phasor.models.presets import preset
from phasor.nn.init import initialize
from phasor.parallel.fresh import fresh_weights
from phasor.parallel.mesh import Mesh, mesh_why_not
from phasor.quantization import quantize_base
from phasor.training.base_weights import base_quantization, check_base, quantize_weights
from phasor.training.datasets import Datasets
from phasor.training.objectives import objective_of
from phasor.training.state import TrainingState
from phasor.training.trained import check_adapter, choose_weights, with_adapter
from phasor.transformer import Transformer


def merge(below: Any, above: Any) -> Any:
    """One value merged over another: mappings of the same kind field by field, anything else as a whole.

    >>> merge({"kind": "rotary", "base": 1e4}, {"base": 5e5}), merge({"kind": "rotary"}, {"kind": "alibi"})
    ({'kind': 'rotary', 'base': 500000.0}, {'kind': 'alibi'})
    """
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    if above.get("kind", below.get("kind")) != below.get("kind"):
        return dict(above)
    return {**below, **{name: merge(below.get(name), value) for name, value in above.items()}}


def model_config(
    recipe: Recipe, vocab_size: int, source_vocab_size: int | None = None, labels: tuple[str, ...] = ()
) -> ModelConfig:
    """The configuration of a recipe's model. Its vocabulary is the tokenizer's unless the recipe asks for more.

    >>> config = model_config(Recipe(model={"preset": "gpt-2", "dim": 64, "num_heads": 2, "num_layers": 2}), 300)
    >>> config.vocab_size, config.hidden_dim
    (300, 256)
    """
    fields = dict(recipe.model)
    name = fields.pop("preset", None)
    objective = objective_of(recipe)
    given = None if name is None else preset(name)
    if given is not None and "shape" not in fields:
        check_shape(given, recipe)
    if head := objective.head(given, labels):
        fields["head"] = merge(head, fields.get("head", {}))
    fields = {"shape": objective.shapes[0], "vocab_size": vocab_size} | fields if name is None else fields
    fields.setdefault("vocab_size", vocab_size)
    if source_vocab_size is not None:
        fields["embedding"] = merge({"source_vocab_size": source_vocab_size}, fields.get("embedding", {}))
    if name is None:
        config = ModelConfig.from_dict(fields)
    else:
        full = preset(name).to_dict()
        config = preset(name, **{field: merge(full.get(field), value) for field, value in fields.items()})
    return check_config(config, recipe, vocab_size, source_vocab_size)


def check_config(
    config: ModelConfig, recipe: Recipe, vocab_size: int, source_vocab_size: int | None = None
) -> ModelConfig:
    """The configuration as it is, or one sentence about why the recipe cannot train it."""
    check_shape(config, recipe)
    if (why_not := objective_of(recipe).head_why_not(config)) is not None:
        raise ValueError(why_not)
    if config.embedding.front_end is not None:
        raise ValueError(f"the task {recipe.task!r} reads texts, and the source of this model are features")
    if config.vocab_size < vocab_size:
        raise ValueError(f"the tokenizer has {vocab_size} tokens, and the model's vocabulary {config.vocab_size}")
    read, known = source_vocab_size or vocab_size, config.embedding.source_vocab_size or config.vocab_size
    if config.shape == "encoder-decoder" and known < read:
        raise ValueError(f"the source's tokenizer has {read} tokens, and the model's source vocabulary {known}")
    for position in (config.input_position, *config.layer_positions()):
        limit = position.max_positions
        coupled = recipe.data.positions == "coupled" and recipe.data.positions_to is not None
        if limit is not None and recipe.data.sequence_length > limit and not coupled:
            raise ValueError(
                f"data.sequence_length is {recipe.data.sequence_length}, and this model allows {limit} tokens"
            )
        if limit is not None and (recipe.data.positions_to or 0) > limit:
            raise ValueError(
                f"data.positions_to is {recipe.data.positions_to}, and this model allows {limit} positions"
            )
    return config


def check_shape(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The configuration as it is, if the recipe's task trains a model of its shape, with any head."""
    shapes = objective_of(recipe).shapes
    if config.shape not in shapes:
        expected = " or ".join(map(with_article, shapes))
        raise ValueError(f"the task {recipe.task!r} trains {expected}, and this model is {with_article(config.shape)}")
    return config


def with_article(shape: str) -> str:
    """
    >>> with_article("encoder"), with_article("decoder")
    ('an encoder', 'a decoder')
    """
    return f"{'an' if shape.startswith('e') else 'a'} {shape}"


def check_model(recipe: Recipe, processes: int = 1) -> None:
    """Refuse a model that cannot be trained on any data, before these are prepared."""
    check_adapter(recipe)
    if recipe.init_from is None:
        config = model_config(recipe, vocab_size=1)
    else:
        merged = merge(read_config(recipe.init_from).to_dict(), recipe.model)
        if (resolve_folder(recipe.init_from, files="config") / QUANTIZATION).exists():
            raise ValueError(f"the weights of {recipe.init_from} are quantized: train the original model")
        config = objective_of(recipe).with_head(check_shape(ModelConfig.from_dict(merged), recipe))
        check_config(config, recipe, vocab_size=1)
    check_mesh(config, recipe, processes)


def has_experts(config: ModelConfig) -> bool:
    """Whether a layer has routed experts."""
    return any(config.layer(i).feedforward.experts is not None for i in range(config.num_layers))


def check_mesh(config: ModelConfig, recipe: Recipe, processes: int) -> None:
    """Refuse a model that the processes of a recipe cannot share."""
    replicate, shard, context, tensor = recipe.parallel.sizes(processes)
    mesh = Mesh(replicate=replicate, shard=shard, context=context, tensor=tensor)
    length = recipe.data.sequence_length
    objective = objective_of(recipe)
    if processes > 1 and objective.reads_other_rows and has_experts(config):
        raise ValueError(f"the task {recipe.task!r} trains routed experts in one process alone")
    if context * tensor > 1 and not objective.cuts_tokens:
        raise ValueError(
            f"the task {recipe.task!r} does not cut rows or heads: leave parallel.context and parallel.tensor out"
        )
    if recipe.optimizer.kind == "muon" and shard * context * tensor > 1:
        raise ValueError(
            "optimizer.kind 'muon' takes whole matrices, and processes along parallel.shard, context or tensor hold "
            f"parts: parallel.replicate {processes} keeps them whole"
        )
    reason = mesh_why_not(config, mesh, length, prefix="parallel.", row="data.sequence_length {:,}")
    if reason is not None:
        raise ValueError(reason)


def build_model(recipe: Recipe, datasets: Datasets) -> Transformer:
    """A recipe's model, with fresh weights drawn from the recipe's seed or with those of `init_from`."""
    if recipe.init_from is not None:
        model = load_base(recipe, recipe.init_from, datasets)
        choose_weights(model, recipe, None)
        return model
    config = model_config(recipe, *vocabulary_sizes(datasets), labels=datasets.labels)
    config = config.replace(trained_length=datasets.longest)
    torch.manual_seed(recipe.train.seed)
    model = Transformer(config)
    special, start = datasets.special, datasets.special.start if config.shape == "encoder-decoder" else None
    model.special = SpecialTokens(stop=(special.eos,), start=start, bos=special.bos, pad=special.pad)
    choose_weights(model, recipe, None)
    return adopt_tokens(model, datasets)


def adopt_tokens(model: Transformer, datasets: Datasets) -> Transformer:
    """The model with its data's tokenizers and chat template; the token that ends a reply stops it first of all."""
    model.tokenizer, model.source_tokenizer = datasets.tokenizer, datasets.source_tokenizer
    model.chat_template, end = datasets.template, datasets.end_of_turn
    if end is not None:
        others = (token for token in model.special.stop if token != end)
        model.special = model.special.replace(stop=(end, *others))
    return model


def load_base(recipe: Recipe, folder: str, datasets: Datasets) -> Transformer:
    """The model of `init_from`; weights that a recipe quantizes are on the device, each as soon as it is read."""
    quantization = base_quantization(recipe)
    if quantization is None:
        return fit_model(load(folder, dtype=base_dtype(recipe)), recipe, datasets)[0]
    with open_folder(folder, base_dtype(recipe)) as opened:
        model, new = fit_model(opened.model.to(base_dtype(recipe)), recipe, datasets)

        def read(name: str, device: torch.device) -> Tensor:
            return new[name] if name in new else opened.read(name, device)

        fitted = replace(opened, model=model, read=read)
        loaded = fitted.load(resolve_device(recipe.train.device), quantization=quantization)
    check_base(loaded, recipe)
    return loaded


def base_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype in which the weights of `init_from` are read: the base of an adapter as it stays."""
    dtype: torch.dtype = torch.float32 if recipe.lora is None else getattr(torch, recipe.train.param_dtype)
    return dtype


def vocabulary_sizes(datasets: Datasets) -> tuple[int, int | None]:
    """The numbers of tokens of the tokenizer, and of the source's where it has its own."""
    source = datasets.source_tokenizer
    return datasets.tokenizer.get_vocab_size(), None if source is None else source.get_vocab_size()


def outline_model(
    recipe: Recipe, datasets: Datasets, state: TrainingState | None, *, verify: bool
) -> tuple[Transformer, Iterable[tuple[str, Tensor]]]:
    """A recipe's model on the meta device, and its weights one after another; none where a checkpoint has them.

    They have the bits of those of `build_model`. With `verify` the folder of `init_from` is compared with its manifest.
    """
    if recipe.init_from is None or (state is not None and recipe.lora is None):
        with torch.device("meta"):
            model = build_model(recipe, datasets) if state is None else rebuild_model(recipe, datasets, state)
        return model, fresh_weights(model.config, recipe.train.seed) if state is None else ()
    with open_folder(recipe.init_from, base_dtype(recipe), verify=verify) as opened:
        model, new = fit_model(opened.model.to(base_dtype(recipe)), recipe, datasets)
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    read = read_weights(recipe.init_from, {*shapes} - {*new})
    weights: Iterable[tuple[str, Tensor]] = chain(((name, grow_rows(x, shapes[name])) for name, x in read), new.items())
    quantization = base_quantization(recipe)
    if quantization is not None:
        quantize_base(model, quantization)
        check_base(model, recipe)
    choose_weights(model, recipe, state, verify=verify)
    if state is not None:
        take_values(model, state)
    elif recipe.lora is not None:
        weights = with_adapter(model, recipe, weights)
    return model, weights if quantization is None else quantize_weights(
        model, quantization, base_dtype(recipe), weights
    )


def read_weights(folder: str, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Those weights of a folder that are named; it was opened before, when its warnings were given."""
    with ExitStack() as stack:
        with warnings.catch_warnings(action="ignore"):
            opened = stack.enter_context(open_folder(folder, torch.float32, verify=False))
        yield from ((name, weight) for name, weight in opened.weights() if name in names)


def rebuild_model(recipe: Recipe, datasets: Datasets, state: TrainingState) -> Transformer:
    """The model of a run that is resumed, for the weights of its checkpoint.

    Of `init_from` the base of an adapter alone is read again.
    """
    if recipe.init_from is None:
        return build_model(recipe, datasets)
    if recipe.lora is not None:
        model = load_base(recipe, recipe.init_from, datasets)
        choose_weights(model, recipe, state)
        take_values(model, state)
        return model
    config = ModelConfig.from_dict(state.values["fixed"]["model"])
    check_config(config, recipe, datasets.tokenizer.get_vocab_size())
    model = Transformer(record_length(config, datasets))
    take_values(model, state)
    choose_weights(model, recipe, state)
    return adopt_tokens(model, datasets)


def take_values(model: Transformer, state: TrainingState) -> None:
    """Give a model the special tokens and settings for generation that a checkpoint holds."""
    model.special = SpecialTokens.from_dict(state.values["special"])
    model.generation_settings = state.values.get("generation", {})


def record_length(config: ModelConfig, datasets: Datasets, trained: int = 0) -> ModelConfig:
    """The configuration with the length it is trained at; fine-tuning on shorter texts leaves the longer one."""
    if datasets.longest is None:
        return config
    return config.replace(trained_length=max(trained or trained_length(config), datasets.longest))


def fit_model(source: Transformer, recipe: Recipe, datasets: Datasets) -> tuple[Transformer, dict[str, Tensor]]:
    """The model of `init_from` with what the recipe changes of it that its weights still fit, and its data's tokens.

    Its vocabulary grows by the tokens that a chat template adds. Also the weights of a head that is trained in place of
    another, by name: drawn from the recipe's seed.
    """
    family = None if source.origin is None else source.origin.family
    known, size = source.config.vocab_size, datasets.tokenizer.get_vocab_size()
    if datasets.template is not None and size > known:
        if recipe.lora is not None:
            raise ValueError(
                f"the chat template needs {size - known} tokens that {recipe.init_from} does not have, and an adapter "
                "leaves the vocabulary of its base as it is: give a template whose tokens it has, or leave lora out"
            )
        source = grow_vocabulary(source, size)
    config = ModelConfig.from_dict(merge(source.config.to_dict(), recipe.model))
    config = objective_of(recipe).with_head(config, datasets.labels, family if family in families.names() else None)
    check_config(config, recipe, *vocabulary_sizes(datasets))
    config = record_length(config, datasets, trained_length(source.config))
    model, new = source, {}
    if config != source.config:
        with torch.device("meta"):
            model = Transformer(config)
        weights, shapes = source.state_dict(), {name: x.shape for name, x in model.state_dict().items()}
        if config.head != source.config.head:
            weights = {name: x for name, x in weights.items() if shapes.get(name) == x.shape or not of_head(name)}
            new = fresh_head(config, [name for name in shapes if name not in weights], recipe.train.seed)
        theirs = {name: x.shape for name, x in (weights | new).items()}
        unfit = sorted(name for name in theirs.keys() | shapes.keys() if theirs.get(name) != shapes.get(name))
        if unfit:
            raise ValueError(f"the weights of {recipe.init_from} do not fit the recipe's model: {', '.join(unfit[:5])}")
        model.load_state_dict(weights | {name: x.to(source.tokens.dtype) for name, x in new.items()}, assign=True)
        carry_over(source, model)
        model.newly_initialized = (*source.newly_initialized, *new)
    return adopt_tokens(model, datasets), new


def of_head(name: str) -> bool:
    """
    >>> of_head("head.score.weight"), of_head("pooler.dense.bias"), of_head("decoder.norm.weight")
    (True, True, False)
    """
    return name.startswith(("head.", "pooler."))


def fresh_head(config: ModelConfig, names: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Weights of the head and pooler of a model, those that are named, drawn from a seed."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config)
    for part in (model.pooler, model.head):
        if part is not None:
            initialize(part.to_empty(device="cpu"), config, "encoder" if config.shape == "encoder" else "decoder")
    return {name: weight.detach() for name, weight in model.state_dict().items() if name in names and of_head(name)}
