"""Attention for the whole batch at once on a CPU, instead of SGLang's loop over requests. Takes the place of `torch_native`.

Letters: B requests, N longest context, H query heads, K key/value heads, G = H / K, D head size, T new tokens of all requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def install() -> None:
    """Register the backend under the name that SGLang's checks know."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(Batched, TorchNativeAttnBackend):
        """torch_native, with our batched forms in front of its loops."""

    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedAttention


class Batched:
    """Plans each forward once (which cache slots, which mask), then runs one padded SDPA per layer."""

    _slots: torch.Tensor | None = None
    """[B * N] cache slots of all contexts, padded with slot 0; None: the stock loop runs (encoder-decoder models)."""

    def init_forward_metadata(self, forward_batch) -> None:
        """Called once per forward, before the layers."""
        super().init_forward_metadata(forward_batch)
        self._slots = None
        if forward_batch.encoder_lens is not None or forward_batch.batch_size == 0:
            return
        lens_B = forward_batch.seq_lens
        num_slots = int(lens_B.max())
        slots_BN = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :num_slots].long()
        position_N = torch.arange(num_slots, device=slots_BN.device)
        held_BN = position_N[None] < lens_B[:, None]
        self._slots = slots_BN.masked_fill_(~held_BN, 0).reshape(-1)
        self._batch, self._num_slots = slots_BN.shape
        self._positions, self._lens = position_N, lens_B
        self._masks: dict[tuple[torch.dtype, int | None], torch.Tensor] = {}
        if forward_batch.forward_mode.is_decode():
            self._query_positions = lens_B[:, None] - 1
            self._query_rows = None
        else:
            self._plan_extend(forward_batch)

    def _plan_extend(self, forward_batch) -> None:
        """New tokens lie one request after the other; the padded form puts each request in a row of its own."""
        prefix_B, new_B = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
        longest = int(new_B.max())
        offset_Q = torch.arange(longest, device=new_B.device)
        is_new_BQ = offset_Q[None] < new_B[:, None]
        self._query_rows = is_new_BQ.reshape(-1).nonzero().squeeze(1)
        self._longest = longest
        self._query_positions = prefix_B[:, None] + offset_Q[None]

    def _mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """[B, 1, Q, N] additive; a padded query sees the first slot, so that no row is empty. Made once per forward."""
        key = (dtype, window)
        if key not in self._masks:
            query_BQ1 = self._query_positions[:, :, None]
            seen = self._positions <= torch.minimum(query_BQ1, self._lens[:, None, None] - 1)
            if window is not None and window > -1:
                seen = seen & (self._positions >= query_BQ1 - window)
                seen[..., 0] |= ~seen.any(-1)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[key] = mask[:, None]
        return self._masks[key]

    def _context(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, K, N, D] of one layer's keys or values."""
        rows = cache.index_select(0, self._slots)
        return rows.view(self._batch, self._num_slots, *cache.shape[1:]).to(dtype).transpose(1, 2)

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, *args, scaling=None, sliding_window_size=None, **kwargs
    ):
        """One new token per request; the G query heads of a key/value head are treated as G query positions, so K and V are
        read once. Overrides the stock loop, same arguments."""
        if self._slots is None:
            kwargs.update(scaling=scaling, sliding_window_size=sliding_window_size)
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        num_heads, size = query.shape[1:]
        num_kv = k_cache.shape[1]
        query_BKGD = query.view(self._batch, num_kv, num_heads // num_kv, size)
        attended = F.scaled_dot_product_attention(
            query_BKGD,
            self._context(k_cache, query.dtype),
            self._context(v_cache, query.dtype),
            attn_mask=self._mask(query.dtype, sliding_window_size),
            scale=scaling,
        )
        output.copy_(attended.reshape(output.shape))
        return output

    def _run_sdpa_forward_extend(
        self, query, output, k_cache, v_cache, *args, scaling=None, causal=False, sliding_window_size=None, **kwargs
    ):
        """Several new tokens per request. Overrides the stock loop, same arguments."""
        if self._slots is None or not causal:
            kwargs.update(scaling=scaling, causal=causal, sliding_window_size=sliding_window_size)
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *args, **kwargs)
        num_heads, size = query.shape[1:]
        padded = query.new_zeros((self._batch * self._longest, num_heads, size))
        padded.index_copy_(0, self._query_rows, query)
        attended = F.scaled_dot_product_attention(
            padded.view(self._batch, self._longest, num_heads, size).transpose(1, 2),
            self._context(k_cache, query.dtype),
            self._context(v_cache, query.dtype),
            attn_mask=self._mask(query.dtype, sliding_window_size),
            scale=scaling,
            enable_gqa=num_heads != k_cache.shape[1],
        )
        flat = attended.transpose(1, 2).reshape(self._batch * self._longest, num_heads, -1)
        torch.index_select(flat, 0, self._query_rows, out=output)
        return output
