"""The contract of position schemes, configuration side: what a scheme says about itself and what a model asks of it.

The schemes themselves are folders of `phasor.nn.positions`, each with its `config.py` and its `module.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from phasor.config.cached import CachedTensor
from phasor.config.schema import Choice

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


@dataclass(frozen=True)
class RotaryPair:
    """One rotated pair of features: its rotation as trained, and with the extension."""

    index: int
    axis: int
    frequency: float  # radians per token, before the extension
    wavelength: float  # tokens per rotation, before the extension
    rotations: float  # within the original length, before the extension
    extended_frequency: float
    extended_wavelength: float
    slowed: float  # frequency / extended frequency; infinite for a pair that no longer rotates
    effect: str


class Extension(Choice, what="extension"):
    """How a scheme changes so that a model reads further than it was trained."""

    depends_on_length: ClassVar[bool] = False

    def extended_length(self, trained: int) -> int:
        """The maximum length of a model that was trained at some length, with this extension."""
        return trained

    def trained_length(self, extended: int) -> int:
        """The length a model was trained at, from its maximum length with this extension."""
        return extended

    @classmethod
    def fields_for(cls, model: ModelConfig, factor: float, original: int) -> dict[str, Any]:
        """The fields of the extension that makes a model read `factor` times the length it was trained at."""
        return {}

    @classmethod
    def example(cls) -> Self:
        """A small configuration that the contract tests run, for a rotary dimension of 8; by default all defaults."""
        return cls()


class PositionConfig(Choice, what="position scheme"):
    """How a model learns the positions of its tokens."""

    @property
    def acts_on(self) -> tuple[str, ...]:
        """Where positions enter: the input, queries, keys, values or scores."""
        return ()

    @property
    def shift_invariant(self) -> bool:
        """Whether adding one offset to all positions of a sequence leaves the result unchanged."""
        return False

    @property
    def axes(self) -> int:
        """How many position rows a token has: one in text, two in a grid, three in video."""
        return 1

    @property
    def depends_on_length(self) -> bool:
        """Whether the length of the whole sequence changes what a token gets."""
        return False

    @property
    def max_positions(self) -> int | None:
        """The number of positions the scheme is defined for; None where there is no limit."""
        return None

    @property
    def follows_input(self) -> bool:
        """Whether what a token gets depends on the layer's input too, so that the module has a hook `for_layer`."""
        return False

    @property
    def multiplies_input(self) -> bool:
        """Whether what follows the input is a product with it, so that tokens of zeros get nothing."""
        return False

    @property
    def reads_heads(self) -> bool:
        """Whether what it adds to scores is computed from queries and keys, which no other scheme may change."""
        return False

    @property
    def takes_latent_keys(self) -> bool:
        """Whether keys may be wider than heads, so that at most the first features of a head are rotated."""
        return not self.reads_heads and not {"keys", "values"} & set(self.acts_on)

    @property
    def decode_kernel_why_not(self) -> str | None:
        """Why decode kernels do not apply the scheme inside layers; None where they do.

        They rotate by `Position.rotary_args`, and add what `Position.on_scores` gives for positions alone.
        """
        if self.follows_input or self.acts_on not in ((), ("input",), ("scores",)):
            return "positions inside layers are neither rotary nor a bias by position"
        return None

    @property
    def parts(self) -> tuple[PositionConfig, ...]:
        """The schemes that act together: this one, or those that it combines."""
        return (self,)

    @property
    def extendable(self) -> bool:
        """Whether `with_extension` is defined."""
        return False

    def with_extension(self, extension: Extension | None) -> PositionConfig:
        """The same scheme with another extension, or with none."""
        raise ValueError(f"an extension needs rotary positions, and this model's are {self.kind!r}")

    @property
    def compares_extensions(self) -> bool:
        """Whether comparisons of schemes measure it with every extension too, and the others against its window."""
        return False

    def fold_extension(self, model: ModelConfig) -> PositionConfig:
        """The same positions without an extension, where other fields of the scheme can say them; else as it is."""
        return self

    def without_rotation(self) -> PositionConfig:
        """The scheme less what rotates queries and keys."""
        return self

    def marked_lengths(self) -> tuple[int, ...]:
        """The lengths of a text from which on tokens get other positions."""
        return ()

    def keeps_rows(self, before: PositionConfig) -> bool:
        """Whether weights of another scheme, row by row, serve this one as well."""
        return self == before

    def attention_factor(self, length: int | None = None) -> float:
        """What positioned queries and keys are multiplied by, in a text of some length."""
        return 1.0

    def rotary_pairs(self, model: ModelConfig, length: int) -> tuple[RotaryPair, ...]:
        """The pairs of features that the scheme rotates in a model that reads `length` tokens."""
        return ()

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError for a model that the scheme is not defined for."""

    def resolve(self, model: ModelConfig) -> PositionConfig:
        """The same scheme with those fields filled in that follow from the model."""
        return self

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The shapes of what the scheme learns in each stack of a model."""
        return ()

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The shapes of what the scheme learns for each layer that uses it."""
        return ()

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        """What a layer with the scheme keeps for each token beside its keys and values, by name."""
        return {}

    @classmethod
    def for_lengths(cls, trained: int, largest: int) -> Self:
        """The scheme of a model that is trained at one length and reads up to another; by default all defaults."""
        return cls()

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        """Small configurations by name, which every contract test runs, in a model with a head_dim of 8."""
        return {cls.kind: cls()}
