"""How fast miles trains on this CPU beside a plain PyTorch loop over transformers' model, in turns:

    python bench/train.py [--pairs 5] [--lengths equal --lengths ragged] [--profile]
    python bench/train.py --precision int4_qat [--experts 8]   # beside miles itself in fp32
    python bench/train.py --precision int4_qat --model FOLDER --sequences 64   # a real model

One rank of the trainer, with the plan's threads for this machine, and the policy objective; the
quickstart's model. The peer pads its batch, masks attention, takes log-probs by log_softmax and
gather, clips gradients and steps AdamW, with torch's own number of threads. Both start with the
same weights and learn from the same sequences with the same advantages: gradient norms are
compared. Tokens per second count real tokens, prompts included, and no padding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pairs import Machine, Table, command_line, report, take_turns
from sides import Orders, Side, parse_as_side

from milescli.models import load_facts, table
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel

if TYPE_CHECKING:
    from milescli.train.base import TrainShard

LENGTHS = {"equal": (40, 40), "ragged": (10, 70)}
"""Shortest and longest sequence; lengths are drawn evenly."""
LR, BETAS, MAX_GRAD_NORM = 1e-4, (0.9, 0.98), 1.0
"""What a recipe has, but for the learning rate."""
MICROBATCH_TOKENS = 8192
STEPS_PER_RUN = 2
MAX_NORM_DIFFERENCE = 1e-3
"""Relative, between the gradient norms of both sides: they do the same work."""


def model_of(experts: int) -> ScratchModel:
    """The quickstart's model, or that of `quickstart-moe` with so many experts."""
    if not experts:
        return ScratchModel()
    return ScratchModel(family="qwen3_moe", num_experts=experts, tie_embeddings=False)


def shard_of(lengths: str, num_sequences: int, microbatch_tokens: int) -> TrainShard:
    """The batch, equal on both sides; every sequence has an advantage of its own sign."""
    import numpy as np
    from gpu.trainer import make_shard

    shortest, longest = LENGTHS[lengths]
    return make_shard(
        np.random.default_rng(0).integers(shortest, longest + 1, num_sequences),
        vocab_size=ScratchModel().vocab_size,
        microbatch_tokens=microbatch_tokens,
    )


async def serve_miles(options: argparse.Namespace) -> None:
    """The side of miles: one rank, in this process, as Ray would host it."""
    from own_run import plan_of

    orders = Orders()
    recipe = {
        "model": {"path": str(options.model or options.folder / "model")},
        "data": {"prompts": "task:sums"},
        "rollout": {"reward": "gsm8k"},
        "train": {"optimizer": {"lr": LR}, "precision": options.precision or "fp32"},
    }
    plan = plan_of(recipe, options.folder)
    from milescli.platform.environment import trainer_environment

    os.environ.update(trainer_environment(plan))  # before torch is imported
    import torch

    from milescli.doctor.tiny_trainer import start_rank
    from milescli.recipe.schema import Recipe

    settings = Recipe.model_validate({"train": recipe["train"]})
    trainer = start_rank(plan, options.model or options.folder / "model", recipe=settings)
    shard = shard_of(options.lengths[0], options.sequences, plan.batch.max_row_tokens(1))

    async def steps(order: dict[str, Any]) -> dict[str, Any]:
        if order.get("profile"):
            with torch.profiler.profile() as profile:
                trainer.step(shard, LR)
            averages = profile.key_averages()
            return {"profile": averages.table(sort_by="self_cpu_time_total", row_limit=28)}
        started, computed = time.perf_counter(), time.process_time()
        reports = [trainer.step(shard, LR).report for _ in range(STEPS_PER_RUN)]
        seconds, last = time.perf_counter() - started, reports[-1]
        return {
            "seconds": seconds,
            "cpu": time.process_time() - computed,
            "tokens": STEPS_PER_RUN * last.num_tokens,
            "norms": [report.grad_norm for report in reports],
        }

    try:
        await orders.obey(steps, about=f"threads: {torch.get_num_threads()}")
    finally:
        trainer.close()


async def serve_peer(options: argparse.Namespace) -> None:
    """The side of plain PyTorch."""
    orders = Orders()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        options.folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
    )
    shard = shard_of(options.lengths[0], options.sequences, MICROBATCH_TOKENS)
    spans = list(pairwise(shard.cu_seqlens.tolist()))
    sequences = [torch.from_numpy(shard.token_ids[a:b]).long() for a, b in spans]
    weight = shard.streams["advantage"] * shard.loss_mask
    weights = [
        torch.from_numpy(weight[a:b]) * float(of_sequence)
        for (a, b), of_sequence in zip(spans, shard.loss_weights, strict=True)
    ]

    def step() -> float:
        """One update, in parts of `--peer-batch` sequences. Returns the gradients' norm."""
        optimizer.zero_grad()
        for first in range(0, len(sequences), options.peer_batch):
            part = slice(first, first + options.peer_batch)
            tokens, mask, factors = _padded(sequences[part], weights[part])
            logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None])
            loss = -(logprobs.squeeze(-1) * factors[:, 1:]).sum()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return float(norm)

    async def steps(order: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        norms = [step() for _ in range(STEPS_PER_RUN)]
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": STEPS_PER_RUN * spans[-1][1], "norms": norms}

    await orders.obey(steps, about=f"threads: {torch.get_num_threads()}")


def _padded(sequences: list[Any], weights: list[Any]) -> tuple[Any, Any, Any]:
    """[B, L] tokens, attention mask, and weight of each token's loss; padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    mask = pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    return (
        pad_sequence(sequences, batch_first=True),
        mask,
        pad_sequence(weights, batch_first=True),
    )


def measure(lengths: str, result: Table, options: argparse.Namespace) -> None:
    """Start both sides, run the pairs, stop both; adds a row."""
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = Path(temporary)
        if options.model is None:
            make_model(model_of(options.experts), folder / "model", seed=0)
        millions = table(load_facts(options.model or folder / "model")).num_parameters / 1e6

        def start(side: str) -> Side:
            command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
            command += ["--lengths", lengths, "--sequences", str(options.sequences)]
            command += ["--peer-batch", str(options.peer_batch)]
            if options.model is not None:
                command += ["--model", str(options.model)]
            if side == "miles" and options.precision:
                command += ["--precision", options.precision]
            if side == "peer" and options.precision:
                command[command.index("peer")] = "miles"
            return Side(side, command, log=folder / f"{side}.log")

        norms: dict[int, dict[str, float]] = {}

        def run(side: Side, number: int) -> dict[str, float]:
            reply = side.ask({})
            # two formats train weights apart: only the first step of all has equal ones
            used = reply["norms"][0] if options.precision else reply["norms"][-1]
            norms.setdefault(0 if options.precision else number, {}).setdefault(side.name, used)
            figures = {"tokens/s": reply["tokens"] / reply["seconds"]}
            return figures | ({"cpu": reply["cpu"] / STEPS_PER_RUN} if options.precision else {})

        print(f"{lengths}: starting both sides", flush=True)
        with start("miles") as miles, start("peer") as peer:
            setting = f"{lengths}: miles {miles.ready()['about']}; peer {peer.ready()['about']}"
            print(setting, flush=True)
            pairs = take_turns(
                lambda number: run(miles, number),
                lambda number: run(peer, number),
                num_pairs=options.pairs,
            )
            if options.profile:
                print(miles.ask({"profile": True})["profile"])
    apart = max(abs(of["miles"] / of["peer"] - 1) for of in norms.values())
    assert options.precision or apart < MAX_NORM_DIFFERENCE, (
        f"the sides do not train the same: {norms}"
    )
    shortest, longest = LENGTHS[lengths]
    size = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    result.add(
        pairs,
        name="tokens/s",
        what=f"{lengths}, {millions:.2f} M, {options.sequences} x {size}",
        unit="tokens/s",
        better="more",
    )
    if options.precision:
        what = f"CPU time of a step, {lengths}, {millions:.2f} M"
        result.add(pairs, name="cpu", what=what, unit="s", better="less")
    which = "the first gradient norms" if options.precision else "gradient norms"
    result.notes.append(f"{setting}; {which} differ by {apart:.1e} at most")


def main() -> None:
    """The command line; `--side` is how the benchmark starts its own sides."""
    parser = command_line(__doc__, num_pairs=5)
    parser.add_argument("--lengths", choices=sorted(LENGTHS), action="append")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument(
        "--peer-batch",
        type=int,
        default=64,
        help="sequences that the peer pads together; on a CPU fewer are faster than all 512",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print what a step of miles spends its time on"
    )
    parser.add_argument("--precision", help="`train.precision`, beside miles itself in fp32")
    parser.add_argument("--experts", type=int, default=0, help="experts of the model's layers")
    parser.add_argument("--model", type=Path, help="a real model's folder, with --precision")
    options = parse_as_side(parser, miles=serve_miles, peer=serve_peer)
    if options is None:
        return
    result = Table(
        peer="plain PyTorch over transformers' Qwen3, fp32, sdpa, parts of "
        f"{options.peer_batch} sequences padded to their longest, fused AdamW"
        if options.precision is None
        else "miles itself in fp32",
        machine=Machine.read(),
    )
    for lengths in options.lengths or LENGTHS:
        measure(lengths, result, options)
    report(result, options)


if __name__ == "__main__":
    main()
