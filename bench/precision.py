"""What number formats do to a run on this CPU:

    python bench/precision.py learn [--recipe quickstart-moe] [--precision mxfp8] [--seed 1]
    python bench/precision.py pairs [--model smollm2-135m] [--pair fp32:int4] [--models DIR]

`learn`: for each seed a recipe's model is made and warmed up once, in float32; it then takes the
recipe's RL steps with each `train.precision`. Prints greedy accuracy on all held-out prompts beside
that of fp32 at the same seed.

`pairs`: for each model and pair `train.precision`:`rollout.precision` one step of a run: how far
engine and trainer are apart in the check before it, beside what rounding alone does to the trainer
(nats a token, mean and largest), their KL, the time of the update, and what is published. Tiny
models are random: they show that both sides compute the same, and nothing of what a format costs.
Real ones are made of PyPI packages (`real_models.py`), or lie in DIR.

One run at a time; runs that `--folder` holds are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import real_models
from learn import miles, warmed_up
from rl import read_events
from sides import exit_on_term

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import load_facts
from milescli.models.scratch import make_from_config
from milescli.plan.memory import memory_of
from milescli.plan.types import EngineLayout
from milescli.recipe.load import load

PRECISIONS = ("fp32", "fp8_block", "mxfp8", "int4_qat", "nvfp4")
NUM_HELD_OUT = 256
"""All prompts of `task:sums-heldout`."""
PAIRS = (
    *(f"{precision}:same" for precision in PRECISIONS),
    *(f"fp32:{form}" for form in ("fp8_block", "mxfp8", "int4", "nvfp4")),
)
_TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
TINY: dict[str, dict[str, Any]] = {
    "tiny-dense": {**_TEXT, "model_type": "qwen3"},
    "tiny-moe": {**_TEXT, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 8},
    "tiny-mla": {
        **_TEXT,
        **_EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    "tiny-hybrid": {
        **_TEXT,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 0,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}
"""config.json by name: blocks of all formats divide their matrices."""


def is_done(events: Path) -> bool:
    """Whether these are the events of a run that ended well."""
    return events.exists() and '"outcome": "done"' in events.read_text(encoding="utf-8")


def run(folder: Path, name: str, recipe: str, sets: list[str]) -> list[dict[str, Any]]:
    """The events of the run NAME of a recipe, which is run where it is not there."""
    events = folder / "runs" / name / "events.jsonl"
    if not is_done(events):
        began = time.monotonic()
        shutil.rmtree(events.parent, ignore_errors=True)  # of a run that was cut short
        sets = [*sets, f"run.dir={folder}/runs", "checkpoint.every=0", "eval.every=0"]
        words = [word for text in sets for word in ("--set", text)]
        miles(
            *("launch", "--recipe", recipe, "--name", name, "--quiet", *words),
            log=folder / f"{name}.log",
        )
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return read_events(events)


def learn(options: argparse.Namespace, folder: Path) -> int:
    """One line a recipe and precision. Returns 1 where a run did not end."""
    failed = 0
    for recipe in options.recipe or ("quickstart", "quickstart-moe"):
        plain = dict[int, float]()
        for precision in options.precision or PRECISIONS:
            ends, starts = dict[int, float](), list[float]()
            for seed in options.seed or range(3):
                try:
                    first, ends[seed] = _learned(folder, recipe, precision, seed)
                    starts.append(first)
                except subprocess.CalledProcessError:
                    failed = 1
            if precision == "fp32":
                plain = ends
            print(f"{recipe:15} {precision:10} {_line(starts, ends, plain)}", flush=True)
    return failed


def _learned(folder: Path, recipe: str, precision: str, seed: int) -> tuple[float, float]:
    """Held-out accuracy before the first RL step, and after the last."""
    sets = [
        *("model.scratch=null", f"model.path={warmed_up(folder, seed, recipe=recipe)}"),
        *("warmup.steps=0", "data.demonstrations=null", f"run.seed={seed}"),
        *(f"train.precision={precision}", f"eval.num_prompts={NUM_HELD_OUT}"),
    ]
    events = run(folder, f"{recipe}-{precision}-{seed}", recipe, sets)
    found = {each["step"]: each["accuracy"] for each in events if each["event"] == "EvalDone"}
    return found[0], found[max(found)]


def _line(starts: list[float], ends: dict[int, float], plain: dict[int, float]) -> str:
    """Accuracy of each seed, their mean, and its difference to fp32's over the same seeds."""
    if not ends:
        return "no run ended"
    before = " ".join(f"{accuracy:.1%}" for accuracy in starts)
    each = " ".join(f"{accuracy:.1%}" for accuracy in ends.values())
    text = f"{before} -> {each}   mean {statistics.mean(ends.values()):.1%}"
    apart = [accuracy - plain[seed] for seed, accuracy in ends.items() if seed in plain]
    if apart and ends is not plain:
        text += f"   beside fp32 {100 * statistics.mean(apart):+.1f} points"
    return text


def pairs(options: argparse.Namespace, folder: Path) -> int:
    """One line a model and pair. Returns 1 where a run did not end."""
    failed = 0
    print("| model | trainer, engines | difference | rounding alone | KL | update, s | MiB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.model or (*TINY, *real_models.PACKAGES):
        model = _model(name, folder, options.models)
        for pair in options.pair or PAIRS:
            try:
                print(f"| {name} | {pair.replace(':', ', ')} | {_pair(name, model, pair, folder)}")
            except subprocess.CalledProcessError:
                failed = 1
    return failed


def _model(name: str, folder: Path, given: Path | None) -> Path:
    """The Hugging Face folder of a model, with a tokenizer."""
    if name in real_models.PACKAGES:
        model = (given or folder) / name
        real_models.make(name, model)
        return model
    model = folder / name
    if not (model / "model.safetensors").exists():
        make_from_config({**TINY[name], "torch_dtype": "float32"}, model, seed=0, std=None)
        make_scratch_tokenizer(["1 + 2 = 3"], 300, model)
    return model


def _pair(name: str, model: Path, pair: str, folder: Path) -> str:
    """The figures of one run, as cells of a line."""
    trainer, _, rollout = pair.partition(":")
    is_tiny = name in TINY
    task, reward = ("task:sums", "gsm8k") if is_tiny else ("task:instructions", "instructions")
    recipe = {
        "model": {"path": str(model)},
        "data": {"prompts": task, "max_prompt_tokens": 128},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_response_tokens": 40,
            "reward": reward,
            "precision": rollout,
        },
        "train": {"precision": trainer, "steps": 1, "optimizer": {"lr": 1e-5}},
    }
    if not is_tiny and not (model / "chat_template.jinja").exists():
        recipe["data"]["chat_template"] = "none"  # a base model
    file = folder / f"{name}-{trainer}-{rollout}.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    events = run(folder, file.stem, str(file), [])
    # gigabytes of a real model, which nothing reads again
    shutil.rmtree(folder / "runs" / file.stem / "checkpoints", ignore_errors=True)
    check = next(each for each in events if each["event"] == "EngineTrainerChecked")
    step = next(each for each in events if each["event"] == "StepDone")
    loaded = load(str(file), environ={}, cwd=folder, home=folder).recipe
    published = memory_of(loaded, load_facts(model)).engine_weights(EngineLayout(), size=4)
    cells = [
        f"{check['diff_mean']:.1e}, {check['diff_max']:.1e}",
        f"{check['floor_mean']:.1e}, {check['floor_max']:.1e}",
        f"{check['kl']:.1e}",
        f"{step['seconds']['train_s']:.2f}",
        f"{published / 2**20:,.1f} |",
    ]
    return " | ".join(cells)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["learn", "pairs"])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--seed", action="append", type=int, help="0, 1 and 2 where none is named")
    parser.add_argument("--model", action="append", choices=[*TINY, *real_models.PACKAGES])
    parser.add_argument("--pair", action="append")
    parser.add_argument("--models", type=Path, help="where real models lie, or are made")
    parser.add_argument("--folder", type=Path, help="keep models and runs here")
    options = parser.parse_args()
    exit_on_term()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="miles-precision-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"models and runs in {folder}", flush=True)
    return (learn if options.what == "learn" else pairs)(options, folder)


if __name__ == "__main__":
    sys.exit(main())
