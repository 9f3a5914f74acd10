"""Speculative decoding of an engine: SGLang's flags for it, and the cases that SGLang cannot serve
correctly. Plain data and pure functions; `cpu.drafts` is what it needs on a CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from milescli.backends.sglang.launch.servable import CPU_FAMILIES, CpuFamily
from milescli.core.errors import MachineError, RecipeError
from milescli.models import parse_facts
from milescli.models.mtp import field_of

MTP_MODULES = {
    "deepseek_v2": "deepseek_nextn",
    "glm4_moe": "glm4_moe_nextn",
    "glm4_moe_lite": "glm4_moe_lite_nextn",
    "mimo": "mimo_mtp",
    "qwen3_5": "qwen3_5_mtp",
    "qwen3_5_text": "qwen3_5_mtp",
    "qwen3_next": "qwen3_next_mtp",
}
"""Module of SGLang's model zoo -> the module with its MTP layer, for those that were tested on a
CPU."""
NO_DRAFTS = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "mimo",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)
"""Model types for which SGLang 0.5.20 uses a draft model only as their MTP layer."""
PIECE = "drafts"
"""Module of `cpu/` for engines that speculate."""
STATES = "states"
"""Module of `cpu/` for engines that speculate with layers that keep a state."""
OFF = "--set rollout.speculative.kind=none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Describes with what, and how far, engines speculate."""

    kind: Literal["ngram", "draft", "mtp"]
    """ngram: what followed the same tokens before; draft: a smaller model; mtp: the model's own
    multi-token-prediction layer."""
    num_guesses: int
    """Number of tokens that are guessed before the model checks them all at once."""
    draft_dir: Path | None = None
    """draft: the Hugging Face folder of the smaller model."""
    ngram_breadth: int = 1
    """ngram: most continuations after one token."""
    ngram_length: int = 18
    """ngram: tokens of the longest n-gram."""

    @property
    def has_own_weights(self) -> bool:
        """Return True if the draft is not part of the model whose weights are published."""
        return self.kind == "draft"

    @property
    def has_weights(self) -> bool:
        """Return True if the draft is a model."""
        return self.kind != "ngram"


def speculation_arguments(wanted: Speculation) -> dict[str, object]:
    """Return the arguments of `sglang.launch_server`."""
    verified = wanted.num_guesses + 1  # the token that they are guessed behind, too
    if wanted.kind == "ngram":
        return {
            "speculative-algorithm": "NGRAM",
            "speculative-num-draft-tokens": verified,
            "speculative-ngram-max-bfs-breadth": wanted.ngram_breadth,
            "speculative-ngram-max-trie-depth": wanted.ngram_length,
        }
    arguments: dict[str, object] = {
        "speculative-algorithm": "EAGLE" if wanted.kind == "mtp" else "STANDALONE",
        "speculative-num-steps": wanted.num_guesses,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": verified,
    }
    if wanted.draft_dir is not None:
        arguments["speculative-draft-model-path"] = wanted.draft_dir
    return arguments


def cpu_modules(
    wanted: Speculation, family: CpuFamily, draft_config: Mapping[str, object] | None
) -> set[str]:
    """Return the modules of SGLang's model zoo that speculation needs on a CPU. `draft_config` is
    that of `draft_dir`, if it exists."""
    if wanted.kind == "mtp":
        return {MTP_MODULES[family.module]} if family.module in MTP_MODULES else set()
    drafting = _draft_family(draft_config)
    return {drafting.module} if drafting else set()


def cpu_pieces(family: CpuFamily, draft_config: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return the modules of `cpu/` that speculation needs, with arguments as in `cpu_modules`."""
    drafting = _draft_family(draft_config)
    states = (STATES,) if "delta" in family.pieces else ()
    return (PIECE, *states, *(drafting.pieces if drafting else ()))


def _draft_family(config: Mapping[str, object] | None) -> CpuFamily | None:
    return CPU_FAMILIES.get(str(config.get("model_type"))) if config is not None else None


def check_speculation(
    wanted: Speculation,
    *,
    device_kind: str,
    config: Mapping[str, object],
    draft_config: Mapping[str, object] | None,
    records_experts: bool = False,
) -> None:
    """Raise an error if engines of this kind cannot speculate in this way for this model, or would
    sample differently. `config`: of the model; `draft_config`: of the draft model;
    `records_experts`: the engines also record the chosen experts."""
    model_type = str(config["model_type"])
    if device_kind == "rocm":
        raise MachineError(
            "engines on ROCm cannot speculate",
            why="on ROCm, SGLang 0.5.20 verifies guesses against the likeliest token at any "
            "temperature, so the samples would not come from the policy",
            fix=OFF,
        )
    if records_experts and device_kind != "cpu":
        raise MachineError(
            f"routing cannot be replayed for tokens that were guessed on {device_kind.upper()}",
            why="SGLang 0.5.20 records experts by cache slot, and its n-gram method moves "
            "accepted tokens without their records"
            if wanted.kind == "ngram"
            else "nothing has verified what engines record while they speculate there",
            fix=[OFF, "--set train.routing_replay=false"],
        )
    if wanted.kind == "mtp" and not (facts := parse_facts(dict(config))).num_mtp_layers:
        raise RecipeError(
            f"this `{model_type}` model has no multi-token-prediction layer to guess tokens with",
            why=f"its config.json has no `{field_of(facts)}`",
            fix=["--set rollout.speculative.kind=ngram", OFF],
        )
    if draft_config is not None:
        _require_whole(str(draft_config["model_type"]))
        _require_same_vocabulary(config, draft_config)
    if device_kind != "cpu":
        return
    _require_on_cpu(model_type, "model", can={"latent", "delta", "mimo"})
    if draft_config is not None:
        _require_on_cpu(str(draft_config["model_type"]), "draft model", can={"latent", "mimo"})


def _require_whole(model_type: str) -> None:
    if model_type in NO_DRAFTS:
        raise RecipeError(
            f"a draft model of type `{model_type}` cannot guess tokens",
            why="SGLang 0.5.20 takes a model of this type for a multi-token-prediction layer, "
            "and does not find its weights",
            fix=[OFF, "--set rollout.speculative.model=FOLDER   # a dense model"],
        )


def _require_on_cpu(model_type: str, name: str, *, can: set[str]) -> None:
    """Raise an error if speculation is impossible on a CPU. `can`: pieces of `cpu/` that support
    it."""
    family = CPU_FAMILIES.get(model_type)
    pieces = set(family.pieces) if family else {"?"}
    if pieces - can or (family and family.windows):
        raise MachineError(
            f"a {name} of type `{model_type}` cannot speculate on a CPU",
            why="its layers keep a state, or use a window, that cannot be restored after a "
            "wrong guess"
            if family
            else "it is not served there",
            fix=OFF,
        )


def _require_same_vocabulary(
    config: Mapping[str, object], draft_config: Mapping[str, object]
) -> None:
    sizes = [each.get("vocab_size") for each in (config, draft_config)]
    if sizes[0] != sizes[1]:
        raise RecipeError(
            "the draft model has another vocabulary than the model",
            why=f"it has {sizes[1]} tokens, and the model has {sizes[0]}",
            fix=[OFF, "--set rollout.speculative.model=FOLDER   # a model of the same family"],
        )


def require_compiler(name: str) -> None:
    """Raise MachineError if this machine cannot build SGLang's n-gram table, which is C++ and built
    on first use. `name` is the engine's."""
    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool.split()[0]) is None]
    if missing:
        raise MachineError(
            f"{name} cannot use n-grams on this machine",
            why="SGLang compiles 1,500 lines of C++ for the n-gram table, and there is no "
            f"{' and no '.join(f'`{tool}`' for tool in missing)}",
            fix=["apt-get install g++ ninja-build", OFF],
        )
