"""Which prompts of a batch are computed once, and whose keys, values and logits they then are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milescli.backends.sglang.inside.cpu.prompts import find_shared, is_plain

QUESTION, OTHER = [5, 6, 7], [5, 6]


def batch_of(*prompts: list[int], **changed: object) -> SimpleNamespace:
    """A batch of new requests as SGLang's `ForwardBatch` has it, each token in a slot of its own:
    request i begins at slot 100 * (i + 1)."""
    count, lens = len(prompts), [len(prompt) for prompt in prompts]
    fields = {
        "forward_mode": SimpleNamespace(name="EXTEND"),
        "batch_size": count,
        "input_ids": torch.tensor([token for prompt in prompts for token in prompt]),
        "out_cache_loc": torch.tensor(
            [100 * (i + 1) + place for i in range(count) for place in range(lens[i])]
        ),
        "positions": torch.tensor([place for length in lens for place in range(length)]),
        "req_pool_indices": torch.arange(count) + 40,
        "seq_lens": torch.tensor(lens),
        "orig_seq_lens": torch.tensor(lens, dtype=torch.int32),
        "seq_lens_cpu": torch.tensor(lens),
        "seq_lens_sum": sum(lens),
        "extend_num_tokens": sum(lens),
        "extend_seq_lens": torch.tensor(lens, dtype=torch.int32),
        "extend_prefix_lens": torch.zeros(count, dtype=torch.int32),
        "extend_start_loc": torch.tensor([sum(lens[:i]) for i in range(count)], dtype=torch.int32),
        "extend_seq_lens_cpu": lens,
        "extend_prefix_lens_cpu": [0] * count,
        "extend_logprob_start_lens_cpu": lens,
        "return_logprob": True,
        "top_logprobs_nums": [0] * count,
        "token_ids_logprobs": [None] * count,
        "rids": [f"request {i}" for i in range(count)],
        "mm_inputs": None,
        "lora_ids": [None] * count,
        "input_embeds": None,
        "replace_embeds": None,
        "encoder_lens": None,
        "mrope_positions": None,
        "capture_hidden_mode": None,
    }
    return SimpleNamespace(**fields | changed)


def test_of_equal_prompts_the_first_is_computed_and_the_others_are_copied() -> None:
    whole = batch_of(QUESTION, OTHER, QUESTION, OTHER, QUESTION)
    shared = find_shared(whole)
    assert shared is not None
    assert shared.original_of.tolist() == [0, 1, 0, 1, 0]
    assert shared.copies.tolist() == [300, 301, 302, 400, 401, 500, 501, 502]
    assert shared.originals.tolist() == [100, 101, 102, 200, 201, 100, 101, 102]


def test_what_is_computed_is_a_batch_of_its_own() -> None:
    whole = batch_of(OTHER, OTHER, QUESTION)
    shared = find_shared(whole)
    assert shared is not None
    ours, expected = vars(shared.batch), vars(batch_of(OTHER, QUESTION))
    expected |= {
        "out_cache_loc": torch.tensor([100, 101, 300, 301, 302]),
        "req_pool_indices": torch.tensor([40, 42]),
        "rids": ["request 0", "request 2"],
    }
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name
    assert whole.batch_size == 3 and len(whole.input_ids) == 7, "the whole batch is as it was"


def test_where_every_prompt_is_another_nothing_is_shared() -> None:
    assert find_shared(batch_of(QUESTION, OTHER, QUESTION[::-1])) is None


def test_a_prompt_that_another_begins_with_is_another() -> None:
    assert find_shared(batch_of(OTHER, [*OTHER, 7])) is None


def test_new_requests_of_text_are_plain() -> None:
    assert is_plain(batch_of(QUESTION, QUESTION))


@pytest.mark.parametrize(
    "changed",
    [
        {"forward_mode": SimpleNamespace(name="DECODE")},
        {"forward_mode": SimpleNamespace(name="MIXED")},
        {"extend_prefix_lens_cpu": [0, 2]},
        {"extend_logprob_start_lens_cpu": [3, 1]},
        {"input_embeds": torch.zeros(6, 4)},
        {"mm_inputs": [None, object()]},
        {"lora_ids": [None, "adapter"]},
        {"capture_hidden_mode": SimpleNamespace(need_capture=lambda: True)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_batch_of_which_more_is_wanted_is_computed_whole(changed: dict[str, object]) -> None:
    assert not is_plain(batch_of(QUESTION, QUESTION, **changed))


def test_a_single_request_shares_with_nobody() -> None:
    assert not is_plain(batch_of(QUESTION))


def test_logprobs_of_prompts_do_not_count_where_none_are_wanted() -> None:
    batch = batch_of(QUESTION, QUESTION, return_logprob=False, extend_logprob_start_lens_cpu=[0, 0])
    assert is_plain(batch)
