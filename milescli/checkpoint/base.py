"""Defines a checkpoint: a folder, and a manifest that is written last. Protocol and data; the store
is the next module."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST_NAME = "manifest.json"
"""Its presence means that the folder is complete."""
CHECKPOINT_PART = "release"
"""Folder of the tensors within a converted model."""
CARRIED_PART = "hf"
"""Folder, within a converted model, of everything that Megatron does not store: config.json,
tokenizer, tensors that are passed through."""
CRITIC_PART = "critic"
"""Folder within a checkpoint that holds its critic, if the run trains one; a `torch_dist` folder
like the checkpoint itself."""
RECORD_NAME = "source.json"
"""File in CARRIED that records the layout of the Hugging Face folder."""
DRAFT_PART = "draft"
"""Folder within a checkpoint that holds its draft model; a `torch_dist` folder, too."""
METADATA_NAME = ".metadata"
"""Index file of a `torch_dist` folder."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""File in which Megatron finds the newest checkpoint of a folder; `release` in a converted model.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Holds what `resume` needs besides the tensors to continue exactly where the run stopped."""

    format: str
    """torch_dist"""
    step: int
    """RL steps done; 0 is the state after the warm-up."""
    version: int
    """Weight version that the engines held."""
    prompt_position: int
    """Number of prompts taken from the source."""
    seed: int
    plan_fingerprint: str
    recipe_sha256: str
    """SHA-256 of the run's recipe.yaml, hex."""
    data_sha256: str
    layout: dict[str, int]
    """tp, pp, cp, ep, etp, dp of the trainer that wrote it; a reader may have another."""
    created: str
    """UTC, ISO 8601"""
    miles_version: str
    size_bytes: int
    files: dict[str, int]
    """Relative path -> size in bytes of every file, to find torn ones."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Relative path -> SHA-256 of every file, hex, to find flipped bytes; empty in checkpoints of
    older versions."""
    checksum: str = ""
    """SHA-256 of the manifest itself, without this line; empty in checkpoints of older versions."""
    recipe: str = ""
    """The run's recipe.yaml, from which a lost one is restored; empty in checkpoints of older
    versions."""
    objective: dict[str, float] = field(default_factory=dict)
    """State of the objective, by its own names."""
    curriculum: dict[str, list[float]] = field(default_factory=dict)
    """Results of each prompt that was tried, by its index: mean reward when it was last sampled,
    and the number of times."""
    taken: list[int] = field(default_factory=list)
    """Positions after `prompt_position` whose prompts were already used in steps
    (`rollout.order=done`)."""
    warmup_steps: int | None = None
    """Number of completed warm-up steps, if the run was stopped before its first step. None: the
    state is that of `step`."""


def checksum_of(record: dict[str, object]) -> str:
    """Return the correct `checksum` of a manifest whose JSON form is `record`."""
    rest = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_converted(folder: Path) -> bool:
    """Return True if `miles convert hf-to-megatron` wrote the folder."""
    return (folder / CHECKPOINT_PART / METADATA_NAME).is_file() and (
        folder / CARRIED_PART / "config.json"
    ).is_file()
