"""Models by a name on the Hugging Face hub, from a server of its interface with all kinds of faults."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
from decoding import byte_tokenizer
from hub_server import Repository, serve

import phasor
from phasor.adapters import add_adapter
from phasor.checkpoints import hub_download
from phasor.checkpoints.hub import HubName, resolve_folder
from phasor.checkpoints.hub_listing import list_files
from phasor.checkpoints.load import read_config
from phasor.cli import main
from phasor.evaluation.compare.problems import find_tokenizer

TOKENS = torch.arange(1, 24)[None]
NAME = "someone/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama as the hub has it, with files that phasor does not read."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    size = tokenizer.get_vocab_size()
    model = phasor.Transformer(phasor.preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=size))
    model.tokenizer, model.special = tokenizer, phasor.SpecialTokens(stop=(0,))
    place = tmp_path_factory.mktemp("models") / "tiny"
    phasor.save(model, place, format="hf")
    (place / "phasor_manifest.json").unlink()
    (place / "README.md").write_text("# tiny")
    (place / "pytorch_model.bin").write_bytes(b"\x80\x04 a pickle")
    (place / "modeling_tiny.py").write_text("raise SystemExit")
    (place / "onnx").mkdir()
    (place / "onnx" / "config.json").write_text("{}")
    (place / "chat_template.jinja").write_text("{{ messages }}")
    return place


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub, and an empty cache."""
    list_files.cache_clear()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.chdir(tmp_path)
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


@pytest.fixture
def tiny(hub, folder):
    return hub.add(NAME, folder)


def shard(repository, count=3):
    """Put the weights of a repository into several files."""
    from safetensors.torch import load, save

    tensors = load(repository.files.pop("model.safetensors"))
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        repository.files[file] = save({name: tensors[name] for name in names[i::count]})
        weight_map |= dict.fromkeys(names[i::count], file)
    repository.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()


def refusal(call) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_is_loaded_and_only_what_is_read_is_fetched(hub, tiny, folder):
    expected = phasor.load(folder)
    model = phasor.load(NAME)
    assert torch.equal(model(TOKENS), expected(TOKENS))
    assert model.tokenizer.to_str() == expected.tokenizer.to_str()
    fetched = set(hub.fetched())
    assert fetched == set(tiny.files) - {"README.md", "pytorch_model.bin", "modeling_tiny.py", "onnx/config.json"}
    assert hub.fetched()[-1] == "model.safetensors"
    # What is in the cache is not fetched again, by this process or by huggingface_hub.
    before = len(hub.requests)
    assert torch.equal(phasor.load(f"{NAME}@main")(TOKENS), expected(TOKENS))
    assert len(hub.requests) == before
    path = huggingface_hub.hf_hub_download(
        NAME, "model.safetensors", cache_dir=os.environ["HF_HUB_CACHE"], local_files_only=True
    )
    assert Path(path).read_bytes() == tiny.files["model.safetensors"]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, tiny, folder):
    tiny.revisions = ("main", "v1.0", "refs/pr/1")
    for revision in ("v1.0", "refs/pr/1", tiny.commit):
        assert phasor.load(f"{NAME}@{revision}").config == phasor.load(folder).config
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        for revision in ("v1.0", "refs/pr/1", tiny.commit):
            assert resolve_folder(f"{NAME}@{revision}").name == tiny.commit
        assert "HF_HUB_OFFLINE forbids" in refusal(lambda: resolve_folder(NAME))
    finally:
        del os.environ["HF_HUB_OFFLINE"]
    assert refusal(lambda: phasor.load(f"{NAME}@v2")) == f"{NAME} on {hub.address} has no branch, tag or commit v2"


@pytest.mark.parametrize("read", [read_config, phasor.explain, phasor.backends])
def test_what_needs_only_the_configuration_fetches_only_that(hub, tiny, read):
    read(NAME)
    assert hub.fetched() == ["config.json"]


def test_commands_take_a_name(hub, tiny, capsys):
    for words in (["explain", NAME], ["plan", "--model", NAME, "--devices", "8"]):
        assert main(words) == 0, capsys.readouterr().err
    assert hub.fetched() == ["config.json"]
    assert main(["convert", NAME, "mine"]) == 0
    assert main(["generate", NAME, "--prompt", "a", "--max-new-tokens", "2"]) == 0
    Path("text.txt").write_text("some text\n" * 20)
    assert main(["evaluate", NAME, "--data", "text.txt"]) == 0
    assert main(["extend", NAME, "long", "--to", "8192", "--method", "yarn"]) == 0
    recipe = [
        "--data.train",
        "text.txt",
        "--train.steps",
        "1",
        "--data.sequence_length",
        "16",
        "--train.batch_tokens",
        "64",
    ]
    assert main(["train", "--init-from", NAME, "--out", "run", *recipe]) == 0, capsys.readouterr().err
    assert json.loads(Path("run", "recipe.json").read_text())["init_from"] == f"{NAME}@{hub.repositories[NAME].commit}"
    assert (phasor.load("mine").config, phasor.load("long").config.max_length) == (phasor.load(NAME).config, 8192)


def move_branch(hub, repository):
    """Another commit of the repository, with other weights."""
    before = repository.commit
    repository.older[before] = Repository(dict(repository.files), before)
    repository.commit = before[::-1]
    weights = safetensors.torch.load(repository.files["model.safetensors"])
    repository.files["model.safetensors"] = safetensors.torch.save({name: 2 * x for name, x in weights.items()})
    list_files.cache_clear()
    return before


def test_a_run_keeps_the_commit_of_its_base(hub, tiny, capsys):
    Path("text.txt").write_text("some text\n" * 20)
    data = ["--data.train", "text.txt", "--data.sequence_length", "16", "--train.batch_tokens", "64"]
    first = ["train", "--init-from", NAME, "--lora.rank", "2", "--out", "run", *data]
    assert main([*first, "--train.steps", "1"]) == 0, capsys.readouterr().err
    commit = move_branch(hub, tiny)
    assert main([*first, "--train.steps", "2", "--resume"]) == 0, capsys.readouterr().err
    assert main(["train", "--resume", "--out", "run", "--train.steps", "3"]) == 0, capsys.readouterr().err
    for file, kept in (("run/recipe.json", ["init_from"]), ("run/model/adapter.json", ["base", "folder"])):
        found = json.loads(Path(file).read_text())
        for name in kept:
            found = found[name]
        assert found == f"{NAME}@{commit}"
    model = phasor.load("run/model")
    assert torch.equal(model.tokens.weight, phasor.load(f"{NAME}@{commit}").tokens.weight)
    assert not torch.equal(model.tokens.weight, phasor.load(NAME).tokens.weight)
    phasor.save(model, "peft", format="peft")
    config = json.loads(Path("peft", "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, commit)
    assert torch.allclose(phasor.load("peft")(TOKENS), model(TOKENS), atol=1e-5)
    assert main([*first, "--init-from", f"{NAME}@{tiny.commit}", "--train.steps", "4", "--resume"]) == 2
    assert f"{NAME}@{commit}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "field"), [("distill", ("distill", "teacher")), ("preference", ("preference", "reference"))]
)
def test_a_run_keeps_the_commit_of_its_teacher_or_reference(task, field, hub, tiny, folder, capsys):
    rows = [{"prompt": f"{i}", "chosen": "some", "rejected": "other", "text": f"text {i} " * 9} for i in range(20)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data.train", "data.jsonl", "--data.valid", "data.jsonl", "--data.sequence_length", "64"]
    data += ["--train.batch_tokens", "64"]
    data += ["--data.chat_template", "plain"] if task == "preference" else []
    first = ["train", "--task", task, "--init-from", str(folder), "--out", "run", *data]
    named = [*first, f"--{'.'.join(field)}"]
    assert main([*named, NAME, "--train.steps", "1"]) == 0, capsys.readouterr().err
    commit = move_branch(hub, tiny)
    assert main([*named, NAME, "--train.steps", "2", "--resume"]) == 0, capsys.readouterr().err
    recipe = json.loads(Path("run/recipe.json").read_text())
    assert recipe[field[0]][field[1]] == f"{NAME}@{commit}"
    assert main([*named, f"{NAME}@{tiny.commit}", "--train.steps", "3", "--resume"]) == 2
    assert f"{NAME}@{commit}" in capsys.readouterr().err
    snapshot = resolve_folder(f"{NAME}@{commit}") / "model.safetensors"
    weights = {name: 2 * x for name, x in safetensors.torch.load_file(snapshot).items()}
    snapshot.unlink()
    safetensors.torch.save_file(weights, snapshot)
    assert main(["train", "--resume", "--out", "run", "--train.steps", "3"]) == 2
    assert field[1] in capsys.readouterr().err


def test_a_tokenizer_by_name_is_fetched_alone(hub, tiny, folder):
    place = find_tokenizer(NAME)
    assert (place / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "model.safetensors" not in hub.fetched()
    assert "a tokenizer is 'bytes', 'bpe', 'unigram' or a folder" in refusal(lambda: find_tokenizer("wordpiece"))


def test_an_adapter_by_name(hub, tiny, folder, tmp_path, monkeypatch):
    model = phasor.load(folder)
    add_adapter(model, phasor.LoRAConfig(rank=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.normal_(std=0.1)
    phasor.save(model, tmp_path / "adapter", format="peft")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": NAME}))
    (tmp_path / "adapter" / "phasor_manifest.json").unlink(missing_ok=True)
    (tmp_path / "adapter" / "training_args.bin").write_bytes(b"a pickle")
    repository = hub.add("someone/adapter", tmp_path / "adapter")
    expected = model(TOKENS)
    assert torch.allclose(phasor.load(NAME, adapter="someone/adapter")(TOKENS), expected, atol=1e-5)
    assert torch.allclose(phasor.load("someone/adapter")(TOKENS), expected, atol=1e-5)
    assert "training_args.bin" not in hub.fetched()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert torch.allclose(phasor.load("someone/adapter")(TOKENS), expected, atol=1e-5)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    del repository.files["adapter_model.safetensors"]
    list_files.cache_clear()
    shutil.rmtree(HubName("someone/adapter").entry)
    assert "is an adapter without weights" in refusal(lambda: phasor.load("someone/adapter"))


def test_a_folder_of_that_name_wins(hub, tiny, folder):
    shutil.copytree(folder, NAME)
    (Path(NAME) / "pytorch_model.bin").unlink()
    phasor.load(NAME)
    assert hub.requests == []


def test_a_renamed_repository_is_followed(hub, tiny, folder):
    hub.moved["old/name"] = NAME
    assert torch.equal(phasor.load("old/name")(TOKENS), phasor.load(folder)(TOKENS))


def test_progress_counts_bytes_of_files(hub, tiny):
    calls = []
    resolve_folder(NAME, progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert {done[-1]} == set(totals) == {sum(len(tiny.files[name]) for name in hub.fetched())}


def test_the_command_line_shows_sizes(hub, tiny, monkeypatch, capsys):
    monkeypatch.setattr(hub_download, "SMALL", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["convert", NAME, "mine"]) == 0
    error = capsys.readouterr().err
    assert f"fetching {NAME}, " in error
    assert "kB" in error
    assert "100 %" in error
    shutil.rmtree(os.environ["HF_HUB_CACHE"])
    phasor.load(NAME)  # the library is silent
    assert capsys.readouterr().err == ""


def test_weights_in_several_files(hub, tiny, folder):
    shard(tiny)
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))
    assert hub.fetched()[0] == "model.safetensors.index.json"


def test_a_missing_shard_is_named_before_anything_large_is_fetched(hub, tiny):
    shard(tiny)
    del tiny.files["model-00002-of-00003.safetensors"]
    message = refusal(lambda: phasor.load(NAME))
    assert message.startswith(f"{NAME} is incomplete: its model.safetensors.index.json names model-00002-of-00003")
    assert hub.fetched() == ["model.safetensors.index.json"]


def test_an_index_that_names_files_elsewhere_is_refused(hub, tiny):
    shard(tiny)
    tiny.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../evil.safetensors"}}'
    assert "weight_map from names to files of the same folder" in refusal(lambda: phasor.load(NAME))


def test_pickles_are_not_fetched(hub, tiny):
    del tiny.files["model.safetensors"]
    message = refusal(lambda: phasor.load(NAME))
    assert "pytorch_model.bin" in message
    assert "run code" in message
    assert hub.fetched() == []
    del tiny.files["pytorch_model.bin"]
    list_files.cache_clear()
    assert "neither model.safetensors nor" in refusal(lambda: phasor.load(NAME))
    del tiny.files["config.json"]
    list_files.cache_clear()
    assert "no config.json" in refusal(lambda: phasor.explain(NAME))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_hash_is_refused_and_fetched_again(hub, tiny, folder, file):
    data = bytearray(tiny.files[file])
    data[-1] ^= 1
    hub.altered[file] = bytes(data)
    message = refusal(lambda: phasor.load(NAME))
    assert message.startswith(f"{file} of {NAME} did not arrive as it is on the hub: its SHA")
    del hub.altered[file]
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))


def test_a_connection_that_breaks_is_continued(hub, tiny, folder, monkeypatch, capfd):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # what is kept is whole chunks
    size = len(tiny.files["model.safetensors"])
    hub.cuts["model.safetensors"] = [size // 3, size // 2]
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))
    assert capfd.readouterr().err == ""
    ranges = {int(one.removeprefix("bytes=").removesuffix("-")) for one in hub.ranges()}
    assert ranges == {size // 3 // 4096 * 4096, size // 2 // 4096 * 4096}


def test_a_file_that_is_shorter_than_stated_is_refused(hub, tiny, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.altered["model.safetensors"] = tiny.files["model.safetensors"][:-100]
    assert "cut off" in refusal(lambda: phasor.load(NAME))


def test_a_partial_file_that_is_too_long_begins_again(hub, tiny, folder):
    blobs = HubName(NAME).entry / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{tiny.hash_of('model.safetensors')}.phasor.incomplete"
    partial.write_bytes(tiny.files["model.safetensors"] + b"more")
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))
    assert hub.ranges() == []


def start(server, cache, *words):
    """A command in a process of its own."""
    env = {**os.environ, "HF_ENDPOINT": server.address, "HF_HUB_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    env = {name: value for name, value in env.items() if name not in ("HF_HUB_OFFLINE", "TRITON_INTERPRET")}
    return subprocess.Popen([sys.executable, "-m", "phasor", *words], env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=["ctrl-c", "kill"]
)
def test_an_interrupted_download_is_continued(hub, tmp_path, number):
    model = phasor.Transformer(phasor.preset("llama-2", dim=256, num_heads=4, num_layers=6, vocab_size=1000))
    phasor.save(model, tmp_path / "large", format="hf")
    larger = hub.add(NAME, tmp_path / "large")
    partial = tmp_path / "cache" / "models--someone--tiny" / "blobs"
    partial /= f"{larger.hash_of('model.safetensors')}.phasor.incomplete"
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE  # what huggingface_hub writes at once
    assert len(larger.files["model.safetensors"]) > 2 * chunk
    hub.pause = 0.05
    command = "convert", NAME, str(tmp_path / "mine")
    process = start(hub, tmp_path / "cache", *command)
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in error
    assert not (tmp_path / "mine").exists()
    hub.pause = 0.0
    hub.requests.clear()
    begun = partial.stat().st_size
    assert begun > 0
    assert main(list(command)) == 0
    assert set(hub.ranges()) == {f"bytes={begun}-"}
    assert torch.equal(phasor.load(tmp_path / "mine")(TOKENS), model(TOKENS))
    assert not partial.exists()


def test_gated_private_and_unknown_repositories(hub, tiny, monkeypatch):
    hub.gated.add(NAME)
    message = refusal(lambda: phasor.load(NAME))
    assert message == (
        f"{NAME} is gated: accept its conditions at {hub.address}/{NAME}, and log in by `hf auth login`, "
        "or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "your token was not given access" in refusal(lambda: phasor.load(NAME))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.token = "hf_right"
    phasor.load(NAME)
    unknown = "someone/unknown"
    expected = f"there is no folder {unknown} here, and no model of that name on {hub.address}"
    assert refusal(lambda: phasor.load(unknown)) == expected
    monkeypatch.delenv("HF_TOKEN")
    for read in (phasor.load, phasor.explain, phasor.evaluate, resolve_folder):
        assert refusal(lambda read=read: read(unknown)).startswith(f"{expected}; if it is private")
    hub.refused["someone/private"] = 403
    assert "refuses someone/private (403): log in" in refusal(lambda: phasor.load("someone/private"))


def test_a_server_that_is_down(hub, tiny, folder, monkeypatch):
    hub.refused[NAME] = 503
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert refusal(lambda: phasor.load(NAME)).startswith(
        f"there is no folder {NAME} here, and {hub.address} answers 503 for {NAME}"
    )
    hub.refused.clear()
    phasor.load(NAME)
    hub.refused[NAME] = 503
    list_files.cache_clear()
    with pytest.warns(UserWarning, match="answers 503 .* is read as it was fetched last"):
        assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))


def test_without_a_network(hub, tiny, folder, monkeypatch):
    phasor.explain(NAME)
    list_files.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    with pytest.warns(UserWarning, match="cannot be reached"):
        phasor.explain(NAME)
    assert "http://127.0.0.1:9 cannot be reached" in refusal(lambda: phasor.load(NAME))  # weights are not in the cache
    assert "cannot be reached" in refusal(lambda: phasor.load("someone/other"))


def test_offline(hub, tiny, folder, monkeypatch):
    phasor.explain(NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(hub.requests)
    phasor.explain(NAME)
    message = refusal(lambda: phasor.load(NAME))
    assert message.startswith(
        f"there is no folder {NAME} here, and no model of that name in the Hugging Face hub's cache"
    )
    assert "HF_HUB_OFFLINE forbids to fetch it" in message
    monkeypatch.delenv("HF_HUB_OFFLINE")
    phasor.load(NAME)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    after = len(hub.requests)
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))
    assert (len(hub.fetched()) > 1, len(hub.requests)) == (before > 0, after)
    assert "TRANSFORMERS_OFFLINE forbids to fetch it" in refusal(lambda: phasor.load("someone/other"))


def test_without_the_package(hub, tiny, folder, monkeypatch):
    phasor.load(NAME)
    before = len(hub.requests)
    list_files.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert torch.equal(phasor.load(NAME)(TOKENS), phasor.load(folder)(TOKENS))
    assert "phasor needs the package huggingface_hub: pip install 'phasor-transformer[hub]'" in refusal(
        lambda: phasor.load("someone/other")
    )
    assert len(hub.requests) == before


def test_a_full_disk(hub, tiny, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "and the disk of" in refusal(lambda: phasor.load(NAME))
    assert hub.fetched() == []
    monkeypatch.undo()


def test_a_disk_that_fills_up(hub, tiny, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    assert "is full: make room" in refusal(lambda: phasor.load(NAME))


@pytest.mark.parametrize("commit", ["../../../../evil", "main", "", "0123"])
def test_a_hub_that_names_no_commit_is_refused(hub, tiny, commit):
    tiny.commit = commit
    assert "names no commit" in refusal(lambda: phasor.load(NAME))


NO_NAMES = [
    "../a",
    "a/../b",
    "a/b/c",
    "/a/b",
    "a//b",
    "a/",
    "./a",
    "~/a",
    "a b",
    "-a/b",
    "a/b.",
    "a--b/c",
    "x" * 97,
    ".a",
    "é/b",
]


@pytest.mark.parametrize("text", [*NO_NAMES, "config.json", "a\nb", "http://a/b"])
def test_what_is_no_name(text):
    assert HubName.parse(text) is None


@pytest.mark.parametrize("revision", ["../../x", "", "a//b", "/a", "a/", "a b", "-a", "a..b", "a\nb"])
def test_what_is_no_revision(revision):
    assert "a revision is a branch, a tag or a commit" in refusal(lambda: HubName.parse(f"{NAME}@{revision}"))


@pytest.mark.slow
def test_two_processes_fetch_a_file_once(hub, tiny, tmp_path):
    hub.pause = 0.01
    processes = [start(hub, tmp_path / "cache", "convert", NAME, str(tmp_path / f"mine-{i}")) for i in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    sent = [path for method, path, _ in hub.requests if method == "GET" and path.startswith("/storage/")]
    assert len(sent) == 1
