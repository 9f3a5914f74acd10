"""How an engine on a CPU starts and serves: its processes are forked, its folder must fill every
weight, its cache is as large as the plan says, and a streamed response that is wanted as a whole is
sent at its end."""

from __future__ import annotations

import multiprocessing

import psutil
import torch

from milescli.backends.sglang.client.batching import ONLY_WHEN_DONE
from milescli.backends.sglang.inside.quantised import NEVER_SENT
from milescli.backends.sglang.inside.verify import is_missing, unsent
from milescli.core.units import format_few


def install() -> None:
    """Install the corrections of this module."""
    _install_fork()
    install_cache_size()
    _install_whole_responses()
    _install_complete_weights()


def _install_complete_weights() -> None:
    """End an engine at its start where the folder does not fill a parameter that SGLang makes.
    SGLang allocates weights without setting them and skips names that it does not know, so that
    such a parameter would be whatever lay in memory. Wraps the loading of a folder, at the start
    and from disk later."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    assert weight_updater.DefaultModelLoader is DefaultModelLoader
    load = DefaultModelLoader.load_weights_only

    def load_whole(model, weights, target_device):
        mark(model)
        load(model, weights, target_device)
        is_mtp = type(model).__module__.endswith(("_nextn", "_mtp"))
        shared = _SHARED if is_mtp else ()
        if missing := [name for name in unfilled(model) if name not in shared]:
            shown = format_few(missing, 3)
            raise SystemExit(f"miles: the folder does not fill what SGLang's model has: {shown}")

    DefaultModelLoader.load_weights_only = staticmethod(load_whole)


_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights that an MTP layer takes from the model after loading its own."""


@torch.no_grad()
def mark(model: torch.nn.Module) -> None:
    """Set every weight to NaN until it is loaded, packed numbers and scales of integers to -1. What
    nobody sends keeps SGLang's default."""
    for name, parameter in model.named_parameters():
        if not name.endswith(NEVER_SENT):
            parameter.fill_(unsent(parameter))


@torch.no_grad()
def unfilled(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters that still contain NaN, or nothing but -1. SGLang fills its
    own padding."""

    def is_unfilled(weight: torch.Tensor) -> bool:
        missing = is_missing(weight)
        return bool(missing.any() if weight.is_floating_point() else missing.all())

    return [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not name.endswith(NEVER_SENT) and is_unfilled(weight)
    ]


def _install_fork() -> None:
    """Fork the engine's processes from the one that imported SGLang; stock SGLang imports it three
    times. It forces the start method `spawn`, which CUDA needs. Nothing here has touched a device
    or started a thread when it launches its scheduler and detokenizer, so `fork` is sound and saves
    two imports of torch and SGLang."""
    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configure_then_fork(server_args: object) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = configure_then_fork


def install_cache_size() -> None:
    """Make the cache as large as the plan says, regardless of other processes. SGLang compares free
    main memory before and after it loads weights, and attributes the difference to itself: beside a
    trainer rank that loads, it refuses to start. The comparison is not needed: command.py always
    sets `max-total-tokens`. States of linear attention are sized by the memory before."""
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


def _install_whole_responses() -> None:
    """Send nothing of a streamed response before its end where it is wanted as a whole, and leave
    nothing behind it. By itself SGLang sends the first token of every stream: without that, 256
    responses of 32 tokens take 6 % less time. And it looks two seconds after a stream whether its
    requests are to be aborted, for which an engine that is told to end would wait."""
    from sglang.srt.managers.scheduler_components import output_streamer
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.background import BackgroundTask

    accumulator = output_streamer._GenerationStreamAccumulator
    accept = accumulator.accept

    def accept_when_done(self, *, req):
        if req.sampling_params.stream_interval != ONLY_WHEN_DONE or req.finished():
            accept(self, req=req)

    accumulator.accept = accept_when_done
    create_abort_task = TokenizerManager.create_abort_task

    def abort_what_is_left(self, obj):
        background = create_abort_task(self, obj)
        (late,) = background.tasks

        async def at_once_unless_left():
            if any(request in self.rid_to_state for request in _ids(obj)):
                await late()

        background.tasks[:] = [BackgroundTask(at_once_unless_left)]
        return background

    TokenizerManager.create_abort_task = abort_what_is_left


def _ids(obj) -> list[str]:
    return [obj.rid] if obj.is_single else obj.rid
