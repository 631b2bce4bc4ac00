"""One sequence of any length, read once: its loss, its memory, its positions, and what is refused."""

import json
import signal

import numpy as np
import pytest
import stream_kills
import torch
import torch.nn.functional as F
from commands import CommandRunner
from processes import forkserver
from safetensors import SafetensorError

from phasor import ModelConfig, Transformer, quantize, save
from phasor.artifacts import ArtifactFolder
from phasor.data.tokenizers import byte_tokenizer
from phasor.evaluation import evaluate_stream
from phasor.evaluation.stream import split_at_powers_of_two
from phasor.kv_cache import cache_file
from phasor.models.windows import window_config

VOCAB = 300


@pytest.fixture
def run_phasor(capsys):
    return CommandRunner(capsys)


def new_model(position="rotary", layers=2, dim=16, vocab_size=VOCAB, **attention):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        position=position,
        norm="rmsnorm",
        attention=attention,
        max_length=256,
        init={"kind": "normal", "std": 0.3},
    )
    return Transformer(config).eval()


def write_ids(folder, count, vocab_size=VOCAB, name="ids.bin"):
    ids = np.random.default_rng(0).integers(0, vocab_size, count).astype("<u2")
    ids.tofile(folder / name)
    return folder / name, torch.from_numpy(ids.astype(np.int64))[None]


@torch.no_grad()
def full_losses(model, ids, offset=0):
    """The loss of every token but the first, by one forward without a cache, in float64."""
    positions = torch.arange(ids.shape[1] - 1) + offset
    logits = model(ids[:, :-1], positions=positions)
    return F.cross_entropy(logits[0].double(), ids[0, 1:], reduction="none")


MODELS = {
    "window": {"window": 24},
    "sinks": {"window": 24, "sink_tokens": 3},
    "capped": {"window": 24, "sink_tokens": 3, "cap_sinks": True},
    "alibi": {"position": "alibi", "window": 24, "sink_tokens": 2},
    "t5": {"position": "t5", "window": 24},
    "full": {},
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunk", [1, 13, 24, 100, 500])
def test_a_stream_has_the_loss_of_a_full_forward(tmp_path, kind, chunk):
    model = new_model(**MODELS[kind])
    path, ids = write_ids(tmp_path, 200 if chunk > 1 else 60)
    result = evaluate_stream(model, path, chunk=chunk)
    expected = full_losses(model, ids)
    assert result["tokens"] == ids.shape[1]
    assert result["loss"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert result["perplexity"] == pytest.approx(expected.mean().exp().item(), rel=1e-4)
    for k, part in enumerate(result["curve"]):
        assert (part["first"], part["tokens"]) == (2**k, part["last"] - part["first"] + 1)
        assert part["loss"] == pytest.approx(expected[part["first"] - 1 : part["last"]].mean().item(), abs=1e-5)
    assert sum(part["tokens"] for part in result["curve"]) == ids.shape[1] - 1


def test_buckets_are_powers_of_two():
    assert [
        list(split_at_powers_of_two(1, 9)),
        list(split_at_powers_of_two(6, 6)),
        list(split_at_powers_of_two(2**31 - 1, 2**31 + 2)),
    ] == [
        [(0, 1, 2), (1, 2, 4), (2, 4, 8), (3, 8, 9)],
        [],
        [(30, 2**31 - 1, 2**31), (31, 2**31, 2**31 + 2)],
    ]


def test_text_and_token_files_give_the_same_bits(tmp_path):
    model = new_model(window=16)
    model.tokenizer = byte_tokenizer()
    text = "Some text, of a few lines.\n" * 30
    (tmp_path / "a.txt").write_text(text)
    ids = np.array(model.tokenizer.encode(text).ids)
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids)
    results = [evaluate_stream(model, tmp_path / name, chunk=64) for name in ("a.txt", "a.bin", "a.npy")]
    assert results[0]["tokens"] == len(ids)
    for name in ("loss", "curve", "tokens"):
        assert results[0][name] == results[1][name] == results[2][name]


@pytest.mark.parametrize(("sinks", "position"), [(0, "rotary"), (4, "rotary"), (4, "alibi"), (2, "none")])
def test_a_window_lets_a_model_without_one_read_on(tmp_path, sinks, position):
    """StreamingLLM's cache: the first tokens and the last, positions counted within the cache."""
    model = new_model(position)
    path, ids = write_ids(tmp_path, 400)
    result = evaluate_stream(model, path, window=24, sinks=sinks, chunk=50)
    twin = new_model(position, window=24, sink_tokens=sinks, cap_sinks=sinks > 0)
    assert result["loss"] == pytest.approx(full_losses(twin, ids).mean().item(), abs=1e-5)
    assert result["windows"] == [{"window": 24, "sinks": sinks}]
    assert model.config.attention.window is None


def test_layers_with_a_shorter_window_keep_theirs():
    config = new_model(window=8).config
    mixed = config.replace(layers=({"attention": {"window": 8}}, {"attention": {}}))
    windows = [(a.window, a.sink_tokens) for a in (window_config(mixed, 32, 4).layer(i).attention for i in range(2))]
    assert windows == [(8, 0), (32, 4)]
    assert window_config(config, 4, None).attention.window == 4
    assert window_config(config, None, 2).attention.sink_tokens == 2
    assert window_config(config, None, None) is config


def test_a_model_is_left_as_it_was(tmp_path):
    """Which weights have gradients, and the mode; a model with a window shares them."""
    model, (path, _) = new_model().train(), write_ids(tmp_path, 50)
    model.tokens.weight.requires_grad_(False)
    evaluate_stream(model, path, window=8)
    assert model.training
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["tokens.weight"]
    refused("a model of quantized weights keeps its positions and windows", quantize(model), path, window=8)


def test_a_window_longer_than_the_file_takes_no_more_memory_than_the_file(tmp_path):
    model, (path, ids) = new_model(), write_ids(tmp_path, 100)
    result = evaluate_stream(model, path, window=1 << 40, chunk=30)
    assert result["cache_bytes"] == model.new_cache(1, 99).nbytes
    assert result["loss"] == pytest.approx(float(full_losses(model, ids).mean()), abs=1e-5)


def test_limit_reads_the_first_tokens(tmp_path):
    model = new_model(window=16)
    path, ids = write_ids(tmp_path, 300)
    result = evaluate_stream(model, path, chunk=32, limit=100)
    assert result["tokens"] == 100
    assert result["loss"] == pytest.approx(full_losses(model, ids[:, :100]).mean().item(), abs=1e-5)


@pytest.mark.parametrize("offset", [10**9, 2**31 - 100, 2**36])
def test_an_offset_does_not_change_the_loss(tmp_path, offset):
    """Within 1e-6 in float32 and 1e-3 in bfloat16, which float32 angles (those of transformers) do not give."""
    path, _ = write_ids(tmp_path, 600)
    model = new_model(window=32, sink_tokens=2)
    near, far = (evaluate_stream(model, path, chunk=64, offset=start)["loss"] for start in (0, offset))
    assert abs(near - far) < 1e-6
    half = model.bfloat16()
    near, far = (evaluate_stream(half, path, chunk=64, offset=start)["loss"] for start in (0, offset))
    assert abs(near - far) < 1e-3


def test_transformers_changes_its_loss_at_an_offset_of_a_billion(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=None,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    path, ids = write_ids(tmp_path, 200)

    @torch.no_grad()
    def loss(offset):
        positions = torch.arange(199)[None] + offset
        logits = theirs(ids[:, :-1], position_ids=positions).logits[0]
        return F.cross_entropy(logits.double(), ids[0, 1:]).item()

    ours = [evaluate_stream(tmp_path / "model", path, chunk=64, offset=n, device="cpu")["loss"] for n in (0, 10**9)]
    assert ours[0] == pytest.approx(loss(0), abs=1e-5)
    assert abs(ours[0] - ours[1]) < 1e-6
    assert abs(loss(10**9) - loss(0)) > 1e-3


def test_a_million_tokens_across_position_2_to_the_31(tmp_path):
    """In constant memory, and with the loss of the same tokens from position 0 on."""
    model = new_model(layers=1, dim=8, vocab_size=16, window=16)
    path, _ = write_ids(tmp_path, 1_000_001, vocab_size=16)
    near = evaluate_stream(model, path, chunk=8192, limit=30_000)
    crossing = evaluate_stream(model, path, chunk=8192, offset=2**31 - 15_000, limit=30_000)
    assert crossing["loss"] == pytest.approx(near["loss"], abs=1e-6)
    result = evaluate_stream(model, path, chunk=8192, offset=2**31 - 500_000)
    assert result["tokens"] == 1_000_001
    assert result["curve"][-1]["last"] == 1_000_000
    for before, after in zip(near["curve"][:-1], result["curve"], strict=False):
        assert before["loss"] == pytest.approx(after["loss"], abs=1e-6)
    assert abs(result["curve"][-1]["loss"] - result["loss"]) < 0.01
    assert result["peak_memory_bytes"] <= 1.01 * crossing["peak_memory_bytes"]
    assert result["cache_bytes"] == near["cache_bytes"]


@pytest.mark.parametrize("offset", [0, 10**9])
def test_xpos_reads_on_past_its_span_under_a_window(tmp_path, offset):
    """A decay over one position spans 64; without a window, or with one of more than half of that, it ends there."""
    model, (path, _) = new_model({"kind": "xpos", "decay": 1.0}), write_ids(tmp_path, 300)
    options = {"chunk": 20, "offset": offset}
    result = evaluate_stream(model, path, window=24, sinks=2, **options)
    other = evaluate_stream(model, path, window=24, sinks=2, chunk=7)
    assert result["loss"] == pytest.approx(other["loss"], abs=1e-5)
    said = "xpos positions span at most 64 tokens, and .* has more: give every layer a window of at most half of that"
    refused(said, model, path, window=33, **options)
    refused(said, model, path, max_length=1000, **options)
    assert evaluate_stream(model, path, limit=65, **options)["tokens"] == 65


def test_progress_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("phasor.evaluation.stream.REPORT_SECONDS", 0)
    model = new_model(window=16)
    model.tokenizer = byte_tokenizer()
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    seen = []
    result = evaluate_stream(model, tmp_path / "a.txt", chunk=128, progress=seen.append)
    assert [report.tokens for report in seen[:2]] == [129, 257]
    assert seen[-1].tokens == seen[-1].expected == 1101
    assert seen[-1].loss == pytest.approx(result["loss"])
    assert all(report.tokens_per_second > 0 for report in seen)


def refused(match, *args, **options):
    with pytest.raises(ValueError, match=match) as caught:
        evaluate_stream(*args, **options)
    assert "\n" not in str(caught.value)


def test_streams_that_a_model_cannot_read_are_refused(tmp_path):
    path, _ = write_ids(tmp_path, 400)
    short, _ = write_ids(tmp_path, 257, name="short.bin")
    one, _ = write_ids(tmp_path, 1, name="one.bin")
    model = new_model()
    mixed = Transformer(model.config.replace(layers=({"attention": {"window": 8}}, {"attention": {}})))
    refused("layer 1 of the model has no window, so that it reads at most 256 tokens", mixed, path)
    refused("layer 0 of the model has no window", model, path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert evaluate_stream(model, short)["tokens"] == 257
    assert evaluate_stream(model, path, max_length=399)["tokens"] == 400
    refused("reads at most 398 tokens", model, path, max_length=398)
    learned = new_model("learned", window=8)
    refused("learned positions are a table of 256, and .* goes on past its end$", learned, path)
    refused("from the offset 1 on", learned, short, offset=1)
    assert evaluate_stream(learned, short)["tokens"] == 257
    dynamic = new_model(
        {"kind": "rotary", "extension": {"kind": "dynamic-ntk", "factor": 2.0, "original_length": 64}}, window=8
    )
    refused("frequencies depend on the length of the sequence", dynamic, path)
    assert evaluate_stream(dynamic, path, max_length=400)["tokens"] == 400
    refused(r"one.bin has 1 tokens, and a loss needs 2", new_model(window=8), one, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    refused("another vocabulary", new_model(window=8, vocab_size=200), path)


def test_bad_arguments_are_refused(tmp_path):
    path, _ = write_ids(tmp_path, 50)
    model = new_model(window=8)
    refused("chunk must be an integer of at least 1, not 0", model, path, chunk=0)
    refused("window must be an integer of at least 1, not -1", model, path, window=-1)
    refused("sinks must be an integer of at least 0", model, path, sinks=-1)
    refused("offset must be an integer of at least 0", model, path, offset=1.5)
    refused("limit must be an integer of at least 2", model, path, limit=1)
    refused("save_seconds must be a number", model, path, save_seconds="a")
    refused("resume needs out", model, path, resume=True)
    refused("ids.bin is a file, and --out takes a folder", model, path, out=path)
    refused("give window too", new_model(), path, sinks=4)
    refused("does not exist", model, tmp_path / "none.txt")
    (tmp_path / "ids.txt").write_text("text")
    refused("no tokenizer to read the text", model, tmp_path / "ids.txt")
    refused("for the folder of a model", model, tmp_path / "ids.txt", dtype=torch.bfloat16)
    encoder = Transformer(ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1, shape="encoder"))
    refused("read by a decoder, and this model is an encoder", encoder, tmp_path / "ids.txt")


def test_a_folder_of_any_format_and_dtype(tmp_path):
    model = new_model(window=8)
    save(model, tmp_path / "model")
    path, ids = write_ids(tmp_path, 100)
    result = evaluate_stream(tmp_path / "model", path, device="cpu", dtype=torch.float64)
    assert result["dtype"] == "float64"
    assert result["loss"] == pytest.approx(full_losses(model.double(), ids).mean().item(), abs=1e-9)
    refused("checkpoint is for the folder of a run", tmp_path / "model", path, checkpoint="best", device="cpu")


def same(first, second):
    times = ("seconds", "tokens_per_second", "resumed_at", "peak_memory_bytes")
    return json.dumps({k: v for k, v in first.items() if k not in times}) == json.dumps(
        {k: v for k, v in second.items() if k not in times}
    )


class StopError(Exception):
    pass


def stop_after(reports):
    """A callback that ends a run after some reports."""
    left = [reports]

    def stop(report):
        left[0] -= 1
        if left[0] == 0:
            raise StopError

    return stop


@pytest.mark.parametrize("kind", ["window", "capped", "full"])
@pytest.mark.parametrize("text", [False, True])
def test_a_stream_that_was_stopped_is_resumed_to_the_same_bits(tmp_path, monkeypatch, kind, text):
    monkeypatch.setattr("phasor.evaluation.stream.REPORT_SECONDS", 0)
    model = new_model(**MODELS[kind])
    model.tokenizer = byte_tokenizer()
    path, _ = write_ids(tmp_path, 250)
    if text:
        path = tmp_path / "a.txt"
        path.write_text("some words and more\n" * 12)
    whole = evaluate_stream(model, path, chunk=32, out=tmp_path / "whole")
    options = {"chunk": 32, "out": tmp_path / "out", "save_seconds": 0}
    with pytest.raises(StopError):
        evaluate_stream(model, path, progress=stop_after(3), **options)
    with pytest.raises(StopError):
        evaluate_stream(model, path, progress=stop_after(2), resume=True, **options)
    resumed = evaluate_stream(model, path, resume=True, **options)
    assert resumed["resumed_at"] == 96
    assert same(resumed, whole)
    again = evaluate_stream(model, path, resume=True, **options)
    assert same(again, whole)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == [".lock", f"cache-{whole['tokens'] - 1}.safetensors", "result.json", "state.json"]
    assert same(json.loads((tmp_path / "out" / "result.json").read_text()), whole)


def check_kills(folder, points):
    """A stream killed before operations on its files, each time in a new folder, and resumed."""
    model = new_model(window=8, sink_tokens=2)
    model.tokenizer = byte_tokenizer()
    save(model, folder / "model")
    file, report = folder / "a.txt", folder / "report.json"
    file.write_text("a few words\n" * 6)

    def start(out, resume, point):
        args = (str(folder / "model"), str(file), str(out), resume, point, str(report))
        process = forkserver().Process(target=stream_kills.stream_and_die, args=args)
        process.start()
        process.join()
        return process.exitcode

    assert start(folder / "whole", False, None) == 0
    whole = json.loads(report.read_text())
    for point in points(whole["points"]):
        out = folder / f"killed-{point}"
        assert start(out, False, point) == -signal.SIGKILL
        resumed = evaluate_stream(
            folder / "model", file, chunk=16, out=out, resume=(out / "state.json").exists(), device="cpu"
        )
        assert same(resumed, whole["result"])
        assert len(list(out.iterdir())) == 4


def test_a_killed_stream_is_resumed_to_the_same_bits(tmp_path):
    check_kills(tmp_path, lambda count: (count // 3, count - 5))


@pytest.mark.slow
def test_a_stream_killed_at_any_point_is_resumed_to_the_same_bits(tmp_path):
    check_kills(tmp_path, lambda count: range(1, count + 1))


def test_two_processes_do_not_read_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("phasor.evaluation.stream.REPORT_SECONDS", 0)
    model = new_model(window=8)
    path, _ = write_ids(tmp_path, 100)
    options = {"chunk": 16, "out": tmp_path / "out"}

    def start_another(report):
        refused("another process reads the stream of", model, path, resume=True, **options)

    evaluate_stream(model, path, progress=start_another, **options)


def test_the_command(tmp_path, run_phasor):
    model = new_model(window=8)
    model.tokenizer = byte_tokenizer()
    save(model, tmp_path / "model")
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    command = ["evaluate", str(tmp_path / "model"), "--stream", str(tmp_path / "a.txt"), "--device", "cpu"]
    expected = evaluate_stream(model, tmp_path / "a.txt")
    printed = run_phasor(*command)
    assert f"loss        {expected['loss']:.6f}" in printed
    assert "tokens      221" in printed
    assert "128 to 220" in printed
    out = ["--out", str(tmp_path / "out"), "--chunk", "16"]
    first = json.loads(run_phasor(*command, "--json", *out, "--window", "4", "--sinks", "2", "--offset", "7"))
    assert (first["windows"], first["offset"], first["chunk"]) == ([{"window": 4, "sinks": 2}], 7, 16)
    resumed = run_phasor(*command, *out, "--window", "4", "--sinks", "2", "--offset", "7", "--resume")
    assert "tokens      221, resumed at 220" in resumed
    assert json.loads(run_phasor(*command, "--json", "--dtype", "bfloat16", "--limit", "50"))["dtype"] == "bfloat16"
    errors = {
        ("--dtype", "int8"): "--dtype must be one of",
        ("--lengths", "64"): "--lengths and --stream are two evaluations",
        ("--data", "x"): "--data does not go with --stream",
        ("--target", "x"): "--target is for translation, and does not go with --stream",
        ("--extension", "yarn"): "--extension does not go with --stream",
        ("--resume",): "resume needs out",
        ("--token-dtype", "uint16"): "--token-dtype is for files of token ids",
    }
    for options, message in errors.items():
        assert message in run_phasor.expect_error(*command, *options)
    assert "--chunk is for --stream" in run_phasor.expect_error(*command[:2], "--chunk", "5")
    assert "does not exist" in run_phasor.expect_error(*command[:3], str(tmp_path / "none"))


def test_what_a_resumed_stream_may_not_change(tmp_path):
    model, out = new_model(window=8), tmp_path / "out"
    path, ids = write_ids(tmp_path, 100)
    options = {"chunk": 16, "out": out}
    refused("holds no stream to resume", model, path, resume=True, **options)
    assert not out.exists()
    evaluate_stream(model, path, **options)
    refused("holds a stream already: resume it", model, path, **options)
    refused("begun with --chunk 16, and cannot be resumed with 32", model, path, out=out, chunk=32, resume=True)
    refused("--offset 0, and cannot be resumed with 5", model, path, offset=5, resume=True, **options)
    refused("begun without --window, and cannot be resumed with 4", model, path, window=4, resume=True, **options)
    refused("begun without --sinks, and cannot be resumed with 2", model, path, sinks=2, resume=True, **options)
    refused("begun without --limit, and cannot be resumed with 9", model, path, limit=9, resume=True, **options)
    with torch.no_grad():
        model.tokens.weight[0, 0] += 1
    refused("the model has changed since", model, path, resume=True, **options)
    with torch.no_grad():
        model.tokens.weight[0, 0] -= 1
    model = new_model(window=8)
    changed = ids.numpy().astype("<u2")
    changed[0, 50] += 1
    path.write_bytes(changed.tobytes())
    refused("the file has changed since the stream in .*out was begun", model, path, resume=True, **options)
    write_ids(tmp_path, 100)
    assert evaluate_stream(model, path, resume=True, **options)["resumed_at"] == 99
    state = json.loads((out / "state.json").read_text())
    state["state"]["nats"][0] += 1
    (out / "state.json").write_text(json.dumps(state))
    refused(r"state\.json is damaged, or was changed", model, path, resume=True, **options)
    state["state"]["nats"][0] -= 1
    del state["sha256"]
    ArtifactFolder(out).write_checksummed("state.json", state | {"device": "cuda"})
    with pytest.warns(UserWarning, match="was begun on cuda and is continued on cpu"):
        evaluate_stream(model, path, resume=True, **options)
    cache = next(out.glob("cache-*"))
    cache.write_bytes(cache.read_bytes()[:-1] + b"x")
    refused("not as it was written", model, path, resume=True, **options)
    ArtifactFolder(out).write_checksummed("state.json", {"format": 0})
    refused("is not the state of a stream", model, path, resume=True, **options)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    refused("is not empty, and holds no stream", model, path, out=tmp_path / "notes")
    assert [file.name for file in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_a_full_disk_is_one_sentence_and_leaves_the_state_before(tmp_path, monkeypatch):
    model, out = new_model(window=8), tmp_path / "out"
    path, _ = write_ids(tmp_path, 100)

    def fail(*args):
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "save_file", fail)
        with pytest.raises(OSError, match=rf"No space left on device: '{out}/.*cache"):
            evaluate_stream(model, path, chunk=16, out=out)
    assert sorted(file.name for file in out.iterdir()) == [".lock", "state.json"]
    assert evaluate_stream(model, path, chunk=16, out=out, resume=True)["tokens"] == 100
