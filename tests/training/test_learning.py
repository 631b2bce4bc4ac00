"""What makes learning work: scores of unit variance, the softmax's gradient, and DeepNorm at depth."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phasor import ModelConfig, Record, Transformer
from phasor.ops.attention import Mask, ScoreMod, attention


@pytest.mark.parametrize("width", [16, 64, 256])
@pytest.mark.parametrize("scale", [1.0, None], ids=["as they are", "scaled"])
def test_scores_have_the_variance_of_their_width_and_1_once_scaled(width, scale):
    """Unit-variance tokens, queries and keys; the scores are read back from the weights as `log p` plus a constant."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "dim": 512, "num_layers": 1, "num_heads": 2, "head_dim": width}
    model = Transformer(
        ModelConfig(**sizes, shape="encoder", attention={"scale": scale}, norm="none", init="fan-in")
    ).double()
    record = Record("attention")
    with torch.no_grad():
        model(torch.arange(400)[None], record=record)
    variance = float(record.attention[0].log().var(-1).mean())
    # Two heads' matrices of 512 rows leave the estimate a spread of some per cent.
    assert variance == pytest.approx(width if scale else 1, rel=0.2)


@pytest.mark.parametrize("path", ["fused", "plain"])
def test_the_gradient_of_the_softmax(path):
    """`dp_i / ds_j = p_i (delta_ij - p_j)`, read off attention whose scores are its keys and whose values are 1."""
    torch.manual_seed(0)
    count = 7
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    one_each = torch.eye(count, dtype=torch.float64)[None, :, None]
    # A sink logit of -200 has no weight in float64 and takes the path without the fused kernel.
    sinks = torch.tensor([-200.0], dtype=torch.float64) if path == "plain" else None

    def weights(scores: Tensor) -> Tensor:
        score_mod = ScoreMod(scale=1.0, sink_logits=sinks)
        return attention(q, scores[None, :, None, None], one_each, Mask(), score_mod)[0, 0, 0]

    scores = torch.randn(count, dtype=torch.float64)
    p = scores.exp() / scores.exp().sum()
    torch.testing.assert_close(weights(scores), p)
    jacobian = torch.autograd.functional.jacobian(weights, scores)
    torch.testing.assert_close(jacobian, p.diag() - p[:, None] * p[None, :])


@pytest.fixture
def for_small_operations() -> Iterator[None]:
    """Matrices as small as here lose more to sharing and to oneDNN's preparations than they gain by them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about GPUs that this torch does not know
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    torch.set_num_threads(threads)


VALUES, COUNT = 4, 4


def guessing() -> float:
    """The loss of knowing how often each running maximum occurs at each place, and nothing of the tokens."""
    places = torch.arange(1, COUNT + 1, dtype=torch.float64)
    at_most = (torch.arange(VALUES + 1, dtype=torch.float64) / VALUES)[:, None] ** places
    p = at_most.diff(dim=0)
    return float(-(p * p.log()).sum(0).mean())


def losses(config: ModelConfig, drawn_for: str, steps: int) -> list[float]:
    """Learning the running maximum of random tokens with Adam at 1e-3, no warm-up, from one placement's weights."""
    torch.manual_seed(0)
    drawn, model = Transformer(config.replace(placement=drawn_for)), Transformer(config)
    model.load_state_dict(drawn.state_dict())
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    curve = []
    for _ in range(steps):
        ids = torch.randint(0, VALUES, (32, COUNT))
        logits = model(ids, ids) if config.shape == "encoder-decoder" else model(ids)
        loss = cross_entropy(logits.flatten(0, 1), ids.cummax(1).values.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        curve.append(loss.item())
    return curve


def deep(placement: str, **changes: object) -> ModelConfig:
    sizes = {"vocab_size": VALUES, "dim": 64, "hidden_dim": 64, "num_layers": 200, "num_heads": 2}
    parts = {"position": "sinusoidal", "feedforward": {"bias": True}, "embedding": {"scale": "sqrt"}, "init": "xavier"}
    return ModelConfig(**{**sizes, **parts, "placement": placement, **changes})


def check_depth(steps: int, post_drawn_for: str, **shape: object) -> None:
    deepnorm = losses(deep("deepnorm", **shape), "deepnorm", steps)[-5:]
    post = losses(deep("post", **shape), post_drawn_for, steps)[-5:]
    assert sum(deepnorm) / 5 < 0.2 * guessing(), (deepnorm, post)
    assert sum(post) / 5 > 0.9 * guessing(), (deepnorm, post)


@pytest.mark.slow
def test_two_hundred_layers_learn_with_deepnorm_and_not_with_post_norm(for_small_operations):
    """From the same weights, DeepNorm's beta in them."""
    check_depth(steps=28, post_drawn_for="deepnorm")


@pytest.mark.slow
@pytest.mark.parametrize("drawn_for", ["deepnorm", "post"])
def test_two_hundred_layers_after_more_steps(for_small_operations, drawn_for):
    check_depth(steps=80, post_drawn_for=drawn_for)


@pytest.mark.slow
def test_a_hundred_layers_on_each_side(for_small_operations):
    check_depth(steps=40, post_drawn_for="deepnorm", shape="encoder-decoder", num_layers=100)


def test_deepnorm_has_the_constants_of_its_paper():
    """Alpha in the blocks, beta in the spread of the values beside that of the queries, for N and M layers."""
    both = deep("deepnorm", dim=256, shape="encoder-decoder", num_encoder_layers=5, num_layers=3, vocab_size=9)
    n, m = 5, 3
    expected = {
        (deep("deepnorm", dim=256, num_layers=n), "decoder"): ((2 * n) ** 0.25, (8 * n) ** -0.25),
        (deep("deepnorm", dim=256, num_layers=n, shape="encoder"), "encoder"): ((2 * n) ** 0.25, (8 * n) ** -0.25),
        (both, "encoder"): (0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)),
        (both, "decoder"): ((3 * m) ** 0.25, (12 * m) ** -0.25),
    }
    for (config, side), (alpha, beta) in expected.items():
        torch.manual_seed(0)
        stack = getattr(Transformer(config), side)
        for block in stack.blocks:
            assert block.residual.alpha == pytest.approx(alpha)
            attention = block.attention
            spread = {
                part: float(rows.detach().std()) for rows, part, _ in attention.split_rows(attention.qkv.weight, "qkv")
            }
            # 256 x 256 draws: the spread itself is known to 0.3 %.
            assert spread["v"] / spread["q"] == pytest.approx(beta, rel=0.03)
            assert spread["k"] / spread["q"] == pytest.approx(1, rel=0.03)
