"""Learning from rows beside TRL's trainers on this CPU, in turns:

    python bench/stages.py [--stage sft --stage dpo] [--lengths equal] [--pairs 5] [--profile]

SFTTrainer, DPOTrainer (sigmoid; with `--stage exo` another loss) and RewardTrainer, with the
quickstart's model in fp32; `lora` is SFT of an adapter of rank 16 on every matrix, beside
SFTTrainer with PEFT. Both sides
begin with the same weights, take the same rows in the same order with the same AdamW, and must
report the same loss in each of the first steps, else it fails. A reference's log-probs are computed
before the first step on both sides. A step is all of it: rows to tensors, forward, backward,
clipping, AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pairs import Machine, Table, command_line, report, take_turns
from sides import Orders, Side, parse_as_side
from start_adapter import write_start

from milescli.checkpoint.score_model import score_model
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import load_facts, table
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe

LENGTHS = {"equal": (40, 40), "ragged": (10, 70)}
"""Shortest and longest sequence, prompt included; lengths are drawn evenly."""
THEIR_NAMES = {
    **{loss: loss for loss in ("sigmoid_norm", "robust", "hinge", "ipo", "apo_zero", "apo_down")},
    "exo": "exo_pair",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
}
"""TRL's names of losses over pairs, by ours."""
SMOOTHED = {loss: {"label_smoothing": 0.1} for loss in ("robust", "exo")}
"""Losses in which TRL reads it."""
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "supervised"},
    "lora": {"objective": "supervised", "lora": {"rank": 16}},
    "dpo": {"objective": "preference", "preference": {"loss": "sigmoid"}},
    **{
        loss: {"objective": "preference", "preference": {"loss": loss, **SMOOTHED.get(loss, {})}}
        for loss in THEIR_NAMES
    },
    "reward": {"objective": "reward_model", "reward_model": {"center_coef": 0.01}},
}
"""What each sets of `train`."""
FROM_TEXTS = ("sft", "lora")
"""Those that learn from rows without a comparison."""
TIMED = ("sft", "lora", "dpo", "reward")
"""Those that are measured where none is named; the other losses do the same work."""
LR, BETAS = 1e-4, (0.9, 0.98)
STEPS_PER_RUN, NUM_COMPARED, MAX_LOSS_DIFFERENCE = 5, 5, 1e-5
NUM_BATCHES = 8
"""Of different rows; then they come again."""
FIRST_TOKEN = 3
"""Behind the special ones."""


def write_rows(file: Path, lengths: str, num_rows: int) -> None:
    """A prompt and two responses of random tokens each; the first is the chosen one."""
    import numpy as np

    shortest, longest = LENGTHS[lengths]
    rng, rows = np.random.default_rng(0), []
    for _ in range(num_rows):
        sizes = rng.integers(shortest, longest + 1, 2)
        prompt = int(rng.integers(2, min(sizes) - 1)) if shortest < longest else shortest // 2

        def tokens(count: int) -> list[int]:
            return rng.integers(FIRST_TOKEN, ScratchModel().vocab_size, count).tolist()

        rows.append([tokens(prompt), *(tokens(size - prompt) for size in sizes)])
    file.write_text(json.dumps(rows), encoding="utf-8")


def recipe_of(stage: str, folder: Path) -> dict[str, Any]:
    """As a user would write it."""
    adapter = {"adapter": str(folder / "adapter")} if stage == "lora" else {}
    return {
        "model": {"path": str(folder / "model"), **adapter},
        "data": {"train": "rows.jsonl", "max_row_tokens": 128},
        "train": {**STAGES[stage], "optimizer": {"lr": LR}},
    }


async def serve_miles(options: argparse.Namespace) -> None:
    """The side of miles: one rank, in this process, as Ray would host it."""
    from own_run import plan_of

    orders = Orders()
    stage = options.stage[0]
    recipe = recipe_of(stage, options.folder)
    plan = plan_of(recipe, options.folder)
    from milescli.platform.environment import trainer_environment

    os.environ.update(trainer_environment(plan))  # before torch is imported
    import torch

    from milescli.doctor.tiny_trainer import start_rank
    from milescli.train.objectives import load_objective, sequences_from
    from milescli.train.packing import pack

    wanted = Recipe.model_validate(recipe)
    trainer = start_rank(plan, options.folder / "model", recipe=wanted)
    name = wanted.train.objective
    objective = load_objective(name, wanted)
    items = _items(options.folder, stage)
    if wanted.caches_reference:
        items = _with_reference(items, trainer, plan.batch.max_row_tokens(1))
    batches = [items[at : at + options.rows] for at in range(0, len(items), options.rows)]
    done = 0

    def step() -> float:
        nonlocal done
        batch = pack(
            sequences_from(objective, batches[done % len(batches)], name=name),
            objective=name,
            dp=1,
            max_tokens_per_microbatch=plan.batch.max_row_tokens(1),
        )
        done += 1
        return trainer.step(batch.shards[0], LR).report.loss

    async def steps(order: dict[str, Any]) -> dict[str, Any]:
        if order.get("profile"):
            with torch.profiler.profile() as profile:
                step()
            averages = profile.key_averages()
            return {"profile": averages.table(sort_by="self_cpu_time_total", row_limit=28)}
        began = time.perf_counter()
        losses = [step() for _ in range(STEPS_PER_RUN)]
        return {"seconds": time.perf_counter() - began, "losses": losses}

    try:
        await orders.obey(steps, about=f"threads: {torch.get_num_threads()}")
    finally:
        trainer.close()


def _items(folder: Path, stage: str) -> list[Any]:
    from milescli.core.types import Pair
    from milescli.data.chat_masks import demonstration_trajectory

    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    if stage in FROM_TEXTS:
        return [demonstration_trajectory(prompt, chosen) for prompt, chosen, _ in rows]
    return [
        Pair(
            index=index,
            chosen=demonstration_trajectory(prompt, chosen),
            rejected=demonstration_trajectory(prompt, rejected),
        )
        for index, (prompt, chosen, rejected) in enumerate(rows)
    ]


def _with_reference(pairs: list[Any], trainer: Any, cap: int) -> list[Any]:
    from array import array
    from dataclasses import replace

    from milescli.train.base import sequence_of
    from milescli.train.packing import pack

    sequences = [
        sequence_of(side, streams={}, token_weight=1.0, share=1.0, group=pair.index)
        for pair in pairs
        for side in pair.sides
    ]
    batch = pack(sequences, objective="supervised", dp=1, max_tokens_per_microbatch=cap)
    numbers = batch.shards[0].sequence_ids.tolist()
    values = dict(zip(numbers, trainer.score(batch.shards[0]), strict=True))
    lines = [array("f", values[number].tobytes()) for number in range(len(sequences))]
    return [
        replace(pair, references=tuple(lines[2 * place : 2 * place + 2]))
        for place, pair in enumerate(pairs)
    ]


async def serve_peer(options: argparse.Namespace) -> None:
    """The side of TRL: its trainer runs in a thread, and waits between the runs."""
    orders = Orders()
    import torch

    allowed: queue.Queue[int] = queue.Queue()
    reached: queue.Queue[dict[str, Any]] = queue.Queue()
    trainer = _trl_trainer(options, allowed, reached)
    threading.Thread(target=trainer.train, daemon=True).start()

    async def steps(_: dict[str, Any]) -> dict[str, Any]:
        allowed.put(STEPS_PER_RUN)
        return reached.get()

    await orders.obey(steps, about=f"threads: {torch.get_num_threads()}")


def _trl_trainer(options: argparse.Namespace, allowed: Any, reached: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    stage, folder = options.stage[0], options.folder / "model"
    kind, config, settings = _trl_form(stage)
    load = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    turns = _turns(allowed, reached)

    class Prepared(kind):  # type: ignore[misc, valid-type]
        """Takes rows of tokens as they are, and keeps the loss of each step."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            turns.losses.append(float(loss))
            return loss

    model = load.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if stage == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.folder / "adapter", is_trainable=True)
    return Prepared(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(_trl_rows(options.folder, stage)),
        args=config(
            output_dir=str(options.folder / "trl"),
            per_device_train_batch_size=options.rows,
            max_steps=1_000_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=1.0,
            weight_decay=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            max_length=None,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
        ),
        callbacks=[turns],
    )


def _trl_form(stage: str) -> tuple[Any, Any, dict[str, Any]]:
    """(trainer, its configuration, what is set of that) for a stage."""
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    if stage in FROM_TEXTS:
        return SFTTrainer, SFTConfig, {}
    if stage == "reward":
        return RewardTrainer, RewardConfig, {"center_rewards_coefficient": 0.01}
    preference = STAGES[stage]["preference"]
    settings = {
        "beta": 0.1,
        "precompute_ref_log_probs": True,
        "loss_type": [THEIR_NAMES.get(preference["loss"], preference["loss"])],
        "label_smoothing": preference.get("label_smoothing", 0.0),
    }
    return DPOTrainer, DPOConfig, settings


def _turns(allowed: Any, reached: Any) -> Any:
    """A callback that waits for leave before each run, and says what it took."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        """Of one trainer."""

        def __init__(self) -> None:
            self.left, self.began = 0, 0.0
            self.losses: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.left == 0 and state.global_step == 0:
                self._wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.left -= 1
            if self.left == 0:
                seconds = time.perf_counter() - self.began
                reached.put({"seconds": seconds, "losses": list(self.losses)})
                self.losses.clear()
                self._wait()

        def _wait(self) -> None:
            self.left = allowed.get()
            self.began = time.perf_counter()

    return Turns()


def _trl_rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    if stage in FROM_TEXTS:
        return [
            {"input_ids": prompt + chosen, "labels": [-100] * len(prompt) + chosen}
            for prompt, chosen, _ in rows
        ]
    if stage == "reward":
        return [
            {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            for prompt, chosen, rejected in rows
        ]
    return [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for prompt, chosen, rejected in rows
    ]


def measure(stage: str, lengths: str, result: Table, options: argparse.Namespace) -> None:
    """Start both sides, run the pairs, stop both; adds a row."""
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = Path(temporary)
        base = folder / ("base" if stage == "reward" else "model")
        make_model(ScratchModel(), base, seed=0)
        make_scratch_tokenizer(["1 + 2 = 3"], 300, base)
        if stage == "reward":
            score_model(base, folder / "model", pad_id=0, seed=0)
        if stage == "lora":
            write_start(folder / "adapter", base, recipe_of(stage, folder))
        write_rows(folder / "rows.json", lengths, NUM_BATCHES * options.rows)
        millions = table(load_facts(folder / "model")).num_parameters / 1e6

        def start(side: str) -> Side:
            command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
            command += ["--stage", stage, "--lengths", lengths, "--rows", str(options.rows)]
            return Side(side, command, log=folder / f"{side}.log")

        losses: dict[str, list[float]] = {"miles": [], "peer": []}

        def run(side: Side) -> dict[str, float]:
            reply = side.ask({})
            losses[side.name] += reply["losses"]
            return {"s": reply["seconds"] / STEPS_PER_RUN}

        print(f"{stage}, {lengths}: starting both sides", flush=True)
        with start("miles") as miles, start("peer") as peer:
            setting = f"{stage}, {lengths}: miles {miles.ready()['about']}; peer "
            setting += peer.ready()["about"]
            print(setting, flush=True)
            pairs = take_turns(lambda _: run(miles), lambda _: run(peer), num_pairs=options.pairs)
            if options.profile:
                print(miles.ask({"profile": True})["profile"])
    compared = zip(losses["miles"][:NUM_COMPARED], losses["peer"][:NUM_COMPARED], strict=True)
    # the ipo loss is 25 here, and float32 has 2e-6 between two numbers of that size
    apart = max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in compared)
    assert apart < MAX_LOSS_DIFFERENCE, f"{stage}: the sides do not train the same: {losses}"
    shortest, longest = LENGTHS[lengths]
    size = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    what = f"{stage}, {lengths}, {millions:.2f} M, {options.rows} x {size}, a step"
    result.add(pairs, name="s", what=what, unit="s", better="less")
    result.notes.append(f"{setting}; losses of {NUM_COMPARED} steps differ by {apart:.1e} at most")


def main() -> None:
    """The command line; `--side` is how the benchmark starts its own sides."""
    parser = command_line(__doc__, num_pairs=5)
    parser.add_argument("--stage", choices=sorted(STAGES), action="append")
    parser.add_argument("--lengths", choices=sorted(LENGTHS), action="append")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step; a pair is one")
    parser.add_argument(
        "--profile", action="store_true", help="print what a step of miles spends its time on"
    )
    options = parse_as_side(parser, miles=serve_miles, peer=serve_peer)
    if options is None:
        return
    result = Table(
        peer="TRL's trainers, fp32, sdpa, one batch padded to its longest, fused AdamW",
        machine=Machine.read(),
    )
    for stage in options.stage or TIMED:
        for lengths in options.lengths or LENGTHS:
            measure(stage, lengths, result, options)
    report(result, options)


if __name__ == "__main__":
    main()
