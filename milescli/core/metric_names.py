"""Every number that a run reports for a step or an evaluation: its name, unit, meaning, and when it
exists. The names are stable: metrics.jsonl, trackers, Prometheus and docs/metrics.md take them from
here. `core.scalars` extracts the numbers from events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

ANY = "*"
"""Ends the name of a row that stands for all names that a recipe or a plug-in chooses."""
SHARE = "share"
SECONDS = "s"
NATS = "nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Describes one metric, or all metrics below a prefix."""

    name: str
    """`train/loss`; `reward/*`: every name below `reward/` without a row of its own."""
    unit: str
    """s, tokens, share (of 1), nats, tokens/s, ...; empty: a plain number."""
    about: str
    when: str
    """Events, or recipe keys, with which the metric exists."""


def _rows(prefix: str, rows: Iterable[tuple[str, ...]], *, when: str) -> Iterable[Metric]:
    for name, unit, about, *own in rows:
        yield Metric(name=f"{prefix}/{name}", unit=unit, about=about, when=own[0] if own else when)


_SAMPLED = "each step, where engines sampled"
_TRAIN = (
    ("loss", "", "what was differentiated; mean over the updates of the step"),
    ("grad_norm", "", "global L2 norm before clipping; mean over the updates"),
    ("lr", "", "learning rate"),
    ("logprob_diff_mean", NATS, "mean of abs(engine - trainer) over trained tokens", _SAMPLED),
    ("logprob_diff_max", NATS, "maximum of the same: drift between engine and trainer", _SAMPLED),
    ("logprob_diff_tokens", "tokens", "trained tokens that differ at all", _SAMPLED),
    ("num_tokens", "tokens", "all that went through the model, prompts included"),
    ("num_loss_tokens", "tokens", "trained on"),
    ("num_microbatches", "", "of one data-parallel rank"),
    ("forward_backward_s", SECONDS, "forward and backward passes"),
    ("optimizer_s", SECONDS, "optimizer updates"),
    ("save_wait_s", SECONDS, "waiting for a checkpoint to read the weights before an update"),
    ("epoch", "", "passes over the rows so far", "each step over rows"),
)
_POLICY = (
    ("policy_loss", "", "the surrogate's part of the loss"),
    ("entropy", NATS, "of the policy's next token; mean over trained tokens", "each step"),
    ("entropy_coef", "", "weight of the entropy bonus", "`train.entropy_target`"),
    ("kl", NATS, "estimated KL from the reference to the policy", "`train.kl_coef` above 0, KTO"),
    ("clip_fraction", SHARE, "tokens whose ratio was bounded", "surrogates that bound it"),
    ("dual_clip_fraction", SHARE, "tokens bounded by `train.dual_clip`", "`train.dual_clip`"),
    ("ratio_mean", "", "mean ratio of new to old policy", "surrogates with a ratio"),
    ("clamp_fraction", SHARE, "tokens whose log-ratio was beyond what exp() bears"),
    ("taper_mean", "", "mean weight of a token", "`train.surrogate=topr`"),
    ("held_back_fraction", SHARE, "tokens held back", "`train.surrogate` clip_cov, kl_cov"),
    ("off_policy_masked", SHARE, "tokens that teach nothing", "`train.off_policy_mask`"),
    ("correction_ratio", "", "trainer over engine; mean", "`train.correction.kind`"),
    ("correction_bounded", SHARE, "tokens whose ratio was bounded", "`train.correction.kind`"),
    ("correction_rejected", SHARE, "tokens that were left out", "`train.correction.kind`"),
    ("teacher_kl", NATS, "divergence from the teacher", "`train.distill`"),
    ("imitation_loss", NATS, "cross-entropy of the rows", "`train.objective=distillation`"),
    ("routes_differ", SHARE, "replayed routes that the trainer chose otherwise", "routing replay"),
    ("mtp_loss", NATS, "cross-entropy of the MTP layer", "`train.mtp.loss_weight`"),
    ("indexer_kl", NATS, "of sparse attention's indexer from the attention", "`model.indexer=kl`"),
    ("draft_loss", NATS, "cross-entropy of the draft model", "`train.draft.lr`"),
    ("draft_grad_norm", "", "of the draft model", "`train.draft.lr`"),
)
_PAIRS = "`train.objective` preference"
_JUDGED = "`train.preference.loss=kto`"
_SCORED = "`train.objective=reward_model`"
_OTHERS = (
    ("reward_chosen", "", "beta times log-ratio to the reference, chosen", _PAIRS),
    ("reward_rejected", "", "the same, rejected", _PAIRS),
    ("reward_margin", "", "the difference of the two", _PAIRS),
    ("pair_accuracy", SHARE, "pairs whose chosen side is ahead", f"{_PAIRS} or reward_model"),
    ("chosen_logprob", NATS, "what the loss compares, of the chosen side", _PAIRS),
    ("rejected_logprob", NATS, "the same of the rejected side", _PAIRS),
    ("reward_good", "", "beta times log-ratio, of responses judged good", _JUDGED),
    ("reward_bad", "", "the same of those judged bad", _JUDGED),
    ("score_margin", "", "score of the chosen less that of the rejected", _SCORED),
    ("score_chosen", "", "score of the chosen", _SCORED),
    ("score_rejected", "", "score of the rejected", _SCORED),
    ("value_loss", "", "of the critic", "`train.credit=gae`"),
    ("value_grad_norm", "", "of the critic", "`train.credit=gae`"),
    ("value_lr", "", "learning rate of the critic", "`train.credit=gae`"),
    ("value_mean", "", "mean value that the critic says", "`train.credit=gae`"),
    ("return_mean", "", "mean return that it learns", "`train.credit=gae`"),
    ("value_clip_fraction", SHARE, "tokens whose value was bounded", "`train.critic.clip`"),
    (ANY, "", "a figure of an objective or surrogate of your own", "a plug-in gives it"),
)
_ROLLOUT = (
    ("num_groups", "groups", "that the step trained on"),
    ("num_samples", "samples", "of those groups"),
    ("reward_mean", "", "mean reward of the samples"),
    ("reward_std", "", "standard deviation of the rewards"),
    ("zero_variance_fraction", SHARE, "groups whose rewards are all equal: they teach nothing"),
    ("truncated_fraction", SHARE, "responses that were cut off"),
    ("response_tokens_mean", "tokens", "mean length of a response"),
    ("response_tokens_max", "tokens", "the longest"),
    ("prompt_tokens_mean", "tokens", "mean length of a prompt"),
    ("staleness_mean", "versions", "trainer's version less that of a sample's oldest token; mean"),
    ("staleness_max", "versions", "maximum of the same"),
    ("dropped_groups", "groups", "refused by the filter"),
    ("generated_tokens", "tokens", "that engines sampled for the step"),
    ("accept_length", "tokens", "of one pass over guessed tokens", "`rollout.speculative`"),
    ("accept_rate", SHARE, "guesses that were right", "`rollout.speculative`"),
    ("skipped_prompts", "prompts", "longer than `data.max_prompt_tokens`, since the start"),
)
_AGENT = (
    ("turns", "", "turns of a sample; mean", "agents that chat"),
    ("tool_calls", "", "calls of tools; mean", "agents that chat"),
    ("malformed_calls", "", "calls that could not be read; mean", "agents that chat"),
    ("rewritten_histories", "", "earlier turns that the template wrote anew", "agents that chat"),
    ("failed_episodes", "", "episodes that were repeated", "where there were any"),
    ("tool_errors", "", "calls that failed; mean", "`rollout.agent=tools`"),
    ("tool_s", SECONDS, "in tools, of a sample; mean", "`rollout.agent=tools`"),
    ("environment_s", SECONDS, "in the environment; mean", "`rollout.agent=environment`"),
    ("not_understood", "", "actions that could not be read", "gymnasium, openenv"),
    (ANY, "", "a figure that an agent, role or environment gives; mean", "an agent gives it"),
)
_TIME = (
    ("rollout_s", SECONDS, "waiting for groups; what was sampled meanwhile does not count"),
    ("pack_s", SECONDS, "making the batch"),
    ("train_s", SECONDS, "the trainer's step"),
    ("publish_s", SECONDS, "giving the weights to the engines"),
    ("save_s", SECONDS, "beginning a checkpoint"),
    ("step_s", SECONDS, "all together"),
)
_PUBLISH = (
    ("num_running", "", "requests that were running when it began"),
    ("wait_s", SECONDS, "until none was running any more: the drain"),
    ("discarded_tokens", "tokens", "of responses that were given up, since the publish before"),
    ("sent_bytes", "bytes", "of weights that all trainer ranks sent"),
    ("retractions", "", "times that a full KV cache made an engine compute a response again"),
    ("held_requests", "", "most that were held back because engines could not run them"),
)
_FLOW = (
    ("idle_s", SECONDS, "in which no sample was being made, since the step before"),
    ("running_mean", "samples", "that were being made; mean over the time"),
    ("waiting_groups", "groups", "scored, and left when the step had its own"),
    ("stale_groups", "groups", "given up as too old for `rollout.max_staleness`"),
    ("wasted_tokens", "tokens", "of those groups"),
)
_SPEED = (
    ("rollout_tokens_per_s", "tokens/s", "sampled tokens over the wait for them", _SAMPLED),
    ("train_tokens_per_s", "tokens/s", "all tokens over the trainer's step"),
)
_EVAL = (
    ("accuracy", "", "mean reward over held-out prompts and samples"),
    ("truncated_fraction", SHARE, "responses that were cut off"),
    ("response_tokens_mean", "tokens", "mean length of a response"),
    ("reward/*", "", "mean of one part of the reward", "`rollout.reward` names several"),
    ("agent/*", "", "as `agent/*` above, of the evaluation", "an agent gives it"),
    (ANY, "", "what `eval.metrics` says, as `eval/pass_at_4`", "`eval.metrics`"),
)
_VALIDATION = (
    ("loss", "", "of held-out rows, without a step"),
    (ANY, "", "a figure of the objective, as `train/*` above has it"),
)
_WARMUP = (
    ("loss", "", "of a supervised step on demonstrations"),
    ("grad_norm", "", "before clipping"),
    ("step_s", SECONDS, "of the step"),
)

METRICS: tuple[Metric, ...] = (
    *_rows("train", _TRAIN, when="each step"),
    *_rows("train", _POLICY, when="each step of RL"),
    *_rows("train", _OTHERS, when=""),
    *_rows("rollout", _ROLLOUT, when=_SAMPLED),
    *_rows("reward", [(ANY, "", "mean of one part, before its weight")], when="several rewards"),
    *_rows("agent", _AGENT, when=""),
    *_rows("time", _TIME, when="each step"),
    *_rows("publish", _PUBLISH, when=_SAMPLED),
    *_rows("flow", _FLOW, when=_SAMPLED),
    *_rows("speed", _SPEED, when="each step"),
    *_rows("weights", [("version", "", "that the engines hold")], when=_SAMPLED),
    *_rows("eval", _EVAL, when="each evaluation"),
    *_rows("validation", _VALIDATION, when="each evaluation on rows"),
    *_rows("warmup", _WARMUP, when="`warmup.steps`"),
)


@cache
def by_name() -> Mapping[str, Metric]:
    """Return name -> description of every metric."""
    return {metric.name: metric for metric in METRICS}


def metric_of(name: str) -> Metric | None:
    """Return the description of the scalar `name`: its own, or that of its prefix; None if neither
    exists."""
    rows = by_name()
    parts = name.split("/")
    wide = ["/".join([*parts[:depth], ANY]) for depth in range(len(parts) - 1, 0, -1)]
    return next((rows[key] for key in (name, *wide) if key in rows), None)
