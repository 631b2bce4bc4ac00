"""The configuration of a mixture of experts."""

from __future__ import annotations

from typing import Literal

from phasor.config.schema import MOST_WIDTH, Config, not_negative, positive


class ExpertsConfig(Config):
    """A mixture of experts in place of one feed-forward network.

    The router's `scores` are the softmax of its logits over all experts, or their sigmoid. A token takes the `top_k`
    experts with the highest score, weighted by their scores, which `normalize` rescales to sum to 1 (`normalize_eps` is
    added to the sum, LFM2) and `scale` multiplies. With `correction` a bias per expert is added to the scores for the
    choice alone (DeepSeek V3); training leaves it as it is. Of `num_groups` groups of experts the best `top_groups`
    remain, by their best expert ("max", DeepSeek V2) or by the sum of their two best ("top2", DeepSeek V3).

    With the scores "sparsemixer" (Phi-MoE) one expert is chosen after the other, by the logits of those that remain,
    and its weight is its softmax among them without those whose logit is lower by more than `2 jitter` times its size.
    Training chooses as evaluation does, without sampling.

    With `weight_inputs` the weights multiply what experts take, not what they give (Llama 4). With `latent_dim` the
    routed experts take and give vectors of that width, between two projections without a bias (Nemotron 3 Super).

    `shared_dim` adds a shared expert for every token, weighted by a learned gate with `shared_gate`. Several shared
    experts are one of their joint width. With `branch_norms` the shared expert and the routed ones take the residual
    stream, each between norms of its branch, in place of the one norm before both. `router_norm` normalizes what the
    router takes, times 1/sqrt(dim), and `expert_scale` multiplies the weight of an expert by a number that is learned
    (all three Gemma 4).

    >>> ExpertsConfig(num_experts=8, scores="sigmoid", num_groups=4, top_groups=2, correction=True, scale=2.5).top_k
    2
    """

    num_experts: int
    top_k: int = 2
    hidden_dim: int | None = None
    normalize: bool = True
    normalize_eps: float = 0.0
    router_bias: bool = False
    shared_dim: int | None = None
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.01
    correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    scale: float = 1.0
    router_norm: bool = False
    expert_scale: bool = False
    branch_norms: bool = False
    weight_inputs: bool = False
    latent_dim: int | None = None

    @property
    def kernel_why_not(self) -> str | None:
        """Why kernels do not choose these experts; None where they do: by the softmax of the logits alone."""
        if self.scores != "softmax":
            return f"{self.scores} scores of experts have no kernel"
        if self.normalize and self.normalize_eps:
            return "a normalization that adds to the sum of weights has no kernel"
        if self.correction:
            return "a correction of the choice of experts has no kernel"
        if self.num_groups > 1:
            return "groups of experts have no kernel"
        if self.weight_inputs:
            return "weights of what experts take have no kernel"
        if self.latent_dim is not None:
            return "projections around experts have no kernel"
        if self.router_norm or self.branch_norms:
            return "norms of the router or of the experts have no kernel"
        return None if self.scale == 1 and not self.expert_scale else "scaled weights of experts have no kernel"

    def check(self) -> None:
        positive(self, "num_experts", "top_k", "hidden_dim", "shared_dim", "latent_dim", most=MOST_WIDTH)
        positive(self, "num_groups", "top_groups", "scale")
        not_negative(self, "jitter", "normalize_eps")
        if self.scores == "sparsemixer" and (self.normalize or self.correction or self.num_groups > 1):
            raise ValueError(
                "ExpertsConfig.scores 'sparsemixer' gives weights as they are: normalize and correction must be false "
                "and num_groups 1"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"ExpertsConfig.top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if self.shared_gate and self.shared_dim is None:
            raise ValueError("ExpertsConfig.shared_gate needs shared_dim: there is no shared expert to gate")
        if self.branch_norms and self.shared_dim is None:
            raise ValueError("ExpertsConfig.branch_norms needs shared_dim: there is one branch alone")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"ExpertsConfig.num_groups ({self.num_groups}) must divide num_experts ({self.num_experts})"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(f"ExpertsConfig.top_groups ({self.top_groups}) exceeds num_groups ({self.num_groups})")
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and self.group_score == "top2" and size < 2:
            raise ValueError(
                f"ExpertsConfig.group_score 'top2' needs two experts in a group, and {self.num_experts} experts in "
                f"{self.num_groups} groups are {size}"
            )
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"ExpertsConfig.top_k ({self.top_k}) exceeds the {self.top_groups * size} experts of "
                f"top_groups ({self.top_groups})"
            )
