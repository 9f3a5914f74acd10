"""Diagnoses of responses: too long, truncated, repetitive, or all with one phrase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from milescli.insight import series
from milescli.insight.case import Case, Finding, Level, number
from milescli.insight.samples import KeptSample

LENGTH, TRUNCATED = "rollout/response_tokens_mean", "rollout/truncated_fraction"
GROWN = 1.8
CUT = 0.3
ENDLESS = 0.95
"""Share of the responses of one evaluation."""
PIECES = 4
"""Number of tokens of an n-gram whose repetitions are counted."""
LONG_ENOUGH = 48
"""Tokens: shorter responses repeat naturally."""
DISTINCT = 0.35
"""Share of a response's n-grams that differ; below it, the response repeats itself."""
OFTEN = 0.25
"""Share of the stored samples."""
PHRASE = 6
"""Number of words of a phrase."""
EVERYWHERE, BEFORE = 0.6, 0.2
PROMPTS = 4
"""Smallest number of different prompts."""


def length_explosion(case: Case) -> Finding | None:
    """Detect that responses grow without a better reward."""
    if not case.has(LENGTH):
        return None
    before, now = case.early(LENGTH), case.recent(LENGTH)
    if now < GROWN * before or case.is_rising or case.is_at_ceiling:
        return None
    return case.finding(
        "length-explosion",
        Level.WARNING,
        "Responses grow without better rewards",
        evidence=f"the mean response length went from {number(before)} to {number(now)} tokens, "
        f"the mean reward from {number(case.early('rollout/reward_mean'))} to "
        f"{number(case.recent('rollout/reward_mean'))}",
        advice=(
            "--set train.aggregation=constant (Dr. GRPO) removes the length bias from the loss",
            "--set rollout.shaping=overlong with rollout.overlong_buffer penalises long responses",
        ),
        source="Liu et al. (Dr. GRPO), arXiv 2503.20783, section 3.1: the length bias of GRPO",
        columns=(LENGTH, "rollout/reward_mean"),
    )


def truncation(case: Case) -> Finding | None:
    """Detect that many responses are truncated."""
    if not case.has(TRUNCATED, least=series.MIN_WINDOW) or (now := case.recent(TRUNCATED)) < CUT:
        return None
    bound = case.facts.key("rollout.max_response_tokens")
    return case.finding(
        "truncation",
        Level.WARNING,
        "Responses are cut off",
        evidence=f"{now:.0%} of the responses of the last steps reach the limit"
        + (f" of {bound} tokens" if bound else ""),
        advice=(
            "--set rollout.max_response_tokens=... (twice as many)",
            "check whether the model can end a response: see its stop tokens and chat template "
            "with miles data check",
            "--set rollout.overlong_buffer=... lets the penalty rise gradually (DAPO)",
        ),
        source="Yu et al. (DAPO), arXiv 2503.14476, section 3.4: truncated samples are noise",
        columns=(TRUNCATED, LENGTH),
    )


def endless_evaluation(case: Case) -> Finding | None:
    """Detect that nearly no held-out response ends before the bound."""
    evaluations = case.history.evaluations
    last = evaluations[-1] if evaluations else None
    if last is None or last.step == 0 or last.figures.get("truncated_fraction", 0.0) < ENDLESS:
        return None
    key = "eval.max_response_tokens"
    bound = case.facts.key(key) or case.facts.key("rollout.max_response_tokens")
    return case.finding(
        "endless-evaluation",
        Level.WARNING,
        "Held-out responses do not end",
        evidence=f"{last.figures['truncated_fraction']:.0%} of the responses of the evaluation "
        f"after step {last.step} reach the limit" + (f" of {bound} tokens" if bound else ""),
        advice=(
            "check that the model stops where it was trained to end: compare the end of a turn "
            "in the chat template with eos_token_id in generation_config.json",
            f"--set {key}=... (twice as many), if the responses were about to end",
        ),
        source="derived: a response that is cut off states no answer, whatever was learned",
        columns=("eval/truncated_fraction", "eval/accuracy"),
    )


def repetition(case: Case) -> Finding | None:
    """Detect that responses repeat themselves."""
    long = [ids for sample in case.samples if len(ids := _pieces(sample)) >= LONG_ENOUGH]
    circling = [ids for ids in long if _distinct(ids) < DISTINCT]
    if len(circling) < 3 or len(circling) < OFTEN * len(case.samples):
        return None
    return case.finding(
        "repetition",
        Level.BAD,
        "Responses repeat themselves",
        evidence=f"in {len(circling)} of the {len(case.samples)} newest stored samples, fewer "
        f"than {DISTINCT:.0%} of the {PIECES}-grams of tokens differ",
        advice=(
            "read them: miles ui, page Samples",
            "a lower train.optimizer.lr; a KL to the reference: --set train.kl_coef=0.001",
            "--set rollout.temperature=1.0, if it is lower",
        ),
        source="Welleck et al., arXiv 1908.04319, section 4: repeated n-grams (seq-rep-4)",
        columns=(LENGTH, "train/entropy"),
    )


def one_phrase(case: Case) -> Finding | None:
    """Detect a phrase that has spread to most responses to different prompts, a sign of reward
    hacking."""
    prompts = {(sample.step, sample.prompt_index) for sample in case.samples}
    if len(prompts) < PROMPTS or not case.first_samples:
        return None
    first_step = min(sample.step for sample in case.first_samples)
    if all(sample.step == first_step for sample in case.samples):
        return None
    now, before = _phrases(case.samples), _phrases(case.first_samples)
    often = [
        (count / len(case.samples), phrase)
        for phrase, count in now.items()
        if count >= EVERYWHERE * len(case.samples)
        and before[phrase] <= BEFORE * len(case.first_samples)
    ]
    if not often:
        return None
    share, phrase = max(often, key=lambda pair: (pair[0], len(pair[1])))
    is_better = case.accuracy.is_rising
    return case.finding(
        "one-phrase",
        Level.HINT if is_better else Level.WARNING,
        "One phrase is in most responses",
        evidence=f"`{phrase[:120]}` appears in {share:.0%} of the newest stored samples of "
        f"{len(prompts)} groups; at step {first_step} it appeared in "
        f"{before[phrase] / len(case.first_samples):.0%}",
        advice=(
            "check whether the reward pays for it: read the samples with the highest rewards",
            "held-out accuracy tells whether it is a habit or a trick: --set eval.every=...",
        ),
        source="Skalse et al., arXiv 2209.13085: hacking a reward; by counting n-grams of words",
        columns=("rollout/reward_mean", "eval/accuracy"),
    )


def _pieces(sample: KeptSample) -> Sequence[object]:
    """Return the sample's tokens; its words if the tokens are not stored."""
    return sample.record.get("response_ids") or sample.response.split()


def _distinct(pieces: Sequence[object]) -> float:
    grams = [tuple(pieces[at : at + PIECES]) for at in range(len(pieces) - PIECES + 1)]
    return len(set(grams)) / len(grams)


def _phrases(samples: Sequence[KeptSample]) -> Counter[str]:
    """Count for each phrase the samples that have it while their prompt does not."""
    counts = Counter[str]()
    for sample in samples:
        words = sample.response.split()
        phrases = {" ".join(words[at : at + PHRASE]) for at in range(len(words) - PHRASE + 1)}
        counts.update(phrase for phrase in phrases if phrase not in sample.prompt)
    return counts


ALL = (repetition, length_explosion, truncation, endless_evaluation, one_phrase)
