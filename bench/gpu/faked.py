"""Whether the kit's engine would import and compile on a Hopper GPU, seen without one:
`python bench/gpu/faked.py [--compile]` after `source bench/gpu/unpack.sh all`.

torch.cuda is made to say that there is one H100, and SGLang's server, scheduler, models, attention
backend and compiled kernels are imported as they are there, and its own rules applied to the
command line that miles starts it with. `--compile` also builds, for sm_90a, the kernels that
SGLang compiles at first use on the kit's path, into SGLang's own cache, and says how long each
took; on the GPU machine that can be done while the trainer is measured. It needs nvcc, a C++
compiler and ninja, and no GPU. Nothing is computed: no CUDA call is made, no kernel runs, and where
there is no driver a stand-in for its library refuses every call. Ends with 0 where all went well,
and else names the first thing that did not.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from abi import read_symbols  # beside this script

NAME, CAPABILITY, MEMORY_BYTES = "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30
DRIVER = "libcuda.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE, what the stand-in for the driver answers."""
MODULES = (
    "sgl_kernel",
    "flashinfer",
    "torch_memory_saver",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops",
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
)
RESOLVED = (
    "attention_backend",
    "sampling_backend",
    "disable_radix_cache",
    "chunked_prefill_size",
    "mem_fraction_static",
    "cuda_graph_config",
)
KV_HEADS = ((2, 32), (8, 128))
"""Heads and their size, of the quickstart's model and of Qwen3 0.6B."""
FUSED_ROPE_DIMS = (64, 128, 256, 512)
"""Sizes of heads for which SGLang has a fused kernel; others take `rotary_embedding`."""


def fake_device() -> None:
    """torch.cuda says that there is one H100."""
    properties = SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=227 * 2**10,
        L2_cache_size=50 * 2**20,
    )
    said: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    }
    for name, function in said.items():
        setattr(torch.cuda, name, function)


def stand_in_for_driver(libraries: Iterable[Path], folder: Path) -> None:
    """Where no driver is installed: a library of its name that has what the others want of it."""
    try:
        ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    wanted = {
        name
        for library in libraries
        for name in read_symbols(library).undefined
        if name.startswith("cu") and name[2:3].isupper()
    }
    source = folder / "driver.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(wanted)),
        encoding="utf-8",
    )
    library = folder / DRIVER
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(library), str(source)],
        check=True,
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def resolve_arguments(folder: Path, *further: str) -> dict[str, object]:
    """What SGLang makes of miles' own command line for Qwen3 0.6B on this device. Reads no
    weights."""
    from checks import Visit
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args
    from shapes import config_of

    from milescli.backends.sglang.launch.command import engine_command
    from milescli.backends.sglang.launch.spec import EngineSpec

    config = config_of("qwen3-0.6b", Visit(device="cuda", folder=folder))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = EngineSpec(
        model_dir=folder,
        tokenizer_dir=None,
        device_kind="cuda",
        precision="bf16",
        port=30_000,
        log_path=folder / "log",
        extra_args=further,
    )
    arguments = prepare_server_args(engine_command(spec)[3:])
    arguments.resolve_once()
    view = resolved_view(arguments)
    return {name: str(getattr(view, name)) for name in RESOLVED}


def kernels() -> dict[str, tuple[str, tuple[object, ...]]]:
    """What SGLang compiles at first use on the kit's path, bf16, Triton attention and one GPU: the
    function that builds each, and its arguments. With deterministic inference `qknorm` is not used;
    norms, products of matrices and a MoE's router are Triton's."""
    ops, bf16 = "sglang.kernels.ops", torch.bfloat16
    table: dict[str, tuple[str, tuple[object, ...]]] = {
        "activation": (f"{ops}.activation.activation:activation_module", (bf16,)),
        "clamp_position": (
            f"{ops}.attention.clamp_position:_jit_clamp_position_module",
            (torch.int64,),
        ),
        "rotary_embedding": (f"{ops}.attention.rope:_jit_rotary_embedding_module", ()),
    }
    for heads, dim in KV_HEADS:
        row_bytes = bf16.itemsize * heads * dim
        table[f"kvcache {row_bytes}"] = (
            f"{ops}.kvcache.kvcache:_jit_kvcache_module",
            (row_bytes, row_bytes),
        )
        if dim in FUSED_ROPE_DIMS:
            table[f"fused_rope {dim}"] = (
                f"{ops}.attention.rope:_jit_fused_rope_module",
                (True, dim, bf16, bf16),
            )
            table[f"qknorm {dim}"] = (f"{ops}.layernorm.norm:_jit_qknorm_module", (dim, bf16))
    return table


def build(function: str, arguments: tuple[object, ...]) -> None:
    """Compile one, or take it from SGLang's cache."""
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(*arguments)


def attempt(kind: str, name: str, action: Callable[[], object]) -> bool:
    """One line of JSON: what, whether it went well, seconds, and how it failed."""
    began = time.monotonic()
    try:
        result = action()
        error = None
    except BaseException as failure:  # some modules end the process
        error = "".join(traceback.format_exception(failure)[-3:])
    row = {"kind": kind, "name": name, "ok": error is None, "s": round(time.monotonic() - began, 1)}
    if error is not None:
        row["error"] = error
    elif isinstance(result, dict):
        row |= result
    print(json.dumps(row), flush=True)
    return error is None


def main() -> int:
    """0 where all was imported, and compiled where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="build the kernels, too")
    options = parser.parse_args()
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.origin is None:
        print(
            "error: the kit is not unpacked\n  why: sgl_kernel is not on PYTHONPATH\n"
            "  fix: source bench/gpu/unpack.sh all",
            file=sys.stderr,
        )
        return 4
    site = Path(spec.origin).parents[1]
    with tempfile.TemporaryDirectory(prefix="miles-driver-") as folder:
        libraries = [*site.glob("sgl_kernel/sm90/*.so"), *site.glob("torch_memory_saver_*.so")]
        stand_in_for_driver(libraries, Path(folder))
        fake_device()
        for module in MODULES:
            if not attempt("import", module, lambda name=module: importlib.import_module(name)):
                return 1
        if not attempt("arguments", "qwen3", lambda: resolve_arguments(Path(folder))):
            return 1
        if options.compile:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                builds = [
                    pool.submit(attempt, "compile", name, partial(build, *kernel))
                    for name, kernel in kernels().items()
                ]
            return int(not all(one.result() for one in builds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
