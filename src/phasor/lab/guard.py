"""What stands in front of the lab's answers: headers of every response, and requests that are refused at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

HEADERS = {
    "Content-Security-Policy": "default-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOCAL = ("127.0.0.1", "localhost", "::1")


class Guard:
    """Middleware that refuses requests by their Host or Origin header and adds security headers to every response.

    A page elsewhere can point its own name at this machine (DNS rebinding): its requests carry that name as their
    host. So a host must be one of `hosts`, or where the server is open to a network a numeric address.
    """

    def __init__(self, app: Any, hosts: Iterable[str] = LOCAL, numeric: bool = False) -> None:
        self.app, self.hosts, self.numeric = app, frozenset(host.lower() for host in hosts), numeric

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self.refusal(scope["method"], Headers(scope=scope))
        app = self.app if refused is None else JSONResponse({"error": refused, "field": None}, 403)
        await app(scope, receive, send_with_headers)

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Why a request is refused, in one sentence, or None.

        Links to this page may stand on others: a browser that follows one opens it in a window alone.
        """
        if len(headers.getlist("host")) != 1 or not self.is_known(headers["host"]):
            return "the Host header does not name this server: open the address that phasor lab printed"
        origin = headers.get("origin")
        if origin is not None and urlsplit_host(origin) != headers["host"].lower():
            return "requests from other pages are refused"
        follows_link = method == "GET" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not follows_link:
            return "requests from other pages are refused"
        return None

    def is_known(self, host: str) -> bool:
        """Whether a Host header names this server, with or without a port."""
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if name is None or parts.netloc != host or parts.username is not None:
            return False
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.numeric


def urlsplit_host(origin: str) -> str | None:
    """The host and port of an origin, or None where it has none.

    >>> urlsplit_host("http://127.0.0.1:8765"), urlsplit_host("null")
    ('127.0.0.1:8765', None)
    """
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
