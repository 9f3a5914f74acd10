"""From rewards to advantages. `train.advantage` names an estimator: built in here, an entry point,
or an import path."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Union

import numpy as np

from milescli.core.errors import RecipeError
from milescli.core.role_views import has_role_rewards, views_of
from milescli.core.types import Group, Sample, Trajectory
from milescli.core.user_code import name_of, plugin_fix
from milescli.recipe.train import Train

Advantage = Union[float, "Sequence[float | np.ndarray]"]
"""The advantage of one sample: a number, which all of its tokens share; or for each of its
trajectories such a number, or [num_tokens]."""
AdvantageRows = Sequence[Sequence[Advantage]]
"""[groups][samples of the group]"""


NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
NO_STATE: Mapping[str, float] = MappingProxyType({})


class AdvantageEstimator(Protocol):
    """Defines a plug-in of `train.advantage`. An attribute `needs_greedy = True` requests
    `Group.greedy_reward`; `needs_weights = True` a further argument `weights`, which maps each name
    in `Sample.reward_parts` to its weight in the reward.

    An estimator with a state has an attribute `next_state`, a function (*, groups, settings, state)
    that returns the state after the step: numbers by name, none at first. Both get it as `state`,
    and must not change it; checkpoints store it. Such an estimator is called once for all roles,
    and reads their rewards itself (`Sample.role_rewards`).
    """

    def __call__(self, *, groups: Sequence[Group], settings: Train) -> AdvantageRows:
        """Return the advantages of all groups of a step, before the step is split into updates."""
        ...


def estimate(
    estimator: AdvantageEstimator,
    groups: Sequence[Group],
    *,
    settings: Train,
    weights: Mapping[str, float] = NO_WEIGHTS,
    state: Mapping[str, float] = NO_STATE,
) -> AdvantageRows:
    """Return the estimator's advantages, computed separately for each role with a reward of its
    own. `weights`: of the recipe's rewards; `state`: the estimator's state. Raises RecipeError
    unless each sample or token gets one finite number, and if a role has a reward of its own, but
    the estimator compares with a greedy response."""
    if keeps_state(estimator):
        return _call_estimator(estimator, groups, settings=settings, state=dict(state))
    if has_role_rewards(groups):
        if getattr(estimator, "needs_greedy", False):
            raise RecipeError(
                f"`{name_of(estimator)}` does not support rewards of roles",
                why="the agent gave a role its own reward, but the greedy response that "
                "`train.advantage` compares with has only the episode's reward",
                fix="--set train.advantage=rloo",
            )
        return _by_role(estimator, groups, settings=settings, weights=weights)
    return _call_estimator(
        estimator, groups, settings=settings, **_extra_arguments(estimator, weights)
    )


def keeps_state(estimator: AdvantageEstimator) -> bool:
    """Return True if the estimator has a state that lasts from step to step."""
    return hasattr(estimator, "next_state")


def next_state(
    estimator: AdvantageEstimator,
    groups: Sequence[Group],
    *,
    settings: Train,
    state: Mapping[str, float],
) -> dict[str, float]:
    """Return the estimator's state after a step with these groups. Raises RecipeError unless it is
    finite numbers by name."""
    made = estimator.next_state(  # type: ignore[attr-defined]
        groups=groups, settings=settings, state=dict(state)
    )
    is_state = isinstance(made, Mapping) and all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in made.items()
    )
    if is_state:
        return {name: float(value) for name, value in made.items()}
    raise RecipeError(
        f"`next_state` of the advantage estimator `{name_of(estimator)}` returned {made!r}",
        why="checkpoints store what it keeps as finite numbers by name",
        fix=plugin_fix(estimator),
    )


def _extra_arguments(estimator: AdvantageEstimator, weights: Mapping[str, float]) -> dict[str, Any]:
    return {"weights": weights} if getattr(estimator, "needs_weights", False) else {}


def _by_role(
    estimator: AdvantageEstimator,
    groups: Sequence[Group],
    *,
    settings: Train,
    weights: Mapping[str, float],
) -> AdvantageRows:
    """Return for each sample the advantages of its trajectories, computed role by role."""
    rows: list[list[list[float | np.ndarray]]] = [
        [[0.0] * len(one.trajectories) for one in group.samples] for group in groups
    ]
    views = [views_of(group) for group in groups]
    for role in dict.fromkeys(role for of_group in views for role in of_group):
        numbers = [number for number, of_group in enumerate(views) if role in of_group]
        parts = [views[number][role] for number in numbers]
        own_groups = [part.group for part in parts]
        further = _extra_arguments(estimator, weights)
        given = _call_estimator(estimator, own_groups, settings=settings, **further)
        for number, part, values in zip(numbers, parts, given, strict=True):
            for (place, lines), value in zip(part.places, values, strict=True):
                for order, line in enumerate(lines):
                    own = value[order] if isinstance(value, Sequence) else value
                    rows[number][place][line] = own
    return rows


def _call_estimator(
    estimator: AdvantageEstimator, groups: Sequence[Group], *, settings: Train, **further: Any
) -> AdvantageRows:
    rows = estimator(groups=groups, settings=settings, **further)
    sizes, expected = [len(row) for row in rows], [len(group.samples) for group in groups]
    name = name_of(estimator)
    if sizes != expected:
        raise RecipeError(
            f"the advantage estimator `{name}` returned {sizes} values per group",
            why=f"the groups have {expected} samples, and each sample needs one value",
            fix=plugin_fix(estimator, "it returns a list of numbers for each group"),
        )
    for group, row in zip(groups, rows, strict=True):
        if all(type(value) is float and math.isfinite(value) for value in row):
            continue
        for index, (sample, value) in enumerate(zip(group.samples, row, strict=True)):
            if fault := _advantage_fault(sample, value):
                raise RecipeError(
                    f"the advantage estimator `{name}` returned {fault}",
                    why=f"for sample {index} of prompt {group.prompt.index}, whose rewards are "
                    f"{group.rewards}",
                    fix=plugin_fix(
                        estimator,
                        "an advantage is a finite number, or such a number for each token of each "
                        "trajectory",
                    ),
                )
    return rows


def _advantage_fault(sample: Sample, value: Advantage) -> str | None:
    import numpy as np

    if isinstance(value, int | float | np.number):
        return None if math.isfinite(value) else f"{value}"
    if not isinstance(value, Sequence) or not all(
        isinstance(row, np.ndarray | float) for row in value
    ):
        return f"{value!r}"
    wanted = [(trajectory.num_tokens,) for trajectory in sample.trajectories]
    shapes = [np.shape(row) for row in value]
    filled = [shape or own for shape, own in zip(shapes, wanted, strict=False)]
    if filled != wanted or len(shapes) != len(wanted):
        return f"arrays of shapes {shapes} for trajectories of {wanted}"
    bad = [float(x) for row in value for x in np.ravel(row)[~np.isfinite(np.ravel(row))]]
    return f"{bad[0]}" if bad else None


# --- the estimators that are built in

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = (r_i - mean of the group) / std (GRPO, arXiv 2402.03300, section 4.1.2).

    std by `settings.normalize_std`: of the group, or of the whole batch's rewards (arXiv
    2508.08221, section 4), or 1 (Dr. GRPO, arXiv 2503.20783). It is the sample standard deviation
    (n - 1); a single sample has none and gets 0.
    """
    rows, scale = [group.rewards for group in groups], 1.0
    if settings.normalize_std == "batch":
        scale = 1.0 / (std_of([reward for row in rows for reward in row]) + STD_FLOOR)
    stds = dict[tuple[float, ...], float]()  # many groups have the same rewards
    advantages = []
    for row in rows:
        if settings.normalize_std == "group":
            if (own := tuple(row)) not in stds:
                stds[own] = std_of(row)
            scale = 1.0 / (stds[own] + STD_FLOOR)
        mean = statistics.fmean(row)
        advantages.append([(reward - mean) * scale for reward in row])
    return advantages


def gdpo(
    *, groups: Sequence[Group], settings: Train, weights: Mapping[str, float] = NO_WEIGHTS
) -> list[list[float]]:
    """A_i = (s_i - mean of the batch's s) / std of the batch's s; s_i = sum over the rewards k of
    w_k (r_ik - mean) / std, both over the group's r_k (GDPO, arXiv 2601.05242, section 3): rewards
    of several kinds do not hide each other. The rest of a reward beyond its weighted parts, such as
    a shaping, counts as one more part of weight 1; a reward without parts is its only part."""
    scores = [_decoupled(group, weights) for group in groups]
    values = [score for row in scores for score in row]
    mean, scale = statistics.fmean(values), 1.0 / (std_of(values) + STD_FLOOR)
    return [[(score - mean) * scale for score in row] for row in scores]


gdpo.needs_weights = True  # type: ignore[attr-defined]


def _decoupled(group: Group, weights: Mapping[str, float]) -> list[float]:
    """Return for each sample the weighted sum of its rewards, each normalised over the group."""
    names = list(dict.fromkeys(name for one in group.samples for name in one.reward_parts))
    parts = [
        (weights.get(name, 1.0), [one.reward_parts.get(name, 0.0) for one in group.samples])
        for name in names
    ]
    rest = [
        reward - sum(weight * part[place] for weight, part in parts)
        for place, reward in enumerate(group.rewards)
    ]
    scores = [0.0] * len(rest)
    for weight, part in [*parts, (1.0, rest)]:
        if (std := std_of(part)) > _ROUNDING:
            mean = statistics.fmean(part)
            for place, value in enumerate(part):
                scores[place] += weight * (value - mean) / (std + STD_FLOOR)
    return scores


_ROUNDING = 1e-9
"""A standard deviation below this comes from the rounding of a sum."""


def std_of(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def reinforce(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i (REINFORCE, Williams 1992; REINFORCE++, arXiv 2501.03262, whitens it later)."""
    return [list(group.rewards) for group in groups]


def rloo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, section 3.3). A
    single sample gets its reward."""
    return [
        [reward - _mean_of_others(group, reward) for reward in group.rewards] for group in groups
    ]


def opo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - mean of the group, each reward weighted by its response's trained tokens (OPO,
    arXiv 2505.23585): the baseline of least variance if the gradients of tokens are alike. A single
    sample gets its reward."""
    rows = []
    for group in groups:
        lengths = [sample.num_loss_tokens for sample in group.samples]
        weighted = sum(n * reward for n, reward in zip(lengths, group.rewards, strict=True))
        baseline = weighted / sum(lengths) if len(lengths) > 1 and sum(lengths) else 0.0
        rows.append([reward - baseline for reward in group.rewards])
    return rows


def remax(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505), which
    the collector samples in addition."""
    rows = []
    for group in groups:
        assert group.greedy_reward is not None, (
            f"prompt {group.prompt.index} has no greedy response"
        )
        rows.append([reward - group.greedy_reward for reward in group.rewards])
    return rows


remax.needs_greedy = True  # type: ignore[attr-defined]


def gpg(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = alpha (r_i - mean of the group); alpha = samples / samples of groups whose rewards
    differ (GPG, arXiv 2504.02546): groups without a signal do not dilute the others."""
    total = sum(len(group.samples) for group in groups)
    telling = sum(len(group.samples) for group in groups if len(set(group.rewards)) > 1)
    alpha = total / max(telling, 1)
    means = [statistics.fmean(group.rewards) for group in groups]
    return [
        [alpha * (reward - mean) for reward in group.rewards]
        for group, mean in zip(groups, means, strict=True)
    ]


def _mean_of_others(group: Group, reward: float) -> float:
    others = len(group.rewards) - 1
    return (sum(group.rewards) - reward) / others if others else 0.0


def pass_at_k(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """Of pass@k, the chance that one of k = `pass_k` samples is right (Pass@k training, arXiv
    2508.10751). N: samples; W: wrong ones, reward 0 or less; C: binomials:

    p = 1 - C(W, k) / C(N, k), s = sqrt(p (1 - p)); a right sample gets (1 - p) / s, a wrong one
    (1 - p - C(W - 1, k - 1) / C(N - 1, k - 1)) / s; all get 0 where s is 0.
    """
    k, rows = settings.pass_k, []
    for group in groups:
        count = len(group.rewards)
        wrong = sum(reward <= 0 for reward in group.rewards)
        fails = math.comb(wrong, k) / math.comb(count, k) if count >= k else 1.0
        spread = math.sqrt(fails * (1.0 - fails))
        if not spread:
            rows.append([0.0] * count)
            continue
        fails_given_wrong = math.comb(wrong - 1, k - 1) / math.comb(count - 1, k - 1)
        right_value, wrong_value = fails / spread, (fails - fails_given_wrong) / spread
        rows.append([right_value if reward > 0 else wrong_value for reward in group.rewards])
    return rows


def best_of_n(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """The best sample of a group gets its lead over the second, divided by the std that
    `normalize_std` selects; the others get 0 (arXiv 2503.19595). The first of equals is the best; a
    single sample gets 0."""
    batch_std = std_of([reward for group in groups for reward in group.rewards])
    rows = []
    for group in groups:
        row = [0.0] * len(group.rewards)
        if len(row) > 1:
            best, second = sorted(group.rewards, reverse=True)[:2]
            stds = {"group": std_of(group.rewards), "batch": batch_std}
            scale = (
                stds[settings.normalize_std] + STD_FLOOR if settings.normalize_std in stds else 1
            )
            row[group.rewards.index(best)] = (best - second) / scale
        rows.append(row)
    return rows


def max_rl(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = (r_i - mean) / mean of the group (MaxRL, arXiv 2602.02710): the gradient of the
    likelihood of being right, so that hard prompts weigh more. 0 where the mean is 0."""
    rows = []
    for group in groups:
        if min(group.rewards) < 0:
            raise RecipeError(
                f"`max_rl` does not support the reward {min(group.rewards):g}",
                why=f"prompt {group.prompt.index}: it divides by the mean reward as a success "
                "rate, so rewards must be at least 0",
                fix="--set train.advantage=grpo",
            )
        mean = statistics.fmean(group.rewards)
        rows.append([(reward - mean) / mean if mean else 0.0 for reward in group.rewards])
    return rows


Place = tuple[int, int, int]
"""(sample, trajectory, turn)"""


def turns(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of turn t = (G_t - mean) / std over the group's samples that have a turn t; G_t = sum over
    its turns j >= t of gamma^(j - t) r_j: a turn is compared with what other samples get from the
    same turn on, and gets no credit for earlier rewards (GRPO, arXiv 2402.03300, turn by turn, as
    process rewards in its section 4.1.3). r: the rewards of turns; the part of the sample's reward
    beyond their sum belongs to the last turn. std by `settings.normalize_std`; a turn that no other
    sample has gets 0."""
    rows = [[returns_of(each, gamma=settings.gamma) for each in group.samples] for group in groups]
    batch_std = std_of([value for row in rows for sample in row for value in sample.values()])
    return [
        [
            _at_tokens(sample, own)
            for sample, own in zip(
                group.samples, _normalise_turns(row, batch_std, settings), strict=True
            )
        ]
        for group, row in zip(groups, rows, strict=True)
    ]


def returns_of(sample: Sample, *, gamma: float) -> dict[tuple[int, int], float]:
    """Map each (trajectory, turn) to its return: the discounted rewards from that turn to the end
    of its trajectory. The part of the sample's reward beyond the sum of its turns' rewards comes at
    the end of each trajectory."""
    rewards = [
        trajectory.turn_rewards or (0.0,) * len(trajectory.turns)
        for trajectory in sample.trajectories
    ]
    rest = (sample.reward or 0.0) - sum(map(sum, rewards))
    made = dict[tuple[int, int], float]()
    for index, row in enumerate(rewards):
        following = rest
        for turn in reversed(range(len(row))):
            is_last = turn == len(row) - 1
            following = row[turn] + (following if is_last else gamma * following)
            made[index, turn] = following
    return made


turns.reads_tokens = True  # type: ignore[attr-defined]


def _normalise_turns(
    row: Sequence[dict[tuple[int, int], float]], batch_std: float, settings: Train
) -> list[dict[tuple[int, int], float]]:
    """Return the advantages of the turns of each sample of a group, by place."""
    meetings: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in row:
        for place, value in sample.items():
            meetings[place].append(value)

    def scale(values: Sequence[float]) -> float:
        stds = {"group": std_of(values), "batch": batch_std}
        std = stds.get(settings.normalize_std)
        return 1.0 if std is None else 1.0 / (std + STD_FLOOR)

    scales = {place: scale(values) for place, values in meetings.items()}
    means = {place: statistics.fmean(values) for place, values in meetings.items()}
    return [
        {place: (value - means[place]) * scales[place] for place, value in sample.items()}
        for sample in row
    ]


def _at_tokens(sample: Sample, own: Mapping[tuple[int, int], float]) -> list[np.ndarray]:
    """Return [trajectories][num_tokens] the value of each turn at its tokens; 0 elsewhere."""
    made = []
    for index, trajectory in enumerate(sample.trajectories):
        row = np.zeros(trajectory.num_tokens, np.float32)
        for turn, (begin, end) in enumerate(trajectory.turns):
            row[begin:end] = own.get((index, turn), 0.0)
        made.append(row)
    return made


def gigpo(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of a turn = GRPO's of its sample + `turn_weight` x its own (GiGPO, arXiv 2505.10978). A
    turn's own: its return (`returns_of`), less the mean over the group's turns that answered the
    same observation, over their std unless `normalize_std` is none. An observation is the tokens
    and images between the previous turn and this one; a turn whose observation no other has gets 0.
    """
    rows = []
    for group, episode in zip(groups, grpo(groups=groups, settings=settings), strict=True):
        own = _compare_by_observation(group, settings, history=0)
        weighted = {place: settings.turn_weight * value for place, value in own.items()}
        made = _by_sample(group, weighted)
        rows.append([[base + row for row in of] for base, of in zip(episode, made, strict=True)])
    return rows


gigpo.reads_tokens = True  # type: ignore[attr-defined]


def hgpo(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of a turn = sum over k of (k + 1) A_k / sum over k of (k + 1); A_k as a turn's own in
    `gigpo`, among the turns that also answered the same k observations before, k = 0 ..
    `turn_history` (HGPO, arXiv 2602.22817): a longer equal history counts more. A k for which no
    other turn has the same history is left out; without any, the turn gets 0."""
    rows = []
    for group in groups:
        sums: defaultdict[Place, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for history in range(settings.turn_history + 1):
            for place, value in _compare_by_observation(group, settings, history=history).items():
                sums[place][0] += (history + 1) * value
                sums[place][1] += history + 1
        own = {place: value / weight for place, (value, weight) in sums.items()}
        rows.append(_by_sample(group, own))
    return rows


hgpo.reads_tokens = True  # type: ignore[attr-defined]


def _compare_by_observation(group: Group, settings: Train, *, history: int) -> dict[Place, float]:
    """Return the normalised return of each turn whose observation, together with the `history`
    observations before it, another turn of the group shares."""
    meetings: defaultdict[tuple[tuple[bytes, ...], ...], list[Place]] = defaultdict(list)
    returns: dict[Place, float] = {}
    for i, sample in enumerate(group.samples):
        own = returns_of(sample, gamma=settings.gamma)
        returns |= {(i, j, t): value for (j, t), value in own.items()}
        for j, line in enumerate(sample.trajectories):
            observations = _observations(line)
            for t in range(history, len(observations)):
                meetings[tuple(observations[t - history : t + 1])].append((i, j, t))
    compared = dict[Place, float]()
    for places in meetings.values():
        values = [returns[place] for place in places]
        if len(values) > 1:
            mean = statistics.fmean(values)
            scale = 1.0 if settings.normalize_std == "none" else std_of(values) + STD_FLOOR
            compared |= {
                place: (value - mean) / scale for place, value in zip(places, values, strict=True)
            }
    return compared


def _observations(line: Trajectory) -> list[tuple[bytes, ...]]:
    """Return [turns] the observation before each turn: the tokens since the previous turn, and the
    hashes of the images among them."""
    ids, before, observations = np.frombuffer(line.token_ids, np.int32), 0, []
    for begin, end in line.turns:
        shown = (s.sha256.encode() for s in line.image_spans if before <= s.start < begin)
        observations.append((ids[before:begin].tobytes(), *shown))
        before = end
    return observations


def _by_sample(group: Group, own: Mapping[Place, float]) -> list[list[np.ndarray]]:
    """Return [samples][trajectories][num_tokens] the value of each turn at its tokens."""
    of: list[dict[tuple[int, int], float]] = [{} for _ in group.samples]
    for (i, j, t), value in own.items():
        of[i][j, t] = value
    return [_at_tokens(sample, row) for sample, row in zip(group.samples, of, strict=True)]
