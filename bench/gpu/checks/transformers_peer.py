"""The same model, tokens and optimizer updates in plain transformers: what a user writes who has
no trainer. Used by `train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from checks.kernels import varlen_flash
from milescli.train.base import TrainShard
from milescli.train.packing import first_fit

CLIP = 1.0
"""As the recipe's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How a peer attends, and lays out its microbatches."""

    name: str
    implementation: str
    """As transformers calls it; a name with `flash` in it would be looked for on the hub."""
    packed: bool
    """Sequences end to end; else padded to the longest of a microbatch, with a mask."""
    note: str


PADDED_SDPA = Attention(
    name="transformers_sdpa",
    implementation="sdpa",
    packed=False,
    note="attn_implementation=sdpa, sequences of like length padded to rectangles with a mask; "
    "without cuDNN's kernel, whose plans for new shapes would slow it down",
)
VARLEN_FLASH = Attention(
    name="transformers_flash",
    implementation="torch_varlen",
    packed=True,
    note="sequences packed without padding, PyTorch's own build of FlashAttention 2 registered "
    "with transformers' AttentionInterface (the flash-attn package is not here)",
)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: [1, heads, S, d] -> [1, S, heads, d]."""
    assert attention_mask is None, "the ends of sequences say what is seen"
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if query.device.type != "cpu":
        out = varlen_flash(*rows, cu_seq_lens_q, max_length_q, scale=scaling)
        return out[None], None
    parts = []
    for start, end in zip(cu_seq_lens_q.tolist(), cu_seq_lens_q.tolist()[1:], strict=False):
        part = F.scaled_dot_product_attention(
            *(row[start:end].transpose(0, 1)[None] for row in rows),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)[None], None


class Peer:
    """A model of transformers with torch's AdamW."""

    def __init__(self, folder: Path, *, attention: Attention, cap: int, device: str) -> None:
        """`cap`: positions of a microbatch, padding counted."""
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(VARLEN_FLASH.implementation, _attend)
        self._attention, self._cap, self._device = attention, cap, device
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if device != "cpu" else torch.float32,
            attn_implementation=attention.implementation,
        ).to(device)
        self._model.train()
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), weight_decay=0.0, fused=device != "cpu"
        )

    def step(self, shard: TrainShard, lr: float) -> None:
        """One optimizer update by the log-probs of the shard's trained tokens."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        trained = float(shard.loss_mask.sum())
        for members in self._microbatches(shard):
            (-self._logprobs(shard, members).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()

    @torch.no_grad()
    def score(self, shard: TrainShard) -> np.ndarray:
        """[T] log-prob of each token of the shard, 0.0 where it is not trained."""
        scores = np.zeros(len(shard.token_ids), np.float32)
        for members in self._microbatches(shard):
            values = self._logprobs(shard, members).float().cpu().numpy()
            for number in members:
                start, end = int(shard.cu_seqlens[number]), int(shard.cu_seqlens[number + 1])
                scores[start + 1 : end], values = np.split(values, [end - start - 1])
        return scores

    def _microbatches(self, shard: TrainShard) -> Iterator[list[int]]:
        """Sequence numbers; of like length where they are padded, which is kind to the peer."""
        lengths = (np.diff(shard.cu_seqlens) - 1).tolist()
        if self._attention.packed:
            yield from first_fit(lengths, self._cap)
            return
        members: list[int] = []
        for number in np.argsort(-np.array(lengths), kind="stable").tolist():
            if members and (len(members) + 1) * lengths[members[0]] > self._cap:
                yield members
                members = []
            members.append(number)
        yield members

    def _logprobs(self, shard: TrainShard, members: Sequence[int]) -> torch.Tensor:
        """[positions] log-prob of each token, 0.0 off the mask."""
        ends = shard.cu_seqlens
        spans = [slice(int(ends[number]), int(ends[number + 1])) for number in members]
        tokens = [torch.from_numpy(shard.token_ids[span]).long() for span in spans]
        masks = [torch.from_numpy(shard.loss_mask[span])[1:] for span in spans]
        logits = self._packed(tokens) if self._attention.packed else self._padded(tokens)
        targets = torch.cat([row[1:] for row in tokens]).to(self._device)
        mask = torch.cat(masks).to(self._device)
        # as transformers' own loss: float32 before the softmax
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return torch.where(mask, -losses, 0.0)

    def _packed(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        lengths = [len(row) - 1 for row in tokens]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(self._device)
        output = self._model(
            input_ids=torch.cat([row[:-1] for row in tokens])[None].to(self._device),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(self._device),
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
            use_cache=False,
        )
        return output.logits[0]

    def _padded(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = [row[:-1] for row in tokens]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
        output = self._model(
            input_ids=padded.to(self._device),
            attention_mask=mask.long().to(self._device),
            use_cache=False,
        )
        return output.logits[mask.to(self._device)]
