"""Models whose source are features of audio: caches, batches, masks, searches and checks, and what refuses them."""

import random

import pytest
import torch
import transformers
from bad_inputs.sentences import assert_refusal, config
from families.cases import redraw
from families.speech import CASES

import phasor
from phasor import EncoderConfig, ModelConfig
from phasor.checkpoints.compare import compare
from phasor.cli import main
from phasor.config import ConvolutionConfig, FrontEndConfig
from phasor.config.parameters import parameters_of
from phasor.nn.front_end import FrontEnd
from phasor.parallel.mesh import Mesh, mesh_why_not
from phasor.quantization import quantize
from phasor.training.build import check_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

EXACT = 1e-12  # of float64, in logits of size one


class Speech:
    """A model of theirs with every weight redrawn, and ours loaded from its folder."""

    def __init__(self, name, folder):
        self.case = CASES[name](random.Random(name))
        self.theirs, self.folder = self.case.cls(self.case.config).eval(), folder
        redraw(self.theirs, self.case.buffers)
        with torch.no_grad():
            self.case.touch(self.theirs)
        self.theirs.save_pretrained(folder)
        self.ours = phasor.load(folder)
        self.features = self.case.features(3, torch.Generator().manual_seed(5))


@pytest.fixture(params=["whisper", "moonshine"])
def speech(request, tmp_path):
    return Speech(request.param, tmp_path)


@torch.no_grad()
def test_a_cache_keeps_what_the_encoder_heard(speech):
    model, target = speech.ours.double(), torch.randint(3, 50, (3, 12))
    whole, cache = model(speech.features, target), model.new_cache(3, 12)
    parts = [model(speech.features, target[:, :5], cache=cache), model(None, target[:, 5:], cache=cache)]
    assert float((torch.cat(parts, dim=1) - whole).abs().max()) < EXACT


def test_rows_of_a_batch_are_those_of_each_alone(speech):
    given = {"max_new_tokens": 9, "stop": [], "start": 3}
    together = phasor.generate(speech.ours, speech.features, **given)
    assert together == [phasor.generate(speech.ours, one, **given) for one in speech.features]
    assert together == phasor.generate(speech.ours, list(speech.features), **given)
    assert list(phasor.stream(speech.ours, speech.features[0], **given)) == together[0]
    samples = phasor.generate(speech.ours, speech.features[0], temperature=1.0, num_return_sequences=2, seed=1, **given)
    assert [len(tokens) for tokens in samples] == [9, 9]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_begins_with_several_tokens(speech, beams):
    """As those of a language and a task; transformers takes them as the tokens there are already."""
    begin = torch.tensor([[3, 9, 4]])
    (inputs,) = speech.case.inputs(speech.features[:1]).values()
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "num_beams": beams, "do_sample": False}
    options |= {"decoder_input_ids": begin, "decoder_start_token_id": 3, "past_key_values": cache}
    theirs = transformers.GenerationMixin.generate(speech.theirs, inputs, **options)[0, 3:].tolist()
    given = {"max_new_tokens": 8, "num_beams": beams, "stop": []}
    assert phasor.generate(speech.ours, speech.features[0], start=[3, 9, 4], **given) == theirs


@torch.no_grad()
def test_a_mask_of_vectors_is_every_384th_of_that_of_samples(tmp_path):
    speech = Speech("moonshine", tmp_path)
    target, samples = torch.randint(3, 50, (3, 7)), speech.features.shape[1]
    mask = torch.ones(3, samples, dtype=torch.int64)
    mask[1, 1500:] = 0
    inputs = speech.case.inputs(speech.features)
    expected = speech.theirs(**inputs, attention_mask=mask, decoder_input_ids=target).logits
    front_end = speech.ours.config.embedding.front_end
    assert front_end.hop == 384
    heard = mask[:, :: front_end.hop][:, : front_end.length(samples)].bool()
    found = speech.ours(speech.features, target, attention_mask=heard)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert not torch.allclose(found[1], speech.ours(speech.features, target)[1], atol=1e-3)


def test_a_model_is_compared_with_transformers_on_random_features(speech):
    assert compare(speech.ours, speech.folder).largest < 1e-4
    with torch.no_grad():
        speech.ours.front_end[0].convolution.weight.mul_(1.5)
    with pytest.raises(ValueError, match="transformers computes other logits"):
        compare(speech.ours, speech.folder)


def test_weights_are_those_declared_and_become_8_bit_but_for_convolutions(speech):
    declared = parameters_of(speech.ours.config).total
    assert declared == sum(weight.numel() for weight in speech.ours.parameters())
    small = quantize(speech.ours)
    assert torch.equal(small.front_end[0].convolution.weight, speech.ours.front_end[0].convolution.weight)
    assert len(phasor.generate(small, speech.features[0], max_new_tokens=4, start=3, stop=[])) == 4


def test_gradients_reach_the_first_convolution(speech):
    target = torch.randint(3, 50, (3, 12))
    speech.ours.loss(speech.features, target[:, :-1], targets=target[:, 1:]).total.backward()
    assert all(float(weight.grad.abs().max()) > 0 for weight in speech.ours.front_end.parameters())


def test_a_native_folder_comes_back(speech, tmp_path):
    phasor.save(speech.ours, tmp_path / "native")
    back = phasor.load(tmp_path / "native")
    assert back.config == speech.ours.config
    for one, other in zip(back.parameters(), speech.ours.parameters(), strict=True):
        assert torch.equal(one, other)


CONVOLUTIONS = [(3, 1, 0), (3, 2, 1), (7, 3, 0), (5, 2, 2), (1, 1, 0)]


@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_lengths_are_those_of_torch(sizes):
    width, stride, padding = sizes
    first = ConvolutionConfig(features=4, width=width, stride=stride, padding=padding, norm=True, activation="tanh")
    front_end = FrontEndConfig(features=2, convolutions=(first, ConvolutionConfig(features=3, width=4, stride=2)))
    module = FrontEnd(front_end)
    for frames in range(front_end.least, front_end.least + 9):
        assert module(torch.randn(1, frames, 2)).shape == (1, front_end.length(frames), 3)
    assert front_end.length(front_end.least) == 1
    assert front_end.length(front_end.least - 1) == 0


def test_an_encoder_of_another_width_takes_features():
    model = phasor.Transformer(
        ModelConfig(
            vocab_size=9,
            dim=8,
            num_layers=1,
            num_heads=2,
            shape="encoder-decoder",
            position="learned",
            max_length=5,
            embedding={"front_end": {"features": 3, "convolutions": [{"features": 12, "width": 2, "stride": 2}]}},
            encoder=EncoderConfig(dim=12, max_length=7),
        )
    )
    assert [len(stack.position(0).weight) for stack in (model.encoder, model.decoder)] == [7, 5]
    assert model(torch.randn(2, 14, 3), torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 9)
    with pytest.raises(ValueError, match="7 positions"):
        model(torch.randn(2, 16, 3), torch.zeros(2, 5, dtype=torch.int64))


AUDIO = {"front_end": {"features": 3, "convolutions": [{"features": 8, "width": 2}]}}
BOTH = {"shape": "encoder-decoder", "num_heads": 2, "dim": 8}
BAD_CONFIGURATIONS = {
    "of a decoder": (lambda: config(embedding=AUDIO), "front_end is for an encoder-decoder"),
    "another width": (lambda: config(**BOTH | {"dim": 16}, embedding=AUDIO), "gives 8 features", "has 16"),
    "a vocabulary too": (lambda: config(**BOTH, embedding=AUDIO | {"source_vocab_size": 9}), "give one"),
    "types too": (lambda: config(**BOTH, embedding=AUDIO | {"token_types": 2}), "without width and token_types"),
    "no convolutions": (lambda: FrontEndConfig(features=3, convolutions=()), "at least one"),
    "padding": (lambda: ConvolutionConfig(features=3, width=2, padding=2), "padding (2)", "width (2)"),
}


@pytest.mark.parametrize(("make", "mentions"), [(m, w) for m, *w in BAD_CONFIGURATIONS.values()])
def test_bad_configurations_are_named(make, mentions):
    assert_refusal(make, *mentions)


SOURCE = "the source of this model are features, floats [batch, frames, "


def test_other_sources_are_refused_in_a_sentence(speech):
    model, tokens, features = speech.ours, torch.ones(1, 9, dtype=torch.int64), speech.features
    bad = {
        "tokens": lambda: model(tokens, tokens),
        "a list of tokens": lambda: phasor.generate(model, [1, 2, 3], max_new_tokens=2, start=3),
        "one row without a batch": lambda: model(features[0], tokens),
        "other features": lambda: model(torch.randn(1, 900, 99), tokens),
        "too few frames": lambda: model(features[:1, :0], tokens),
    }
    for make in bad.values():
        assert_refusal(make, SOURCE)
    model.tokenizer = object()
    assert_refusal(lambda: phasor.generate(model, "hello", max_new_tokens=2, start=3), SOURCE, "not str")
    lengths = [features[0], torch.cat((features[0], features[0]))]
    if model.config.position.kind == "rotary":
        assert_refusal(lambda: phasor.generate(model, lengths, max_new_tokens=2, start=3), "one number of frames")
    else:
        assert_refusal(lambda: phasor.generate(model, lengths[1], max_new_tokens=2, start=3), "positions of the model")
    assert_refusal(lambda: phasor.generate(model, features, max_new_tokens=2, start=[]), "start is empty")
    assert_refusal(lambda: phasor.generate(model, features, max_new_tokens=2, start="a"), "the start token 'a'")
    assert_refusal(lambda: phasor.Engine(model), "an engine reads tokens")
    assert_refusal(lambda: phasor.translate(model, ["hello"]), "translation reads texts")
    assert "one device" in mesh_why_not(model.config, Mesh(shard=2), 64)
    recipe = phasor.Recipe.from_dict({"task": "translation", "data": {"train": "pairs.tsv"}})
    assert_refusal(lambda: check_config(model.config, recipe, 9), "'translation' reads texts")


def test_commands_refuse_features_in_a_sentence(speech, capsys):
    for command in (["generate", "--prompt", "hello", "--max-new-tokens", "2"], ["serve", "--port", "0"]):
        assert main([command[0], str(speech.folder), *command[1:]]) != 0
        said = capsys.readouterr().err
        assert "features" in said or "needs a tokenizer" in said
        assert "Traceback" not in said


def test_features_are_no_prompt_of_a_decoder():
    model = phasor.Transformer(config())
    assert_refusal(lambda: phasor.generate(model, torch.randn(9, 3), max_new_tokens=2), "a prompt is a list of token")
