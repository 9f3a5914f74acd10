"""Starts and stops the router before the engines, as a child process of whoever holds a
RouterServer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from milescli.backends.sglang.launch.key import KEY_VARIABLE
from milescli.backends.sglang.launch.process import ManagedProcess
from milescli.core.private import without_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Describes the router before the engines."""

    worker_urls: tuple[str, ...]
    port: int
    metrics_port: int
    log_path: Path
    host: str = "127.0.0.1"
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send, and that the router sends to the engines."""
    policy: str = "cache_aware"
    max_concurrent_requests: int = 4096
    request_timeout_s: int = 3600

    @property
    def url(self) -> str:
        """Return http://host:port."""
        return f"http://{self.host}:{self.port}"


class RouterServer(ManagedProcess):
    """Runs one sglang-router."""

    def __init__(self, spec: RouterSpec) -> None:
        """Prepare the process without starting it. Its workers should be ready before it starts:
        then it is ready at once."""
        self.spec = spec
        if spec.worker_urls:  # 200 once one is registered; without any, it never is
            self.ready_path = "/readiness"
        command = [
            sys.executable,
            "-m",
            "milescli.backends.sglang.launch.router_process",
            "--worker-urls",
            *spec.worker_urls,
        ]
        arguments = {
            "host": spec.host,
            "port": spec.port,
            "prometheus-port": spec.metrics_port,
            "prometheus-host": spec.host,
            "policy": spec.policy,
            "max-concurrent-requests": spec.max_concurrent_requests,
            "queue-size": spec.max_concurrent_requests,
            "worker-startup-check-interval": 1,
            "request-timeout-secs": spec.request_timeout_s,
            "log-level": "warn",
        }
        # a failure is ours to name, at once
        command += ["--disable-retries", "--disable-circuit-breaker"]
        command += [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        super().__init__(
            name="router",
            command=command,
            env=_router_environment(spec),
            log_path=spec.log_path,
            url=spec.url,
        )


def _router_environment(spec: RouterSpec) -> dict[str, str]:
    """Return our environment without proxies, through which the router would send requests and key,
    and without secrets."""
    ours = without_secrets(os.environ)
    env = {name: value for name, value in ours.items() if not name.lower().endswith("_proxy")}
    return env if spec.api_key is None else env | {KEY_VARIABLE: spec.api_key}
