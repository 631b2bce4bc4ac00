"""The model for lm-evaluation-harness: its scores against transformers, and against the harness's own model `hf`."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from decoding import byte_tokenizer

from phasor.evaluation.lm_eval import HarnessModel, register, rolling_windows
from phasor.generation.engine import Engine, prompt_list

# Two layers in float32, over sums of up to 64 log-probabilities of order 5.
CLOSE = 1e-5
TEXTS = ["The grass is green.", "Two and two is four, and five is one more.", "a", "x y z " * 20]


def ask(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama as transformers saves it, with a tokenizer of bytes that begins texts with <s>."""
    place = tmp_path_factory.mktemp("checkpoint") / "llama"
    tokenizer = byte_tokenizer(special=("<s>", "</s>"))
    from tokenizers import processors

    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": start, "eos_token_id": tokenizer.token_to_id("</s>")}
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=96, **sizes, **ends
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() == 2 else 1.0)
    model.save_pretrained(place)
    fast.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder):
    return HarnessModel(str(folder), device="cpu", batch_size=2)


def score_ref(theirs, context, continuation):
    with torch.no_grad():
        logits = theirs(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(logits[range(len(wanted)), wanted].sum()), bool((logits.argmax(-1) == wanted).all())


def test_continuations(folder, theirs, ours):
    """A space before a continuation belongs to it; a continuation without a context follows <s>."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cases = [("Two and two is", " four"), ("Two and two is ", "four"), ("", "green"), ("The", " grass is green. " * 3)]
    found = ours.loglikelihood([ask(*case) for case in cases])
    for (context, continuation), (score, greedy) in zip(cases, found, strict=True):
        before = tokenizer(context.rstrip()).input_ids
        whole = tokenizer(context + continuation).input_ids
        expected = score_ref(theirs, before, whole[len(before) :])
        assert score == pytest.approx(expected[0], abs=CLOSE * len(whole))
        assert greedy == expected[1]
    assert ours.truncated == {"loglikelihood": 0, "generate_until": 0}


def test_rolling_windows_predict_every_token_once():
    for count in range(40):
        ids = list(range(1, count + 1))
        windows = list(rolling_windows(ids, 0, 7))
        assert [token for _, continuation in windows for token in continuation] == ids
        assert all(len(context) + len(continuation) - 1 <= 7 for context, continuation in windows)
        for context, continuation in windows:  # what is read before a token is what precedes it
            assert context == [0, *ids][continuation[0] - len(context) : continuation[0]]


def test_long_requests_are_reported(folder, theirs):
    """Cut at the beginning as the harness does, with a warning and a count."""
    small = HarnessModel(str(folder), device="cpu", max_length=16, batch_size="auto")
    cases = [ask("The grass is green, and", " so on"), ask("a", " b"), ask("x" * 40, " b")]
    with pytest.warns(UserWarning, match=r"2 of 3 requests are longer than max_length \(16 tokens\) and were cut"):
        found = small.loglikelihood(cases)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    whole = tokenizer("The grass is green, and so on").input_ids[-17:]
    assert found[0][0] == pytest.approx(score_ref(theirs, whole[:-6], whole[-6:])[0], abs=17 * CLOSE)
    with pytest.warns(UserWarning, match=r"1 of 2 requests is longer than max_length \(16 tokens\) and was cut"):
        small.generate_until([ask("x" * 40, {"max_gen_toks": 4}), ask("x", {"max_gen_toks": 4})])
    assert small.get_model_info()["truncated"] == {"loglikelihood": 2, "generate_until": 1}
    with pytest.raises(ValueError, match="a continuation has 41 tokens, and the model reads 16 at most"):
        small.loglikelihood([ask("a", " " + "x" * 40)])
    with pytest.raises(ValueError, match="a task generates 16 tokens, and max_length is 16"):
        small.generate_until([ask("x", {"max_gen_toks": 16})])


def test_generation_stops_at_texts(folder, theirs, ours):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = ["The grass", "Two and", "x" * 30]
    whole = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        whole.append(tokenizer.decode(new, skip_special_tokens=True))
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    assert ours.generate_until([ask(prompt, options) for prompt in prompts]) == whole
    stop = whole[1][3:5]
    found = ours.generate_until([ask(prompt, options | {"until": stop}) for prompt in prompts])
    assert found == [text.split(stop)[0] for text in whole]


def test_generation_is_computed_by_an_engine(ours, monkeypatch):
    rows = []

    class Counted(Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            rows.append(options["max_rows"])

    monkeypatch.setattr(prompt_list, "Engine", Counted)
    options = {"until": ["."], "max_gen_toks": 4, "do_sample": False}
    ours.generate_until([ask(prompt, options) for prompt in ("a", "b", "c")])
    assert rows == [2]  # batch_size


def test_chat_template(ours):
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(messages) == "[user] Hello\n"
    assert ours.chat_template(True).startswith("{% for")
    assert ours.chat_template(False) is None


def test_an_extension_is_made_for_the_length(folder):
    extended = HarnessModel(str(folder), device="cpu", max_length=384, extension="yarn")
    assert extended.model.config.position.extension.factor == 4.0
    assert extended.get_model_info()["extension"] == "yarn"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"max_length": 0}, "max_length must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"extension": "yran"}, "unknown extension 'yran'"),
        ({"checkpoint": "last"}, "checkpoint is for the folder of a run"),
    ],
    ids=str,
)
def test_bad_arguments(folder, arguments, said):
    with pytest.raises(ValueError, match=said):
        HarnessModel(str(folder), device="cpu", **arguments)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Three tasks of the harness's three kinds of questions, made of local files."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"{a} and {b} is", "right": str(a + b), "wrong": str(a - b)} for a in range(4) for b in range(1, 4)]
    rows.append({"q": "long " * 30, "right": "x", "wrong": "y"})  # more tokens than the model has
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))

    def task(name, data, **fields):
        files = {"data_files": {"test": str(place / data)}}
        config = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **fields}
        (place / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML

    metrics = {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    choice = "{{[right, wrong]}}"
    task("sums_choice", "rows.jsonl", output_type="multiple_choice", doc_to_text="{{q}}", doc_to_target=0,
         doc_to_choice=choice, **metrics)  # fmt: skip
    rolling = [{"metric": "bits_per_byte"}]
    task("texts_loss", "texts.jsonl", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
         metric_list=rolling)  # fmt: skip
    match = {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    stops = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    task("sums_text", "rows.jsonl", output_type="generate_until", doc_to_text="{{q}}", doc_to_target="{{right}}",
         generation_kwargs=stops, **match)  # fmt: skip
    return place


@pytest.mark.filterwarnings("ignore")
def test_equal_to_the_models_of_the_harness(folder, tasks, tmp_path, monkeypatch):
    """Every answer of `hf`: log-probabilities to 1e-5 per token, choices, and generated texts."""
    harness = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # of `hf`
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    register()
    names = ["sums_choice", "texts_loss", "sums_text"]
    shared = {"tasks": names, "batch_size": 2, "device": "cpu", "bootstrap_iters": 0, "log_samples": True}
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = harness.simple_evaluate(
        "hf", {"pretrained": str(folder), "dtype": "float32"}, task_manager=manager, **shared
    )
    found = harness.simple_evaluate("phasor", {"path": str(folder), "dtype": "float32"}, task_manager=manager, **shared)
    for name in names:
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, abs=1e-5), (name, metric)
        for a, b in zip(expected["samples"][name], found["samples"][name], strict=True):
            compare_answers(a["resps"], b["resps"])
    assert found["config"]["truncated"] == {"loglikelihood": 2, "generate_until": 1}
    assert found["config"]["max_length"] == 96


def compare_answers(theirs, ours):
    """Lists of lists of texts, or of log-probabilities with whether they are greedy."""
    if isinstance(theirs, list | tuple):
        assert len(theirs) == len(ours)
        for a, b in zip(theirs, ours, strict=True):
            compare_answers(a, b)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=120 * CLOSE)
    else:
        assert ours == theirs


@pytest.mark.slow
def test_the_command_of_the_harness(folder, tasks, tmp_path):
    pytest.importorskip("lm_eval")
    command = [sys.executable, "-m", "phasor.evaluation.lm_eval", "--model", "phasor", "--tasks", "sums_choice"]
    command += ["--model_args", f"path={folder},dtype=float32,max_length=64", "--include_path", str(tasks)]
    command += ["--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sums_choice" in done.stdout
    assert "2 of 26 requests are longer than max_length (64 tokens)" in done.stderr
    [file] = tmp_path.glob("out*.json")
    assert json.loads(file.read_text())["config"]["truncated"] == {"loglikelihood": 2, "generate_until": 0}
