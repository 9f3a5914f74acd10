"""A sandbox behind HTTP, as sandbox-fusion serves it: `POST /run_code`. What contains the code is
that server's matter; here requests are bounded, tried again, and named."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

from milescli.core.errors import EndpointError, MachineError
from milescli.sandbox.base import Limits, Ran, Session
from milescli.sandbox.local import encoded

PATH = "/run_code"
_SLACK_S = 30.0
"""For a request beyond the run's own wall time: the server may have a queue."""
_FOR_A_WHILE = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Between two attempts; doubled each time."""
_ROOM_BYTES = 1 << 20
_TIME_IS_UP = "TimeLimitExceeded"


class RemoteSandbox:
    """See Sandbox. Of the limits it sends wall time and memory, and cuts output; it has no
    sessions."""

    kind = "remote"

    def __init__(self, url: str, *, retries: int = 3) -> None:
        """`url`: of the server, without the path."""
        self.url, self._retries = url.rstrip("/"), retries

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> Ran:
        """See Sandbox. Raises EndpointError."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "files": encoded(files),
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_bytes // 1024**2,
        }
        reply = await self._post(body, limits)
        if not isinstance(reply, dict) or reply.get("status") == "SandboxError":
            raise self._failure(f"it replied {reply!r:.300}")
        result = reply.get("run_result")
        if not isinstance(result, dict):
            raise self._failure(f"it replied without a run_result: {reply!r:.300}")
        return _ran(result, limits)

    async def open(
        self,
        *,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> Session:
        """Raises MachineError."""
        raise MachineError(
            "a remote sandbox has no sessions",
            why=f"{self.url}{PATH} runs whole programs and keeps nothing between them",
            fix="apt-get install bubblewrap   # and run the code on this machine",
        )

    def close(self) -> None:
        """There is nothing to end."""

    async def _post(self, body: dict[str, Any], limits: Limits) -> Any:
        import aiohttp

        bound = aiohttp.ClientTimeout(total=limits.wall_s + _SLACK_S)
        most = 2 * limits.output_bytes + _ROOM_BYTES
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(_pause_s(attempt))
            try:
                async with (
                    aiohttp.ClientSession(timeout=bound) as session,
                    session.post(self.url + PATH, json=body, allow_redirects=False) as reply,
                ):
                    raw = await _bounded(reply.content, most)
                    status = reply.status
            except TimeoutError:
                told = f"no reply within {bound.total:g} s"
                continue
            except aiohttp.ClientError as error:
                told = f"no connection: {error}"
                continue
            text = raw.decode("utf-8", "replace")
            if status == 200:
                try:
                    return json.loads(text)
                except (ValueError, RecursionError):
                    raise self._failure(
                        f"its reply is no JSON, or longer than {most} bytes: {text[:200]!r}"
                    ) from None
            told = f"HTTP {status}: {text[:300]}"
            if status not in _FOR_A_WHILE:
                raise self._failure(told)
        raise self._failure(f"{told} (attempt {self._retries + 1} of {self._retries + 1})")

    def _failure(self, why: str) -> EndpointError:
        where = self.url + PATH
        return EndpointError(
            f"the sandbox at {where} failed", why=why, fix=f"curl -i {where}   # does it answer?"
        )


async def _bounded(content: Any, most: int) -> bytes:
    """One byte more than `most` where there is more."""
    pieces, size = list[bytes](), 0
    async for piece in content.iter_chunked(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            break
    return b"".join(pieces)[: most + 1]


def _ran(result: dict[str, Any], limits: Limits) -> Ran:
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    kept = stdout[: limits.output_bytes]
    rest = stderr[: limits.output_bytes - len(kept)]
    is_cut = len(kept) + len(rest) < len(stdout) + len(stderr)
    code, seconds = result.get("return_code"), result.get("execution_time")
    is_late = result.get("status") == _TIME_IS_UP
    has_exited = isinstance(code, int) and not is_late and code >= 0
    return Ran(
        stdout=kept,
        stderr=rest,
        exit_code=code if has_exited else None,
        ended="timeout" if is_late else "exited" if has_exited else "killed",
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        is_truncated=is_cut,
        why="wall time" if is_late else "" if has_exited else str(result.get("status")),
    )


def _pause_s(attempt: int) -> float:
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)
