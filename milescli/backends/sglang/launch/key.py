"""Manages the API key of a run: engines refuse every request without it, except for health checks.

It is passed in the environment of a process, never in its arguments, since SGLang writes its own
arguments into its log and into /server_info."""

from __future__ import annotations

import os
import sys

KEY_VARIABLE = "MILES_ENGINE_KEY"
"""Set by EngineServer for the process that it starts, which removes it again."""


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the headers of a request; empty without a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


_changed: str | None = None


def change_key(api_key: str) -> None:
    """Replace the key of this process: after a fork, by that of the run whose engine the process
    became."""
    global _changed
    _changed = api_key


def take_key() -> str | None:
    """Remove the key from this process's environment and return it. Children do not inherit it
    afterwards, and no report of the environment shows it."""
    return os.environ.pop(KEY_VARIABLE, None)


def install(api_key: str) -> None:
    """Put SGLang's own check before every endpoint of this process, with a key that does not appear
    in its arguments. The check does not cover websockets, so these are removed. Called by the
    plug-in, before SGLang imports its HTTP server."""
    from sglang.srt.utils import auth
    from starlette.routing import WebSocketRoute

    assert "sglang.srt.entrypoints.http_server" not in sys.modules, (
        "SGLang's HTTP server was imported before the plug-in"
    )
    add_check = auth.add_api_key_middleware

    def add_check_with_key(app, **_: object) -> None:
        from sglang.srt.entrypoints import http_server

        # SGLang would ask for it without the key, and the refusal's traceback would stand among the
        # last lines of the log; EngineServer asks for it
        http_server._freeze_gc_after_server_warmup = lambda server_args: None
        app.router.routes[:] = [
            route for route in app.router.routes if not isinstance(route, WebSocketRoute)
        ]
        add_check(app, api_key=_changed or api_key, admin_api_key=None)

    auth.add_api_key_middleware = add_check_with_key
    # what makes SGLang add the check although its arguments have no key
    auth.app_has_admin_force_endpoints = lambda app: True
