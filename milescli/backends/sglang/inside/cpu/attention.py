"""Attention for the whole batch at once on a CPU, instead of SGLang's loop over requests. Takes the
place of `torch_native`.

Letters: B requests, N longest context, H query heads, K key/value heads, G = H / K, D head size, Q
most new tokens of a request, T new tokens of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from milescli.backends.sglang.inside.gemma_images import images_of, see_themselves
from milescli.platform import cpu_kernels, exact

FEW_POSITIONS = 128
"""New and all positions of a request up to which two plain products beat torch's fused attention,
which is slower with two threads than with one there."""


def install() -> None:
    """Register the backend under the name that SGLang's checks know, and as compatible with prefix
    caching."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import kv_cache_dtype
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    class BatchedAttention(Batched, TorchNativeAttnBackend):
        """torch_native, with our batched forms in front of its loops."""

        def __init__(self, *arguments, **settings) -> None:
            super().__init__(*arguments, **settings)
            pool = self.token_to_kv_pool
            plain = type(pool) is MHATokenToKVPool and pool.dtype is torch.float32
            self._has_kernel = plain and cpu_kernels.is_available()
            assert self._has_kernel or not exact.is_on(), (
                f"`train.on_policy=exact` over a cache of {type(pool).__name__}, {pool.dtype}"
            )

        def _store(self, layer, forward_batch, key, value) -> None:
            place = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, key, value)

    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedAttention
    if exact.is_on():  # the kernel reads float32, also the numbers of a bfloat16 model
        kv_cache_dtype.configure_kv_cache_dtype = lambda **_: (None, torch.float32)
    # the engine's command says whether prefixes are kept; a token does not depend on it
    if "torch_native" not in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


class Batched:
    """Plans each forward once (cache slots and mask), then computes attention for all requests of a
    layer at once."""

    images_see_themselves = False
    """True if tokens of an image see all of it (Gemma 3)."""
    _images: Sequence[tuple[int, int, int]] = ()
    """(request, first, last place) of the images in this pass."""
    _has_kernel = False
    """True if one call of a kernel computes a decode step over this cache."""
    _by_kernel = False
    """True if this pass is such a step, or under `exact`: each query is then summed by itself."""
    _rows: torch.Tensor | None = None
    """[T] row of the table of slots of each query, in such a step."""
    _seen: torch.Tensor | None = None
    """[T] positions that each query sees, its own included."""
    _longest_context = 0
    """Largest of them."""

    num_guessed = 0
    """Tokens of every request that a draft model has guessed before this pass, which are in the
    cache and not in `seq_lens`."""
    _tree: torch.Tensor | None = None
    """[B, Q, Q] which of the new tokens each of them sees, where they are guesses on several ways;
    None: all before it."""
    _slots: torch.Tensor | None = None
    """[B * N] cache slots of all contexts, padded with slot 0; None: the stock loop runs
    (encoder-decoder models)."""
    _sinks: torch.Tensor | None = None
    """[H] of the layer that runs now: a logit beside those of the keys, whose value is nothing
    (gpt-oss)."""

    def forward_extend(self, q, k, v, layer, forward_batch, *rest, sinks=None, **settings):
        """Compute new tokens with the kernel under `exact`, else with the stock method, which
        accepts no sinks."""
        if self._by_kernel:
            assert k is not None and sinks is None and _is_plain(layer), "the plan refuses it"
            return self._attend_by_kernel(q, k, v, layer, forward_batch)
        self._sinks = sinks
        return super().forward_extend(q, k, v, layer, forward_batch, *rest, **settings)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **more):
        """Decode with a kernel if there is one, else with the stock method, which accepts no
        sinks."""
        if self._by_kernel and k is not None and sinks is None and _is_plain(layer):
            return self._attend_by_kernel(q, k, v, layer, forward_batch)
        if self._by_kernel and self._slots is None:
            self._plan_slots(forward_batch)
        self._sinks = sinks
        return super().forward_decode(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **more
        )

    def _attend_by_kernel(self, q, k, v, layer, forward_batch) -> torch.Tensor:
        """Store keys and values, and compute each query by itself: [T, H * D]."""
        self._store(layer, forward_batch, k, v)
        window = layer.sliding_window_size
        attended = cpu_kernels.attend_slots(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).float(),
            *self.token_to_kv_pool.get_kv_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            self._rows,
            self._seen,
            longest=self._longest_context,
            scale=layer.scaling,
            window=0 if window is None or window < 0 else window + 1,
        )
        return attended.flatten(1).to(q.dtype)

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan a forward pass; called once per pass, before the layers."""
        super().init_forward_metadata(forward_batch)
        self._slots, self._by_kernel, self._tree = None, False, None
        if forward_batch.encoder_lens is not None or forward_batch.batch_size == 0:
            return
        self._lens = forward_batch.seq_lens + self.num_guessed
        if forward_batch.forward_mode.is_target_verify():
            self._plan_guesses(forward_batch.spec_info)
            self._plan_slots(forward_batch)
        elif self._has_kernel and (forward_batch.forward_mode.is_decode() or exact.is_on()):
            self._by_kernel = True
            self._rows, self._seen = forward_batch.req_pool_indices, self._lens
            if not forward_batch.forward_mode.is_decode():
                self._rows = self._rows.repeat_interleave(forward_batch.extend_seq_lens)
                self._seen = forward_batch.positions + 1
            self._longest_context = int(self._lens.max())
        else:
            self._plan_slots(forward_batch)

    def _plan_guesses(self, guesses) -> None:
        """Plan the verification of guesses behind the context, as many of each request."""
        num_new = guesses.draft_token_num
        self._prefix, self._new = self._lens, torch.full_like(self._lens, num_new)
        self._lens = self._lens + num_new
        if guesses.tree_topk != 1:
            self._tree = guesses.custom_mask.view(-1, num_new, num_new)

    def _plan_slots(self, forward_batch) -> None:
        """Find the slots of the contexts, and what each query may see of them."""
        lens_B = self._lens
        num_slots = int(lens_B.max())
        slots_BN = self.req_to_token_pool.req_to_token[
            forward_batch.req_pool_indices, :num_slots
        ].long()
        position_N = torch.arange(num_slots, device=slots_BN.device)
        is_used_BN = position_N[None] < lens_B[:, None]
        self._slots = slots_BN.masked_fill_(~is_used_BN, 0).reshape(-1)
        self._batch, self._num_slots = slots_BN.shape
        self._positions = position_N
        self._images = list(images_of(forward_batch)) if self.images_see_themselves else ()
        self._masks: dict[tuple[torch.dtype, int | None], torch.Tensor] = {}
        if forward_batch.forward_mode.is_decode():
            self._query_positions = lens_B[:, None] - 1
            self._query_rows = None
            return
        if not forward_batch.forward_mode.is_target_verify():
            self._prefix = forward_batch.extend_prefix_lens
            self._new = forward_batch.extend_seq_lens
        self._plan_extend(self._prefix, self._new)

    def _plan_extend(self, prefix_B: torch.Tensor, new_B: torch.Tensor) -> None:
        """Plan the padded form, with a row for each request; new tokens lie one request after the
        other."""
        longest = int(new_B.max())
        offset_Q = torch.arange(longest, device=new_B.device)
        is_new_BQ = offset_Q[None] < new_B[:, None]
        self._query_rows = is_new_BQ.reshape(-1).nonzero().squeeze(1)
        self._longest = longest
        self._query_positions = prefix_B[:, None] + offset_Q[None]

    def _mask(self, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """Return [B, 1, Q, N] additive; a padded query sees the first slot, so that no row is
        empty. Made once per forward."""
        key = (dtype, window)
        if key not in self._masks:
            query_BQ1 = self._query_positions[:, :, None]
            seen = self._positions <= torch.minimum(query_BQ1, self._lens[:, None, None] - 1)
            if self._tree is not None:
                assert window in (None, -1), "guesses on several ways under a window"
                seen = self._seen_of_tree()
            if window is not None and window > -1:
                seen = seen & (self._positions >= query_BQ1 - window)
                seen[..., 0] |= ~seen.any(-1)
            if self._images:
                seen = see_themselves(seen, self._query_positions, self._images)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, float("-inf")
            )
            self._masks[key] = mask[:, None]
        return self._masks[key]

    def _seen_of_tree(self) -> torch.Tensor:
        """Return [B, Q, N] bool: the whole context, and of the guesses what the tree says."""
        offset_B1N = self._positions[None, None] - self._prefix[:, None, None]
        num_new = self._tree.shape[-1]
        place = offset_B1N.clamp(0, num_new - 1).expand(-1, num_new, -1)
        is_guess = (offset_B1N >= 0) & (offset_B1N < num_new)
        return (offset_B1N < 0) | (is_guess & self._tree.gather(2, place))

    def _attend(
        self, query, k_cache, v_cache, *, window: int | None, scaling: float | None, grouped: bool
    ) -> torch.Tensor:
        """Return [B, heads, positions, D of values]. `query`: [B, K, G, D], the heads of a group as
        positions (`grouped`), or [B, H, Q, D]."""
        key, value = self._context(k_cache, query.dtype), self._context(v_cache, query.dtype)
        mask = self._mask(query.dtype, window)
        if self._sinks is not None:
            key, value, mask = self._with_sinks(query, key, value, mask, grouped=grouped)
        few = query.shape[2] * key.shape[2] <= FEW_POSITIONS**2
        if few and query.dtype is torch.float32 and query.shape[-1] == key.shape[-1]:
            return attend_unfused(query, key, value, mask, scaling=scaling)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _with_sinks(self, query, key, value, mask, *, grouped: bool):
        """Append one more key of zeros, whose logit is thus the mask's, and one more value of
        zeros."""
        batch, heads, positions, _ = query.shape
        shape = (1, heads, positions, 1) if grouped else (1, heads, 1, 1)
        sinks = self._sinks.to(mask.dtype).view(shape).expand(batch, heads, positions, 1)
        mask = torch.cat([mask.expand(batch, heads, positions, -1), sinks], dim=-1)
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask

    def _context(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return [B, K, N, D] of one layer's keys or values."""
        rows = cache.index_select(0, self._slots)
        return rows.view(self._batch, self._num_slots, *cache.shape[1:]).to(dtype).transpose(1, 2)

    def _run_sdpa_forward_decode(
        self,
        query,
        output,
        k_cache,
        v_cache,
        *args,
        scaling=None,
        sliding_window_size=None,
        **kwargs,
    ):
        """One new token per request; the G query heads of a key/value head are treated as G query
        positions, so K and V are read once. Overrides the stock loop, same arguments."""
        if self._slots is None:
            kwargs.update(scaling=scaling, sliding_window_size=sliding_window_size)
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, *args, **kwargs
            )
        num_heads, size = query.shape[1:]
        num_kv = k_cache.shape[1]
        query_BKGD = query.view(self._batch, num_kv, num_heads // num_kv, size)
        attended = self._attend(
            query_BKGD, k_cache, v_cache, window=sliding_window_size, scaling=scaling, grouped=True
        )
        output.copy_(attended.reshape(output.shape))
        return output

    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        *args,
        scaling=None,
        causal=False,
        sliding_window_size=None,
        **kwargs,
    ):
        """Several new tokens per request. Overrides the stock loop, same arguments."""
        if self._slots is None or not causal:
            kwargs.update(scaling=scaling, causal=causal, sliding_window_size=sliding_window_size)
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, *args, **kwargs
            )
        num_heads, size = query.shape[1:]
        padded = query.new_zeros((self._batch * self._longest, num_heads, size))
        padded.index_copy_(0, self._query_rows, query)
        query_BHQD = padded.view(self._batch, self._longest, num_heads, size).transpose(1, 2)
        attended = self._attend(
            query_BHQD, k_cache, v_cache, window=sliding_window_size, scaling=scaling, grouped=False
        )
        flat = attended.transpose(1, 2).reshape(self._batch * self._longest, num_heads, -1)
        torch.index_select(flat, 0, self._query_rows, out=output)
        return output


def _is_plain(layer) -> bool:
    """Return True if the kernel supports its heads."""
    size = layer.qk_head_dim
    fits = size == layer.v_head_dim and size % cpu_kernels.LANES == 0
    return fits and not layer.is_cross_attention


def attend_unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """Compute torch's `scaled_dot_product_attention` with all scores in memory. `query` is [B, H,
    Q, D]; `key` and `value` are [B, K, N, D]; `mask` is [B, 1 or H, 1 or Q, N] additive. Returns
    [B, H, Q, D of values]."""
    batch, num_heads, num_new, size = query.shape
    num_kv, num_positions = key.shape[1:3]
    group = num_heads // num_kv
    grouped = query.reshape(batch, num_kv, group * num_new, size)
    scores = torch.matmul(grouped, key.transpose(2, 3))
    scores.mul_(size**-0.5 if scaling is None else scaling)
    by_head = scores.view(batch, num_kv, group, num_new, num_positions)
    # of a mask the heads, and in a decode step the positions, may be one for all
    heads = (num_kv, group) if mask.shape[1] > 1 else (1, 1)
    by_head += mask.view(batch, *heads, mask.shape[2], num_positions)
    attended = torch.matmul(torch.softmax(scores, -1), value)
    return attended.view(batch, num_heads, num_new, -1)
