"""Speculation on a CPU that changes no token: what the model chooses behind each guess is sampled
as ever, by the request's seed at the token's own position, and a guess is right where it is that
very token. Stock takes the likeliest token on a CPU, whatever the temperature.

Draft models attend with the backend of this folder, one pass a guess.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def install() -> None:
    """Install the pieces, only in engines that speculate: SGLang's modules for it take a second to
    import."""
    from sglang.srt.speculative import draft_utils, eagle_utils, spec_utils

    stock_sample, stock_verify = eagle_utils.eagle_sample, eagle_utils.verify_tree_greedy_func

    def eagle_sample(verify_input, batch, logits_output, *arguments, **settings):
        info = batch.sampling_info
        if batch.forward_mode.is_idle() or info.is_all_greedy:
            return stock_sample(verify_input, batch, logits_output, *arguments, **settings)

        def verify(*, target_predict, **trees):
            # by now stock has added biases to these logits
            logits = logits_output.next_token_logits
            chosen = choose(logits, info, verify_input.positions).view_as(target_predict)
            return stock_verify(target_predict=chosen, **trees)

        eagle_utils.verify_tree_greedy_func = verify
        try:
            return stock_sample(verify_input, batch, logits_output, *arguments, **settings)
        finally:
            eagle_utils.verify_tree_greedy_func = stock_verify

    eagle_utils.eagle_sample = eagle_sample
    factory = draft_utils.DraftBackendFactory
    # the names of what SGLang makes for its own backend on a CPU
    factory._create_intel_amx_decode_backend = lambda self: ("torch_native", _Steps(self))
    factory._create_intel_amx_prefill_backend = lambda self: (
        "torch_native",
        _backend(self.draft_model_runner),
    )
    create = factory._create_backend

    def create_ours(self, name, makers, *arguments, **settings):
        makers = {**makers, "torch_native": makers["intel_amx"]}
        return create(self, name, makers, *arguments, **settings)

    factory._create_backend = create_ours
    move = spec_utils.move_accept_tokens_to_target_kvcache

    def move_with_records(batch, accepted, num_right, allocator):
        return move(batch, accepted, num_right, _with_records(allocator))

    spec_utils.move_accept_tokens_to_target_kvcache = move_with_records
    # the workers take functions of those modules when they are imported
    from sglang.srt.speculative import standalone_worker_v2

    # stock looks for it when a draft model of its own is sent weights, and has not set it
    standalone_worker_v2.StandaloneWorkerV2.ps = property(lambda self: self._draft_worker.ps)
    # a draft takes embeddings and output layer of the model, and stock waits for the GPU then
    torch.cuda.synchronize = torch.cuda.empty_cache = _nothing  # type: ignore[assignment]


def _with_records(allocator) -> SimpleNamespace:
    """Whose cache moves the record of chosen experts (R3) with the tokens, which has a row for each
    cache slot. On a CPU it is written when the pass is over, before anything moves."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    cache, capturer = allocator.get_kvcache(), get_global_experts_capturer()

    def move(to: torch.Tensor, source: torch.Tensor) -> None:
        cache.move_kv_cache(to, source)
        if capturer is not None:
            rows = capturer.host_cache.buffer
            rows[to] = rows[source]

    return SimpleNamespace(get_kvcache=lambda: SimpleNamespace(move_kv_cache=move))


def _nothing(*arguments: object) -> None:
    """Do nothing: there is no GPU."""


def choose(logits: torch.Tensor, info, positions: torch.Tensor) -> torch.Tensor:
    """Sample [rows] tokens of `logits` [rows, vocabulary], with equally many consecutive rows per
    request of `info`, at `positions` [rows]."""
    from sglang.srt.layers import sampler

    num_nodes = len(logits) // len(info.temperatures)
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed")
    of = SimpleNamespace(**{name: _repeated(getattr(info, name), num_nodes) for name in names})
    probs = torch.softmax(logits / of.temperatures, dim=-1)
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        chosen = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            of.top_ks,
            of.top_ps,
            of.min_ps,
            info.need_min_p_sampling,
            of.sampling_seed,
            positions,
        )
    else:
        chosen = sampler.sampling_from_probs_torch(
            probs, sampling_seed=of.sampling_seed, positions=positions
        )
    return chosen.to(torch.int64)


def _repeated(values: torch.Tensor | None, times: int) -> torch.Tensor | None:
    return None if values is None else values.repeat_interleave(times, dim=0)


def _backend(runner):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS["torch_native"](runner)


class _Steps:
    """Runs the passes of a draft model after its first, each with its own backend: pass i sees i
    tokens more than the request has."""

    def __init__(self, factory) -> None:
        assert factory.topk == 1, "a draft model guesses one way on here"
        self.attn_backends = []
        for step in range(1, factory.speculative_num_steps):
            backend = _backend(factory.draft_model_runner)
            backend.num_guessed = step
            self.attn_backends.append(backend)

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan the passes like a backend plans one."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
