"""Chat templates against `apply_chat_template` of transformers, for templates as published; and hostile ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from phasor import Transformer, convert, load, preset, save
from phasor.checkpoints import template_process
from phasor.checkpoints.chat_replies import added_tokens, find_by_parts, find_each, find_replies, trained_spans
from phasor.checkpoints.chat_template import ChatTemplate
from phasor.checkpoints.folder import read_tokenizer
from phasor.checkpoints.template_process import TemplateProcess

PUBLISHED = Path(__file__).parents[1] / "published" / "chat_templates"
ROWS = re.findall(
    r"^\| ([a-z][\w.-]+) \| [\w.-]+/[^|]+ \| (\S*) ?\| (\S+) \|", (PUBLISHED / "README.md").read_text(), re.M
)
SPECIAL = {
    name: {"bos_token": bos.replace("\\|", "|"), "eos_token": eos.replace("\\|", "|")} for name, bos, eos in ROWS
}
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.jinja"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city <today>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
}


HEADER = r"^(<｜Assistant｜>|<\|start\|>assistant)"
TOOLS = {"hermes-2-pro": [WEATHER]}  # which has a template for conversations with tools


def user(text="How is the sky?"):
    return {"role": "user", "content": text}


def reply(text="It is blue.", **fields):
    return {"role": "assistant", "content": text, **fields}


CONVERSATIONS = {
    "one turn": {"messages": [user()]},
    "a system turn": {"messages": [{"role": "system", "content": "You are terse."}, user()]},
    "three turns": {"messages": [user(), reply(), user("Why?")]},
    "a reply": {"messages": [user(), reply()]},
    "all of it": {
        "messages": [{"role": "system", "content": "Be kind."}, user(), reply(), user(" Why? \n"), reply("\nLight…\n")]
    },
    "other letters": {"messages": [user("天空 <|x|> 'n' \"q\" {{ a }}\n\n"), reply("藍 🟦"), user("</s> <b>&")]},
    "tools": {"messages": [user()], "tools": [WEATHER]},
    "a call": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            user("Zürich?"),
            reply("", tool_calls=[CALL]),
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": '{"sun": true}'},
            reply("It is sunny."),
        ],
        "tools": [WEATHER],
    },
    "a call without content": {
        "messages": [user("Zürich?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "tools": [WEATHER],
    },
    "two calls": {"messages": [user(), reply("", tool_calls=[CALL, CALL | {"id": "call67890"}])], "tools": [WEATHER]},
    "reasoning": {"messages": [user(), reply(reasoning_content="Look up."), user("And?"), reply(reasoning="Hm.\n")]},
    "thoughts in the text": {"messages": [user(), reply("<think>\nUp.\n</think>\n\nBlue."), user("And?")]},
    "parts": {"messages": [user([{"type": "text", "text": "How"}, {"type": "text", "text": " is it?"}]), reply()]},
    "documents": {"messages": [user()], "documents": [{"title": "Sky", "text": "It is blue."}]},
    "an unknown role": {"messages": [user(), {"role": "narrator", "content": "It rains."}]},
    "two questions": {"messages": [user(), user("Well?")]},
    "a reply first": {"messages": [reply("Hello."), user()]},
    "no content": {"messages": [{"role": "user"}]},
    "a date": {"messages": [user()], "date_string": "1 Jan 2025", "enable_thinking": False},
}


@pytest.fixture(scope="session")
def base_tokenizer():
    """BPE on bytes with merges across words and newlines, as those of templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [(PUBLISHED / f"{name}.jinja").read_text() for name in ("llama-2", "lfm2", "zephyr")]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def folder_of(base_tokenizer, tmp_path_factory):
    """The folder of a template with a tokenizer that has its special tokens, written by transformers."""
    made = {}

    def make(name, file=None):
        file = file or PUBLISHED / f"{name}.jinja"
        if file not in made:
            text = file.read_text(encoding="utf-8")
            special = {role: token for role, token in SPECIAL[name].items() if token}
            found = re.findall(r"<\|[\w ]+\|>|<｜[^｜'\"]+｜>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_turn>", text)
            tokenizer = Tokenizer.from_str(base_tokenizer)
            written = sorted({*found, *special.values()})
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in written])
            folder = made[file] = tmp_path_factory.mktemp("template")
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=text, **special).save_pretrained(folder)
        return made[file]

    return make


def test_there_are_thirty_templates_and_each_has_its_row():
    assert len(NAMES) >= 30
    assert sorted(SPECIAL) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_template_equals_transformers(name, folder_of):
    """Tokens are equal, and where transformers refuses, so do we, with its message."""
    folder = folder_of(name)
    theirs, template = PreTrainedTokenizerFast.from_pretrained(folder), ChatTemplate.read(folder)
    tokenizer = read_tokenizer(folder)
    rendered = 0
    for what, conversation in CONVERSATIONS.items():
        given = {**conversation}
        messages = given.pop("messages")
        for begun in (False, True):
            options = {"add_generation_prompt": begun, **given}
            try:
                expected = theirs.apply_chat_template(messages, return_dict=False, **options)
            except Exception as error:
                message = error.message if isinstance(error, jinja2.TemplateError) else str(error)
                with pytest.raises(ValueError, match=r"refuses|fails") as caught:
                    template.render(messages, **options)
                assert " ".join(message.split())[:80] in str(caught.value), what
            else:
                assert template.encode(tokenizer, messages, **options) == expected, what
                rendered += 1
    assert rendered >= 8


@pytest.mark.parametrize("name", NAMES)
def test_a_final_message_is_continued_as_in_transformers(name, folder_of):
    theirs, template = PreTrainedTokenizerFast.from_pretrained(folder_of(name)), ChatTemplate.read(folder_of(name))
    for text in ("It is", "It is "):
        messages = [user(), reply(text)]
        options = {"tools": TOOLS.get(name), "continue_final_message": True}
        assert template.render(messages, **options) == theirs.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("file", sorted((PUBLISHED / "training").glob("*.jinja")), ids=lambda file: file.stem)
def test_replies_are_those_that_trl_marks(file, folder_of):
    """Without `{% generation %}` replies are found as the template of TRL marks them, but for the line end after them.

    What follows the token that ends a turn is written by the template and never by the model; so is the header, which
    two of the templates of TRL train.
    """
    marked, plain = folder_of(file.stem, file), folder_of(file.stem)
    theirs, template = PreTrainedTokenizerFast.from_pretrained(marked), ChatTemplate.read(marked)
    own, tokenizer = ChatTemplate.read(plain), read_tokenizer(plain)
    compared = 0
    for what, conversation in CONVERSATIONS.items():
        messages = conversation["messages"]
        if what in ("other letters", "no content") or messages[-1]["role"] != "assistant":
            continue  # of a letter of several tokens, transformers takes the first alone
        options = {"tools": conversation.get("tools")}
        try:
            expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        except Exception:
            continue
        ids, trained = template.encode_replies(read_tokenizer(marked), messages, **options)
        assert (ids, trained) == (expected["input_ids"], [bool(one) for one in expected["assistant_masks"]]), what
        try:
            same = own.render(messages, **options) == template.render(messages, **options)
        except ValueError:
            same = False
        if not same:
            continue
        compared += 1
        found = own.encode_replies(tokenizer, messages, **options)
        assert found[0] == read_tokenizer(plain).encode(own.render(messages, **options), add_special_tokens=False).ids
        assert spoken(tokenizer, *found) == spoken(read_tokenizer(marked), ids, trained), what
    assert compared >= 2


def spoken(tokenizer, ids, trained):
    """The texts of replies without the space at their ends."""
    runs, last = [], False
    for token, now in zip(ids, trained, strict=True):
        if now:
            runs = [*runs[:-1], [*runs[-1], token]] if last else [*runs, [token]]
        last = now
    texts = [tokenizer.decode(run, skip_special_tokens=False).strip() for run in runs]
    return [re.sub(HEADER, "", text).strip() for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_every_reply_is_trained_and_no_question(name, folder_of):
    """Several turns, in every template that takes them: the replies with the tokens that end them, and nothing else."""
    template, tokenizer = ChatTemplate.read(folder_of(name)), read_tokenizer(folder_of(name))
    messages = [user("Alpha?"), reply("Beta."), user("Gamma?"), reply("Delta."), user("Epsilon?"), reply("Zeta.")]
    ids, trained = template.encode_replies(tokenizer, messages, TOOLS.get(name))
    assert ids == template.encode(tokenizer, messages, TOOLS.get(name))
    replies = spoken(tokenizer, ids, trained)
    assert len(replies) == 3
    for text, content in zip(replies, ("Beta.", "Delta.", "Zeta."), strict=True):
        assert content in text
    unspoken = tokenizer.decode(
        [token for token, now in zip(ids, trained, strict=True) if not now], skip_special_tokens=False
    )
    assert not re.search(r"Beta|Delta|Zeta", unspoken)
    assert not re.search(r"Alpha|Gamma|Epsilon", " ".join(replies))
    ended = [text for text in replies if not text.endswith(("Beta.", "Delta.", "Zeta."))]
    assert len(ended) >= 2  # the last turn has no end where the next one ends it
    messages[3]["weight"] = 0
    _, weighted = template.encode_replies(tokenizer, messages, TOOLS.get(name))
    assert spoken(tokenizer, ids, weighted) == [replies[0], replies[2]]


@pytest.mark.parametrize("name", NAMES)
def test_replies_of_a_long_conversation_are_found_by_its_parts(name, folder_of):
    """The same ones as by renderings of all of it, with reasoning and where replies are alike."""
    template, tokens = ChatTemplate.read(folder_of(name)), added_tokens(read_tokenizer(folder_of(name)))

    def render(part, begun):
        return template.render(part, TOOLS.get(name), begun)

    messages = []
    for i in range(10):
        thought = {"reasoning_content": f"Hm {i}."} if i % 3 == 1 else {}
        messages += [user(), reply("It is blue." if i % 2 else f"Look {i}.", **thought)]
    text = render(messages, False)
    found = find_by_parts(render, messages, text, tokens)
    assert found == find_each(render, messages, text, tokens)
    assert (text, found) == find_replies(render, messages, tokens)


@pytest.mark.parametrize("header", ["<|{role}|>", "<|{role}{left}|>"])
def test_the_time_to_find_replies_goes_by_the_number_of_turns(header):
    """Where what the template writes of a turn depends on how many follow, it goes by their square."""
    rendered = 0

    def render(part, begun):
        nonlocal rendered
        rendered += len(part)
        heads = [header.format(role=one["role"], left=len(part) - i) for i, one in enumerate(part)]
        text = "".join(f"{head}{one['content']}<|end|>" for head, one in zip(heads, part, strict=True))
        return text + (header.format(role="assistant", left=0) if begun else "")

    messages = [turn for i in range(60) for turn in (user(f"Is it {i}?"), reply("Yes."))]
    text, spans = find_replies(render, messages, ["<|end|>"])
    assert [text[start:end] for start, end in spans] == ["Yes.<|end|>"] * 60
    assert (rendered < 20 * len(messages)) == ("left" not in header)


def test_a_reply_without_weight_is_left_out_of_marked_ones(folder_of):
    marked = folder_of("qwen2.5", PUBLISHED / "training" / "qwen2.5.jinja")
    template, tokenizer = ChatTemplate.read(marked), read_tokenizer(marked)
    messages = [user("Alpha?"), {**reply("Beta."), "weight": 0}, user("Gamma?"), reply("Delta.")]
    assert spoken(tokenizer, *template.encode_replies(tokenizer, messages)) == ["Delta.<|im_end|>"]
    with pytest.raises(ValueError, match="marks 1 parts of 2 replies"):
        trained_spans(messages, [(0, 3)])


def test_the_end_of_a_turn(folder_of):
    ends = {
        "chatml": "<|im_end|>",
        "gpt-oss": "<|return|>",
        "phi-3": "<|end|>",
        "llama-2": "</s>",
        "glm-4.5": "<|user|>",
    }
    for name, token in ends.items():
        tokenizer = read_tokenizer(folder_of(name))
        assert tokenizer.id_to_token(ChatTemplate.read(folder_of(name)).end_of_turn(tokenizer)) == token


QUESTION = [user("Hello")]


def write(folder, **files):
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


FORMS = {
    "a file": {"chat_template.jinja": "A{{ bos_token }}", "tokenizer_config.json": {"bos_token": "<s>"}},
    "a file before a field": {"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}},
    "a field": {
        "tokenizer_config.json": {
            "chat_template": "B{{ eos_token }}",
            "eos_token": {"__type": "AddedToken", "content": "</s>"},
        }
    },
    "named": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "T{{ tools }}"}]
        }
    },
    "files": {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "U"},
    "the old file of special tokens": {
        "tokenizer_config.json": {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<a>"},
        "special_tokens_map.json": {"bos_token": {"content": "<b>", "lstrip": False}, "eos_token": "<c>"},
    },
    "both": {
        "tokenizer_config.json": {
            "chat_template": "{{ bos_token }}{{ eos_token }}",
            "bos_token": "<a>",
            "added_tokens_decoder": {"0": {"content": "<a>", "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "<b>"},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_read_as_transformers_reads_it(form, tmp_path, base_tokenizer):
    write(tmp_path, **{"tokenizer.json": base_tokenizer}, **FORMS[form])
    theirs, template = PreTrainedTokenizerFast.from_pretrained(tmp_path), ChatTemplate.read(tmp_path)
    for tools in (None, [WEATHER]):
        expected = theirs.apply_chat_template(QUESTION, tools=tools, tokenize=False)
        assert template.render(QUESTION, tools) == expected
    template.write(tmp_path)  # over what is there
    again = ChatTemplate.read(tmp_path)
    assert again.texts == template.texts


def test_a_file_takes_the_special_tokens_of_a_folder(tmp_path):
    write(tmp_path, **{"tokenizer_config.json": {"bos_token": "<s>"}, "mine.jinja": "{{ bos_token }}!"})
    assert ChatTemplate.read(tmp_path) is None
    assert ChatTemplate.read(tmp_path, tmp_path / "mine.jinja").render(QUESTION) == "<s>!"


BAD_FOLDERS = {
    "chat_template must be a text, or a list of them": {"tokenizer_config.json": {"chat_template": 3}},
    "with name and template": {"tokenizer_config.json": {"chat_template": [{"name": "default"}]}},
    "has more than 1024 KiB": {"chat_template.jinja": "a" * (1 << 20) + "b"},
    "which none needs": {"tokenizer_config.json": {"chat_template": "a" * (1 << 20) + "b"}},
    "is not UTF-8": {"chat_template.jinja": b"\xff"},
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_bad_folders(message, tmp_path):
    for name, content in BAD_FOLDERS[message].items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / name).write_bytes(data if name.endswith("json") or isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate.read(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_bad_conversations():
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    for messages, message in {
        "Hello": "messages must be a list of objects",
        (): "at least one message",
        ("Hello",): "messages must be a list of objects",
        ((("role", "user"),),): "messages must be a list of objects",
    }.items():
        with pytest.raises(ValueError, match=message):
            template.render(messages)
    with pytest.raises(ValueError, match="holds what JSON can"):
        template.render([user(object())])
    with pytest.raises(ValueError, match="tools must be a list of objects"):
        template.render(QUESTION, [user])
    with pytest.raises(ValueError, match=r"unknown template of the chat template 'rag'; known: default"):
        template.render(QUESTION, name="rag")
    with pytest.raises(ValueError, match="not both"):
        template.render(QUESTION, None, True, continue_final_message=True)
    with pytest.raises(ValueError, match="no reasoning to continue"):
        template.render(QUESTION, continue_final_message="reasoning")
    with pytest.raises(ValueError, match=r"^templates/bad\.jinja is not Jinja: line 1"):
        ChatTemplate({"default": "{% for %}"}, where="templates/bad.jinja").render(QUESTION)
    with pytest.raises(ValueError, match="leaves out parts"):
        ChatTemplate({"default": "content"}).render(QUESTION, continue_final_message=True)


def test_a_reply_that_is_not_written_has_no_tokens(folder_of):
    template = ChatTemplate({"default": "{% for m in messages[::-1] %}{{ m.content|length }};{% endfor %}"})
    with pytest.raises(ValueError, match="message 2: the template does not write this reply"):
        template.encode_replies(read_tokenizer(folder_of("chatml")), [user(), reply(), user()])


HOSTILE = {
    "{{ 'a' * 10**9 }}": "takes more than 512 MiB of memory",
    "{{ 'a'|center(10**9) }}": "takes more than 512 MiB of memory",
    "{{ '%999999999d' % 1 }}": "takes more than 512 MiB of memory",
    "{{ range(10**9) }}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "computes for more than 1 s",
    "{{ 7 ** 99999999 }}": "computes for more than 1 s",
    "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}": "takes more",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "writes more than 16,777,216 characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "calls itself without end",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "SecurityError",
    "{{ namespace(__class__=1) }}": "begins with an underscore",
    "{{ messages.append(1) }}": "SecurityError",
    "{% include '/etc/passwd' %}": "no loader",
    "{% for %}": "is not Jinja: line 1",
    "\n{{ 1 | nothing }}": "is not Jinja: line 2",
    "{{ missing.name }}": "'missing' is undefined",
    "{{ raise_exception('never ' * 999) }}": "refuses this conversation: never",
}


@pytest.mark.skipif(sys.platform != "linux", reason="bounds on memory are those of Linux")
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_templates_end_in_a_sentence(text):
    begun, process = os.times().children_user, TemplateProcess()
    with pytest.raises(ValueError, match=re.escape(HOSTILE[text])) as caught:
        process.render(text, {"messages": QUESTION})
    assert len(str(caught.value)) < 700
    process.end()
    assert os.times().children_user - begun < 2.5  # seconds: one of the template, and the start of a process
    assert process.render("{{ messages[0].content }}", {"messages": QUESTION})[0] == "Hello"


def test_a_process_that_dies_is_said_and_replaced():
    process = TemplateProcess()
    assert process.render("a", {})[0] == "a"
    process.process.kill()
    with pytest.raises(ValueError, match="ended the process"):
        process.render("b", {})
    assert process.render("c", {})[0] == "c"


def test_the_process_ends_with_the_program():
    code = (
        "from phasor.checkpoints.chat_template import ChatTemplate as T; from phasor.checkpoints.template_process "
        "import template_process; import os; T({'default': ''}).render([{}]); p = template_process(os.getpid()); "
        "print(p.process.pid); os.fork() or T({'default': ''}).render([{}])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout.split()[0]), 0)


def test_without_jinja_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"need the package jinja2: pip install 'phasor-transformer\[chat\]'"):
        TemplateProcess().render("a", {})
    monkeypatch.undo()
    monkeypatch.setattr(template_process.importlib.metadata, "version", lambda name: "3.1.5")
    with pytest.raises(ValueError, match=r"the sandbox of jinja2 3\.1\.5 has holes"):
        TemplateProcess().render("a", {})


def test_templates_go_where_a_model_goes(folder_of, tmp_path):
    """Through `save` and `convert` in both formats, from a folder with files and from one with a field."""
    model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=800))
    for i, name in enumerate(("chatml", "llama-3.1")):
        first = tmp_path / f"{i}-first"
        save(model, first, format="hf")
        for file in folder_of(name).iterdir():
            (first / file.name).write_bytes(file.read_bytes())
        if i:  # as older folders have it
            config = json.loads((first / "tokenizer_config.json").read_text())
            config["chat_template"] = (first / "chat_template.jinja").read_text()
            (first / "chat_template.jinja").unlink()
            write(first, **{"tokenizer_config.json": config})
        convert(first, tmp_path / f"{i}-native")
        convert(tmp_path / f"{i}-native", tmp_path / f"{i}-hf")
        save(load(tmp_path / f"{i}-hf"), tmp_path / f"{i}-saved")
        expected = ChatTemplate.read(first).render(QUESTION, add_generation_prompt=True)
        for place in ("native", "hf", "saved"):
            assert ChatTemplate.read(tmp_path / f"{i}-{place}").render(QUESTION, add_generation_prompt=True) == expected


def test_a_model_takes_a_template_of_its_own(folder_of, tmp_path):
    """One that is given to a model is written with it, in place of that of its folder."""
    save(Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=800)), tmp_path / "a", format="hf")
    for file in folder_of("chatml").iterdir():
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    model = load(tmp_path / "a")
    assert ChatTemplate.of(model).texts == ChatTemplate.read(folder_of("chatml")).texts
    model.chat_template = ChatTemplate({"default": "mine"})
    assert ChatTemplate.of(model) is model.chat_template
    save(model, tmp_path / "b")
    assert ChatTemplate.of(load(tmp_path / "b")).texts == {"default": "mine"}
