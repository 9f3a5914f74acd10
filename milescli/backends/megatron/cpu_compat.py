"""Makes unmodified Megatron-Core run on a machine without an accelerator, over gloo. Trainer
processes (and export) install it before they import megatron; it changes torch process-wide, so no
other process may import it. It does nothing on a machine with CUDA."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from milescli.backends.megatron.cpu import collectives
from milescli.core.imports import without_gc, without_packages
from milescli.plan.types import Plan
from milescli.platform import exact
from milescli.platform.allocation import keep_freed_memory
from milescli.platform.no_compiler import disable_compiler

_TRACKERS = ("wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """Import Megatron as if no experiment tracker were installed: importing wandb takes half as
    long as all of Megatron-Core, and miles does not use it through Megatron."""
    with without_gc(), without_packages(*_TRACKERS):
        import megatron.core.inference.contexts
        import megatron.core.timers  # noqa: F401


def define_te_gemm() -> None:
    """Define `te_general_gemm`, which a router compares with None although it may be undefined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)


def install() -> bool:
    """Redirect the CUDA runtime to the host, once. Return False and change nothing if there is an
    accelerator."""
    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, "_miles_on_host", False):
        torch.cuda._miles_on_host = True
        _redirect_runtime()
        _redirect_generator()
        _redirect_factories()
        _rename_tensor_types()
        # Megatron-Core decorates two dozen functions as it is imported, before its own switch
        # (`jit.disable_jit_fuser`) can be reached
        disable_compiler()
        collectives.install()
        import_megatron()
        _patch_megatron()
        keep_freed_memory()
    return True


def select_device(plan: Plan) -> torch.device:
    """Return the CPU, or the one accelerator that this process sees, and make it current. Call it
    once, before the process imports Megatron."""
    # it announces every layer and buffer, and warns of what this package has chosen on purpose
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if install():
        torch.set_num_threads(plan.cpu_threads)
        if plan.on_policy == "exact":
            exact.turn_on()
            _route_exactly()
        return torch.device("cpu")
    import_megatron()
    if plan.on_policy == "exact":
        from megatron.core.transformer.custom_layers import batch_invariant_kernels

        batch_invariant_kernels.enable_batch_invariant_mode()
    from milescli.backends.megatron.layers.attention import avoid_cudnn

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    avoid_cudnn()
    return device


def _redirect_runtime() -> None:
    """Replace torch.cuda.<stream, event, device> by their torch.cpu namesakes, which do nothing."""
    for name in ("current_device", "set_device", "device_count", "synchronize", "stream"):
        setattr(torch.cuda, name, _forward(getattr(torch.cpu, name)))
    # fresh classes: torch._dynamo refuses one object under two names
    torch.cuda.Stream = type(
        "Stream",
        (torch.cpu.Stream,),
        {"record_event": lambda self, event=None: event or torch.cuda.Event()},
    )
    torch.cuda.Event = type("Event", (torch.cpu.Event,), {})
    only_stream = torch.cuda.Stream()
    torch.cuda.current_stream = lambda device=None: only_stream
    torch.cuda.default_stream = lambda device=None: only_stream
    torch.cuda.empty_cache = lambda: None


def _forward(target: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: target(*args, **kwargs)


def _redirect_generator() -> None:
    """Use the CPU generator as the CUDA generator."""
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: (
        torch.get_rng_state()
    )
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, device=None: (
        torch.set_rng_state(state)
    )
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)


def _host(device: Any) -> Any:
    return "cpu" if device is not None and str(device).startswith("cuda") else device


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `device="cuda"` and `pin_memory` mean plain host memory."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        return function(*args, **kwargs)

    return redirected


def _redirect_factories() -> None:
    """Redirect a literal device="cuda" in factories, .cuda() and .to("cuda")."""
    _device_constructors()  # `with torch.device(...)` knows factories by identity, as they are now
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    to = _on_host(torch.Tensor.to)

    def to_host(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(
            self,
            *(_host(arg) if isinstance(arg, str | torch.device) else arg for arg in args),
            **kwargs,
        )

    torch.Tensor.to = to_host
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _rename_tensor_types() -> None:
    """Let Tensor.type() return 'torch.cuda.*Tensor', which Megatron compares with."""
    plain = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            plain(self, *args, **kwargs)
            if args or kwargs
            else plain(self).replace("torch.", "torch.cuda.", 1)
        )

    torch.Tensor.type = named


def _patch_megatron() -> None:
    """Replace what Megatron-Core 0.16.1 assumes of CUDA beyond torch."""
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import mlp

    from milescli.backends.megatron.cpu import linear, swiglu

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        setattr(layers, name, linear.faster(getattr(layers, name)))
    mlp.bias_swiglu_impl, mlp.weighted_bias_swiglu_impl = swiglu.swiglu, swiglu.weighted_swiglu
    from megatron.core.transformer.moe import token_dispatcher

    define_te_gemm()
    # split sizes are turned into numpy only `if tensor.is_cuda`
    token_dispatcher.maybe_move_tensor_to_cpu = _maybe_to_numpy


def _route_exactly() -> None:
    """Make routers multiply, and experts be summed in float32, exactly as the engine does it."""
    from megatron.core.transformer.moe import router, token_dispatcher

    from milescli.backends.megatron.cpu import linear

    def gate(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        out = linear.product(x, weight).to(dtype)
        return out if bias is None else out + bias.to(dtype)

    add_up = token_dispatcher.unpermute

    def unpermute(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return add_up(tokens.float(), *args, **kwargs).to(tokens.dtype)

    router.router_gating_linear, token_dispatcher.unpermute = gate, unpermute


def _maybe_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
