"""Refusals in OpenAI's form: an object `error` with a sentence, its type, and the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

INVALID, FAILED = "invalid_request_error", "server_error"


class RequestError(Exception):
    """A request that is not answered: the sentence, the status, and the field (`param`) where it is wrong."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        kind: str = INVALID,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.content, self.status, self.headers)


def failure(error: Exception) -> RequestError:
    """What is said of an answer that failed while it was computed: what it says itself where its request is wrong.

    >>> failure(ValueError("logits are not finite")).status
    500
    """
    if isinstance(error, RequestError):
        return error
    return RequestError(f"the answer failed: {error}", 500, kind=FAILED)
