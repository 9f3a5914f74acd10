"""How fast `miles convert` is beside a plain copy of the same bytes, and how much memory it takes:
`python bench/convert.py [--gib 16 --folder DIR]`. Makes a synthetic checkpoint with experts, copies
it with cp and sync, converts it both ways, compares the bytes, and removes everything again. Says
nothing of logits: they are not compared here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from milescli.checkpoint.files import StreamFile, as_bytes, crc32_of
from milescli.checkpoint.pipeline import ranges_within
from milescli.checkpoint.safetensors_file import TensorSpec, make_header
from milescli.models import parse_facts, table

GIB = 2**30
MAX_RATIO = 1.5
MAX_EXTRA_BYTES = GIB
"""Beside the largest tensor of the output: the bound of the issue."""
_SHARD = 4 * 10**9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16.0, help="size of the checkpoint")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp"), help="on the disk that is measured"
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-size", type=int, default=1024)
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> dict[str, object]:
    """A Qwen3-MoE of about the asked size."""
    config: dict[str, object] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": options.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 4 * options.hidden,
        "moe_intermediate_size": options.expert_size,
        "num_experts": options.experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    one = table(parse_facts(config)).num_parameters
    two = table(parse_facts({**config, "num_hidden_layers": 2})).num_parameters
    layers = round((options.gib * GIB / 2 - (2 * one - two)) / (two - one))
    return {**config, "num_hidden_layers": max(1, layers)}


def make_model(folder: Path, config: dict[str, object]) -> int:
    """Write it in shards, with an index. Returns its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [
        TensorSpec(name=name, dtype=torch.bfloat16, shape=shape)
        for name, shape in table(parse_facts(config)).hf_shapes().items()
    ]
    shards = [
        [tensors[place] for place in within]
        for within in ranges_within((spec.num_bytes for spec in tensors), limit=_SHARD)
    ]
    generator = torch.Generator().manual_seed(0)
    largest = max(spec.num_bytes for spec in tensors)
    noise = torch.randn(largest // 2 + 4096, generator=generator).bfloat16()
    weight_map, total = {}, 0
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        with StreamFile(folder / name) as stream:
            stream.write(make_header(shard, {"format": "pt"}))
            for place, spec in enumerate(shard):
                start = place * 17 % 4096
                data = as_bytes(noise[start : start + spec.num_bytes // 2])
                stream.write_tensor(data, crc32=crc32_of(data))
                weight_map[spec.name] = name
                total += spec.num_bytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class Peak:
    """Largest resident memory of a process and its children while it runs."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.bytes = 0
        self._process, self._thread = process, threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._process.poll() is None:
            try:
                own = psutil.Process(self._process.pid)
                size = sum(
                    process.memory_info().rss for process in (own, *own.children(recursive=True))
                )
                self.bytes = max(self.bytes, size)
            except psutil.Error:
                pass
            time.sleep(0.02)


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp -r` and `sync`, the yardstick."""
    os.sync()
    began = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    os.sync()
    return time.monotonic() - began


def convert(*arguments: str) -> tuple[float, int]:
    """(seconds, peak bytes) of `miles convert`, with a `sync` at its end as the copy has one."""
    os.sync()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "milescli", "convert", *arguments, "--verify", "tensors", "--quiet"],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.DEVNULL,
    )
    peak = Peak(process)
    assert process.wait() == 0
    os.sync()
    return time.monotonic() - began, peak.bytes


def compare(first: Path, second: Path) -> bool:
    """Whether all weights are equal to the byte."""
    return all(
        subprocess.run(["cmp", str(path), str(second / path.name)], check=False).returncode == 0
        for path in first.glob("*.safetensors")
    )


def main() -> None:
    """Prints a table, then one line of JSON. Ends with 1 where a bound is broken."""
    options = parse()
    root = options.folder / f"miles-bench-{os.getpid()}"
    root.mkdir(parents=True)
    try:
        config = config_of(options)
        size = make_model(root / "hf", config)
        largest = max(2 * entry.num_elements for entry in table(parse_facts(config)).entries)
        measured: dict[str, tuple[float, int]] = {}
        plain = copy(root / "hf", root / "copy")
        shutil.rmtree(root / "copy")
        measured["hf-to-megatron"] = convert(
            "hf-to-megatron", str(root / "hf"), str(root / "megatron")
        )
        plain_back = copy(root / "megatron", root / "copy")
        shutil.rmtree(root / "copy")
        measured["megatron-to-hf"] = convert(
            "megatron-to-hf", str(root / "megatron"), str(root / "back")
        )
        equal = compare(root / "hf", root / "back")
        report(
            size,
            largest,
            measured,
            {"hf-to-megatron": plain, "megatron-to-hf": plain_back},
            equal=equal,
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


def report(
    size: int,
    largest: int,
    measured: dict[str, tuple[float, int]],
    plain: dict[str, float],
    *,
    equal: bool,
) -> None:
    """What was measured, side by side."""
    print(
        f"{size / GIB:.2f} GiB; largest tensor {largest / 2**20:.0f} MiB; came back byte for byte: "
        f"{'yes' if equal else 'NO'}"
    )
    print(f"{'':16}{'cp + sync':>12}{'convert':>12}{'ratio':>8}{'peak memory':>14}")
    fine = equal
    for name, (seconds, peak) in measured.items():
        ratio = seconds / plain[name]
        print(
            f"{name:16}{plain[name]:>10.1f} s{seconds:>10.1f} s{ratio:>8.2f}{peak / 2**20:>10.0f} "
            "MiB"
        )
        fine = fine and ratio <= MAX_RATIO and peak <= MAX_EXTRA_BYTES + largest
    print(
        json.dumps(
            {
                "bytes": size,
                "largest_tensor_bytes": largest,
                "equal": equal,
                "cp_s": plain,
                "convert_s": {name: seconds for name, (seconds, _) in measured.items()},
                "peak_bytes": {name: peak for name, (_, peak) in measured.items()},
                "fine": fine,
            }
        )
    )
    if not fine:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
