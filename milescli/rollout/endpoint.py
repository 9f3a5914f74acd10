"""A client of a server over HTTP: each request is bounded, retried after temporary failures, and
counted. Used by the rewards `judge` and `remote`, and to evaluate a model behind an endpoint;
belongs to one event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from milescli.core.errors import MilesError, RecipeError, RewardError
from milescli.core.files import parse_json

CHAT_PATH = "/chat/completions"
"""Path of chat completions at an OpenAI-compatible endpoint, below its version."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Longest pause between two attempts, whatever the server asks for."""
MAX_REPLY_BYTES = 4 * 1024**2
_SHOWN_CHARACTERS = 300
_TEXT_FIELDS = ("reasoning_content", "reasoning", "refusal", "tool_calls", "audio")
_TEMPORARY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class _TemporaryFailure(Exception):
    """Reports a temporary failure, and its cause."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """Sends requests to one server, and retries those that fail temporarily."""

    caller: str
    """Who sends the requests, for errors: the reward `judge`."""
    section: str
    """Section of the recipe that holds the endpoint's settings."""
    error: type[MilesError] = RewardError
    """Error class that a failure raises."""
    url: str
    timeout_s: float
    """Bound on one request."""
    retries: int
    api_key_env: str | None = None
    max_reply_bytes: int = MAX_REPLY_BYTES
    max_requests: int | None = None
    num_requests: int = 0
    """Number of requests sent so far, retries included."""
    without_content: Counter[str] = field(default_factory=Counter)
    """Field that has the text -> number of replies to `chat_reply` without content."""
    _key: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Read the key. Raises RecipeError if the environment does not have it."""
        if self.api_key_env is None:
            return
        self._key = os.environ.get(self.api_key_env)
        if not self._key:
            raise RecipeError(
                f"{self.caller} needs an API key",
                why=f"`{self.section}.api_key_env` is {self.api_key_env}, which is not defined "
                "in the environment",
                fix=[f"export {self.api_key_env}=...", f"--set {self.section}.api_key_env=null"],
            )
        if any(sign.isspace() or not sign.isprintable() for sign in self._key):
            raise RecipeError(
                f"the key of {self.caller} cannot be sent",
                why=f"{self.api_key_env} contains a blank or a line break",
                fix=f"export {self.api_key_env}=...",
            )

    async def post(self, body: dict[str, Any], path: str = "") -> Any:
        """Post `body` to `path` below the URL, and return the parsed reply. Raises `error` after
        `retries` + 1 attempts with temporary failures; at once if the server refuses, its reply is
        no JSON, or the budget is spent."""
        return await self._request("POST", path, body)

    async def get(self, path: str) -> Any:
        """Get `path` below the URL, and return the parsed reply. Raises as `post`."""
        return await self._request("GET", path, None)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        for attempt in range(1, self.retries + 2):
            self._count_request()
            try:
                return await self._request_once(method, path, body)
            except _TemporaryFailure as failed:
                if attempt > self.retries:
                    raise self.failure(f"{failed} (attempt {attempt} of {attempt})") from None
                await asyncio.sleep(_pause_s(attempt, failed.after_s))
        raise AssertionError(f"no attempt was made: retries {self.retries}")

    async def chat_reply(self, body: dict[str, Any], *fixes: str) -> str:
        """Return the model's reply to the messages of `body`, a chat completion; empty if it has no
        content. Raises as `post`, and if the reply is not a chat completion, with `fixes`."""
        reply = await self.post(body, CHAT_PATH)
        try:
            message = reply["choices"][0]["message"]
            content = message.get("content") or ""
            assert isinstance(content, str), "its content is no text"
            if not content and (other_field := text_outside_content(message)):
                self.without_content[other_field] += 1
        except (KeyError, IndexError, TypeError, AttributeError, AssertionError):
            raise self.failure(
                f"its reply is none of a chat completion: {reply!r:.200}", *fixes
            ) from None
        return content

    def failure(self, why: str, *fixes: str) -> MilesError:
        """Return the error for the user, with the key removed from whatever the server replied."""
        if self._key:
            why = why.replace(self._key, "***")
        return self.error(
            f"{self.caller} failed at {self.url}",
            why=why,
            fix=[*fixes, f"curl -i {self.url}   # does it respond?"],
        )

    def _count_request(self) -> None:
        if self.max_requests is not None and self.num_requests >= self.max_requests:
            raise self.failure(
                f"its budget of {self.max_requests} requests is spent",
                f"--set {self.section}.max_requests={2 * self.max_requests}",
            )
        self.num_requests += 1

    async def _request_once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        proxy = proxy_for(self.url, os.environ)
        bound = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=bound) as session,
                # a redirect would take the key elsewhere
                session.request(
                    method,
                    self.url + path,
                    json=body,
                    headers=headers,
                    allow_redirects=False,
                    proxy=proxy,
                ) as reply,
            ):
                text = await _bounded_text(reply, self.max_reply_bytes)
                status, after = reply.status, reply.headers.get("Retry-After", "")
        except TimeoutError:
            raise _TemporaryFailure(f"no reply within {self.timeout_s:g} s") from None
        except _TooLong:
            raise self.failure(f"its reply is longer than {self.max_reply_bytes} bytes") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            through = f" through the proxy {_without_login(proxy)}" if proxy else ""
            raise _TemporaryFailure(f"no connection{through}: {error}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise self.failure(f"the request could not be sent: {error}") from None
        if status in _TEMPORARY_STATUSES:
            seconds = float(after) if after.isascii() and after.isdigit() else None
            raise _TemporaryFailure(f"HTTP {status}: {text[:_SHOWN_CHARACTERS]}", after_s=seconds)
        if status != 200:
            raise self.failure(f"HTTP {status}: {text[:_SHOWN_CHARACTERS]}")
        try:
            return parse_json(text)
        except ValueError:
            raise self.failure(f"its reply is no JSON: {text[:_SHOWN_CHARACTERS]!r}") from None


def proxy_for(url: str, environ: Mapping[str, str]) -> str | None:
    """Return the proxy that curl would use for `url`; None: it connects directly. `http_proxy`
    (only in small letters), `https_proxy` or `HTTPS_PROXY`, else `all_proxy`; `no_proxy` lists
    hosts, ends of host names, and networks (10.0.0.0/8) without a proxy, or `*`."""
    parts = urlsplit(url)
    names = ["http_proxy"] if parts.scheme == "http" else ["https_proxy", "HTTPS_PROXY"]
    proxy = next(filter(None, map(environ.get, [*names, "all_proxy", "ALL_PROXY"])), None)
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if proxy is None or _is_exempt(parts.hostname or "", exempt):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_exempt(host: str, exempt: str) -> bool:
    host = host.lower().rstrip(".")
    for entry in exempt.lower().replace(",", " ").split():
        name = entry.partition(":")[0] if entry.count(":") == 1 else entry.strip("[]")
        name = name.strip(".")
        if name in ("*", host) or (name and host.endswith(f".{name}")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
        except ValueError:  # a name on either side
            continue
    return False


def _without_login(proxy: str) -> str:
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"


def text_outside_content(message: Mapping[str, Any]) -> str | None:
    """Return the field of a chat message without content that holds its text, as with servers that
    have a reasoning parser; None if the message is empty."""
    return next((name for name in _TEXT_FIELDS if message.get(name)), None)


def base_url(url: str) -> str:
    """Return the URL of an OpenAI-compatible endpoint up to its version, without the path of chat
    completions."""
    return url.rstrip("/").removesuffix(CHAT_PATH)


class _TooLong(Exception):
    """Reports a reply that is larger than the limit."""


async def _bounded_text(reply: Any, max_bytes: int) -> str:
    pieces, size = list[bytes](), 0
    async for piece in reply.content.iter_chunked(1 << 16):
        size += len(piece)
        if size > max_bytes:
            raise _TooLong
        pieces.append(piece)
    return b"".join(pieces).decode("utf-8", "replace")


def _pause_s(attempt: int, after_s: float | None) -> float:
    """Return the pause before the next attempt: doubled each time, and random by half, so that
    requests that failed together do not return together; never less than the server asks for, up to
    the bound."""
    pause = FIRST_PAUSE_S * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)
    return min(MAX_PAUSE_S, max(pause, after_s or 0.0))
