"""What a recipe can pin of where things run: the trainer's layout, and the engines. What is not
pinned is chosen by the plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.section import Positive, Section


class Parallel(Section):
    """Pins of the trainer's layout; what is not pinned is chosen."""

    tp: Positive | None = None
    """Tensor-parallel ranks."""
    pp: Positive | None = None
    """Pipeline stages."""
    cp: Positive | None = None
    """Context-parallel ranks, which share the positions of a sequence."""
    ep: Positive | None = None
    """Expert-parallel ranks, which share the experts."""
    etp: Positive | None = None
    """Tensor-parallel ranks of each expert."""
    dp: Positive | None = None
    """Data-parallel ranks."""
    sequence_parallel: bool | None = None
    """Split norms and residuals along the sequence over the tensor-parallel ranks."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as many as the others."""
    last_stage_layers: Positive | None = None
    """The same of the last stage, which has the output layer to compute as well."""


class EngineSettings(Section):
    """Pins of the rollout engines."""

    num: Positive | None = None
    """Engines."""
    tp: Positive | None = None
    """Devices of one engine."""
    ep: Positive | None = None
    """Expert-parallel groups among the devices of an engine."""
    attention_dp: Positive | None = None
    """Groups of an engine's devices that take different requests, each with its own cache (SGLang's
    DP attention)."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """colocated: trainer and engines share devices and take turns; split: each has its own."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Of a device's memory, for weights and cache; null: chosen by the plan."""
    max_running_requests: Positive | None = None
    """Per engine; null: chosen by the plan."""
    max_total_tokens: Positive | None = None
    """KV-cache slots per engine; null: what the memory fraction allows (on a CPU: chosen by the
    plan)."""
    attention_backend: Literal["fa3", "fa4", "flashinfer", "triton"] | None = None
    """SGLang's attention kernels on an accelerator, of those whose tokens do not depend on the
    batch; null: SGLang's choice for the device (ROCm: triton). A CPU has one of its own."""
    cuda_graphs: bool = True
    """Replay decoding steps as graphs on an accelerator (prefills are not). false: engines start
    sooner and hold less memory; decoding is slower."""
    prefix_cache: bool | None = None
    """Keep what was computed of a prompt for others that begin with it; null: on an accelerator,
    and on a CPU where an agent takes several turns. The tokens are the same, their log-probs
    within 1e-4."""
    extra: list[str] = Field(default=[])
    """Further arguments of SGLang's server, as on its command line: [--chunked-prefill-size=4096].
    What the recipe or miles sets already is refused."""
