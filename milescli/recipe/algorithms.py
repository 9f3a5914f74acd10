"""Defines the RL algorithms as rows of a table: what each sets, as its difference to another.
`train.algorithm` names a row; a recipe can still set each of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milescli.core.errors import RecipeError, nearest
from milescli.recipe.layers import ALGORITHM_KEY, KeyValue, Origin, SettingsLayer, Table

Setting = str | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Describes one algorithm: a row of the table."""

    about: str
    """Description in one line."""
    paper: str
    """Paper or page that defines it."""
    base: str | None = "grpo"
    """The row that this one differs from; None: the row sets every component."""
    sets: Mapping[str, Setting]
    """Recipe keys."""


def _correction(**settings: Setting) -> dict[str, Setting]:
    return {f"train.correction.{key}": value for key, value in settings.items()}


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        about="rewards relative to the group's, PPO's clip; without its KL term (kl_coef=0.04)",
        paper="arXiv 2402.03300",
        base=None,
        sets={
            "train.objective": "policy",
            "train.advantage": "grpo",
            "train.normalize_std": "group",
            "train.credit": "sample",
            "train.gamma": 1.0,
            "train.whiten": False,
            "train.ratio": "token",
            "train.surrogate": "clip",
            "train.clip_low": 0.2,
            "train.clip_high": 0.2,
            "train.dual_clip": None,
            "train.aggregation": "sequence_mean",
            "train.correction.kind": "none",
            "train.off_policy_mask": None,
            "train.kl_coef": 0.0,
            "train.kl_in": "loss",
            "train.kl_estimator": "k3",
            "train.kl_unbiased": False,
            "train.entropy_coef": 0.0,
            "rollout.filter": "none",
            "rollout.shaping": "none",
            "rollout.sample_filter": "none",
        },
    ),
    "dr_grpo": Algorithm(
        about="no division by std or by length",
        paper="arXiv 2503.20783",
        sets={"train.normalize_std": "none", "train.aggregation": "constant"},
    ),
    "dapo": Algorithm(
        about="clip-higher, token mean, equal groups replaced, overlong responses punished",
        paper="arXiv 2503.14476",
        sets={
            "train.clip_high": 0.28,
            "train.aggregation": "token_mean",
            "rollout.filter": "zero_variance",
            "rollout.shaping": "overlong",
        },
    ),
    "lite_ppo": Algorithm(
        about="the group's mean, the batch's std, token mean",
        paper="arXiv 2508.08221",
        sets={"train.normalize_std": "batch", "train.aggregation": "token_mean"},
    ),
    "reinforce": Algorithm(
        about="the reward times log pi, no baseline",
        paper="Williams 1992",
        sets={
            "train.advantage": "reinforce",
            "train.surrogate": "reinforce",
            "train.aggregation": "sequence_sum",
        },
    ),
    "rloo": Algorithm(
        about="REINFORCE against the mean of the other samples",
        paper="arXiv 2402.14740",
        base="reinforce",
        sets={"train.advantage": "rloo"},
    ),
    "remax": Algorithm(
        about="REINFORCE against the greedy response, which is sampled too",
        paper="arXiv 2310.10505",
        base="reinforce",
        sets={"train.advantage": "remax"},
    ),
    "opo": Algorithm(
        about="on-policy, against the group's mean weighted by length",
        paper="arXiv 2505.23585",
        base="reinforce",
        sets={"train.advantage": "opo"},
    ),
    "ppo": Algorithm(
        about="a critic's values for each token (GAE), PPO's clip, the KL as a cost",
        paper="arXiv 1707.06347",
        sets={
            "train.advantage": "reinforce",
            "train.credit": "gae",
            "train.lam": 0.95,
            "train.whiten": True,
            "train.aggregation": "token_mean",
            "train.kl_coef": 0.001,
            "train.kl_in": "reward",
            "train.kl_estimator": "k1",
        },
    ),
    "reinforce_pp": Algorithm(
        about="PPO's clip without a critic: returns of each token, whitened over the batch",
        paper="arXiv 2501.03262",
        sets={
            "train.advantage": "reinforce",
            "train.credit": "to_go",
            "train.whiten": True,
            "train.aggregation": "token_mean",
            "train.kl_coef": 0.001,
            "train.kl_in": "reward",
            "train.kl_estimator": "k1",
        },
    ),
    "reinforce_pp_baseline": Algorithm(
        about="REINFORCE++ against the group's mean, its KL in the loss",
        paper="arXiv 2501.03262",
        base="reinforce_pp",
        sets={
            "train.advantage": "grpo",
            "train.normalize_std": "none",
            "train.credit": "sample",
            "train.kl_in": "loss",
            "train.kl_estimator": "k2",
        },
    ),
    "gspo": Algorithm(
        about="one ratio for a sequence, clipped as a whole",
        paper="arXiv 2507.18071",
        sets={"train.ratio": "sequence", "train.clip_low": 3e-4, "train.clip_high": 4e-4},
    ),
    "gspo_token": Algorithm(
        about="GSPO for advantages that differ within a sequence",
        paper="arXiv 2507.18071",
        base="gspo",
        sets={"train.ratio": "sequence_token"},
    ),
    "luspo": Algorithm(
        about="GSPO, each sequence weighted by its length",
        paper="arXiv 2602.05261",
        base="gspo",
        sets={"train.aggregation": "sequence_sum"},
    ),
    "cispo": Algorithm(
        about="the ratio is clipped as a weight: no token loses its gradient",
        paper="arXiv 2506.13585",
        sets={
            "train.surrogate": "cispo",
            "train.clip_low": 1.0,
            "train.clip_high": 4.0,
            "train.aggregation": "token_mean",
        },
    ),
    "gmpo": Algorithm(
        about="the geometric mean of the clipped ratios of a sequence",
        paper="arXiv 2507.20673",
        sets={"train.surrogate": "gmpo", "train.clip_low": 0.4, "train.clip_high": 0.4},
    ),
    "sapo": Algorithm(
        about="a soft gate instead of a clip",
        paper="arXiv 2511.20347",
        sets={"train.surrogate": "sapo"},
    ),
    "topr": Algorithm(
        about="off-policy: good responses whole, bad ones as far as they are still likely",
        paper="arXiv 2503.14286",
        base="reinforce",
        sets={
            "train.advantage": "grpo",
            "train.normalize_std": "none",
            "train.surrogate": "topr",
            "train.old_logprobs": "engine",
        },
    ),
    "gpg": Algorithm(
        about="centred rewards times log pi, scaled up for groups that teach nothing",
        paper="arXiv 2504.02546",
        sets={
            "train.advantage": "gpg",
            "train.surrogate": "reinforce",
            "train.aggregation": "token_mean",
        },
    ),
    "clip_cov": Algorithm(
        about="a few tokens that make entropy fall are left out, at random",
        paper="arXiv 2505.22617",
        sets={"train.surrogate": "clip_cov", "train.aggregation": "token_mean"},
    ),
    "kl_cov": Algorithm(
        about="the tokens that make entropy fall most are held by a KL term",
        paper="arXiv 2505.22617",
        base="clip_cov",
        sets={"train.surrogate": "kl_cov"},
    ),
    "dppo_tv": Algorithm(
        about="a trust region of probabilities: no token moves by more than 0.15",
        paper="arXiv 2602.04879",
        sets={
            "train.surrogate": "dppo_tv",
            "train.clip_low": 0.15,
            "train.clip_high": 0.15,
            "train.aggregation": "token_mean",
            "train.old_logprobs": "engine",
        },
    ),
    "dppo_kl": Algorithm(
        about="the same, by the divergence of a token's probability",
        paper="arXiv 2602.04879",
        base="dppo_tv",
        sets={"train.surrogate": "dppo_kl", "train.clip_low": 0.05, "train.clip_high": 0.05},
    ),
    "gigpo": Algorithm(
        about="credit of single turns, where samples of a group stood at the same place",
        paper="arXiv 2505.10978",
        sets={"train.advantage": "gigpo", "train.gamma": 0.95},
    ),
    "hgpo": Algorithm(
        about="GiGPO over a hierarchy of groups: a longer equal history of a turn counts more",
        paper="arXiv 2602.22817",
        base="gigpo",
        sets={"train.advantage": "hgpo"},
    ),
    "pass_at_k": Algorithm(
        about="the chance that one of k samples is right",
        paper="arXiv 2508.10751",
        sets={"train.advantage": "pass_at_k"},
    ),
    "best_of_n": Algorithm(
        about="the best sample of a group learns from its lead over the second",
        paper="arXiv 2503.19595",
        sets={"train.advantage": "best_of_n"},
    ),
    "max_rl": Algorithm(
        about="the likelihood of being right: hard prompts weigh more",
        paper="arXiv 2602.02710",
        sets={"train.advantage": "max_rl"},
    ),
    "gdpo": Algorithm(
        about="several rewards, each normalised by itself before they are summed",
        paper="arXiv 2601.05242",
        sets={"train.advantage": "gdpo"},
    ),
    "rae": Algorithm(
        about="self-play: REINFORCE against a moving average of each role's reward in each game",
        paper="arXiv 2506.24119",
        base="reinforce",
        sets={"train.advantage": "rae"},
    ),
    "tis": Algorithm(
        about="GRPO with truncated importance weights between trainer and engine",
        paper="fengyao.notion.site/off-policy-rl",
        sets=_correction(kind="importance", level="token", mode="truncate", low=0.0, high=2.0),
    ),
    "icepop": Algorithm(
        about="the same, tokens outside of the bounds left out",
        paper="arXiv 2510.18855",
        base="tis",
        sets=_correction(mode="mask", low=0.5, high=5.0),
    ),
    "kpop": Algorithm(
        about="the same, by the divergence of a token's probability between trainer and engine",
        paper="ringtech.notion.site/kpop",
        base="tis",
        sets=_correction(mode="binary_kl", high=0.1),
    ),
    "mis": Algorithm(
        about="sequences on whose ratio trainer and engine differ left out",
        paper="richardli.xyz/rl-collapse",
        base="tis",
        sets=_correction(level="sequence", mode="mask", low=0.5, high=2.0),
    ),
    "decoupled_ppo": Algorithm(
        about="stale samples: clipped about the trainer's policy, weighted from the sampling one",
        paper="arXiv 2505.24298",
        base="tis",
        sets={
            "train.old_logprobs": "trainer",
            **_correction(high=5.0),
        },
    ),
}


def settings_of(name: str) -> dict[str, Setting]:
    """Return all keys that the row sets, including those of its bases. Raises RecipeError for an
    unknown row."""
    row = ALGORITHMS.get(name)
    if row is None:
        guess = nearest(name.replace("-", "_").replace(".", "_"), ALGORITHMS)
        raise RecipeError(
            f"there is no algorithm `{name}`",
            why=f"`train.algorithm` must be one of {', '.join(ALGORITHMS)}",
            fix=[
                f"--set train.algorithm={guess or 'grpo'}",
                "miles algorithms   # describes each algorithm",
            ],
        )
    return {**(settings_of(row.base) if row.base else {}), **row.sets}


def with_algorithm(table: Table) -> Table:
    """Apply the layer on top of the row that its `train.algorithm` names. Raises RecipeError for an
    unknown row."""
    entry = table.get(ALGORITHM_KEY)
    if entry is None or entry.value is None:
        return table
    name = str(entry.value)
    origin = Origin(layer=SettingsLayer.ALGORITHM, where=name)
    row = {
        key: KeyValue(value=value, text=str(value), origin=origin)
        for key, value in settings_of(name).items()
    }
    return row | table
