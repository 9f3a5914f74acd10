"""How fast one SGLang engine answers on this CPU, in the two shapes that matter. Real engine,
router, client; tiny models.

    python bench/rollout.py [--runs 10] [--threads 1] [--shape reference|quickstart]

reference: 4.98M-parameter Qwen3, 64 answers x (16 + 128 tokens), fp32, log-probs, seeds.
quickstart: 0.85M parameters, 256 answers x (24 + 32 tokens). One run is a burst of all answers at
once; one table, one line a run. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.sglang.client import SglangFleet
from milescli.backends.sglang.http import EngineHandle
from milescli.backends.sglang.ports import free_ports
from milescli.backends.sglang.server import EngineServer, EngineSpec, RouterServer, RouterSpec
from milescli.rollout.base import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One benchmark: the model and the burst."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    num_answers: int
    prompt_tokens: int
    answer_tokens: int


SHAPES = {
    "reference": Shape(
        hidden=256, layers=6, ffn=768, heads=4, kv_heads=2, head_dim=64, vocab=1024,
        num_answers=64, prompt_tokens=16, answer_tokens=128,
    ),
    "quickstart": Shape(
        hidden=128, layers=4, ffn=384, heads=4, kv_heads=2, head_dim=32, vocab=512,
        num_answers=256, prompt_tokens=24, answer_tokens=32,
    ),
}  # fmt: skip


def write_model(shape: Shape, folder: Path) -> int:
    """A Qwen3 with random weights, in the Hugging Face layout; returns its number of parameters."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        sizes |= {
            f"{block}.input_layernorm.weight": (shape.hidden,),
            f"{block}.post_attention_layernorm.weight": (shape.hidden,),
            f"{block}.self_attn.q_norm.weight": (shape.head_dim,),
            f"{block}.self_attn.k_norm.weight": (shape.head_dim,),
            f"{block}.self_attn.q_proj.weight": (query, shape.hidden),
            f"{block}.self_attn.k_proj.weight": (key, shape.hidden),
            f"{block}.self_attn.v_proj.weight": (key, shape.hidden),
            f"{block}.self_attn.o_proj.weight": (shape.hidden, query),
            f"{block}.mlp.gate_proj.weight": (shape.ffn, shape.hidden),
            f"{block}.mlp.up_proj.weight": (shape.ffn, shape.hidden),
            f"{block}.mlp.down_proj.weight": (shape.hidden, shape.ffn),
        }
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        for name, size in sizes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": shape.vocab + 7, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(weight.numel() for weight in weights.values())


async def burst(fleet: SglangFleet, shape: Shape, *, run: int) -> float:
    """Seconds for all answers of one run."""
    source = random.Random(run)
    requests = [
        GenerateRequest(
            prompt_ids=[source.randrange(3, shape.vocab) for _ in range(shape.prompt_tokens)],
            max_new_tokens=shape.answer_tokens,
            seed=run * 10_000 + index,
        )
        for index in range(shape.num_answers)
    ]
    started = time.perf_counter()
    answers = await asyncio.gather(*(fleet.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    assert all(len(answer.response_ids) == shape.answer_tokens for answer in answers)
    return seconds


async def measure(name: str, *, runs: int, threads: int) -> None:
    """Start, one burst to warm up, `runs` bursts, stop; prints as it goes."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        num_parameters = write_model(shape, Path(folder))
        engine_port, router_port, metrics_port = free_ports(3)
        spec = EngineSpec(
            model_dir=Path(folder), tokenizer_dir=None, device_kind="cpu", precision="fp32", port=engine_port,
            log_path=Path(folder) / "engine.log", context_length=1024, cpu_threads=threads,
        )  # fmt: skip
        engine = EngineServer(spec)
        router = RouterServer(
            RouterSpec(
                worker_urls=(engine.url,),
                port=router_port,
                metrics_port=metrics_port,
                log_path=Path(folder) / "router.log",
            )
        )
        fleet = SglangFleet(
            router_url=router.url,
            engines=[EngineHandle(name=engine.name, url=engine.url, log_path=engine.log_path)],
        )
        try:
            engine.start()
            start_s = engine.wait_ready(180)
            router.start()
            router.wait_ready(60)
            await burst(fleet, shape, run=0)
            speeds = []
            burst_shape = (
                f"{shape.num_answers} x ({shape.prompt_tokens} + {shape.answer_tokens}) tokens"
            )
            print(
                f"{name}: {num_parameters / 1e6:.2f}M parameters, {burst_shape}, {threads} "
                "thread(s)"
            )
            print(
                f"engine ready in {start_s:.1f} s; load of the machine before the first run "
                f"{os.getloadavg()[0]:.1f}"
            )
            print(f"{'run':>5} {'seconds':>8} {'tokens/s':>9}")
            for run in range(1, runs + 1):
                seconds = await burst(fleet, shape, run=run)
                speeds.append(shape.num_answers * shape.answer_tokens / seconds)
                print(f"{run:>5} {seconds:>8.2f} {speeds[-1]:>9.0f}", flush=True)
            print(
                f"{'min':>5} {'':>8} {min(speeds):>9.0f}\n{'med':>5} {'':>8} "
                f"{statistics.median(speeds):>9.0f}"
            )
        finally:
            await fleet.close()
            router.stop()
            engine.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    options = parser.parse_args()
    for name in options.shape or sorted(SHAPES):
        asyncio.run(measure(name, runs=options.runs, threads=options.threads))


if __name__ == "__main__":
    sys.exit(main())
