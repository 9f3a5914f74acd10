"""A group of anything that agents and engines make is the same after it was on disk."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.types import (
    Group,
    Image,
    ImageSpan,
    Prompt,
    RoutedExperts,
    Sample,
    StopReason,
    TeacherTokens,
    Trajectory,
    VersionSpan,
)
from milescli.rollout.collect.group_record import decode_group, encode_group, read_head

SPAN = ImageSpan(start=0, num_tokens=1, grid=(1, 2, 2), sha256="ab")
IMAGE = Image(sha256="ab", png=b"P", width=28, height=28, grid=(1, 2, 2), num_tokens=1)
PROMPT = Prompt(index=7, token_ids=[1, 2], text="1+2", images=[IMAGE], image_spans=[SPAN])
_floats = st.floats(allow_nan=False)
_words = st.text(max_size=6)
_figures = st.dictionaries(_words, _floats, max_size=2)
_singles = st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda v: array("f", v))
_spans = st.builds(
    VersionSpan, start=st.integers(0, 9), end=st.integers(0, 9), version=st.integers(0, 99)
)
_experts = st.builds(
    RoutedExperts,
    indices=st.binary(max_size=12),
    num_tokens=st.integers(0, 3),
    num_layers=st.integers(1, 3),
    topk=st.integers(1, 3),
)
_teachers = st.builds(
    TeacherTokens,
    token_ids=st.binary(max_size=9),
    logprobs=st.binary(max_size=9),
    topk=st.integers(0, 3),
)
_trajectories = st.builds(
    Trajectory,
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: array("i", ids)),
    loss_mask=st.binary(max_size=4),
    logprobs=_singles,
    version_spans=st.lists(_spans, min_size=1, max_size=3),
    routed_experts=st.none() | _experts,
    teacher=st.none() | _teachers,
    rewards=st.none() | _singles,
    role=st.none() | _words,
    image_spans=st.sampled_from([(), (SPAN,)]),
)
_samples = st.builds(
    Sample,
    sample_index=st.integers(0, 9),
    seed=st.integers(0, 2**31 - 1),
    trajectories=st.lists(_trajectories, min_size=1, max_size=3),
    text=_words,
    stop_reason=st.sampled_from(StopReason),
    reward=_floats,
    reward_parts=_figures,
    role_texts=st.dictionaries(_words, _words, max_size=2),
    role_rewards=_figures,
    figures=_figures,
    num_failed=st.integers(0, 3),
    num_counted_tokens=st.integers(0, 3),
    is_learned=st.booleans(),
)
_groups = st.builds(
    Group,
    prompt=st.just(PROMPT),
    samples=st.lists(_samples, min_size=1, max_size=3),
    epoch=st.integers(0, 9),
    greedy_reward=st.none() | _floats,
)


@settings(max_examples=60, deadline=None)
@given(_groups)
def test_a_group_is_read_as_it_was_written(group: Group) -> None:
    head, parts = encode_group(11, group)
    head, body = json.loads(json.dumps(head)), b"".join(parts)
    again = decode_group(head, body, prompt=PROMPT)
    assert again == group
    assert {type(sample.stop_reason) for sample in again.samples} == {StopReason}
    known = read_head(head)
    versions = [span.version for sample in group.samples for span in sample.version_spans]
    assert (known.position, known.prompt_index) == (11, 7)
    assert (known.oldest, known.newest) == (min(versions), max(versions))
    if any(line.image_spans for sample in group.samples for line in sample.trajectories):
        with pytest.raises(ValueError, match="differ from those of the prompt"):
            decode_group(head, body, prompt=replace(PROMPT, images=[]))
    with pytest.raises(ValueError, match="left over"):
        decode_group(head, body + b"x", prompt=PROMPT)
    with pytest.raises(ValueError, match="belongs to prompt 7"):
        decode_group(head, body, prompt=Prompt(index=8, token_ids=[1], text=""))
