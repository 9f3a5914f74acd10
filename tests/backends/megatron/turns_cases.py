"""Two adapters that take turns in one model, and each of them alone. Called by `world.py` through
`cases`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.backends.megatron.harness import another_port, policy_shard, trainer

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1, "train": {"entropy_coef": 0.0}},
    "other": {"seed": 2, "train": {"entropy_coef": 0.05, "kl_coef": 0.1}},
}
"""Other objectives, too: the second has a reference of its own."""
LRS = {"plain": 1e-2, "other": 3e-3}
STEPS = 3


def turns_cases(models: dict[str, str], folder: Callable[[str], str]) -> list[dict[str, Any]]:
    """Of a world of two. `folder`: of a checkpoint, by a name."""
    return [
        {
            "name": name,
            "call": "turns_and_alone",
            "model": models[model],
            "save": folder(name.replace(" ", "-")),
            **how,
        }
        for name, model, how in (
            ("turns dense", "dense", {"layout": {"tp": 2, "sequence_parallel": True}}),
            ("turns moe", "moe", {"layout": {"ep": 2, "dp": 2}, "precision": "bf16"}),
            ("turns glm", "glm", {"layout": {"pp": 2}}),
        )
    ]


def turns_and_alone(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    save: str,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Of each adapter: what its steps report, and hashes of its weights, in turns and alone. In
    turns the second saves while the first goes on, and is loaded again after it has learned."""
    how = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    how |= {"precision": precision}
    folder = Path(save)

    def made(train: dict[str, Any], **more: Any) -> TrainerRank:
        return trainer(**how, train={"lora": {"rank": 4}, **train}, **more)

    both = made({}, turns=ADAPTERS)
    in_turns: dict[str, list[Any]] = {name: [] for name in ADAPTERS}
    both.take_turn("other")
    both.freeze_reference()
    for step in range(STEPS):
        for name in ADAPTERS:
            both.take_turn(name)
            in_turns[name].append(_reported(both, step, name))
        if step == 1:
            both.save(str(folder), True)  # it is the turn of the second
    both.take_turn("plain")
    in_turns["plain"].append(both.parameter_checksums())
    both.take_turn("other")
    in_turns["other"].append(both.parameter_checksums())
    saved = sorted(both.finish_save())
    both.load(str(folder))
    again = [_reported(both, 2, "other"), both.parameter_checksums()]
    both.take_turn("plain")
    is_left_alone = both.parameter_checksums() == in_turns["plain"][-1]
    ports = {each: another_port() for each in ADAPTERS}
    both.close()
    alone = {}
    for name, own in ADAPTERS.items():
        how["port"] = ports[name]
        alone[name] = _alone(name, made(own["train"], seed=own["seed"]))
    return {
        "in turns": in_turns,
        "alone": alone,
        "saved": saved,
        "again": again,
        "is left alone": is_left_alone,
    }


def _alone(name: str, one: TrainerRank) -> list[Any]:
    if ADAPTERS[name]["train"].get("kl_coef"):
        one.freeze_reference()
    told: list[Any] = [_reported(one, step, name) for step in range(STEPS)]
    told.append(one.parameter_checksums())
    one.close()
    return told


def _reported(made: TrainerRank, step: int, name: str) -> dict[str, float]:
    report = made.step(policy_shard(made, step), LRS[name]).report
    return {"loss": report.loss, "grad_norm": report.grad_norm, **report.figures}
