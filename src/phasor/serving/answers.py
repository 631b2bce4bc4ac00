"""Answers in OpenAI's form: whole objects, and the chunks of a stream."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from phasor.generation.generated import Generated
from phasor.generation.text import REPLACEMENT
from phasor.serving.submission import Submission


def usage(submission: Submission) -> dict[str, Any]:
    """How many tokens a call took."""
    read, new = submission.prompt_tokens, submission.new_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": submission.cached_tokens},
    }


class AnswerForm:
    """How answers to one call look: the fields that all of them share, and choices as texts or as messages.

    `logprobs` says whether choices have the log-probabilities of their tokens, `ids` whether they have the tokens.
    """

    name: str
    chunk_name: str

    def __init__(self, identity: str, created: int, model: str, tokenizer: Any, logprobs: bool, ids: bool) -> None:
        self.shared = {"id": identity, "created": created, "model": model}
        self.tokenizer, self.logprobs, self.ids = tokenizer, logprobs, ids

    def whole(self, choices: Sequence[Sequence[Generated]], tokens: dict[str, Any]) -> dict[str, Any]:
        """The answer from the pieces of each choice."""
        listed = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text or "" for piece in pieces)
            reason = pieces[-1].finish_reason if pieces else None
            listed.append(self._choice(index, self.content(text), pieces, 0, reason))
        return {**self.shared, "object": self.name, "choices": listed, "usage": tokens}

    def chunk(self, index: int, piece: Generated, offset: int) -> dict[str, Any]:
        """A piece of a choice in a stream, whose text begins at an offset."""
        choice = self._choice(index, self.delta(piece.text or ""), [piece], offset, piece.finish_reason)
        return {**self.shared, "object": self.chunk_name, "choices": [choice]}

    def last(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """The chunk that ends a stream, with the number of tokens."""
        return {**self.shared, "object": self.chunk_name, "choices": [], "usage": tokens}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice, where there is one."""
        return None

    def _choice(
        self, index: int, content: dict[str, Any], pieces: Sequence[Generated], offset: int, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        if self.logprobs:
            choice["logprobs"] = self.log_probabilities(pieces, offset)
        if self.ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
        return choice

    def content(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """The text of a piece."""
        raise NotImplementedError

    def log_probabilities(self, pieces: Sequence[Generated], offset: int) -> dict[str, Any]:
        """The log-probabilities of the tokens of some pieces."""
        raise NotImplementedError

    def text_of(self, token: int) -> str:
        """A token as text: as the tokenizer writes it where it is no whole character, as its number without one."""
        if self.tokenizer is None:
            return str(token)
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return self.tokenizer.id_to_token(token) if REPLACEMENT in text else text


class CompletionForm(AnswerForm):
    """Choices as texts."""

    name = chunk_name = "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    delta = content

    def log_probabilities(self, pieces: Sequence[Generated], offset: int) -> dict[str, Any]:
        tokens = [self.text_of(token) for piece in pieces for token in piece.tokens]
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [value for piece in pieces for value in piece.log_probabilities],
            "top_logprobs": [
                {self.text_of(token): value for token, value in top.items()}
                for piece in pieces
                for top in piece.top_log_probabilities
            ],
            "text_offset": offsets if tokens else [],
        }


class ChatForm(AnswerForm):
    """Choices as messages of the assistant."""

    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def first(self, index: int) -> dict[str, Any]:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self.shared, "object": self.chunk_name, "choices": [choice]}

    def log_probabilities(self, pieces: Sequence[Generated], offset: int) -> dict[str, Any]:
        content = []
        for piece in pieces:
            tops = piece.top_log_probabilities or [{}] * len(piece.tokens)
            for token, value, top in zip(piece.tokens, piece.log_probabilities, tops, strict=True):
                others = [self._entry(other, likely) for other, likely in top.items()]
                content.append({**self._entry(token, value), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.text_of(token)
        is_whole = self.tokenizer.decode([token], skip_special_tokens=False) == text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if is_whole else None}


def embedding_list(vectors: Sequence[Sequence[float]], model: str, tokens: int, encoding: str) -> dict[str, Any]:
    """The answer to /v1/embeddings; vectors as numbers, or as the bytes of float32 in base64."""

    def encode(vector: Sequence[float]) -> Any:
        return vector if encoding == "float" else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": used}
