"""Calls a sandbox over HTTP, as sandbox-fusion serves it: `POST /run_code`. The server isolates the
code; `endpoint` bounds and retries requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milescli.core.errors import MachineError, SandboxError
from milescli.rollout.endpoint import Endpoint
from milescli.sandbox.base import Limits, RunResult, Session
from milescli.sandbox.local import encode_files

PATH = "/run_code"
_SLACK_S = 30.0
"""Time for a request beyond the run's own wall time: the server may have a queue."""
_OVERHEAD_BYTES = 1 << 20
_TIME_IS_UP = "TimeLimitExceeded"


class RemoteSandbox:
    """Runs code on a server. Sends the limits on wall time and memory, and truncates output itself;
    it has no sessions."""

    kind = "remote"

    def __init__(self, url: str, *, retries: int = 3) -> None:
        """Connect to the server at `url`, given without the path."""
        self.url, self._retries = url.rstrip("/"), retries

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> RunResult:
        """Run the code as a Python program. Raises SandboxError."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "files": encode_files(files),
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_bytes // 1024**2,
        }
        endpoint = self._endpoint(limits)
        reply = await endpoint.post(body, PATH)
        if not isinstance(reply, dict) or reply.get("status") == "SandboxError":
            raise endpoint.failure(f"it replied {reply!r:.300}")
        result = reply.get("run_result")
        if not isinstance(result, dict):
            raise endpoint.failure(f"it replied without a run_result: {reply!r:.300}")
        return _read_result(result, limits)

    async def open(
        self,
        *,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> Session:
        """Raise MachineError: a remote sandbox has no sessions."""
        raise MachineError(
            "a remote sandbox does not support sessions",
            why=f"{self.url}{PATH} only runs whole programs and keeps no state between them",
            fix="apt-get install bubblewrap   # then the code runs on this machine",
        )

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    def _endpoint(self, limits: Limits) -> Endpoint:
        return Endpoint(
            caller="the sandbox",
            section="rollout.code",
            error=SandboxError,
            url=self.url,
            timeout_s=limits.wall_s + _SLACK_S,
            retries=self._retries,
            max_reply_bytes=2 * limits.output_bytes + _OVERHEAD_BYTES,
        )


def _read_result(result: dict[str, Any], limits: Limits) -> RunResult:
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    kept = stdout[: limits.output_bytes]
    rest = stderr[: limits.output_bytes - len(kept)]
    is_cut = len(kept) + len(rest) < len(stdout) + len(stderr)
    code, seconds = result.get("return_code"), result.get("execution_time")
    is_late = result.get("status") == _TIME_IS_UP
    has_exited = isinstance(code, int) and not is_late and code >= 0
    return RunResult(
        stdout=kept,
        stderr=rest,
        exit_code=code if has_exited else None,
        ended="timeout" if is_late else "exited" if has_exited else "killed",
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        is_truncated=is_cut,
        why="wall time" if is_late else "" if has_exited else str(result.get("status")),
    )
