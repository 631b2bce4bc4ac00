"""The chat template of a recipe: a file, a built-in one, or that of the tokenizer's folder."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from phasor.checkpoints.chat_template import DEFAULT, ChatTemplate, special_tokens
from phasor.checkpoints.folder import TOKENIZER_CONFIG, read_json
from phasor.config.recipe import Recipe
from phasor.config.schema import unknown
from phasor.data.tokenizers import SpecialIds

BUILT_IN = ("chatml", "plain")
MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>")  # how templates write the tokens around turns
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read_chat_template(recipe: Recipe, folder: Path | None) -> ChatTemplate:
    """The template that a recipe names, or else that of the folder of its tokenizer, if it has one.

    >>> from phasor.config.recipe import DataConfig
    >>> template = read_chat_template(Recipe(task="chat", data=DataConfig(chat_template="plain")), None)
    >>> template.render([{"role": "user", "content": "2 + 2 ="}], bos_token="<bos>")
    '<bos>2 + 2 ='
    """
    name = recipe.data.chat_template
    if name in BUILT_IN:
        text = resources.files("phasor.data").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
        return ChatTemplate({DEFAULT: text}, where=f"the template {name!r}")
    if name is not None:
        if not Path(name).is_file():
            raise ValueError(
                f"data.chat_template is neither a file nor built in: {unknown('template', name, BUILT_IN)}"
            )
        template = ChatTemplate.read(Path(name).parent, name)
        assert template is not None
        return ChatTemplate(template.texts, where=template.where)
    template = None if folder is None else ChatTemplate.read(folder)
    if template is None:
        place = "a new tokenizer has no chat template" if folder is None else f"{folder} has no chat template"
        raise ValueError(
            f"{place}: give data.chat_template, a file or the name of a built-in one ({', '.join(BUILT_IN)})"
        )
    return template


def with_special_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, special: SpecialIds, folder: Path | None
) -> ChatTemplate:
    """The template with the special tokens that it may write: those that the folder names, or else the usual ones."""
    if folder is not None and (folder / TOKENIZER_CONFIG).is_file():
        named = special_tokens(folder, read_json(folder / TOKENIZER_CONFIG))
    else:
        ids = {"bos_token": special.bos, "eos_token": special.eos, "pad_token": special.pad}
        named = {role: str(tokenizer.id_to_token(i)) for role, i in ids.items() if i is not None}
    return ChatTemplate(template.texts, {**named, **template.special}, template.where)


def add_markers(template: ChatTemplate, tokenizer: Tokenizer) -> int:
    """Add the tokens that the template writes around turns and the tokenizer does not have, and how many these are.

    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> add_markers(ChatTemplate({"default": "<|im_start|>{{ messages[0].content }}<|im_end|>"}), tokenizer)
    2
    >>> tokenizer.decode([261, 262], skip_special_tokens=False)
    '<|im_start|><|im_end|>'
    """
    found = dict.fromkeys(marker for text in template.texts.values() for marker in MARKER.findall(text))
    new = [marker for marker in found if tokenizer.token_to_id(marker) is None]
    return int(tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in new]))


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The token that ends a reply; None where the template writes none, and a reply just stops."""
    ids, trained = template.encode_replies(tokenizer, PROBE)
    last = max((place for place, own in enumerate(trained) if own), default=None)
    added = tokenizer.get_added_tokens_decoder()
    return ids[last] if last is not None and ids[last] in added else None


def template_hash(template: ChatTemplate) -> str:
    """A hash of what a template writes."""
    return hashlib.sha256(json.dumps([dict(template.texts), dict(template.special)]).encode()).hexdigest()
