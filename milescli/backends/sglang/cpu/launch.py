"""A quicker start on a CPU: the engine's processes are forked from the one that imported SGLang;
stock imports it thrice."""

from __future__ import annotations

import multiprocessing


def install() -> None:
    """SGLang forces the start method `spawn`, which CUDA needs. Nothing here has touched a device
    or started a thread when it launches its scheduler and detokenizer, so `fork` is sound and saves
    two imports of torch and SGLang."""
    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configure_then_fork(server_args: object) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = configure_then_fork
