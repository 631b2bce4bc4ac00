"""The configuration of several position schemes in one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from phasor.config.cached import CachedTensor, merge_by_name
from phasor.config.positions import Extension, PositionConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


def by_kinds(*kinds: str) -> Any:
    """The default of a list of schemes by their kinds, which are looked up on construction."""
    return kinds


class CombinedConfig(PositionConfig, kind="combined"):
    """Several schemes in the same layers, for example rotary with ALiBi.

    One of them may rotate keys. Biases on the scores add up.
    """

    schemes: tuple[PositionConfig, ...] = by_kinds("rotary", "alibi")

    def check(self) -> None:
        if len(self.schemes) < 2:
            raise ValueError(f"CombinedConfig.schemes must list at least 2 position schemes, not {len(self.schemes)}")
        for scheme in self.schemes:
            if not scheme.acts_on or isinstance(scheme, CombinedConfig):
                raise ValueError(f"CombinedConfig.schemes cannot contain {scheme.kind!r}: list what acts in a layer")
            if "input" in scheme.acts_on:
                raise ValueError(
                    f"CombinedConfig.schemes cannot contain {scheme.kind!r}, which acts on the model's input: set it "
                    "as ModelConfig.position, and the others as LayerConfig.position"
                )
            if scheme.reads_heads:
                raise ValueError(
                    f"CombinedConfig.schemes cannot contain {scheme.kind!r}, which reads queries or keys, so that "
                    "no other scheme may change them: use it alone in a layer"
                )
            if scheme.axes > 1:
                raise ValueError(
                    f"CombinedConfig.schemes cannot contain {scheme.kind!r}, whose tokens have {scheme.axes} positions "
                    "each: other schemes take one"
                )
        rotating = [scheme.kind for scheme in self.schemes if "keys" in scheme.acts_on]
        if len(rotating) > 1:
            raise ValueError(
                f"CombinedConfig.schemes has {' and '.join(map(repr, rotating))}, which both rotate queries and keys: "
                "only one scheme may"
            )

    @property
    def parts(self) -> tuple[PositionConfig, ...]:
        return self.schemes

    @property
    def acts_on(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place for scheme in self.schemes for place in scheme.acts_on))

    @property
    def shift_invariant(self) -> bool:
        return all(scheme.shift_invariant for scheme in self.schemes)

    @property
    def depends_on_length(self) -> bool:
        return any(scheme.depends_on_length for scheme in self.schemes)

    @property
    def max_positions(self) -> int | None:
        return min((scheme.max_positions for scheme in self.schemes if scheme.max_positions is not None), default=None)

    @property
    def follows_input(self) -> bool:
        return any(scheme.follows_input for scheme in self.schemes)

    @property
    def extendable(self) -> bool:
        return any(scheme.extendable for scheme in self.schemes)

    @property
    def extension(self) -> Extension | None:
        """The extension of the scheme that can have one."""
        return next((getattr(scheme, "extension", None) for scheme in self.schemes if scheme.extendable), None)

    def with_extension(self, extension: Extension | None) -> Self:
        if not self.extendable:
            super().with_extension(extension)
        schemes = tuple(scheme.with_extension(extension) if scheme.extendable else scheme for scheme in self.schemes)
        return self.replace(schemes=schemes)

    def without_rotation(self) -> PositionConfig:
        rest = tuple(scheme for scheme in (part.without_rotation() for part in self.schemes) if scheme.acts_on)
        if len(rest) > 1:
            return self.replace(schemes=rest)
        return rest[0] if rest else self.schemes[0].without_rotation()

    def check_model(self, model: ModelConfig) -> None:
        for scheme in self.schemes:
            scheme.check_model(model)
        biased = [scheme for scheme in self.schemes if "scores" in scheme.acts_on]
        from_input = [scheme.kind for scheme in biased if scheme.follows_input]
        if from_input and len(biased) > 1:
            raise ValueError(
                f"CombinedConfig.schemes has {from_input[0]!r}, whose bias follows the input and does not add up with "
                "that of another scheme on the scores"
            )

    def resolve(self, model: ModelConfig) -> Self:
        return self.replace(schemes=tuple(scheme.resolve(model) for scheme in self.schemes))

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for scheme in self.schemes for shape in scheme.weight_shapes(model))

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for scheme in self.schemes for shape in scheme.layer_weight_shapes(model))

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return merge_by_name(*(scheme.cached_per_token(model) for scheme in self.schemes))

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {
            "combined": cls(),
            "combined-three": cls(schemes=by_kinds("temperature", "kerple", "sandwich")),
            "combined-forget": cls(schemes=by_kinds("rotary", "forget")),
        }
