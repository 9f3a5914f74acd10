"""Losses and gradients of every algorithm under a layout, for random ragged batches and made-up
log-probs: no model computes them, so that what differs is the layout's fault. Called by `world.py`
through `cases`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from milescli.core.plug_points import CREDITS
from milescli.plan.types import TrainerLayout
from milescli.recipe.algorithms import ALGORITHMS, settings_of
from milescli.recipe.schema import Recipe
from milescli.train.base import Objective
from milescli.train.objectives.policy import Policy
from milescli.train.packing import pack
from milescli.train.streams import Stream
from tests.samples import make_group, make_sample, make_trajectory

UNCUT = 1_000_000
VARIANTS: dict[str, dict[str, object]] = {
    **{name: {"train.algorithm": name} for name in ALGORITHMS},
    **{
        f"aggregation {name}": {"train.aggregation": name}
        for name in ("token_mean", "sequence_mean", "sequence_sum", "constant")
    },
    **{
        f"correction {level} {mode}": {
            "train.correction.kind": "importance",
            "train.correction.level": level,
            "train.correction.mode": mode,
            "train.correction.normalize": True,
            "train.correction.veto": 0.01,
            "train.correction.reject_level": level,
            "train.correction.reject_low": 1 / bound,
            "train.correction.reject_high": bound,
        }
        for level, mode, bound in (
            *(("token", "clip", 3.0), ("sequence", "truncate", 300.0)),
            ("geometric", "mask", 2.0),
        )
    },
    "everything": {
        "train.algorithm": "reinforce_pp",
        "train.kl_in": "loss",
        "train.kl_estimator": "low_var",
        "train.kl_coef": 0.1,
        "train.kl_unbiased": True,
        "train.off_policy_mask": 0.05,
        "train.dual_clip": 3.0,
        "train.entropy_coef": 0.01,
        "train.gamma": 0.9,
    },
    "gae": {"train.gamma": 0.9, "train.lam": 0.8},
}
"""What each sets; `gae` is handed its piece, since no recipe may name it yet."""


def recipe_of(settings: dict[str, Any]) -> Recipe:
    """Of dotted keys, an algorithm's row below them."""
    row = settings_of(str(settings["train.algorithm"])) if "train.algorithm" in settings else {}
    nested: dict[str, Any] = {}
    for key, value in {**row, **settings, "train.updates_per_step": 2}.items():
        *parents, last = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return Recipe.model_validate(nested)


def objective_of(name: str) -> Objective[Any]:
    """The variant's."""
    credit = CREDITS.load("gae") if name == "gae" else None
    return Policy(recipe=recipe_of(VARIANTS[name]), credit=credit)


def _groups(rng: np.random.Generator) -> list:
    groups = []
    for index in range(int(rng.integers(2, 5))):
        samples = []
        for number in range(5):
            trajectories = []
            for _ in range(1 + (rng.random() < 0.2)):
                length = int(rng.integers(1, 20))
                trajectories.append(
                    make_trajectory(
                        [index] * int(rng.integers(1, 6)),
                        rng.integers(0, 9, length).tolist(),
                        mask=(rng.random(length) < 0.8).tolist(),
                        logprobs=(-rng.gamma(1.0, 1.0, length)).tolist(),
                    )
                )
            lone = (index, number) == (0, 0)  # every estimator has something to say of its group
            reward = 0.75 if lone else float(index > 0 and rng.random() < 0.3) * rng.random()
            samples.append(make_sample(*trajectories, reward=reward, index=number))
        group = make_group(samples)
        groups.append(type(group)(prompt=group.prompt, samples=samples, greedy_reward=0.5))
    return groups


def algorithms_measured(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    examples: int,
    shares_prompts: bool = False,
) -> dict[str, dict]:
    """By variant and seed: the losses of the updates, and the gradient by the log-prob of each
    token, (sequence, place) -> number; by rank 0. On one process nothing is cut."""
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    from milescli.backends.megatron import mesh
    from milescli.backends.megatron.step import rows
    from milescli.models import load_facts

    rows.MAX_REMAINING_SHARE = 1.0  # these prompts are short
    own = mesh.bring_up(
        layout=TrainerLayout(**layout),
        rank=rank,
        master=("127.0.0.1", port),
        backend="gloo",
        device=torch.device("cpu"),
        timeouts_s=(60, 60),
    )
    facts = load_facts(Path(model))
    made: dict[str, dict] = {}
    for name in VARIANTS:
        for seed in range(examples):
            everywhere: list[Any] = [None] * size
            dist.all_gather_object(
                everywhere, _measured(name, seed, own, facts, size, shares_prompts)
            )
            losses = np.sum([part["losses"] for part in everywhere if part["counts"]], axis=0)
            gradients: dict[tuple[int, int], float] = {}
            for part in everywhere:
                gradients |= part["gradients"]
            made[f"{name} {seed}"] = {"losses": losses.tolist(), "gradients": gradients}
    mesh.tear_down()
    return made


def _measured(  # type: ignore[no-untyped-def]
    name: str, seed: int, own, facts, size: int, shares_prompts: bool
) -> dict[str, Any]:
    from milescli.backends.megatron.step.shard import RankShard

    rng = np.random.default_rng(seed)
    objective = objective_of(name)
    batch = pack(
        objective.sequences(_groups(rng)),
        objective="-",
        dp=own.layout.dp,
        max_tokens_per_microbatch=UNCUT if size == 1 else int(rng.integers(20, 90)),
        updates=2,
    )
    shard = RankShard(
        batch.shards[own.dp_rank], mesh=own, facts=facts, shares_prompts=shares_prompts
    )
    ids_of = torch.from_numpy(shard.shard.sequence_ids)

    def value(microbatch, tilt: float) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """[S] a made-up log-prob of each token, by its sequence's number and its place there."""
        padded = torch.cat([ids_of[microbatch.indices].float(), torch.zeros(1)])
        number = padded[microbatch.places.sequence]
        return -2 * torch.frac((0.137 + tilt) * number + 0.311 * microbatch.places.offset) - 0.02

    for stream, tilt in (
        (Stream.OLD, 0.001),
        (Stream.REFERENCE, 0.003),
        (Stream.VALUES, 0.5),
    ):
        if stream in objective.needs:
            shard.fill(stream, [value(microbatch, tilt) for microbatch in shard.microbatches])
    tokens = shard.all_tokens()
    objective.complete(tokens)
    shard.keep(tokens)
    losses, gradients = [], {}
    for microbatches in shard.updates:
        losses.append(0.0)
        for microbatch in microbatches:
            logprobs = value(microbatch, 0.0).requires_grad_()
            tokens = shard.tokens_of(microbatch, logprobs=logprobs, entropy=0.3 * logprobs.square())
            terms = objective.loss(tokens)
            loss = (torch.where(tokens.loss_mask, terms.loss, 0.0) * tokens.loss_weights).sum()
            loss.backward()
            losses[-1] += float(loss)
            real = tokens.places.sequence < tokens.num_sequences
            numbers = ids_of[microbatch.indices][tokens.places.sequence[real]].tolist()
            places = tokens.places.offset[real].tolist()
            slopes = (logprobs.grad if logprobs.grad is not None else torch.zeros(0))[real].tolist()
            gradients |= dict(zip(zip(numbers, places, strict=True), slopes, strict=True))
    return {
        "losses": losses,
        "gradients": gradients,
        "counts": own.tp_rank == 0 and own.pp_rank == 0,
    }
