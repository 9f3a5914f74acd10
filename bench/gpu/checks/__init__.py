"""The checks of a visit, in their order: what each says, and how long it may take. The table alone;
nothing is imported before a check runs, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from lines import Line

DeviceKind = Literal["cuda", "rocm", "cpu"]
REHEARSAL_TIMES = 4
"""A CPU has so many times an accelerator's limit."""
SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "small-moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a check is given."""

    device: DeviceKind
    folder: Path
    """Its own, empty, removed after it."""

    @property
    def on_device(self) -> bool:
        """On an accelerator, at full size; otherwise a rehearsal in small."""
        return self.device != "cpu"

    @property
    def torch_device(self) -> str:
        """As torch calls it; ROCm's is `cuda` too."""
        return "cuda" if self.on_device else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One process."""

    phase: str
    lines: tuple[str, ...]
    """The names of all that it will say, in order."""
    limit_s: float
    """On an accelerator; see `limit_on`."""
    subject: str = ""
    """Which of several of its phase; its function's argument where it is not empty."""
    function: str = "measure"
    """In `checks/PHASE.py`."""

    @property
    def name(self) -> str:
        """`memory.qwen3-0.6b`"""
        return f"{self.phase}.{self.subject}" if self.subject else self.phase

    def limit_on(self, device: str) -> float:
        """Seconds. A rehearsal is held to no speed: it may share its CPU with others."""
        return self.limit_s if device != "cpu" else REHEARSAL_TIMES * self.limit_s

    def run(self, visit: Visit) -> Iterator[Line]:
        """Lines as they are measured."""
        function = getattr(import_module(f"checks.{self.phase}"), self.function)
        return function(visit, self.subject) if self.subject else function(visit)


CHECKS: tuple[Check, ...] = (
    Check(
        phase="ceilings",
        lines=("copy", "matmul_bf16", "host_to_device", "device_to_host"),
        limit_s=90,
    ),
    Check(
        phase="numerics",
        lines=(
            "attention_bf16",
            "attention_gradient_bf16",
            "packed_row_bf16",
            "kernels",
            "attention_speed",
            "attention_fp32",
            "attention_gradient_fp32",
            "norm_bf16",
            "rotation_bf16",
            "rotation_fp32",
            "logprob_bf16",
            "logprob_gradient_bf16",
            "logprob_fp32",
            "logprob_gradient_fp32",
            "experts_bf16",
        ),
        limit_s=90,
    ),
    Check(phase="nccl", lines=("group_start", "all_reduce", "all_gather", "barrier"), limit_s=60),
    *(
        Check(
            phase="train",
            subject=shape,
            lines=(
                "miles",
                "mfu",
                "transformers_sdpa",
                "transformers_flash",
                "ratio",
                "logprob_difference",
            ),
            limit_s=150,
        )
        for shape in SHAPES
    ),
    *(
        Check(
            phase="memory",
            subject=shape,
            lines=("peak", "peak_recomputed", "context"),
            limit_s=90,
        )
        for shape in SHAPES
    ),
    Check(
        phase="engine",
        lines=(
            "start",
            "greedy",
            "logprob_difference",
            "logprob_difference_mean",
            "decode_1",
            "decode_64",
            "decode_512",
            "prefill",
            "beside_stock_1",
            "beside_stock_64",
            "beside_stock_512",
        ),
        limit_s=480,
    ),
    Check(phase="publish", lines=("publish", "verify", "beside_device_copy"), limit_s=180),
    Check(
        phase="sleep",
        lines=(
            "engine_freed",
            "engine_kept",
            "engine_returned",
            "trainer_freed",
            "trainer_returned",
            "engine_sleep",
            "engine_wake",
            "trainer_sleep",
            "trainer_wake",
            "same_tokens",
        ),
        limit_s=180,
    ),
    Check(
        phase="colocated",
        subject="quickstart",
        function="quickstart",
        lines=("run", "accuracy", "step", "logprob_difference_mean"),
        limit_s=240,
    ),
    Check(
        phase="colocated",
        subject="qwen3-0.6b",
        function="random_model",
        lines=("run", "rollout", "train", "publish", "step", "tokens_per_s"),
        limit_s=300,
    ),
    Check(
        phase="faults",
        lines=("engine_death_named", "resumed", "same_as_undisturbed"),
        limit_s=300,
    ),
)
PHASES = tuple(dict.fromkeys(check.phase for check in CHECKS))
PARTS = {
    1: ("ceilings", "numerics", "nccl", "train", "memory"),
    2: ("engine", "publish", "sleep"),
    3: ("colocated", "faults"),
}
"""To be run one after the other where a command has a limit of its own."""


def chosen(words: Sequence[str]) -> list[Check]:
    """Phases, names of single checks, `part1` .. `part3`, or `all`; in the order of the table.
    Raises ValueError with the word that is none of them."""
    wanted: set[str] = set()
    names = {check.name for check in CHECKS}
    for word in words:
        part = PARTS.get(int(word[4:])) if word[:4] == "part" and word[4:].isdigit() else None
        if word == "all":
            wanted |= names
        elif part or word in PHASES:
            wanted |= {check.name for check in CHECKS if check.phase in (part or (word,))}
        elif word in names:
            wanted.add(word)
        else:
            raise ValueError(word)
    return [check for check in CHECKS if check.name in wanted]
