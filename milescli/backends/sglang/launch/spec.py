"""One engine as plain data, and checks whether SGLang can serve its model here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from milescli.backends.sglang.launch.servable import (
    CPU_FAMILIES,
    cpu_family,
    fault_of_adapter,
    fault_of_quantised,
    fault_of_sglang,
    servable_on_cpu,
)
from milescli.backends.sglang.launch.speculation import Speculation, check_speculation
from milescli.core.errors import MachineError, RecipeError
from milescli.core.files import read_json
from milescli.models import ModelFacts, parse_facts
from milescli.models.adapter import SOLE_ADAPTER
from milescli.models.base import CONFIG_NAME
from milescli.models.precision import Quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Describes one engine: what it serves, and where it runs."""

    model_dir: Path
    tokenizer_dir: Path | None
    """None: the engine has no tokenizer, which lets it start sooner, and refuses stop strings."""
    device_kind: Literal["cpu", "cuda", "rocm"]
    precision: Literal["bf16", "fp32"]
    port: int
    log_path: Path
    name: str = "engine 0"
    """Name in errors."""
    tp: int = 1
    ep: int = 1
    """Number of groups of the tp devices among which the experts are divided."""
    attention_dp: int = 1
    """Number of groups of the tp devices among which the requests are divided."""
    host: str = "127.0.0.1"
    """Address of its node, the only one that it listens on. Beyond loopback it needs a key."""
    api_key: str | None = field(default=None, repr=False)
    """Key that every request must carry (`key.py`); the same for all engines of a run."""
    num_nodes: int = 1
    """Number of machines among which its tp ranks are divided; each has an EngineServer, and that
    of node 0 answers."""
    node_rank: int = 0
    init_address: str | None = None
    """`host:port` on node 0 where the ranks find each other, if there are several nodes; with
    `attention_dp`, also the six ports after it."""
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    """KV-cache slots; None: SGLang sizes it from `memory_fraction` (on a CPU: enough for all
    running requests, bounded)."""
    memory_fraction: float = 0.7
    context_length: int = 4096
    cpu_threads: int = 1
    seed: int = 0
    deterministic: bool = True
    """True if a request's seed is used, and a token does not depend on its batch."""
    exact: bool = False
    """On a CPU: True if its log-probs have the bits of the trainer's (`train.on_policy: exact`)."""
    input_format: Quantised | None = None
    """On a CPU: the format in which the trainer rounds the inputs of quantised layers; None: it
    does not."""
    prefix_cache: bool | None = None
    """True to reuse what was computed for a common prefix; None: on accelerators, not on a CPU."""
    keeps_features: bool = False
    """True to cache a vision tower's features of images, which no flush empties: only correct if
    new weights leave the tower and its projector unchanged."""
    return_routed_experts: bool = False
    speculation: Speculation | None = None
    """None: each pass yields one token."""
    adapter_dir: Path | None = None
    """PEFT folder of the engine's first adapter, after which the trainer sends others of the same
    shape; None: it serves the model itself, and receives all weights."""
    adapter_names: tuple[str, ...] = (SOLE_ADAPTER,)
    """Names by which requests select the adapter, or one of several that are all initially
    equal."""
    visible_devices: tuple[str, ...] = ()
    """Devices of this engine, as the vendor's variable names them; empty: inherited."""
    extra_env: dict[str, str] = field(default_factory=dict)
    warm: Path | None = None
    """Socket of a process that has imported SGLang (see `warm.py`), on a CPU; None: the engine
    imports it itself."""
    shares_outer: bool = False
    """True if all experts of a layer share one A, or one B, of the adapter:
    `train.lora.experts`."""
    attention_backend: str | None = None
    """Attention backend on an accelerator; None: `_attention_backend` chooses."""
    cuda_graphs: bool = True
    """True if an accelerator uses CUDA graphs."""
    ends_group: int = 0
    """Process group of the engine that this one replaces, which must be gone when this one starts,
    as it holds the device. 0: there is none."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of `sglang.launch_server`, last, so that they take precedence; `arguments`
    says which are refused."""

    @property
    def url(self) -> str:
        """Return http://host:port."""
        return f"http://{self.host}:{self.port}"


DEQUANTISE = (
    "dequantise it through a checkpoint: miles convert hf-to-megatron, then miles convert "
    "megatron-to-hf"
)


def check_servable(spec: EngineSpec) -> str:
    """Return the model's `model_type`. Raises an error if the folder is not one of a model, or if
    the model is not served correctly on this device."""
    config, on_cpu = read_config(spec.model_dir), spec.device_kind == "cpu"
    model_type = str(config["model_type"])
    if model_type not in CPU_FAMILIES:
        if not on_cpu:
            return model_type
        why = f"only {', '.join(CPU_FAMILIES)} were compared with transformers there"
        raise _not_on_cpu(model_type.removesuffix("_text"), why=why)
    if on_cpu:
        refuse_quantised(config)
    facts = parse_facts(config)
    require_served(facts, on_cpu=on_cpu, has_adapter=spec.adapter_dir is not None)
    return model_type


def refuse_quantised(config: Mapping[str, object]) -> None:
    """Raise MachineError if a CPU cannot serve the weights of a model with this config.json."""
    if fault := fault_of_quantised(config):
        raise MachineError(
            f"the quantised `{config['model_type']}` model cannot be served on a CPU",
            why=fault,
            fix=DEQUANTISE,
        )


def require_served(facts: ModelFacts, *, on_cpu: bool, has_adapter: bool) -> None:
    """Raise MachineError or RecipeError if SGLang does not serve this model correctly on such a
    device. `has_adapter` adds a LoRA adapter."""
    if on_cpu and cpu_family(facts) is None:
        raise _not_on_cpu(facts.family, why=servable_on_cpu(facts)[1])
    if fault := fault_of_sglang(facts):
        raise RecipeError(
            f"SGLang cannot serve this `{facts.family}` model",
            why=fault,
            fix="choose another model: --set model.path=FOLDER",
        )
    if has_adapter and on_cpu and (fault := fault_of_adapter(facts)):
        raise MachineError(
            f"an adapter over this `{facts.family}` model cannot be served on a CPU",
            why=fault,
            fix=["--set train.lora.publish=merged   # one adapter at a time", "run it on a GPU"],
        )


def _not_on_cpu(family: str, *, why: str) -> MachineError:
    return MachineError(
        f"a `{family}` model cannot be served on a CPU yet",
        why=why,
        fix="run it on a GPU, or choose a model of a family that miles can serve on a CPU   # "
        "miles models",
    )


def check_speculates(spec: EngineSpec) -> None:
    """Raise an error if the engine cannot speculate as it is configured; see
    `check_speculation`."""
    if spec.speculation is not None:
        check_speculation(
            spec.speculation,
            device_kind=spec.device_kind,
            config=read_config(spec.model_dir),
            draft_config=draft_config(spec),
            records_experts=spec.return_routed_experts,
        )


def draft_config(spec: EngineSpec) -> dict[str, object] | None:
    """Return the config of the draft model, if its folder exists."""
    folder = spec.speculation.draft_dir if spec.speculation is not None else None
    return read_config(folder) if folder is not None and folder.is_dir() else None


def read_config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_NAME
    try:
        config = read_json(path)
        _ = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"`{folder}` is not a Hugging Face model folder",
            why=f"{path}: {type(error).__name__}: {error}",
            fix="--set model.path=FOLDER   # a folder with config.json, weights and a tokenizer",
        ) from error
    return config
