"""Admits requests that have the key and use one of the server's own names: to read, and with
`--control` to start and stop runs. Handles every request before the routes, and adds security
headers to every response. Knows nothing of runs."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milescli.web.responses import BadRequest, Forbidden, Refusal, WrongMethod, to_json

KEY_BYTES = 16
"""128 bits."""
CONTROL = "/api/control/"
"""Requests below this path may change something, if the server allows that."""
COOKIE_S = 90 * 24 * 3600
"""Seconds for which a browser keeps a permanent key."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Browsers run only our files, send no referrer, and do not show the page in a frame."""


def new_key() -> str:
    """Create a random key for one server."""
    return secrets.token_urlsafe(KEY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Decides which requests one server admits."""

    key: str = field(repr=False)
    host: str
    """Host that it listens on, as the user gave it."""
    port: int
    is_permanent: bool = False
    """True if the key stays the same when the server restarts."""
    can_control: bool = False
    """True if the page may start and stop runs."""

    @property
    def cookie(self) -> str:
        """Return the name of the cookie. It includes the port, because browsers share cookies
        between the ports of a host."""
        return f"miles_ui_{self.port}"

    def knows_host(self, header: str | None) -> bool:
        """Return True if a `Host:` header names this server. A foreign page whose name was made to
        point here (DNS rebinding) sends its own name."""
        name = _name_of(header or "")
        if name is None:
            return False
        if is_loopback(name):
            return True
        if is_any(self.host):
            return _is_address(name) or name == socket.gethostname().lower()
        return name == self.host.lower()

    def is_key(self, given: str) -> bool:
        """Return True if the key is right. The time does not depend on how many characters
        match."""
        return hmac.compare_digest(given.encode(), self.key.encode())

    def has_key(self, headers: Headers, pairs: Iterable[tuple[str, str]]) -> bool:
        """Return True if the URL, the cookie, or `Authorization: Bearer` (scrapers) has the key."""
        given = [value for name, value in pairs if name == "key"]
        # that of the standard library reads no cookie behind one that it does not understand
        if (kept := cookie_parser(headers.get("cookie", "")).get(self.cookie)) is not None:
            given.append(kept)
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(value.strip())
        return any(self.is_key(one) for one in given)


class Gated:
    """Wraps an ASGI application with a gate."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing else is spoken here: a WebSocket that nobody accepts is refused

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        response = self._response(scope)
        await (response or self.app)(scope, receive, send_with_headers)

    def _response(self, scope: Scope) -> Response | None:
        """Return the response to a request that is refused or redirected; None to pass it on."""
        headers = Headers(scope=scope)
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        is_changing = scope["method"] == "POST" and scope["path"].startswith(CONTROL)
        if scope["method"] not in ("GET", "HEAD") and not (is_changing and self.gate.can_control):
            refused = refuse(_NO_CONTROL if is_changing else _WRONG_METHOD, path=scope["path"])
            refused.headers["allow"] = "GET, HEAD"
            return refused
        if is_changing and not _is_own_page(headers):
            return refuse(_OTHER_PAGE, path=scope["path"])
        if not self.gate.knows_host(headers.get("host")):
            return refuse(self._foreign_name(headers.get("host")), path=scope["path"])
        if not self.gate.has_key(headers, pairs):
            return refuse(_NO_KEY, path=scope["path"])
        is_given = any(name == "key" for name, _ in pairs)
        return self._with_cookie(headers, pairs) if scope["path"] == "/" and is_given else None

    def _with_cookie(self, headers: Headers, pairs: list[tuple[str, str]]) -> Response | None:
        """Store the key as a cookie, and redirect to the URL without it."""
        rest = urlencode([(name, value) for name, value in pairs if name != "key"])
        response = Response(status_code=303, headers={"location": f"/?{rest}" if rest else "/"})
        if headers.get("sec-fetch-site") == "cross-site":
            # a link in somebody's chat: it would not send a strict cookie where it is sent on to
            response = Response(_STEP_IN, media_type="text/html")
        response.set_cookie(
            self.gate.cookie,
            self.gate.key,
            max_age=COOKIE_S if self.gate.is_permanent else None,
            httponly=True,
            samesite="strict",
            path="/",
        )
        return response

    def _foreign_name(self, host: str | None) -> Refusal:
        return BadRequest(
            f"this server is not called `{(host or '')[:100]}`",
            why="a page of somebody else's may have sent your browser here under a name of its own",
            fix=f"open the URL that `miles ui` printed, at {self.gate.host}",
        )


_STEP_IN = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">\n'
_WRONG_METHOD = WrongMethod(
    "nothing can be changed here",
    why="the page only reads: GET and HEAD are all it knows",
    fix="ask with GET",
)
_NO_CONTROL = WrongMethod(
    "this page may not start or stop runs",
    why="`miles ui` was started without --control",
    fix="miles ui --control",
)
_OTHER_PAGE = Forbidden(
    "another page sent this request",
    why="only the page of `miles ui` itself may start or stop runs, with JSON",
    fix="open the URL that `miles ui` printed",
)


def _is_own_page(headers: Headers) -> bool:
    """Return True if a request comes from our page or not from a browser: other sites cannot send
    JSON here without a preflight request, which this server does not answer."""
    is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
    return is_json and headers.get("sec-fetch-site", "same-origin") == "same-origin"


_NO_KEY = Forbidden(
    "this page needs its key",
    why="the key is missing or wrong",
    fix="open the URL that `miles ui` printed, from ?key= on",
)


def refuse(refusal: Refusal, *, path: str) -> Response:
    """Return the refusal as JSON to the page, as plain text to people."""
    if path.startswith("/api/"):
        data = to_json(refusal.as_json())
        return Response(data, status_code=refusal.status, media_type="application/json")
    fields = refusal.as_json()
    text = f"{fields['what']}\nwhy: {fields['why']}\nfix: {fields['fix']}\n"
    return PlainTextResponse(text, status_code=refusal.status)


def is_any(host: str) -> bool:
    """Return True if the host stands for all addresses of this computer."""
    return host == "" or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)


def is_loopback(host: str) -> bool:
    """Return True if an address or a name stands for this computer alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(header: str) -> str | None:
    """Return the host of a header, `[::1]:80` -> `::1`; None if it is invalid."""
    if header.startswith("["):
        name, _, port = header[1:].partition("]")
        port = port.removeprefix(":")
    else:
        name, _, port = header.partition(":")
    if not name or (port and not port.isdecimal()):
        return None
    return name.lower().rstrip(".")
