"""A prompt that several requests of a batch share is computed once on a CPU: the samples of a group
begin together. Their keys and values are copied, so that every request still has its own.
"""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass

import torch

from milescli.backends.sglang.inside.routing import ROUTING_VARIABLE


def install() -> None:
    """Wrap the forward pass of a batch of new requests, unless each token's routing is recorded,
    which SGLang stores by cache slot."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    if os.environ.get(ROUTING_VARIABLE) == "1":
        return
    forward = ModelRunner.forward

    def forward_once(self, forward_batch, *arguments, **settings):
        pool = self.token_to_kv_pool
        shared = None
        if type(pool) is MHATokenToKVPool and is_plain(forward_batch):
            shared = find_shared(forward_batch)
        if shared is None:
            return forward(self, forward_batch, *arguments, **settings)
        output = forward(self, shared.batch, *arguments, **settings)
        for cache in (*pool.k_buffer, *pool.v_buffer):
            cache[shared.copies] = cache[shared.originals]
        logits = output.logits_output
        logits.next_token_logits = logits.next_token_logits[shared.original_of]
        return output

    ModelRunner.forward = forward_once


def is_plain(forward_batch) -> bool:
    """Return True for new requests of text alone that need nothing but the next token."""
    batch = forward_batch
    if (
        batch.forward_mode.name != "EXTEND"
        or batch.batch_size < 2
        or any(batch.extend_prefix_lens_cpu)
    ):
        return False
    if batch.return_logprob and any(
        start < length
        for start, length in zip(
            batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True
        )
    ):
        return False
    others = (batch.input_embeds, batch.replace_embeds, batch.encoder_lens, batch.mrope_positions)
    return (
        all(other is None for other in others)
        and not any(batch.mm_inputs or ())
        and not any(batch.lora_ids or ())
        and not (batch.capture_hidden_mode and batch.capture_hidden_mode.need_capture())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Says which prompts are computed, and which reuse their results."""

    batch: object
    """The first request of each prompt."""
    original_of: torch.Tensor
    """[requests] place of its prompt in `batch`."""
    copies: torch.Tensor
    """[tokens that are not computed] their cache slots."""
    originals: torch.Tensor
    """[tokens that are not computed] slots to copy from."""


def find_shared(forward_batch) -> Shared | None:
    """Find prompts that occur more than once; None if all are different."""
    ids, slots = forward_batch.input_ids.tolist(), forward_batch.out_cache_loc
    ends = itertools.accumulate(forward_batch.extend_seq_lens_cpu, initial=0)
    spans = list(itertools.pairwise(ends))
    first_of: dict[tuple[int, ...], int] = {}
    original_of, unique, copies = [], [], []
    for request, (start, end) in enumerate(spans):
        prompt = tuple(ids[start:end])
        if prompt not in first_of:
            first_of[prompt] = len(unique)
            unique.append(request)
        else:
            copies.append((request, unique[first_of[prompt]]))
        original_of.append(first_of[prompt])
    if not copies:
        return None
    return Shared(
        batch=_only(forward_batch, unique, spans),
        original_of=torch.tensor(original_of),
        copies=torch.cat([slots[slice(*spans[copied])] for copied, _ in copies]),
        originals=torch.cat([slots[slice(*spans[original])] for _, original in copies]),
    )


_BY_REQUEST = (
    "req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu", "extend_seq_lens",
    "extend_prefix_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu", "top_logprobs_nums", "token_ids_logprobs", "rids",
    "mm_inputs", "lora_ids",
)  # fmt: skip
_BY_TOKEN = ("input_ids", "out_cache_loc", "positions")


def _only(forward_batch, unique: list[int], spans: list[tuple[int, int]]):
    """Return the batch with these requests alone."""
    batch, chosen = copy.copy(forward_batch), torch.tensor(unique)
    tokens = torch.cat([torch.arange(*spans[request]) for request in unique])
    for names, index, places in ((_BY_REQUEST, chosen, unique), (_BY_TOKEN, tokens, None)):
        for name in names:
            value = getattr(batch, name)
            if isinstance(value, torch.Tensor):
                setattr(batch, name, value[index])
            elif value is not None:
                setattr(batch, name, [value[place] for place in places])
    batch.batch_size = len(unique)
    batch.extend_num_tokens = len(tokens)
    batch.seq_lens_sum = int(batch.seq_lens.sum())
    batch.extend_start_loc = batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens
    batch.extend_start_loc = batch.extend_start_loc.to(forward_batch.extend_start_loc.dtype)
    return batch
