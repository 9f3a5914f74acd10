"""Seconds and tokens that others have reported of their own runs: what the time model is compared
with. Facts, with no text of theirs; none was measured here. Where the length of responses is not
reported, it is inferred from another figure of the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Weights handed from trainer to engines by broadcasts of 1 GB buckets, on H100s of 80 GB."""

    model: str
    """On the hub."""
    devices: int
    """Of the trainer, and as many of the engines."""
    seconds: float


PUBLICATIONS = (
    Publication(model="moonshotai/Moonlight-16B-A3B-Instruct", devices=8, seconds=1.482),
    Publication(model="zai-org/GLM-4.7-Flash", devices=8, seconds=2.509),
    Publication(model="Qwen/Qwen3-30B-A3B", devices=8, seconds=2.670),
    Publication(model="zai-org/GLM-4.5-Air", devices=32, seconds=5.001),
    Publication(model="Qwen/Qwen3-235B-A22B", devices=64, seconds=10.754),
    Publication(model="zai-org/GLM-5", devices=128, seconds=58.302),
    Publication(model="moonshotai/Kimi-K2-Instruct", devices=256, seconds=53.279),
)
"""Where the number of devices is not reported, it is taken to be one node."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A 27B dense model with linear attention on 8 H200s that take turns: 32 prompts x 8 responses,
    tp 4, Adam on the host, with a reference."""

    model: str = "Qwen/Qwen3.6-27B"
    """Of the same shape."""
    samples: int = 256
    rollout_s: float = 307
    train_s: float = 415
    """All of it."""
    reference_s: float = 100
    """Of it, scoring by the reference, whose weights come from the host first."""
    scoring_s: float = 33
    """Of it, scoring by the trained model."""
    cache_tokens: tuple[tuple[float, int], ...] = ((0.5, 158_000), (0.8, 518_000))
    """(memory fraction, tokens that an engine on one device holds)"""
    decode_rate: float = 1855
    """Tokens a second of one engine, at 0.8."""


STEP = Step()
