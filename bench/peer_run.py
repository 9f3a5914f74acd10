"""What a user of transformers and TRL would write for the task of `sums.py`. A program of its own,
started by `rl.py`, `start.py` and `sums.py`: `warm-up` trains `fresh/` on the demonstrations,
`grpo` does reinforcement learning with TRL's GRPOTrainer, `evaluate` measures a model. `real.py`
uses parts of it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sums
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from milescli.rollout.rewards.math.gsm8k import gsm8k

WARMUP_BATCH, WARMUP_LR, WARMUP_RISE = 64, 3e-3, 20
"""Demonstrations in a step; the highest learning rate, and the steps until it is reached."""


def read_rows(file: Path) -> list[dict[str, str]]:
    """Of a .jsonl file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer), float32, padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def as_chat(row: dict[str, str]) -> list[dict[str, str]]:
    """The prompt as the user's turn."""
    return [{"role": "user", "content": row["prompt"]}]


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Mean reward of greedy responses, all prompts in one batch."""
    texts = [
        tokenizer.apply_chat_template(as_chat(row), tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            use_cache=True,
            max_new_tokens=sums.MAX_RESPONSE_TOKENS,
        )
    model.train(was_training)
    responses = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    rewards = [
        gsm8k(prompt=row["prompt"], response=response, label=row["label"])
        for row, response in zip(rows, responses, strict=True)
    ]
    return sum(rewards) / len(rewards)


def warm_up(folder: Path, *, num_steps: int) -> None:
    """Supervised steps on the demonstrations, from `fresh/` to `model/`."""
    torch.manual_seed(0)
    model, tokenizer = load(folder / "fresh")
    lines = []
    for row in read_rows(folder / "train.jsonl"):
        text = tokenizer.apply_chat_template(
            as_chat(row), tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        response = tokenizer(row["demonstration"], add_special_tokens=False)["input_ids"]
        response = [*response, tokenizer.eos_token_id]
        lines.append((torch.tensor(prompt + response), [-100] * len(prompt) + response))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=WARMUP_LR, betas=(0.9, sums.BETA2), weight_decay=0.0, fused=True
    )
    pad = torch.nn.utils.rnn.pad_sequence
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = WARMUP_LR * min(1, (step + 1) / WARMUP_RISE) * (1 - step / num_steps)
        chosen = [lines[index] for index in torch.randint(len(lines), (WARMUP_BATCH,)).tolist()]
        tokens = pad([ids for ids, _ in chosen], batch_first=True)
        mask = pad([torch.ones_like(ids) for ids, _ in chosen], batch_first=True)
        labels = [torch.tensor(label) for _, label in chosen]
        labels = pad(labels, batch_first=True, padding_value=-100)
        loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    rows = read_rows(folder / "heldout.jsonl")
    print(f"loss {loss.item():.3f}, held-out accuracy {accuracy(model, tokenizer, rows):.3f}")
    model.save_pretrained(folder / "unfinished")
    tokenizer.save_pretrained(folder / "unfinished")
    (folder / "unfinished").rename(folder / "model")


def clock(tell: Callable[..., None], evaluate: Callable[[int], None] = lambda step: None) -> Any:
    """What TRL calls back: tells the seconds, tokens and reward of each step. `evaluate(step)` is
    called before the first one (0) and after each."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluate(0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell("step", step=state.global_step, seconds=time.perf_counter() - self.began)
            evaluate(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "completions/mean_length" in logs:
                tell("log", tokens=logs["completions/mean_length"], reward=logs["reward"])

    return Clock()


def as_peer_reward(reward_of: Callable[..., float]) -> Callable[..., list[float]]:
    """A reward of miles as TRL calls one."""

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            reward_of(prompt="", response=text, label=wanted)
            for text, wanted in zip(texts, label, strict=True)
        ]

    return reward


def grpo(
    folder: Path, *, num_steps: int, eval_every: int, out: Path, algorithm: str | None
) -> None:
    """TRL's defaults but for the recipe's settings; one step is one update of all samples. Writes
    `out/events.jsonl` as it goes, and the trained model into `out/model`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    out.mkdir(parents=True)
    events = (out / "events.jsonl").open("w", buffering=1)
    model, tokenizer = load(folder / "model")
    heldout = read_rows(folder / "heldout.jsonl")

    def tell(event: str, **values: float) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    def evaluate(step: int) -> None:
        """Where miles does."""
        if step % eval_every == 0 or step == num_steps:
            tell("eval", step=step, accuracy=accuracy(model, tokenizer, heldout))

    rows = read_rows(folder / "train.jsonl")
    config = GRPOConfig(
        str(out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        max_steps=num_steps,
        per_device_train_batch_size=sums.PROMPTS_PER_STEP * sums.SAMPLES_PER_PROMPT,
        num_generations=sums.SAMPLES_PER_PROMPT,
        max_completion_length=sums.MAX_RESPONSE_TOKENS,
        learning_rate=sums.LR,
        lr_scheduler_type="constant",
        adam_beta2=sums.BETA2,
        **sums.peer_settings(algorithm),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=as_peer_reward(gsm8k),
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": as_chat(row), "label": row["label"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[clock(tell, evaluate)],
    )
    trainer.train()
    trainer.save_model(str(out / "model"))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("warm-up", "grpo", "evaluate"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--algorithm", choices=list(sums.PEER_FORMS))
    parser.add_argument("--out", type=Path, help="of grpo: a new folder; of evaluate: a model")
    options = parser.parse_args()
    if options.what == "warm-up":
        warm_up(options.folder, num_steps=options.steps)
    elif options.what == "grpo":
        grpo(
            options.folder,
            num_steps=options.steps,
            eval_every=options.eval_every,
            out=options.out,
            algorithm=options.algorithm,
        )
    else:
        model, tokenizer = load(options.out)
        rows = read_rows(options.folder / "heldout.jsonl")
        print(json.dumps({"accuracy": accuracy(model, tokenizer, rows)}))


if __name__ == "__main__":
    main()
