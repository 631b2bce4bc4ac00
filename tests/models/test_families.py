"""Every family: a tiny random model of transformers, every weight redrawn, through phasor and back.

The same logits, the same greedy tokens from a cache, padded batches, and after saving the same weights bit by bit
and the same configuration. Logits may differ by 2e-5, or four times what float32 costs transformers itself; where both
compute in float64, by 1e-10.
"""

import copy
import importlib
import inspect
import json
import os
import pkgutil
import random
import re
from pathlib import Path

import families
import pytest
import torch
import transformers
from families.cases import redraw
from families.float64 import in_float64

import phasor
from phasor.models.families import family, names

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FULL = os.environ.get("PHASOR_EXAMPLES") == "full"
SEEDS = range(8 if FULL else 1)
NEW = 64 if FULL else 34  # tokens decoded from a cache: with the prompt more than the length trained with
PENALTY = 9.0  # for repeating, so that the text is not one token over and over
LIMIT = 2e-5

BUILDERS = {}
for module in pkgutil.iter_modules(families.__path__):
    BUILDERS |= getattr(importlib.import_module(f"families.{module.name}"), "CASES", {})


class Pair:
    """A model of theirs, saved, and ours loaded from the folder."""

    def __init__(self, name, seed, folder, patch):
        self.rng = random.Random(f"{name} {seed}")
        self.case = BUILDERS[name](self.rng)
        self.case.patch(patch)
        self.name, self.seed = name, seed
        self.folder = folder / "theirs"
        torch.manual_seed(seed)
        self.theirs = self.fresh()
        redraw(self.theirs, self.case.buffers)
        with torch.no_grad():
            self.case.touch(self.theirs)
        shards = {} if seed % 2 else {"max_shard_size": "20KB"}
        self.theirs.save_pretrained(self.folder, **shards)
        if self.case.older is not None:
            self.spell(self.case.older)
        self.ours = phasor.load(self.folder)
        self.ours_float64 = copy.deepcopy(self.ours).double()
        self.shape = self.ours.config.shape
        self.worst = 0.0

    def spell(self, older):
        """Write config.json in an older spelling; what it means is what theirs makes of it."""
        file = self.folder / "config.json"
        file.write_text(json.dumps(older(json.loads(file.read_text()))))
        config = type(self.case.config).from_pretrained(self.folder)
        config._experts_implementation = self.case.config._experts_implementation
        self.case.config = config
        self.theirs = self.fresh()

    def fresh(self):
        """A model of theirs that has seen nothing: some remember the longest sequence they met."""
        config = copy.deepcopy(self.case.config)
        config._attn_implementation, config.dtype = self.case.attention, torch.get_default_dtype()
        model = self.case.cls(config).eval()
        if hasattr(self, "theirs"):  # all but what follows from the configuration, which may be wider than before
            drawn = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            state = self.theirs.state_dict().items()
            model.load_state_dict({n: x for n, x in state if n in drawn or self.case.buffers(n)}, strict=False)
        return model

    def tokens(self, *shape):
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.case.lowest, self.ours.config.vocab_size - 5, shape, generator=generator)

    @property
    def takes_target(self):
        """Whether a target is given; a classifier makes it of the source."""
        return self.shape == "encoder-decoder" and not self.ours.config.head.of_sequence

    def ended(self, tokens, real=None):
        """Texts for an encoder-decoder that classifies them by the token that ends each."""
        if self.shape == "encoder-decoder" and not self.takes_target:
            last = tokens.shape[1] - 1 if real is None else real.sum(-1) - 1
            tokens[torch.arange(len(tokens)), last] = self.case.config.eos_token_id
        return tokens

    def source(self, *shape):
        """Tokens, or features of as many rows."""
        if self.case.features is None:
            return self.ended(self.tokens(*shape))
        return self.case.features(shape[0], torch.Generator().manual_seed(self.seed))

    def run_theirs(self, model, tokens, target=None, **more):
        tokens = tokens.to(torch.get_default_dtype()) if tokens.is_floating_point() else tokens
        out = model(**self.case.inputs(tokens), **({} if target is None else {"decoder_input_ids": target}), **more)
        return next(out[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in out)

    def compare(self, tokens, target=None, ours=None, theirs=None, real=slice(None)):
        """Largest difference of the logits, within what is allowed."""
        ours, theirs = ours or {}, theirs or {}
        given = [tokens] if target is None else [tokens, target]
        single = self.run_theirs(self.fresh(), tokens, target, **theirs)[real]
        with in_float64():
            double = self.run_theirs(self.fresh(), tokens, target, **theirs)[real]
        self.near(self.ours(*given, **ours)[real], single, double)
        difference = float((self.ours_float64(*given, **ours)[real] - double).abs().max())
        assert difference <= self.case.limit_float64, f"{self.name} {self.seed}: {difference:.1e} in float64"

    def near(self, mine, single, double):
        """Ours differs from theirs by no more than is allowed."""
        assert float(single.std() if single.shape[-1] > 1 else single.abs().mean()) > 0.05
        allowed = max(LIMIT, 4 * float((single - double).abs().max()))
        difference = float((mine - single).abs().max())
        assert difference <= allowed, f"{self.name} {self.seed}: {difference:.1e}, allowed {allowed:.1e}"
        self.worst = max(self.worst, difference)


@pytest.fixture
def pair(request, tmp_path, monkeypatch):
    return Pair(*request.param, tmp_path, monkeypatch)


def pairs(*, variants):
    """Pairs of the families, or of the variants that some of them have."""
    cases = [(name, seed) for name in BUILDERS for seed in SEEDS if ("/" in name) == variants]
    return pytest.mark.parametrize("pair", cases, ids=lambda p: f"{p[0]}-{p[1]}", indirect=True)


@pairs(variants=False)
@pytest.mark.filterwarnings("ignore:.*alibi_bias_max is")  # where the case patches theirs to follow it
def test_a_family_computes_the_same_and_comes_back_the_same(pair, tmp_path):
    same_both_ways(pair, tmp_path)


@pytest.mark.sample(12)
@pairs(variants=True)
@pytest.mark.filterwarnings("ignore:.*alibi_bias_max is")
def test_a_variant_of_a_family_computes_the_same_and_comes_back_the_same(pair, tmp_path):
    same_both_ways(pair, tmp_path)


@torch.no_grad()
def same_both_ways(pair, tmp_path):
    same_logits(pair)
    same_with_padding(pair)
    same_pooling(pair)
    if pair.shape != "encoder" and pair.ours.config.has_logits and not pair.case.crossing:
        same_greedy(pair)
    same_when_saved_back(pair, tmp_path / "ours")
    note(pair)


def same_logits(pair):
    lengths = [pair.case.length] if not pair.case.crossing else [9, pair.case.length]
    for length in lengths:
        target = pair.tokens(2, length - 4) if pair.takes_target else None
        types = pair.tokens(2, length) % 2
        given = ({"token_types": types}, {"token_type_ids": types}) if pair.case.token_types else ({}, {})
        pair.compare(pair.source(2, length), target, *given)


def same_with_padding(pair):
    if pair.case.features is not None:  # the tests of speech have their masks
        return
    length = min(pair.case.length, 23)
    tokens, real = pair.tokens(3, length), torch.ones(3, length, dtype=torch.bool)
    pad, whole = pair.theirs.config.pad_token_id, pair.ours.config.head.of_sequence
    if pair.shape == "decoder":
        real[1, :5], real[2, :11] = False, False
        tokens = fill_padding(tokens, real, pad)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        theirs = {"attention_mask": real.long()}
        if "position_ids" in inspect.signature(pair.theirs.forward).parameters:
            theirs["position_ids"] = positions
        pair.compare(tokens, None, {"attention_mask": real}, theirs, real=slice(None) if whole else real)
        return
    real[1, 18:], real[2, 12:] = False, False
    tokens = pair.ended(fill_padding(tokens, real, pad), real)
    target = pair.tokens(3, 13) if pair.takes_target else None
    where = slice(None) if target is not None or whole else real
    pair.compare(tokens, target, {"attention_mask": real}, {"attention_mask": real.long()}, real=where)


def fill_padding(tokens, real, pad):
    return tokens if pad is None else tokens.masked_fill(~real, pad)


def same_pooling(pair):
    """The vector for the whole sequence, where both give one."""
    tokens, record = pair.ended(pair.tokens(3, 23)), phasor.Record()
    if pair.ours.pooler is not None and "pooler_output" in pair.fresh()(tokens):
        pair.ours(tokens, record=record)
        single = pair.fresh()(tokens).pooler_output
        with in_float64():
            double = pair.fresh()(tokens).pooler_output
        pair.near(record.pooled, single, double)


def same_greedy(pair):
    prompt = pair.source(1, 9)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if pair.shape == "encoder-decoder":
        same_greedy_target(pair, prompt, options)
        return
    options |= {"attention_mask": torch.ones_like(prompt), "repetition_penalty": PENALTY}
    theirs = pair.fresh().generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    given = {"max_new_tokens": NEW, "repetition_penalty": PENALTY, "stop": []}
    assert phasor.generate(pair.ours, prompt[0].tolist(), **given) == theirs
    assert len(set(theirs)) > NEW / 8


def same_greedy_target(pair, source, options):
    options |= {"decoder_start_token_id": 3, "forced_bos_token_id": None}
    if pair.case.features is None:
        options["attention_mask"] = torch.ones_like(source)
    (inputs,) = pair.case.inputs(source).values()
    for penalty in (1.0, PENALTY) if FULL else (PENALTY,):
        # A cache that grows: the one theirs makes has as many layers as the encoder.
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        options |= {"past_key_values": cache, "repetition_penalty": penalty}
        theirs = transformers.GenerationMixin.generate(pair.fresh(), inputs, **options)[0, 1:]
        given = {"max_new_tokens": NEW, "repetition_penalty": penalty, "start": 3, "stop": []}
        assert phasor.generate(pair.ours, source[0], **given) == theirs.tolist()


def same_when_saved_back(pair, folder):
    phasor.save(pair.ours, folder, format="hf")
    back = pair.case.cls.from_pretrained(folder)
    before, after = pair.theirs.state_dict(), back.state_dict()
    assert list(before) == list(after)
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert different == []
    one, other = pair.theirs.config.to_dict(), back.config.to_dict()
    may = {"_name_or_path", "transformers_version", *pair.case.may_differ}
    assert {n: (one.get(n), other.get(n)) for n in {*one, *other} - may if one.get(n) != other.get(n)} == {}
    again = phasor.load(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(pair.ours.state_dict().values(), again.state_dict().values(), strict=True)
    )


def note(pair):
    """Leave the worst difference for the table in the docs, where somebody collects them."""
    folder = os.environ.get("PHASOR_FAMILY_NOTES")
    if folder:
        found = {"family": pair.name, "class": pair.case.cls.__name__, "worst": pair.worst}
        Path(folder, f"{pair.name.replace('/', '-')}-{pair.seed}.json").write_text(json.dumps(found))


def test_every_family_is_tested():
    assert set(names()) == {name.partition("/")[0] for name in BUILDERS}
    assert [family(name).model_type for name in names()] == names()


def test_the_table_in_the_docs_has_every_family():
    document = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = document.partition("<!-- families")[2]
    assert re.findall(r"^\| [^|`]+ \| `([\w-]+)` \| `", table, re.MULTILINE) == names()
