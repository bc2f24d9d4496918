"""Errors that a client gets, in the form of OpenAI's API. Torch-free."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1
"""Of 429 and 503: the least that OpenAI's client waits before it asks again."""


class Refused(Exception):
    """A request gets this answer instead of tokens."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_S)}
        # The rest of a body that is not read must not be taken for another request.
        return {"connection": "close"} if self.status in (408, 413) else {}


def invalid(param: str | None, message: str) -> Refused:
    """A mistake in a field of the body."""
    return Refused(400, message, param=param)
