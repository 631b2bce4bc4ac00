"""`exact_rotary` on every rotary family of transformers: tiny models, every parameter redrawn.

Cosines and sines are compared with mpmath, at the frequencies that each case writes out beside its configuration.
"""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rope_formulas import exact_frequencies, mp
from schemes import relative_change
from test_pages import prose
from torch import Tensor, nn

import phasor

transformers.logging.set_verbosity_error()

VOCAB, LAYERS, TOKENS, WIDTH = 61, 2, 12, 16
FAR = 2**20
NEAR = 64  # a start beyond every original length here
# Half a unit in the last place of a float32 cosine, and what 2^36 positions make of a 64-bit fraction of a rotation.
EXACT = 4.5e-8
NOISE = 5e-6  # relative, float32: logits of two models whose angles differ in the last place
SHIFTED = 5e-6  # relative, float32: the same tokens at the start and far along
WRONG, MOVED = 1000, 50  # times as much without exact angles: their error, and how far the logits move

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GROUPED = SIZES | {"num_key_value_heads": 2}
LOCAL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LISTS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 * 1.3**i for i in range(8)]}

Scheme = tuple[float, int, dict[str, Any] | None]  # base, rotated width, extension


@dataclass
class Case:
    model: str
    fields: dict[str, Any]
    rope: dict[str, Any] | None  # their `rope_parameters`
    schemes: dict[str | None, Scheme]  # what they mean, by layer type
    layout: str = "halves"


def case(
    model: str,
    fields: dict[str, Any],
    *,
    base: float = 1e4,
    width: int = WIDTH,
    rope: dict[str, Any] | None = None,
    means: dict[str, Any] | None = None,
    layout: str = "halves",
) -> Case:
    """One scheme for all layers; `means` is the extension that `rope` asks for."""
    return Case(model, fields, {"rope_theta": base} | (rope or {}), {None: (base, width, means)}, layout)


HALF, QUARTER = {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}
YARN = {"factor": 32.0, "truncate": False}
FAMILIES = {
    "gptj": Case(
        "GPTJForCausalLM",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
        None,
        {None: (1e4, 8, None)},
    ),
    "gpt_neox": case("GPTNeoXForCausalLM", SIZES, rope=HALF, width=8),
    "llama": case("LlamaForCausalLM", GROUPED, base=5e5),
    "mistral": case("MistralForCausalLM", GROUPED | {"sliding_window": 6}),
    "mixtral": case("MixtralForCausalLM", GROUPED | EXPERTS, base=1e6),
    "qwen2": case("Qwen2ForCausalLM", GROUPED, base=1e6),
    "qwen3": case("Qwen3ForCausalLM", GROUPED | {"head_dim": 12}, base=1e6, width=12),
    "qwen3_moe": case(
        "Qwen3MoeForCausalLM",
        GROUPED | {"head_dim": WIDTH, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gemma": case("GemmaForCausalLM", GROUPED | {"head_dim": 20}, width=20),
    "gemma2": case("Gemma2ForCausalLM", GROUPED | LOCAL | {"head_dim": WIDTH}),
    "gemma3_text": Case(
        "Gemma3ForCausalLM",
        GROUPED | LOCAL | {"head_dim": WIDTH},
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "full_attention": (1e6, WIDTH, {"kind": "linear", "factor": 8.0}),
            "sliding_attention": (1e4, WIDTH, None),
        },
    ),
    "phi": case("PhiForCausalLM", SIZES, rope=HALF, width=8),
    "phi3": case(
        "Phi3ForCausalLM",
        GROUPED | {"max_position_embeddings": 256, "original_max_position_embeddings": 32},
        rope={"rope_type": "longrope", **LISTS},
        means={"kind": "longrope", "original_length": 32, "factor": 8.0, **LISTS},
    ),
    "olmo2": case("Olmo2ForCausalLM", GROUPED, base=5e5),
    "cohere": case("CohereForCausalLM", GROUPED, layout="interleaved"),
    "stablelm": case("StableLmForCausalLM", GROUPED, rope=QUARTER, width=4),
    "starcoder2": case("Starcoder2ForCausalLM", GROUPED),
    "smollm3": case("SmolLM3ForCausalLM", GROUPED | {"no_rope_layers": [1, 0]}, base=5e6),
    "granite": case("GraniteForCausalLM", GROUPED),
    "glm": case("GlmForCausalLM", GROUPED | {"head_dim": WIDTH}, rope=HALF, width=8),
    "glm4": case("Glm4ForCausalLM", GROUPED | {"head_dim": WIDTH}, rope=HALF, width=8),
    "gpt_oss": case(
        "GptOssForCausalLM",
        GROUPED | LOCAL | EXPERTS | {"head_dim": WIDTH, "max_position_embeddings": 512},
        base=150000.0,
        rope={"rope_type": "yarn", "original_max_position_embeddings": 16, **YARN},
        means={"kind": "yarn", "original_length": 16, **YARN},
        layout="once",
    ),
    "falcon": case("FalconForCausalLM", {name: SIZES[name] for name in SIZES if name != "intermediate_size"}),
    "roformer": Case("RoFormerForMaskedLM", SIZES | {"max_position_embeddings": 128}, None, {None: (1e4, WIDTH, None)}),
    "modernbert": Case(
        "ModernBertForMaskedLM",
        SIZES | {"local_attention": 8, "layer_types": LOCAL["layer_types"]},
        {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 1e4}},
        {"full_attention": (160000.0, WIDTH, None), "sliding_attention": (1e4, WIDTH, None)},
    ),
}


def extension_case(kind: str, ours: str, fields: dict[str, Any], original: int | None = None, **changes: Any) -> Case:
    """Llama with an extension, `fields` as both spell them."""
    names = {"attention": "attention_factor"}
    rope = {"rope_type": kind} | {names.get(name, name): value for name, value in fields.items()}
    means = {"kind": ours} | fields
    if original is not None:
        means["original_length"] = original
        rope |= {} if kind == "dynamic" else {"original_max_position_embeddings": original}
    sizes = GROUPED | {"max_position_embeddings": 32 if kind == "dynamic" else 256}
    return case("LlamaForCausalLM", sizes, base=5e4, rope=rope, means=means, **changes)


EXTENSIONS = {
    "linear": extension_case("linear", "linear", {"factor": 3.7}),
    "dynamic": extension_case("dynamic", "dynamic-ntk", {"factor": 4.0}, 32),
    "yarn": extension_case("yarn", "yarn", {"factor": 8.0}, 32),
    "yarn-mscale": extension_case("yarn", "yarn", {"factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7}, 32),
    "llama3": extension_case("llama3", "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 32),
    "longrope": extension_case("longrope", "longrope", {"factor": 3.0, "attention": 1.19, **LISTS}, 32),
    "proportional": case(
        "LlamaForCausalLM",
        GROUPED,
        rope={"rope_type": "proportional", "partial_rotary_factor": 0.3},
        means={"kind": "proportional", "fraction": 0.3},
    ),
    "partial-yarn": case(
        "PhiForCausalLM",
        SIZES | {"max_position_embeddings": 128},
        width=8,
        rope=HALF
        | {"rope_type": "yarn", "original_max_position_embeddings": 32, "attention_factor": 1.7, "factor": 4.0},
        means={"kind": "yarn", "factor": 4.0, "attention": 1.7, "original_length": 32},
    ),
    "dynamic-by-layer-type": Case(
        "Gemma3ForCausalLM",
        GROUPED | LOCAL | {"head_dim": WIDTH, "max_position_embeddings": 32},
        {
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "full_attention": (1e6, WIDTH, {"kind": "dynamic-ntk", "factor": 4.0, "original_length": 32}),
            "sliding_attention": (1e4, WIDTH, None),
        },
    ),
}
CASES = FAMILIES | EXTENSIONS
TABLES = ("gptj", "roformer")
# Frequencies that go with the length differ between near and far, and RoFormer takes no positions.
SHIFTING = [name for name in CASES if name not in ("roformer", "dynamic", "dynamic-by-layer-type")]


def build(name: str, **changes: Any) -> Any:
    """The model of a case, matrices redrawn to keep activations near one, vectors to be standard normal."""
    chosen = CASES[name]
    kind = getattr(transformers, chosen.model)
    rope = {} if chosen.rope is None else {"rope_parameters": copy.deepcopy(chosen.rope)}
    model = kind(kind.config_class(**chosen.fields | rope | changes)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def tokens(rows: int = 1) -> Tensor:
    return torch.randint(1, VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def logits(model: Any, start: int | None = None, ids: Tensor | None = None) -> Tensor:
    """Logits of some tokens, from a position on."""
    ids = tokens() if ids is None else ids
    options = {} if start is None else {"position_ids": torch.arange(ids.shape[1])[None] + start}
    with torch.no_grad():
        return model(ids, **options).logits


def rotary_of(model: Any) -> Any:
    return model.base_model.rotary_emb


def build_long(name: str) -> Any:
    """The model of a case with a table up to far positions, where it has one."""
    if name == "gptj":
        return build(name, n_positions=FAR + 128)
    model = build(name)
    if name != "roformer":
        return model
    # Theirs is made number by number, which takes long.
    embedding = model.roformer.encoder.embed_positions
    angles = np.arange(FAR + 128)[:, None] / np.power(10000, 2 * np.arange(WIDTH // 2) / WIDTH)
    table = torch.cat([torch.FloatTensor(np.sin(angles)), torch.FloatTensor(np.cos(angles))], dim=-1)
    assert torch.equal(table[:128], embedding.weight)
    embedding.weight = nn.Parameter(table, requires_grad=False)
    return model


def angles_of(model: Any, name: str, layer_type: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[N, pairs]` that a model rotates by, once their layout is seen to be the family's."""
    if name in TABLES:
        table = model.transformer.h[1].attn.embed_positions if name == "gptj" else None
        table = model.roformer.encoder.embed_positions.weight if table is None else table
        sin, cos = table[positions].chunk(2, dim=-1)
        return cos, sin
    by_type = {} if layer_type is None else {"layer_type": layer_type}
    both = rotary_of(model)(torch.zeros(1), positions[None], **by_type)
    pairs = CASES[name].schemes[layer_type][1] // 2
    parts = {
        "once": (slice(None),),
        "halves": (slice(pairs), slice(pairs, None)),
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
    }
    found = [[whole[0, :, part] for part in parts[CASES[name].layout]] for whole in both]
    assert all(torch.allclose(part, first, atol=1e-6) for first, *others in found for part in others)
    assert found[0][0].shape == (len(positions), pairs)
    return found[0][0], found[1][0]


def far_positions(end: int) -> Tensor:
    """Every power of two with its neighbors, and 150 positions drawn at random, below an end."""
    powers = [max(0, 2**p + d) for p in range(37) for d in (-1, 0, 1)]
    drawn = torch.randint(0, end, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    return torch.tensor([*(p for p in powers if p < end), *drawn, end - 1])


def worst_error(model: Any, name: str, end: int) -> float:
    """The largest error of cosines and sines over far positions, in units of the attention factor's binade."""
    draw, worst = random.Random(0), 0.0
    positions = far_positions(end)
    for layer_type, (base, width, extension) in CASES[name].schemes.items():
        cos, sin = angles_of(model, name, layer_type, positions)
        assert cos.dtype == sin.dtype == torch.float32
        frequencies, factor = exact_frequencies(extension, base, width, end)
        unit = 2.0 ** math.ceil(math.log2(factor))
        for n, position in enumerate(positions.tolist()):
            i = draw.randrange(width // 2)
            true = [factor * x for x in mp.cos_sin(position * frequencies[i])]
            got = float(cos[n, i]), float(sin[n, i])
            worst = max(worst, *(float(abs(a - b)) / unit for a, b in zip(got, true, strict=True)))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_near_the_start_nothing_changes_but_noise_and_undo_gives_the_same_bits(name):
    model = build(name)
    state, names = {n: t.clone() for n, t in model.state_dict().items()}, [n for n, _ in model.named_modules()]
    starts = {"roformer": [None], "gptj": [None, NEAR]}.get(name, [None, NEAR, FAR])
    before = [logits(model, start) for start in starts]
    swap = phasor.exact_rotary(model)
    for start, expected in list(zip(starts, before, strict=True))[:2]:
        assert relative_change(logits(model, start), expected) < NOISE
    assert [n for n, _ in model.named_modules()] == names
    now = model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(now[n], state[n]) for n in state if "embed_positions" not in n)
    swap.undo()
    assert swap.names == ()
    for start, expected in zip(starts, before, strict=True):
        assert torch.equal(logits(model, start), expected)
    assert all(torch.equal(tensor, state[n]) for n, tensor in model.state_dict().items())


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", CASES)
def test_angles_are_exact_and_were_not(name):
    model = build_long(name)
    end = FAR + 128 if name in TABLES else 2**36
    before = worst_error(model, name, FAR + 128)
    with phasor.exact_rotary(model):
        assert worst_error(model, name, end) <= EXACT
    if name == "roformer":  # its table is made in float64
        assert before <= EXACT
    else:
        assert before > WRONG * EXACT


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", SHIFTING)
def test_tokens_moved_far_along_give_the_same_logits(name):
    model = build_long(name)
    before = relative_change(logits(model, FAR + NEAR), logits(model, NEAR))
    with phasor.exact_rotary(model):
        after = relative_change(logits(model, FAR + NEAR), logits(model, NEAR))
    assert after < SHIFTED
    assert before > MOVED * after


def test_the_page_says_what_is_tested():
    said = (
        f"In the tests, with tiny models of {len(FAMILIES)} families in float32, cosines and sines are off by at most "
        f"{EXACT:.1e} after it, and before it, at positions up to 2^{math.log2(FAR):.0f}, by more than {WRONG:,} "
        "times as much (but for RoFormer's table, which is made in float64); logits of a text moved by "
        f"2^{math.log2(FAR):.0f} positions change by less than {SHIFTED:.0e}, and before it by more than {MOVED} "
        "times as much."
    ).replace("e-0", "e-")
    assert said in prose("docs/checkpoints.md")


TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TABLES])
def test_results_have_the_type_and_shape_they_had(name):
    model, positions = build(name), torch.arange(TOKENS).expand(2, -1)
    found = []
    for _ in range(2):
        for layer_type in FAMILIES[name].schemes:
            by_type = {} if layer_type is None else {"layer_type": layer_type}
            results = [rotary_of(model)(torch.zeros(1, dtype=dtype), positions, **by_type) for dtype in TYPES]
            found.append([(x.dtype, x.shape, x.is_contiguous()) for both in results for x in both])
        phasor.exact_rotary(model)
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_only_the_result_is_rounded(name):
    model = build(name).to(torch.bfloat16)
    before = logits(model)
    exact = copy.deepcopy(model)
    swap = phasor.exact_rotary(exact)
    assert logits(exact).dtype == before.dtype == torch.bfloat16
    after = copy.deepcopy(model).float()
    with phasor.exact_rotary(after):  # the same weights, and float32 in between
        expected = logits(after)
    assert relative_change(logits(exact).float(), expected) < 0.04
    if name not in TABLES:
        for layer_type, (base, width, extension) in FAMILIES[name].schemes.items():
            _, sin = angles_of(exact, name, layer_type, torch.tensor([FAR]))
            frequencies, factor = exact_frequencies(extension, base, width, FAR + 1)
            assert abs(float(sin[0, 1]) - factor * mp.sin(FAR * frequencies[1])) < 1e-7
    swap.undo()
    assert torch.equal(logits(exact), before)


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer", "gemma3_text", "dynamic"])
def test_a_model_that_moved_meanwhile_is_undone_where_it_is(name):
    plain, swapped = build(name), build(name)
    swap = phasor.exact_rotary(swapped)
    swapped.to(torch.bfloat16).train()
    swap.undo()
    assert all(module.training for module in swapped.modules())
    assert torch.equal(logits(swapped.eval()), logits(plain.to(torch.bfloat16)))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma3_text", "phi3", "dynamic", "gpt_oss", "cohere", "falcon"])
def test_generation_from_a_cache(name):
    model = build(name)
    ids = tokens(2)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :5] = 0
    arguments = {"attention_mask": attention_mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **arguments)
    with phasor.exact_rotary(model):
        assert torch.equal(model.generate(ids, **arguments), expected)
        assert torch.equal(model.generate(ids, **arguments, cache_implementation="static"), expected)


@pytest.mark.parametrize("name", ["llama", "gptj", "roformer"])
def test_calling_again_is_harmless_and_copies_can_be_undone(name):
    model = build(name)
    before = logits(model)
    first = phasor.exact_rotary(model)
    exact, names = logits(model), first.names
    other, second = copy.deepcopy(model), phasor.exact_rotary(model)
    assert second.names == names
    assert torch.equal(logits(model), exact)
    assert torch.equal(logits(other), exact)
    with phasor.exact_rotary(model):
        pass
    assert torch.equal(logits(model), exact)
    second.undo()
    first.undo()
    assert torch.equal(logits(model), before)
    assert phasor.exact_rotary(other).names == names
    phasor.exact_rotary(other).undo()
    assert torch.equal(logits(other), before)


def test_an_error_inside_with_undoes_it():
    model = build("llama")
    original = rotary_of(model)
    swap = phasor.exact_rotary(model)
    assert rotary_of(model) is not original
    assert repr(swap) == "ExactSwap(LlamaForCausalLM: model.rotary_emb)"
    with pytest.raises(RuntimeError, match="inside"), swap:
        raise RuntimeError("inside")
    assert rotary_of(model) is original
    assert repr(swap) == "ExactSwap(LlamaForCausalLM: undone)"


def test_a_module_that_two_share_is_swapped_for_one_that_two_share():
    model = build("llama")
    model.again = model.model.rotary_emb
    swap = phasor.exact_rotary(model)
    assert model.again is model.model.rotary_emb
    assert swap.names == ("model.rotary_emb",)
    swap.undo()
    assert model.again is model.model.rotary_emb
    assert type(model.again).__name__ == "LlamaRotaryEmbedding"


def test_length_dependent_frequencies_are_those_of_each_call():
    """Theirs stay grown until a call is shorter than the original length."""
    model = build("dynamic")
    fresh = logits(copy.deepcopy(model), 40)
    logits(model, 1000)
    assert relative_change(logits(model, 40), fresh) > 1e-3
    with phasor.exact_rotary(model):
        logits(model, 1000)
        assert relative_change(logits(model, 40), fresh) < NOISE


def test_padding_may_have_negative_positions_and_positions_any_integer_dtype():
    model, ids = build("llama"), tokens()
    positions = torch.arange(TOKENS)[None] - 3
    with torch.no_grad():
        before = model(ids, position_ids=positions).logits
        phasor.exact_rotary(model)
        assert relative_change(model(ids, position_ids=positions).logits, before) < NOISE
        assert relative_change(model(ids, position_ids=positions.int()).logits, before) < NOISE
        with pytest.raises(ValueError, match=r"integer positions \[B, T\], one per token, not torch\.float32"):
            model(ids, position_ids=positions.float())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_a_compiled_model_is_one_graph(name):
    model = build(name)
    phasor.exact_rotary(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_change(logits(compiled, FAR), logits(model, NEAR)) < SHIFTED


@pytest.mark.parametrize("name", ["gptj", "roformer", "gemma3_text"])
def test_a_swapped_model_saves_as_before(name, tmp_path):
    model = build(name)
    before = logits(model)
    phasor.exact_rotary(model).model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert relative_change(logits(again), before) < NOISE


def test_beyond_a_table_is_an_error_as_before():
    model = build("gptj", n_positions=32)
    with phasor.exact_rotary(model), pytest.raises(RuntimeError, match="out of bounds"):
        logits(model, 30)


def assert_refuses(model: Any, match: str) -> None:
    modules = {name: id(module) for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    with pytest.raises(ValueError, match=match) as error:
        phasor.exact_rotary(model)
    assert "\n" not in str(error.value)
    if modules:
        assert {name: id(module) for name, module in model.named_modules()} == modules


def test_models_without_rotary_positions_are_refused_by_name():
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
    assert_refuses(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)), "GPT2LMHeadModel has no rotary positions"
    )
    assert_refuses(build("falcon", alibi=True), "FalconForCausalLM has no rotary positions")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0}
    marian = transformers.MarianMTModel(transformers.MarianConfig(**sizes, decoder_start_token_id=1))
    assert_refuses(marian, "MarianMTModel has no rotary positions")
    assert_refuses("llama", "takes a loaded transformers model, not a str")


def test_what_phasor_does_not_know_is_refused_and_nothing_changes():
    model = build("llama")
    model.config.rope_parameters["rope_type"] = "spiral"
    assert_refuses(model, "LlamaForCausalLM.config: phasor does not know rope_type = 'spiral'")
    model = build("llama")
    model.config.rope_parameters["rope_theta"] = 7e5  # not what its frequencies were made with
    assert_refuses(model, "its LlamaRotaryEmbedding does not compute what phasor reads")
    model = build("longrope")
    model.config.rope_parameters["long_factor"] = [2.0] * 8
    rotary_of(model).long_inv_freq = torch.ones(8)
    assert_refuses(model, "its LlamaRotaryEmbedding does not compute what phasor reads")
    model = build("gptj", n_positions=32)
    model.transformer.h[1].attn.embed_positions.mul_(0.5)
    assert_refuses(model, "the table of its GPTJAttention is not that of rotary positions")
    assert not hasattr(model.transformer.h[0].attn, "table_before_exact")
    with torch.device("meta"):
        unloaded = build("llama")
    assert_refuses(unloaded, "LlamaForCausalLM is not loaded")
