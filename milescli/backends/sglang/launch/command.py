"""Composes the arguments and the environment of `sglang.launch_server`. Pure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from milescli.backends.sglang.inside.adapter import ADAPTER_VARIABLE
from milescli.backends.sglang.inside.routing import ROUTING_VARIABLE
from milescli.backends.sglang.launch.kernels import has_flash_attention, kernel_environment
from milescli.backends.sglang.launch.key import KEY_VARIABLE
from milescli.backends.sglang.launch.servable import (
    CPU_FAMILIES,
    CpuFamily,
    missing_fields,
    model_zoo,
)
from milescli.backends.sglang.launch.spec import (
    EngineSpec,
    check_servable,
    draft_config,
    read_config,
)
from milescli.backends.sglang.launch.speculation import (
    cpu_modules,
    cpu_pieces,
    speculation_arguments,
)
from milescli.backends.sglang.plugin import (
    ENGINE_VARIABLE,
    EXACT_VARIABLE,
    GEMMA_IMAGES_VARIABLE,
    INPUTS_VARIABLE,
    PIECES_VARIABLE,
)
from milescli.core.private import without_secrets
from milescli.models.adapter import engine_slots
from milescli.models.base import quantization_config
from milescli.plan.on_cpu import PREFILL_TOKENS
from milescli.platform.environment import KERNEL_CACHES, NUM_KERNELS, SPIN_COUNT

CPU_PATH = Path(__file__).parents[1] / "cpu_path"
"""Folder of import stubs on the path of the engine's processes alone."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
RECORDING_KERNELS = {"moe-runner-backend": "triton"}
"""MoE kernels on an accelerator that can record the chosen experts; others (triton_kernel,
flashinfer_trtllm, ...) choose experts internally, and report nothing."""
CPU_TOKENS_LIMIT = 262_144
"""Most cache slots of an engine on a CPU unless their number is set: 256 requests of 1024 tokens.
The cache is allocated in main memory at the start."""
CPU_ARGUMENTS: dict[str, object] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    # else SGLang ends itself where one pass takes 300 s; `EngineWatch` knows slow from hung
    "watchdog-timeout": 86_400,
}


def engine_command(spec: EngineSpec) -> list[str]:
    """Return the whole command line. Pure."""
    return [sys.executable, "-m", "sglang.launch_server", *engine_arguments(spec)]


def engine_arguments(spec: EngineSpec) -> list[str]:
    """Return the arguments of `sglang.launch_server`. Pure."""
    arguments: dict[str, object] = {
        "model-path": spec.model_dir,
        "host": spec.host,
        "port": spec.port,
        "tp-size": spec.tp,
        "dtype": _DTYPES[spec.precision],
        "context-length": spec.context_length,
        "max-running-requests": spec.max_running_requests,
        "random-seed": spec.seed,
        "mem-fraction-static": spec.memory_fraction,
        "weight-version": 0,
        "log-level": "info",
        "log-level-http": "warning",
        "decode-log-interval": 1000,
    }
    if silent := missing_fields(read_config(spec.model_dir)):
        arguments["json-model-override-args"] = json.dumps(silent)
    if spec.num_nodes > 1:
        arguments |= _of_nodes(spec)
    switches = ["skip-server-warmup", "sleep-on-idle"]
    switches += _tokenizer_arguments(spec, arguments)
    if spec.deterministic:
        switches.append("enable-deterministic-inference")
    if spec.return_routed_experts:
        switches.append("enable-return-routed-experts")
    if spec.speculation is not None:
        arguments |= speculation_arguments(spec.speculation)
    if spec.adapter_dir is not None:
        arguments |= _adapter_arguments(spec)
        switches += ["experts-shared-outer-loras"] if spec.shares_outer else []
    if spec.ep > 1:
        arguments["ep-size"] = spec.ep
    if spec.attention_dp > 1:
        arguments["dp-size"] = spec.attention_dp
        switches.append("enable-dp-attention")
    total_tokens, extra = spec.max_total_tokens, ()
    if spec.device_kind == "cpu":
        arguments |= CPU_ARGUMENTS
        switches += ["disable-cuda-graph", "disable-overlap-schedule"]
        if spec.context_length <= PREFILL_TOKENS:
            # no prompt is longer, so none need be cut in chunks, and none is before the first of
            # these bounds: SGLang counts a request that it cuts twice, and lets another wait
            arguments |= {
                "max-prefill-tokens": PREFILL_TOKENS,
                "chunked-prefill-size": 4 * PREFILL_TOKENS,
            }
        family = CPU_FAMILIES[check_servable(spec)]
        extra = family.arguments
        # of other attention than the plain one nobody has compared what a kept prefix gives
        if spec.deterministic and not (family.is_plain and spec.prefix_cache):
            switches.append("disable-radix-cache")
        total_tokens = total_tokens or min(
            spec.max_running_requests * spec.context_length, CPU_TOKENS_LIMIT
        )
    else:
        # prefills are bound by products, which graphs do not speed up; SGLang would capture 58 of
        # them, and their memory stays while an engine sleeps
        graphs = "disable-prefill-cuda-graph" if spec.cuda_graphs else "disable-cuda-graph"
        switches += ["enable-memory-saver", graphs]
        arguments |= RECORDING_KERNELS if spec.return_routed_experts else {}
        if backend := _attention_backend(spec):
            arguments["attention-backend"] = backend
        if spec.prefix_cache is False:
            switches.append("disable-radix-cache")
        if spec.speculation is not None and spec.speculation.has_weights:
            # nobody sends these weights again when the engine wakes
            switches.append("enable-draft-weights-cpu-backup")
    if total_tokens is not None:
        arguments["max-total-tokens"] = total_tokens
    flags = [word for key, value in arguments.items() for word in (f"--{key}", *_words(value))]
    return [*flags, *(f"--{switch}" for switch in switches), *extra, *spec.extra_args]


def _tokenizer_arguments(spec: EngineSpec, arguments: dict[str, object]) -> list[str]:
    """Add the tokenizer to the arguments. For a model that sees images also set how they are read:
    as the trainer does, where torchvision would resize them in another way. Return the switches."""
    family = CPU_FAMILIES.get(str(read_config(spec.model_dir)["model_type"]))
    sees_images = family is not None and family.sees_images
    tokenizer_dir = spec.tokenizer_dir or (spec.model_dir if sees_images else None)
    if tokenizer_dir is None:
        return ["skip-tokenizer-init"]
    arguments["tokenizer-path"] = tokenizer_dir
    if not sees_images:
        return []
    arguments["image-processor-backend"] = "pil"
    switches = ["enable-precise-embedding-interpolation"] if spec.device_kind != "cpu" else []
    if family.module == "gemma3_mm":
        # an image is computed in one pass, since its tokens see each other
        arguments["chunked-prefill-size"] = -1
        switches.append("enable-multimodal")
    return switches


def _words(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _of_nodes(spec: EngineSpec) -> dict[str, object]:
    assert spec.init_address is not None, (
        f"{spec.name}: {spec.num_nodes} nodes without an address to meet at"
    )
    return {
        "nnodes": spec.num_nodes,
        "node-rank": spec.node_rank,
        "dist-init-addr": spec.init_address,
    }


def _adapter_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the arguments of adapters, with a slot for the model without any adapter, which no
    request uses."""
    paths = [f"{name}={spec.adapter_dir}" for name in spec.adapter_names]
    return {
        "lora-paths": paths,
        "max-loras-per-batch": engine_slots(len(paths)),
        "lora-backend": "torch_native" if spec.device_kind == "cpu" else "triton",
    }


def _attention_backend(spec: EngineSpec) -> str | None:
    """Return the attention backend; None: SGLang chooses by the device's architecture. Sets none on
    ROCm, where deterministic inference would use CUDA's `fa3` and refuse AITER; nor if the kernels
    lack `fa3`, nor for Gemma 3 with images."""
    if spec.attention_backend is not None:
        return spec.attention_backend
    # alone it lets the tokens of an image of Gemma 3 see each other
    sees_itself = str(read_config(spec.model_dir)["model_type"]) == "gemma3"
    needs_triton = spec.device_kind == "rocm" or not has_flash_attention() or sees_itself
    return "triton" if needs_triton else None


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the whole environment of the engine: the inherited one (including MILES_RUN_TOKEN),
    ours, and what the device needs."""
    return without_secrets(os.environ) | own_environment(spec)


def own_environment(
    spec: EngineSpec, family: CpuFamily | None = None, *, quantised: bool | None = None
) -> dict[str, str]:
    """Return the variables that an engine needs beyond what it inherits. `family` is that of its
    model on a CPU before the folder exists, and `quantised` says how that will hold its weights;
    None reads the folder."""
    env = {ENGINE_VARIABLE: spec.device_kind, "TOKENIZERS_PARALLELISM": "false"}
    # else SGLang's process titles overwrite /proc/PID/environ, by which a run finds its processes
    env["SPT_NOENV"] = "1"
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        # else the server of an engine that died stays for a minute, for a core dump that none makes
        env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] = "0"
    # else SGLang asks the first interface, or the route to a public address
    env["SGLANG_HOST_IP"] = spec.host
    if spec.api_key is not None:
        env[KEY_VARIABLE] = spec.api_key
    if not spec.keeps_features:
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if spec.return_routed_experts:
        env[ROUTING_VARIABLE] = "1"
    if spec.adapter_dir is not None:
        env[ADAPTER_VARIABLE] = "1"
    module = family.module if family else None
    if module == "gemma3_mm" or (
        module is None and read_config(spec.model_dir).get("model_type") == "gemma3"
    ):
        env[GEMMA_IMAGES_VARIABLE] = "1"
    if spec.device_kind == "cpu":
        config = read_config(spec.model_dir) if quantised is None else {}
        quantised = quantised or quantization_config(config) is not None
        family = family or CPU_FAMILIES[check_servable(spec)]
        env |= _cpu_environment(spec, family, quantised=quantised)
    elif spec.visible_devices:
        env |= _visible_devices(spec)
    if spec.device_kind == "cuda":
        env |= kernel_environment()
    return env | spec.extra_env


def without_device() -> dict[str, str]:
    """Return the variables with which SGLang can be imported if there is no device, or none is to
    be used."""
    python_path = [str(CPU_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(python_path),
    }


def _cpu_environment(spec: EngineSpec, family: CpuFamily, *, quantised: bool) -> dict[str, str]:
    """Return the variables of an engine on a CPU. Waiting threads sleep soon, since the HTTP
    server, the scheduler and the trainer share the cores, but stay awake between two matrix
    products. torch.compile is off: its first calls would build C++ in the middle of a rollout."""
    threads = str(spec.cpu_threads)
    env = without_device() | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "TORCH_COMPILE_DISABLE": "1",
        "SGLANG_MAMBA_CONV_DTYPE": _DTYPES[spec.precision],  # else bfloat16, also beside float32
        "SGLANG_MAMBA_SSM_DTYPE": "float32",  # as the trainer's, whatever config.json says
    }
    if family.sees_images:
        # the numbers of images in a pass differ, too: with 1,024 kernels an engine of
        # quickstart-vision's model grew by 630 MiB in 14,000 requests, with 128 by 180
        env |= dict.fromkeys(KERNEL_CACHES, NUM_KERNELS)
    if spec.exact:
        env[EXACT_VARIABLE] = "1"
        env["SGLANG_ROPE_CACHE_FP32"] = "1"  # else it has the model's dtype
    modules, pieces = {family.module}, [*family.pieces]
    if spec.speculation is not None:
        drafted = draft_config(spec)
        modules |= cpu_modules(spec.speculation, family, drafted)
        pieces += cpu_pieces(family, drafted)
    if spec.adapter_dir is not None:
        pieces.append("adapter")
    if quantised:
        pieces.append("quantised")
        if spec.input_format is not None:
            env[INPUTS_VARIABLE] = spec.input_format
    env["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_model_modules(modules))
    env[PIECES_VARIABLE] = ",".join(dict.fromkeys(pieces))
    if spec.tp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_core_shares(spec.tp // spec.num_nodes))
    return env


def _other_model_modules(needed: set[str]) -> list[str]:
    """Return the modules of SGLang's model zoo that this engine does not need. Otherwise it would
    import all 200, which takes seconds."""
    return sorted(
        path.stem for path in model_zoo().glob("*.py") if path.stem not in {*needed, "__init__"}
    )


def _core_shares(tp: int) -> list[str]:
    """Return [tp] comma-separated cores for each engine rank, distributed in turn; SGLang requires
    them if there are more ranks than NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    return [
        ",".join(str(core) for core in cores[rank % len(cores) :: tp] or cores[:1])
        for rank in range(tp)
    ]


def _visible_devices(spec: EngineSpec) -> dict[str, str]:
    """Return the variables that select devices. Not tested on a device. On ROCm torch reads HIP_
    and CUDA_VISIBLE_DEVICES; both are set, so that they cannot differ."""
    devices = ",".join(spec.visible_devices)
    if spec.device_kind == "rocm":
        return {"HIP_VISIBLE_DEVICES": devices, "CUDA_VISIBLE_DEVICES": devices}
    return {"CUDA_VISIBLE_DEVICES": devices}
