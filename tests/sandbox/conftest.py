"""Each kind of sandbox that works on this machine, begun once for all tests; others are skipped,
with their reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from milescli.sandbox.base import Limits, RunResult
from milescli.sandbox.choose import fault_of, kinds
from milescli.sandbox.local import LocalSandbox

LIMITS = Limits(wall_s=20.0, cpu_s=20.0, memory_bytes=256 * 1024**2)
"""Of tests that are about something else: they are generous, as the machine may be busy."""

Run = Callable[..., RunResult]


@pytest.fixture(scope="session", params=list(kinds()))
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    """One of each kind."""
    if fault := fault_of(request.param):
        pytest.skip(f"{request.param}: {fault}")
    made = kinds()[request.param](None)
    yield made
    made.close()


@pytest.fixture
def run(sandbox: LocalSandbox) -> Run:
    """`run(code, wall_s=1.0, files=...)`: limits by their names."""

    def call(code: str, *, stdin: str = "", files: Any = None, **limits: Any) -> RunResult:
        bounds = replace(LIMITS, **limits)
        return asyncio.run(sandbox.run(code, stdin=stdin, files=files, limits=bounds))

    return call
