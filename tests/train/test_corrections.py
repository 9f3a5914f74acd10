"""Importance weights against their definitions, written out for each sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.plug_points import CORRECTIONS
from milescli.recipe.train import CorrectionSettings, Train
from milescli.train.corrections import Correction, apply_correction
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream
from tests.train.tokens import ragged


def _case(seed: int) -> tuple[PackedTokens, torch.Tensor]:
    rng = np.random.default_rng(seed)
    tokens = ragged(rng)
    return tokens, torch.from_numpy(rng.normal(size=len(tokens.loss_mask)).astype(np.float32))


def _made(tokens: PackedTokens, log_ratio: torch.Tensor, **rule: object) -> np.ndarray:
    settings = Train(correction=CorrectionSettings(kind="importance", **rule))
    correction = CORRECTIONS.load("importance")
    assert correction is not None
    made = apply_correction(correction, log_ratio=log_ratio, tokens=tokens, settings=settings)
    return made.weights[tokens.loss_mask].numpy()


def _ratios(tokens: PackedTokens, log_ratio: torch.Tensor, level: str) -> np.ndarray:
    """Of each trained token."""
    values, mask = log_ratio.double().numpy(), tokens.loss_mask.numpy()
    sequence = tokens.places.sequence.numpy()
    merge = {"sequence": np.sum, "geometric": np.mean}
    made = []
    for place in np.flatnonzero(mask):
        own = values[mask & (sequence == sequence[place])]
        made.append(values[place] if level == "token" else merge[level](own))
    return np.exp(np.clip(np.array(made), -20, 20))


@given(
    st.integers(0, 200),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "clip", "mask"]),
)
def test_ratios_are_bounded_as_their_mode_says(seed: int, level: str, mode: str) -> None:
    tokens, log_ratio = _case(seed)
    ratios = _ratios(tokens, log_ratio, level)
    expected = {
        "truncate": np.minimum(ratios, 2.0),
        "clip": np.clip(ratios, 0.5, 2.0),
        "mask": np.where((ratios >= 0.5) & (ratios <= 2.0), ratios, 0.0),
    }[mode]
    made = _made(tokens, log_ratio, level=level, mode=mode, low=0.5, high=2.0)
    assert made == pytest.approx(expected, rel=1e-5)
    if mode == "truncate" and made.any():
        normal = _made(tokens, log_ratio, level=level, mode=mode, high=2.0, normalize=True)
        of_tokens = made.mean()
        sequences = tokens.places.sequence[tokens.loss_mask].numpy()
        of_sequences = np.mean([made[sequences == s].mean() for s in np.unique(sequences)])
        assert normal * (of_tokens if level == "token" else of_sequences) == pytest.approx(made)


@given(st.integers(0, 200), st.sampled_from([0.01, 0.1, 1.0]))
def test_kpop_excludes_tokens_whose_probability_diverges_in_either_direction(
    seed: int, bound: float
) -> None:
    tokens, log_ratio = _case(seed)
    rng = np.random.default_rng(seed)
    trainer = -rng.gamma(1.0, 1.0, size=len(log_ratio)) - 1e-3
    engine = np.minimum(trainer - log_ratio.numpy(), -1e-3)
    log_ratio = torch.from_numpy((trainer - engine).astype(np.float32))
    tokens = replace(tokens, streams={Stream.ENGINE: torch.from_numpy(engine).float()})
    mask = tokens.loss_mask.numpy()
    p, q = np.exp(trainer)[mask], np.exp(engine)[mask]

    def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))

    divergence = np.maximum(apart(p, q), apart(q, p))
    clear = np.abs(divergence / bound - 1) > 1e-3
    expected = np.where(divergence <= bound, p / q, 0.0)
    made = _made(tokens, log_ratio, mode="binary_kl", high=bound)
    assert made[clear] == pytest.approx(expected[clear], rel=1e-4)


@given(st.integers(0, 200), st.sampled_from(["token", "sequence", "geometric"]))
def test_what_is_rejected_or_vetoed_teaches_nothing(seed: int, level: str) -> None:
    tokens, log_ratio = _case(seed)
    judged = _ratios(tokens, log_ratio, level)
    made = _made(
        tokens, log_ratio, mode="none", reject_level=level, reject_low=0.7, reject_high=1.5
    )
    assert made.tolist() == ((judged >= 0.7) & (judged <= 1.5)).astype(float).tolist()
    vetoed = _made(tokens, log_ratio, mode="none", veto=0.4)
    ratios = _ratios(tokens, log_ratio, "token")
    sequences = tokens.places.sequence[tokens.loss_mask].numpy()
    lowest = [ratios[sequences == own].min() for own in sequences]
    assert vetoed.tolist() == [float(low >= 0.4) for low in lowest]


@pytest.mark.parametrize(
    ("made", "gave"),
    [
        (Correction(weights=torch.ones(())), r"weights of shape \[\]"),
        (torch.ones(3), "a Tensor"),
    ],
)
def test_a_correction_that_is_none_is_named(made: object, gave: str) -> None:
    tokens, log_ratio = _case(0)

    def mine(*, log_ratio, tokens, settings):  # type: ignore[no-untyped-def]
        return made

    with pytest.raises(RecipeError, match=f"the correction `mine` returned {gave}"):
        apply_correction(mine, log_ratio=log_ratio, tokens=tokens, settings=Train())
