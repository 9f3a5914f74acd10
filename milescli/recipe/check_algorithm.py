"""Rules that bind the pieces of an algorithm: what makes no sense together is refused with the
reason, before torch is imported."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe

ALWAYS_ZERO_ALONE = ("grpo", "gpg", "gigpo", "turns", "best_of_n", "max_rl")
OF_TURNS = ("gigpo", "turns")
"""Advantages of a group of one."""
COMPARING = (*ALWAYS_ZERO_ALONE, "rloo", "opo", "pass_at_k")
"""Advantages that compare the samples of a prompt."""
OF_TOKENS = ("reinforce", "topr", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
"""Built-in surrogates that look at tokens one by one, or take no ratio: that of a whole sequence
means nothing to them."""
WITHOUT_DUAL_CLIP = ("reinforce", "topr", "gmpo", "kl_cov", "dppo_tv", "dppo_kl", "cispo", "sapo")
"""Built-in surrogates without PPO's clip."""
WITHOUT_RATIO = ("reinforce",)
CLIPS_RATIO = ("clip", "clip_cov", "cispo")
"""Whose `clip_low` is of a ratio; the others' is of a logarithm, a probability or a divergence."""


def check_algorithm(recipe: Recipe) -> None:
    """Raises RecipeError."""
    for rule in (_groups, _surrogate, _critic, _kl, _correction, _sampled_whole, _drawn):
        rule(recipe)


def doubts_about_algorithm(recipe: Recipe) -> list[str]:
    """What is legal and probably not meant."""
    train, stale = recipe.train, recipe.rollout.max_staleness > 0
    found = []
    if train.kl_coef and train.kl_in == "loss" and train.kl_estimator == "k1":
        found.append(
            "`train.kl_estimator=k1` in the loss has a gradient whose expectation is zero: it adds "
            "noise and holds nothing near the reference; k2 and k3 do"
        )
    if not train.kl_coef and (train.kl_in == "reward" or train.kl_unbiased):
        found.append("`train.kl_in` and `kl_unbiased` have no effect: `train.kl_coef` is 0")
    if train.old_logprobs == "trainer" and stale and train.correction.kind == "none":
        found.append(
            "`train.old_logprobs=trainer` beyond `rollout.max_staleness` 0: the ratio is to the "
            "current trainer's policy, not to the older one that sampled, so stale samples are "
            "trained on as if they were fresh; train.algorithm=decoupled_ppo weighs them"
        )
    if train.surrogate in WITHOUT_RATIO and (stale or train.updates_per_step > 1):
        found.append(
            f"`train.surrogate={train.surrogate}` has no policy ratio: it takes every sample for "
            "one of the current policy"
            + (", which at this `rollout.max_staleness` it is not" if stale else "")
        )
    if train.ratio != "token" and train.aggregation == "token_mean":
        found.append(
            f"`train.ratio={train.ratio}` with `train.aggregation=token_mean`: a sequence counts "
            "by its length, which GSPO divides by; sequence_mean counts each once"
        )
    if train.surrogate == "gmpo" and train.aggregation != "sequence_mean":
        found.append(
            "`train.surrogate=gmpo` is a loss of whole sequences: with another aggregation than "
            "sequence_mean it counts once for each token"
        )
    return found


def _groups(recipe: Recipe) -> None:
    train, samples = recipe.train, recipe.rollout.samples_per_prompt
    is_rewarded = not recipe.teachers or train.distill.reward_weight > 0
    if samples == 1 and train.advantage in COMPARING and is_rewarded:
        outcome = (
            "every advantage is 0" if train.advantage in ALWAYS_ZERO_ALONE else "there is no other"
        )
        raise RecipeError(
            "groups of one teach nothing",
            why=f"`{train.advantage}` compares the samples of one prompt; with "
            f"`rollout.samples_per_prompt` 1 {outcome}",
            fix=["--set rollout.samples_per_prompt=8", "--set train.advantage=reinforce"],
        )
    if train.advantage == "pass_at_k" and train.pass_k >= samples:
        raise RecipeError(
            f"pass@{train.pass_k} of {samples} samples teaches nothing",
            why="all k-subsets of a group would be the group itself: `train.pass_k` must be less "
            "than `rollout.samples_per_prompt`",
            fix=[
                f"--set train.pass_k={max(samples // 2, 1)}",
                f"--set rollout.samples_per_prompt={2 * train.pass_k}",
            ],
        )
    if train.advantage in OF_TURNS and train.credit != "sample":
        raise RecipeError(
            f"`{train.advantage}` cannot be spread by `{train.credit}`",
            why="it gives each turn a credit of its own, discounted already",
            fix="--set train.credit=sample",
        )


def _surrogate(recipe: Recipe) -> None:
    train = recipe.train
    no_bound = train.clip_low == 1.0 and train.surrogate == "cispo"
    if train.surrogate in CLIPS_RATIO and train.clip_low >= 1.0 and not no_bound:
        raise RecipeError(
            f"`train.clip_low` cannot be {train.clip_low:g}",
            why="the ratio is kept above 1 - clip_low, and a ratio is positive: it must stay below "
            "1",
            fix="--set train.clip_low=0.2",
        )
    if train.ratio != "token" and train.surrogate in OF_TOKENS:
        raise RecipeError(
            f"`train.surrogate={train.surrogate}` cannot take the ratio of a {train.ratio}",
            why="it looks at the tokens one by one, or has no ratio at all; clip, cispo and sapo "
            "can",
            fix=["--set train.ratio=token", "--set train.surrogate=clip"],
        )
    if train.dual_clip is not None and train.surrogate in WITHOUT_DUAL_CLIP:
        raise RecipeError(
            f"`train.dual_clip` has no effect on `{train.surrogate}`",
            why="it is a second bound of PPO's clip",
            fix="--set train.dual_clip=null",
        )
    if train.covariance.low >= train.covariance.high:
        raise _empty("train.covariance.low", train.covariance.low, train.covariance.high)


def _critic(recipe: Recipe) -> None:
    train = recipe.train
    if recipe.has_critic and train.critic.warmup_steps >= train.steps:
        raise RecipeError(
            "the policy would never learn",
            why=f"`train.critic.warmup_steps` is {train.critic.warmup_steps}, and `train.steps` is "
            f"{train.steps}: the critic alone learns until then",
            fix=f"--set train.critic.warmup_steps={train.steps // 10}",
        )
    if recipe.has_critic and train.routing_replay:
        raise RecipeError(
            "routing is not replayed in a critic",
            why="`train.routing_replay` fixes the experts by what the engine chose, and the critic "
            "is another model",
            fix="--set train.routing_replay=false",
        )


def _kl(recipe: Recipe) -> None:
    train = recipe.train
    if train.kl_coef and train.reference is False:
        raise RecipeError(
            "a KL term needs a reference",
            why=f"`train.kl_coef` is {train.kl_coef:g}, and `train.reference` is false",
            fix=["--set train.reference=null", "--set train.kl_coef=0"],
        )
    if train.reference_every and not recipe.keeps_reference:
        raise RecipeError(
            "there is no reference to move",
            why=f"`train.reference_every` is {train.reference_every}, and the run keeps none: "
            "`train.kl_coef` is 0",
            fix=["--set train.kl_coef=0.001", "--set train.reference_every=0"],
        )
    if train.entropy_target is not None and train.entropy_coef > train.entropy_max:
        raise RecipeError(
            "the entropy bonus begins above its bound",
            why=f"`train.entropy_coef` {train.entropy_coef:g}, `train.entropy_max` "
            f"{train.entropy_max:g}",
            fix=f"--set train.entropy_max={train.entropy_coef:g}",
        )
    if train.kl_unbiased and train.kl_in == "reward":
        raise RecipeError(
            "`train.kl_unbiased` is of a KL term in the loss",
            why="in the reward the term has no gradient to set right (`train.kl_in` is reward)",
            fix=["--set train.kl_in=loss", "--set train.kl_unbiased=false"],
        )


def _correction(recipe: Recipe) -> None:
    rule = recipe.train.correction
    if rule.kind == "none":
        return
    if recipe.old_logprobs == "engine":
        why = (
            "train.old_logprobs=engine"
            if recipe.train.old_logprobs == "engine"
            else f"rollout.max_staleness={recipe.rollout.max_staleness}, which makes "
            "train.old_logprobs=auto the engine"
        )
        raise RecipeError(
            "the same difference would be corrected twice",
            why=f"the policy ratio is to the engine's log-probs already ({why}), and "
            f"`train.correction.kind={rule.kind}` weighs by trainer / engine once more",
            fix=["--set train.old_logprobs=trainer", "--set train.correction.kind=none"],
        )
    if rule.kind != "importance":
        return
    if rule.low > rule.high:
        raise _empty("train.correction.low", rule.low, rule.high)
    if rule.reject_low > rule.reject_high:
        raise _empty("train.correction.reject_low", rule.reject_low, rule.reject_high)
    if rule.mode == "none" and rule.reject_level == "none" and rule.veto is None:
        raise RecipeError(
            "the correction corrects nothing",
            why="`train.correction.mode` is none, and neither `reject_level` nor `veto` is set",
            fix=["--set train.correction.mode=truncate", "--set train.correction.kind=none"],
        )


def _sampled_whole(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if rollout.top_p == 1.0 and rollout.top_k == -1:
        return
    raise RecipeError(
        "rollout samples another distribution than the trainer scores",
        why=f"rollout.top_p {rollout.top_p:g} and rollout.top_k {rollout.top_k} cut the tail off, "
        "while log-probs are of the whole vocabulary: every ratio and every gradient would be of "
        "a policy that sampled nothing",
        fix="--set rollout.top_p=1.0 --set rollout.top_k=-1   # rollout.temperature is corrected",
    )


def _empty(key: str, low: float, high: float) -> RecipeError:
    upper = key.replace("low", "high")
    return RecipeError(
        f"nothing lies between `{key}` {low:g} and `{upper}` {high:g}",
        why="the lower bound must be below the upper one",
        fix=f"--set {key}={min(low, high):g} --set {upper}={max(low, high):g}",
    )


def _drawn(recipe: Recipe) -> None:
    """Rules of which prompts are begun, and which groups are taken."""
    rollout, curriculum = recipe.rollout, recipe.data.curriculum
    if rollout.selection != "first" and rollout.over_sampling == 1.0:
        raise RecipeError(
            f"`rollout.selection={rollout.selection}` has nothing to choose from",
            why="a step begins no more prompts than it needs: `rollout.over_sampling` is 1",
            fix=["--set rollout.over_sampling=1.5", "--set rollout.selection=first"],
        )
    if curriculum != "none" and rollout.max_staleness > 0:
        raise RecipeError(
            f"`data.curriculum={curriculum}` cannot run ahead",
            why="it chooses by what came of the steps before, which at `rollout.max_staleness` "
            f"{rollout.max_staleness} are not done when the next prompts are chosen",
            fix=["--set rollout.max_staleness=0", "--set data.curriculum=none"],
        )
