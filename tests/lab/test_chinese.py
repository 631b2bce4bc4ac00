"""Refusals are in the language of the page."""

import ast
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import phasor.lab
from phasor.lab.chinese import SENTENCES, translate
from phasor.lab.server import build_app

CHINESE = re.compile(r"[\u4e00-\u9fff]")
REFUSALS = {"mistake": 0, "ValueError": 0, "FieldError": 1}  # calls, by the number of the argument with the sentence


def sentences():
    """The sentences of refusals in the source of the lab, with a word in place of what differs."""
    for path in Path(phasor.lab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = REFUSALS.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if called is not None and isinstance(node.args[called], ast.Constant | ast.JoinedStr):
                parts = getattr(node.args[called], "values", [node.args[called]])
                texts = [part.value if isinstance(part, ast.Constant) else "word" for part in parts]
                if len("".join(text for text in texts if text != "word").split()) > 1:
                    yield "".join(texts).replace("word at", "word must be at").replace("wordword", "word")


def test_all_refusals_of_the_lab_have_chinese():
    found = set(sentences())
    assert len(found) > 40
    assert not [sentence for sentence in found if not CHINESE.search(translate(sentence))]


@pytest.mark.parametrize("english", SENTENCES)
def test_what_differs_is_kept(english):
    words = [f"w{number}" for number in range(english.count("{}"))]
    chinese = translate(english.format(*words))
    assert re.findall(r"w\d", chinese) == words
    assert CHINESE.search(chinese)


def test_a_refusal_is_in_the_language_of_the_request():
    with TestClient(build_app(), base_url="http://127.0.0.1") as client:
        body = {"start": -1}
        english, chinese = (
            client.post("/api/encodings/matrix", json=body, headers={"Accept-Language": language}).json()
            for language in ("en", "zh-CN")
        )
        assert client.get("/gone", headers={"Accept-Language": "zh-CN"}).json()["error"] == "没有这个文件"
    assert (english["error"], english["field"]) == ("start must be at least 0, not -1", "start")
    assert (chinese["error"], chinese["field"]) == ("start 至少为 0，而不是 -1", "start")
