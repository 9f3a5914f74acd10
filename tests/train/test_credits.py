"""How advantages are spread over tokens, against loops that read as the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.plug_points import CREDITS
from milescli.recipe.train import Train
from milescli.train import credits
from milescli.train.credits import discounted_sum
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream
from tests.train.tokens import ragged

FACTORS = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


@given(st.integers(1, 400), FACTORS, st.integers(0, 9))
def test_blocks_sum_as_a_loop_does(width: int, factor: float, seed: int) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, width)))
    expected, running = np.zeros((2, width)), np.zeros(2)
    for column in range(width - 1, -1, -1):
        running = values[:, column].numpy() + factor * running
        expected[:, column] = running
    assert discounted_sum(values, factor).numpy() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def _naive(tokens: PackedTokens, advantages, penalty, values, gamma: float, lam: float):  # type: ignore[no-untyped-def]
    """GAE token by token, over the trained ones; with values 0 and lam 1 the returns. Rewards of
    turns come at their tokens, and the rest of the advantage at the last."""
    own_rewards = tokens.streams.get(Stream.TURN_REWARD, torch.zeros(len(advantages)))
    made = torch.zeros(len(advantages))
    for sequence in range(tokens.num_sequences):
        own = (tokens.places.sequence == sequence) & tokens.loss_mask
        places = torch.nonzero(own).flatten().tolist()
        following, running = 0.0, 0.0
        for number, place in enumerate(reversed(places)):
            rest = float(advantages[place]) - float(own_rewards[own].sum())
            gain = float(own_rewards[place] - penalty[place]) + (rest if number == 0 else 0.0)
            error = gain + gamma * following - float(values[place])
            running = error + gamma * lam * running
            following = float(values[place])
            made[place] = running
    return made


@given(
    st.integers(0, 99),
    st.sampled_from([0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.booleans(),
)
def test_tokens_that_nobody_sampled_are_no_steps(
    seed: int, gamma: float, lam: float, with_turn_rewards: bool
) -> None:
    rng = np.random.default_rng(seed)
    tokens = ragged(rng)
    count = len(tokens.loss_mask)
    advantages, penalty, values = (
        torch.from_numpy(rng.normal(size=count).astype(np.float32)) for _ in range(3)
    )
    tokens.streams = {Stream.VALUES: values}
    if with_turn_rewards:
        rewards = rng.normal(size=count) * (rng.random(count) < 0.3)
        tokens.streams[Stream.TURN_REWARD] = torch.from_numpy(rewards.astype(np.float32))
    settings = Train(gamma=gamma, lam=lam)
    given_all = {"advantages": advantages, "penalty": penalty, "tokens": tokens}
    gae = CREDITS.load("gae")(**given_all, settings=settings)
    assert gae == pytest.approx(
        _naive(tokens, advantages, penalty, values, gamma, lam), rel=1e-5, abs=1e-5
    )
    to_go = CREDITS.load("to_go")(**given_all, settings=settings)
    nothing = torch.zeros(count)
    assert to_go == pytest.approx(
        _naive(tokens, advantages, penalty, nothing, gamma, 1.0), rel=1e-5, abs=1e-5
    )


def test_sequences_are_computed_in_parts_where_one_would_make_the_table_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(1)
    tokens = ragged(rng)
    count = len(tokens.loss_mask)
    advantages, penalty, values = (torch.from_numpy(rng.normal(size=count)) for _ in range(3))
    tokens.streams = {Stream.VALUES: values.float()}
    given_all = {"advantages": advantages.float(), "penalty": penalty.float(), "tokens": tokens}
    for name in ("gae", "to_go"):
        credit, settings = CREDITS.load(name), Train(gamma=0.9, lam=0.9)
        whole = credit(**given_all, settings=settings)
        for max_cells in (1, int(tokens.places.lengths.sum()) // 2):
            monkeypatch.setattr(credits, "MAX_CELLS", max_cells)
            assert len([*tokens.parts(max_cells)]) > 1
            torch.testing.assert_close(credit(**given_all, settings=settings), whole)
        monkeypatch.undo()


def test_a_sequence_without_a_trained_token_gets_nothing() -> None:
    tokens = ragged(np.random.default_rng(0))
    tokens.loss_mask = torch.zeros_like(tokens.loss_mask)
    ones = torch.ones(len(tokens.loss_mask))
    made = CREDITS.load("to_go")(advantages=ones, penalty=ones, tokens=tokens, settings=Train())
    assert not made.any()
