"""HunYuan with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Draft, Field, FieldEntry
from phasor.models.families.hunyuan_v1_dense import HunYuanDense
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Rule, experts, linear


class EveryLayer(Field):
    """A number, or a list that repeats it for every layer."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        value = f.raw(name, f.raw("num_experts_per_tok", self.default))  # which is another name for it
        if isinstance(value, list) and (len(value) < draft["num_layers"] or len(set(value)) != 1):
            raise ValueError(f"{f.file}: {name} must be one number for every layer, not {json_repr(value)}")
        draft.values |= dict.fromkeys(self.paths, value[0] if isinstance(value, list) else value)


class ExpertWidth(FieldEntry):
    """`moe_intermediate_size`, which repeats `intermediate_size`: the width of routed experts and the shared one."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        width, layers = draft["hidden_dim"], draft["num_layers"]
        f.expect(name, width, [width] * layers)
        f.expect("num_shared_expert", 1, [1] * layers)
        draft["feedforward.experts.shared_dim"] = width


class HunYuanMoE(HunYuanDense):
    """HunYuan with experts in every layer, beside a shared one."""

    model_type = "hunyuan_v1_moe"
    title = "HunYuan MoE"
    architectures = {"lm": "HunYuanMoEV1ForCausalLM", "none": "HunYuanMoEV1Model"}
    fields = {
        "num_experts": Field("feedforward.experts.num_experts", default=1, fallback="num_local_experts"),
        "num_hidden_layers": Field("num_layers"),
        "moe_topk": EveryLayer("feedforward.experts.top_k", default=1),
        **HunYuanDense.fields,
        "moe_intermediate_size": ExpertWidth(),
    }
    harmless = HunYuanDense.harmless | {"output_router_logits"}

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.router", f"{theirs}.gate.wg")
        yield from experts(ours, *(f"{theirs}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down")))
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_mlp")


FAMILY = HunYuanMoE()
