"""Tokens per second of one optimizer step of the trainer, beside the planner's forecast, and beside
the same model in plain transformers on the same tokens. Every step sees lengths that no step before
it saw, as in a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lines import Bound, Line
from planning import time_model, work_of
from shapes import write_model
from timing import product_rate
from trainer import end, free_memory, make_shard, make_trainer

from checks import Visit
from checks.profiling import profiled
from checks.transformers_peer import PADDED_SDPA, VARLEN_FLASH, Attention, Peer
from milescli.models.base import WeightTable
from milescli.models.costs import token_flops
from milescli.plan.time import TimeModel, TrainSeconds, Work
from milescli.plan.types import TrainerLayout
from milescli.train.base import TrainShard

LR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the batches."""

    step_tokens: int
    shortest: int
    longest: int
    microbatch_tokens: int
    warmups: int = 2
    steps: int = 3

    @classmethod
    def of(cls, visit: Visit, shape: str) -> Size:
        """What fits on 80 GB beside all that a step keeps."""
        if not visit.on_device:
            return cls(
                step_tokens=256, shortest=16, longest=48, microbatch_tokens=128, warmups=1, steps=2
            )
        cap = 8192 if shape == "qwen3-1.7b" else 16_384
        return cls(step_tokens=32_768, shortest=512, longest=2048, microbatch_tokens=cap)

    def lengths(self, seed: int) -> list[int]:
        """Tokens of the sequences of one step."""
        rng, lengths = np.random.default_rng(seed), []
        while (left := self.step_tokens - sum(lengths)) >= self.shortest:
            lengths.append(min(left, int(rng.integers(self.shortest, self.longest + 1))))
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Steps of one contestant."""

    tokens_per_s: float
    """Median."""
    step_s: float
    figures: dict[str, float]


def measure(visit: Visit, shape: str) -> Iterator[Line]:
    """See the module."""
    folder, weights = write_model(shape, visit)
    size = Size.of(visit, shape)
    shards = [
        make_shard(
            size.lengths(seed),
            vocab_size=weights.facts.vocab_size,
            microbatch_tokens=size.microbatch_tokens,
            seed=seed,
        )
        for seed in range(size.warmups + size.steps)
    ]
    miles, logprobs, profile = _miles(folder, size, shards, visit)
    yield from _own_lines(weights, size, shards, miles, profile, visit)
    peers = []
    for attention in (PADDED_SDPA, VARLEN_FLASH):
        line = _peer_line(attention, folder, size, shards, visit, miles=miles, logprobs=logprobs)
        yield line
        peers += [line] if line.measured else []
    yield Line(
        name="ratio",
        measured=min((line.figures["miles_over_peer"] for line in peers), default=None),
        unit="of the better peer's tokens/s",
        bound=Bound(kind="at least", value=1.0, anywhere=False),
        note="" if peers else "no peer ran",
    )
    yield Line(
        name="logprob_difference",
        measured=max((line.figures["logprob_difference"] for line in peers), default=None),
        unit="nats a token, mean",
        bound=Bound(kind="at most", value=0.1 if visit.on_device else 1e-4),
        note="of the same weights, in transformers and in the trainer, before the first step",
    )


def _miles(
    folder: Path, size: Size, shards: Sequence[TrainShard], visit: Visit
) -> tuple[Timed, np.ndarray, dict[str, float]]:
    """(steps, [T] log-probs of the first shard before them, seconds by kind of kernel)"""
    trainer = make_trainer(folder, microbatch_tokens=size.microbatch_tokens)
    scores = trainer.score(shards[0])
    assert scores is not None, "one rank speaks for its tokens"
    reports = []
    timed = _timed(
        lambda shard: reports.append(trainer.step(shard, LR).report), shards, size, visit
    )
    forward_backward = [report.forward_backward_s for report in reports[size.warmups :]]
    optimizer = [report.optimizer_s for report in reports[size.warmups :]]
    timed.figures.update(
        forward_backward_s=statistics.median(forward_backward),
        optimizer_s=statistics.median(optimizer),
        microbatches=float(reports[-1].num_microbatches),
    )
    profile = profiled(lambda: trainer.step(shards[0], LR)) if visit.on_device else {}
    end(trainer)
    return timed, np.concatenate(scores), profile


def _timed(
    step: Callable[[TrainShard], object], shards: Sequence[TrainShard], size: Size, visit: Visit
) -> Timed:
    rates, seconds = [], []
    for number, shard in enumerate(shards):
        if visit.on_device:
            if number == size.warmups:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        started = time.perf_counter()
        step(shard)
        if visit.on_device:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        rates.append(num_positions(shard) / seconds[-1])
    figures = {"first_step_s": seconds[0], "slowest_step_s": max(seconds[size.warmups :])}
    if visit.on_device:
        figures["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return Timed(
        tokens_per_s=statistics.median(rates[size.warmups :]),
        step_s=statistics.median(seconds[size.warmups :]),
        figures=figures,
    )


def num_positions(shard: TrainShard) -> int:
    """What a model computes: all tokens but the last of each sequence."""
    return len(shard.token_ids) - len(shard.sequence_ids)


def _own_lines(
    weights: WeightTable,
    size: Size,
    shards: Sequence[TrainShard],
    miles: Timed,
    profile: dict[str, float],
    visit: Visit,
) -> Iterator[Line]:
    times = time_model(weights)
    forecast, work = _forecast(times, size, shards[-1], visit)
    compute_s = miles.figures["forward_backward_s"]
    # what the planner's share of the peak would have to be, for its seconds to be these
    factor = forecast.compute / compute_s
    shares = {"train_share": times.efficiency.train_share * factor}
    if weights.facts.num_experts:
        shares["expert_share"] = times.efficiency.expert_share * factor
    yield Line(
        name="miles",
        measured=miles.tokens_per_s,
        predicted=work.tokens / forecast.total,
        unit="tokens/s",
        note=f"steps of {len(shards[-1].sequence_ids)} sequences of {size.shortest} to "
        f"{size.longest} tokens, {size.microbatch_tokens} in a microbatch; predicted: the "
        "planner's",
        figures=miles.figures
        | shares
        | {
            "step_s": miles.step_s,
            "predicted_compute_s": forecast.compute,
            "predicted_optimizer_s": forecast.optimizer,
        },
    )
    flops = token_flops(weights)
    lengths = np.diff(shards[-1].cu_seqlens) - 1
    per_token = sum(int(n) * flops.forward_mean(int(n)) for n in lengths) / lengths.sum()
    rate = 3 * per_token * miles.tokens_per_s
    matmul = product_rate(visit)
    yield Line(
        name="mfu",
        measured=rate / times.device.bf16_flops,
        unit="of the data sheet's bf16 peak",
        note="3 x the forward FLOPs of the model, attention counted; seconds of a step by kind of "
        "kernel",
        figures={
            "tflops": rate / 1e12,
            "of_matmul_measured": rate / matmul,
            "matmul_tflops": matmul / 1e12,
            **profile,
        },
    )


def _forecast(
    times: TimeModel, size: Size, shard: TrainShard, visit: Visit
) -> tuple[TrainSeconds, Work]:
    """By the planner, of this batch."""
    lengths = np.diff(shard.cu_seqlens)
    prompts = lengths // 4
    work = work_of(
        visit,
        num_samples=len(lengths),
        prompt_tokens=float(prompts.mean()),
        response_tokens=float((lengths - prompts).mean()),
        longest_response=int((lengths - prompts).max()),
    )
    return times.train(TrainerLayout(), work, cap=size.microbatch_tokens), work


def _peer_line(
    attention: Attention,
    folder: Path,
    size: Size,
    shards: Sequence[TrainShard],
    visit: Visit,
    *,
    miles: Timed,
    logprobs: np.ndarray,
) -> Line:
    """With as large microbatches as it has memory for."""
    cap, problem = size.microbatch_tokens, ""
    while cap >= size.longest:
        try:
            timed = _peer_steps(attention, folder, size, shards, visit, cap=cap, logprobs=logprobs)
        except torch.OutOfMemoryError as error:
            problem = str(error).split(".")[0]
            timed = None
        except RuntimeError as error:  # the peer's own; the other peer is beside it
            return Line(name=attention.name, measured=None, unit="tokens/s", note=f"fails: {error}")
        free_memory()  # the error and the frames that it held are gone here
        if timed is None:
            cap //= 2
            continue
        return Line(
            name=attention.name,
            measured=timed.tokens_per_s,
            unit="tokens/s",
            note=f"{attention.note}; {cap} tokens in a microbatch"
            f"{f', more: {problem}' if problem else ''}; weights and AdamW's moments in bfloat16, "
            "where the trainer's are float32",
            figures=timed.figures
            | {"miles_over_peer": miles.tokens_per_s / timed.tokens_per_s, "step_s": timed.step_s},
        )
    return Line(name=attention.name, measured=None, unit="tokens/s", note=problem)


def _peer_steps(
    attention: Attention,
    folder: Path,
    size: Size,
    shards: Sequence[TrainShard],
    visit: Visit,
    *,
    cap: int,
    logprobs: np.ndarray,
) -> Timed:
    peer = Peer(folder, attention=attention, cap=cap, device=visit.torch_device)
    apart = np.abs(peer.score(shards[0]) - logprobs)[shards[0].loss_mask]
    timed = _timed(lambda shard: peer.step(shard, LR), shards, size, visit)
    timed.figures["logprob_difference"] = float(apart.mean())
    return timed
