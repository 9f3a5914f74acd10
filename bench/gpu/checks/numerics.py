"""What the trainer computes on this device against float64: attention over a packed row, norm,
rotary embedding, log-probs of a large vocabulary, experts; forward and gradient. The modules are
those of a trainer rank, as it builds them. Every figure is ||out - reference|| / ||reference||,
with fresh random inputs; what it takes is beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from lines import Bound, Line
from timing import seconds_of

from checks import Visit, attention
from checks.one_layer import BF16, BF16_GRADIENT, FP32, OneLayer, apart, worst


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    rank = OneLayer.of(visit)
    torch.seed()  # Megatron has set one
    try:
        yield from attention.measure(rank)
        yield _norm(rank)
        yield from _rotation_lines(rank)
        yield from _logprob_lines(rank)
        yield _experts(rank)
    finally:
        rank.close()


def _norm(rank: OneLayer) -> Line:
    module, facts = rank.layer.input_layernorm, rank.facts
    size = 8192 if rank.visit.on_device else 64
    x = torch.randn(size, facts.hidden_size, device=rank.device).bfloat16().requires_grad_()
    upstream = torch.randn_like(x)

    def run() -> tuple[torch.Tensor, ...]:
        out = module(x)
        return out, *torch.autograd.grad(out, (x, module.weight), upstream)

    wide = x.detach().double().requires_grad_()
    weight = module.weight.detach().double().requires_grad_()
    expected = wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * weight
    references = (expected, *torch.autograd.grad(expected, (wide, weight), upstream.double()))
    names = ("forward", "input_gradient", "weight_gradient")
    parts = {
        name: apart(mine, reference)
        for name, mine, reference in zip(names, run(), references, strict=True)
    }

    def run_fused() -> None:
        out = F.rms_norm(x, (facts.hidden_size,), module.weight, module.eps)
        torch.autograd.grad(out, (x, module.weight), upstream)

    seconds, fused = seconds_of(run, rank.visit), seconds_of(run_fused, rank.visit)
    return Line(
        name="norm_bf16",
        measured=worst(parts),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16),
        note="fused_s: torch.nn.functional.rms_norm in its place",
        figures=parts | {"seconds": seconds, "fused_s": fused, "bytes": x.nbytes},
    )


def _rotation_lines(rank: OneLayer) -> Iterator[Line]:
    """Against angles in float64. Those in float32, as all implementations have them, are right to
    6e-8 of their size: 5e-4 radians after 8192 positions, in the dims that turn fastest."""
    from milescli.backends.megatron.layers.rope import angles, rotate

    facts, length = rank.facts, 8192 if rank.visit.on_device else 64
    x = torch.randn(length, facts.num_heads, facts.head_dim, device=rank.device)
    places = torch.arange(length)
    half = torch.arange(0, facts.head_dim, 2, device=rank.device, dtype=torch.float64)
    turns = torch.outer(places.to(rank.device).double(), facts.rope.theta ** -(half / x.shape[-1]))
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    own = angles(facts.rope, places, head_dim=facts.head_dim, device=rank.device)
    for name, dtype, most in (("bf16", torch.bfloat16, BF16), ("fp32", torch.float32, 1e-3)):
        given = x.to(dtype).requires_grad_()
        first, second = given.detach().double().chunk(2, dim=-1)
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        out = rotate(given, own)
        (back,) = torch.autograd.grad(out, given, out.detach(), retain_graph=True)
        # its gradient turns back: of the output itself, it is the input
        parts = {"forward": apart(out, expected), "gradient": apart(back, given)}

        def run(given=given) -> None:
            torch.autograd.grad(rotate(given, own), given, given.detach())

        yield Line(
            name=f"rotation_{name}",
            measured=worst(parts),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            note=f"{length} positions",
            figures=parts | {"seconds": seconds_of(run, rank.visit), "bytes": given.nbytes},
        )


def _logprob_lines(rank: OneLayer) -> Iterator[Line]:
    for name, dtype, most in (("bf16", torch.bfloat16, BF16), ("fp32", torch.float32, FP32)):
        forward, gradient, figures = _logprobs(rank, dtype)
        yield Line(
            name=f"logprob_{name}",
            measured=worst(forward),
            unit="relative error",
            bound=Bound(kind="at most", value=FP32),
            note="log-prob and entropy in float32 of logits in the dtype of the model",
            figures=forward | figures,
        )
        yield Line(
            name=f"logprob_gradient_{name}",
            measured=worst(gradient),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            figures=gradient,
        )


def _logprobs(
    rank: OneLayer, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(errors of the results, errors of the gradients, what it takes). The vocabulary is padded as
    under tensor parallelism; tokens and columns in two blocks and a rest."""
    from milescli.plan.activations import head_block
    from milescli.train.vocab_parallel import Head, VocabShard, target_logprobs

    device, on_device = rank.device, rank.visit.on_device
    block = head_block(on_host=not on_device)
    num_tokens, vocab, width = 2 * block[0] + 17, 151_936 if on_device else 2 * block[1] + 17, 64
    hidden = torch.randn(num_tokens, width, device=device).to(dtype).requires_grad_()
    weight = (0.4 * torch.randn(vocab + 64, width, device=device)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    weights = torch.randn(2, num_tokens, device=device)
    head = Head(hidden=hidden, weight=weight, shard=VocabShard(size=vocab))
    if on_device:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    results = target_logprobs(head, targets, temperature=0.9)
    of_hidden, of_weight = torch.autograd.grad(results, [hidden, weight], [*weights])
    figures = {}
    if on_device:
        figures["scratch_bytes"] = float(torch.cuda.max_memory_allocated() - before)
    errors, norms = torch.zeros(4, device=device).double(), torch.zeros(4, device=device).double()
    expected_weight = torch.zeros_like(weight, dtype=torch.float64)

    def compare(place: int, mine: torch.Tensor, reference: torch.Tensor) -> None:
        errors[place] += (mine.detach().double() - reference).square().sum()
        norms[place] += reference.square().sum()

    with torch.no_grad():
        for rows in torch.arange(num_tokens, device=device).split(256):
            # logits in the dtype of the model, as they are rounded by the layer
            x = (hidden[rows] @ weight[:vocab].t()).double() / 0.9
            logs = x - x.logsumexp(-1, keepdim=True)
            p = logs.exp()
            entropy = -(p * logs).sum(-1)
            slope = -weights[0, rows, None] * p
            slope -= weights[1, rows, None] * p * (logs + entropy[:, None])
            slope.scatter_add_(1, targets[rows, None], weights[0, rows, None].double())
            slope /= 0.9
            compare(0, results[0][rows], logs.gather(1, targets[rows, None])[:, 0])
            compare(1, results[1][rows], entropy)
            compare(2, of_hidden[rows], slope @ weight[:vocab].double())
            expected_weight[:vocab] += slope.t() @ hidden[rows].double()
    compare(3, of_weight, expected_weight)
    logprob, entropy, by_hidden, by_weight = (errors.sqrt() / norms.sqrt()).tolist()

    def run() -> None:
        (got, _) = target_logprobs(head, targets)
        got.sum().backward()
        hidden.grad = weight.grad = None

    figures["seconds"] = seconds_of(run, rank.visit, repeats=3)
    figures["logits_bytes"] = float(num_tokens * vocab * hidden.element_size())
    return (
        {"logprob": logprob, "entropy": entropy},
        {"hidden": by_hidden, "weight": by_weight},
        figures,
    )


def _experts(rank: OneLayer) -> Line:
    """A whole layer of experts, router included."""
    facts, mlp = rank.facts, rank.layer.mlp
    size = 2048 if rank.visit.on_device else 64
    x = torch.randn(size, 1, facts.hidden_size, device=rank.device).bfloat16()
    with torch.no_grad():
        out, _ = mlp(x)
        wide = x[:, 0].double()
        router = mlp.router.weight.double()
        logits = wide @ router.T
        best, chosen = logits.softmax(-1).topk(facts.topk, dim=-1)
        weights = best / best.sum(-1, keepdim=True) if facts.normalize_topk else best
        expected = torch.zeros_like(wide)
        for number, expert in enumerate(mlp.experts.local_experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            gate, up = (wide[tokens] @ expert.linear_fc1.weight.double().T).chunk(2, dim=-1)
            down = (F.silu(gate) * up) @ expert.linear_fc2.weight.double().T
            expected.index_add_(0, tokens, down * weights[tokens, place, None])
    return Line(
        name="experts_bf16",
        measured=apart(out[:, 0], expected),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16_GRADIENT),
        note=f"{facts.num_experts} experts, {facts.topk} at work: three products, each rounded",
    )
