"""A real engine on a CPU that serves an adapter, or two. Used by tests of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from tests.backends.sglang.warm_engines import engine_of


@contextmanager
def adapter_engine(
    folder: Path, model: Path, adapter: Path | None, **more: object
) -> Iterator[EngineAddress]:
    """It answers within. `folder`: of its log; `adapter`: that it begins with; `more`: see
    EngineSpec."""
    spec = EngineSpec(
        model_dir=model,
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=free_ports(1)[0],
        log_path=folder / f"{model.name}.log",
        adapter_dir=adapter,
        context_length=512,
        max_running_requests=8,
        **more,  # type: ignore[arg-type]
    )
    server = engine_of(spec)
    try:
        server.start()
        server.wait_ready(400)
        yield EngineAddress(url=spec.url, name=spec.name, tp=1, sharing_ranks=[0])
    finally:
        server.stop()
