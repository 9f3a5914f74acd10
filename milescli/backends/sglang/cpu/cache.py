"""The cache of an engine on a CPU is as large as the plan says, whatever other processes take
meanwhile."""

from __future__ import annotations

import psutil


def install() -> None:
    """SGLang looks at the main memory that is left before and after it loads weights, and takes the
    difference for its own: with a trainer rank that loads beside it, it refuses to start. The cache
    needs no such look: command.py always gives `max-total-tokens`. States of linear attention are
    shared out of what was there before."""
    from sglang.srt.mem_cache import kv_cache_configurator as stock

    profile = stock.KVCacheConfigurator._profile_available_bytes

    def available_bytes(self, pre_model_load_memory: float) -> int:
        if self.mambaish_config is None:
            return psutil.virtual_memory().total
        look = stock.get_available_gpu_memory
        stock.get_available_gpu_memory = lambda *_, **__: pre_model_load_memory
        try:
            return profile(self, pre_model_load_memory)
        finally:
            stock.get_available_gpu_memory = look

    stock.KVCacheConfigurator._profile_available_bytes = available_bytes
