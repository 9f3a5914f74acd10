"""Tokens per second of the trainer on this machine, alone: `python bench/train.py [--sequences 512
--length 40 ...]`. One rank, a model with random weights; prints one line of JSON. Says nothing of
rollout, nor of more than one rank."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gpu.trainer import make_shard, make_trainer
from safetensors.torch import save_file

from milescli.models import parse_facts, table


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument(
        "--length",
        type=int,
        default=40,
        help="mean tokens of a sequence; lengths vary by a quarter",
    )
    parser.add_argument("--kind", choices=("policy", "supervised"), default="policy")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--microbatch", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--profile", action="store_true", help="print what one step spends its time on"
    )
    return parser.parse_args()


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """A Qwen3 (or Qwen3-MoE) folder of the asked size."""
    config: dict[str, object] = {
        "model_type": "qwen3_moe" if options.experts else "qwen3",
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": options.hidden // 4,
        "intermediate_size": options.ffn,
        "vocab_size": options.vocab,
        "tie_word_embeddings": True,
    }
    if options.experts:
        config |= {
            "num_experts": options.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": options.hidden,
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = table(parse_facts(config)).hf_shapes()
    save_file(
        {name: torch.randn(shape) * 0.02 + ("norm" in name) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )


def main() -> None:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options)
        trainer = make_trainer(
            Path(name), microbatch_tokens=options.microbatch, threads=options.threads
        )
        spread = options.length // 4
        lengths = np.random.default_rng(0).integers(
            options.length - spread, options.length + spread + 1, options.sequences
        )
        shard = make_shard(
            lengths,
            vocab_size=options.vocab,
            microbatch_tokens=options.microbatch,
            kind=options.kind,
        )
        trainer.step(shard, 1e-4)
        seconds = []
        for _ in range(options.steps):
            started = time.monotonic()
            report = trainer.step(shard, 1e-4)
            seconds.append(time.monotonic() - started)
        if options.profile:
            with torch.profiler.profile() as profile:
                trainer.step(shard, 1e-4)
            print(
                profile.key_averages().table(
                    sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=48
                )
            )
        best = min(seconds)
        result = {
            "tokens": report.num_tokens,
            "tokens_per_s": round(report.num_tokens / best),
            "step_s": round(best, 4),
            "median_step_s": round(sorted(seconds)[len(seconds) // 2], 4),
            "optimizer_s": round(report.optimizer_s, 4),
            "microbatches": report.num_microbatches,
        }
        print(json.dumps(result | {"device": str(trainer.device), "threads": options.threads}))
        trainer.close()


if __name__ == "__main__":
    main()
