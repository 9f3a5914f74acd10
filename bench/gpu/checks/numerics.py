"""What the trainer computes on this device against float64: attention over a packed row, norm,
rotary embedding, log-probs of a large vocabulary, experts; forward and gradient. The modules are
those of a trainer rank, as it builds them. Every figure is ||out - reference|| / ||reference||,
with fresh random inputs; what it takes is beside it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from lines import Bound, Line
from shapes import config_of

from checks import Visit
from checks.ceilings import seconds_of
from checks.kernels import kernel_of, row_seconds

BF16, FP32 = 1e-2, 1e-5
"""A bfloat16 is right to 2^-9; a few roundings one after the other come to 3e-3 to 5e-3. A float32
is right to 6e-8, and sums of thousands to 1e-6."""
BF16_GRADIENT = 2e-2
"""Products of what has been rounded."""
LENGTHS = (2048, 1531, 1100, 777, 300, 64, 3)
LENGTHS_ON_CPU = (40, 27, 9, 3)


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    rank = _Rank.of(visit)
    torch.seed()  # Megatron has set one
    try:
        yield from _attention_lines(rank)
        yield _norm(rank)
        yield from _rotation_lines(rank)
        yield from _logprob_lines(rank)
        yield _experts(rank)
    finally:
        rank.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One layer of a model, as a trainer rank builds it, in bfloat16: 16 heads of 128 in 8 groups
    (in small on a CPU), and experts."""

    visit: Visit
    facts: object
    model: torch.nn.Module
    device: torch.device

    @classmethod
    def of(cls, visit: Visit) -> _Rank:
        from milescli.backends.megatron import mesh, model
        from milescli.models import parse_facts
        from milescli.plan.types import TrainerLayout

        small = {"num_hidden_layers": 1, "vocab_size": 512}
        if visit.on_device:
            small["num_key_value_heads"] = 8
        facts = parse_facts(config_of("small-moe", visit) | small)
        device = torch.device("cuda", 0) if visit.on_device else torch.device("cpu")
        if visit.on_device:
            torch.cuda.set_device(device)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        layout = TrainerLayout()
        own_mesh = mesh.bring_up(
            layout=layout,
            rank=0,
            master=("127.0.0.1", port),
            backend="nccl" if visit.on_device else "gloo",
            device=device,
            timeouts_s=(60, 60),
        )
        config = model.build_config(
            facts,
            layout,
            dtype=torch.bfloat16,
            device=device,
            recompute="none",
            routing_replay=False,
        )
        built = model.build_model(config, facts, own_mesh)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.normal_(std=0.05)
                if parameter.dim() == 1:
                    parameter.add_(1.0)
        return cls(visit=visit, facts=facts, model=built, device=device)

    @property
    def layer(self) -> torch.nn.Module:
        return self.model.decoder.layers[0]

    def close(self) -> None:
        from milescli.backends.megatron import mesh

        mesh.tear_down()

    def row(self, lengths: Sequence[int]):
        """The packed row of sequences of these lengths, as the trainer makes it."""
        from milescli.backends.megatron.layers.attention import pack_row
        from milescli.backends.megatron.rows import RowShape, make_row

        starts = np.cumsum([0, *lengths])
        spans = [(int(start), length) for start, length in zip(starts, lengths, strict=False)]
        shape = RowShape()
        layout = make_row(spans, shape=shape)
        return pack_row(layout, shape=shape, facts=self.facts, device=self.device)

    def heads(self, num_positions: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Random query [S, heads, d], key and value [S, groups, d], with gradient."""
        heads, groups = self.facts.num_heads, self.facts.num_kv_heads
        return [
            torch.randn(num_positions, count, self.facts.head_dim, device=self.device)
            .to(dtype)
            .requires_grad_()
            for count in (heads, groups, groups)
        ]

    def attend(self, query, key, value, row) -> torch.Tensor:
        """By the trainer's own module -> [S, heads * d]"""
        core = self.layer.self_attention.core_attention
        return core(query, key, value, None, packed_seq_params=row)


def _attention_lines(rank: _Rank) -> Iterator[Line]:
    lengths = LENGTHS if rank.visit.on_device else LENGTHS_ON_CPU
    bounds = {torch.bfloat16: (BF16, BF16_GRADIENT), torch.float32: (FP32, FP32)}
    for dtype, (most, most_of_gradient) in bounds.items():
        suffix = "bf16" if dtype is torch.bfloat16 else "fp32"
        row = rank.row(lengths)
        inputs = rank.heads(sum(lengths), dtype)
        out = rank.attend(*inputs, row)
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = _attention64(*wide, row, lengths)
        expected_gradients = torch.autograd.grad(expected, wide, upstream.double())
        kernels = [kernel_of(grid, inputs) for grid in row.grids]
        yield Line(
            name=f"attention_{suffix}",
            measured=_apart(out, expected),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            note=f"row of {list(lengths)}; kernels: {', '.join(dict.fromkeys(kernels))}",
        )
        parts = {
            name: _apart(mine, reference)
            for name, mine, reference in zip(
                ("query", "key", "value"), gradients, expected_gradients, strict=True
            )
        }
        yield Line(
            name=f"attention_gradient_{suffix}",
            measured=_worst(parts),
            unit="relative error",
            bound=Bound(kind="at most", value=most_of_gradient),
            figures=parts,
        )
        if dtype is torch.bfloat16:
            del wide, expected, expected_gradients
            yield _packed_row(rank, inputs, out, upstream, gradients, lengths)
            yield _plain_kernels(kernels)
            yield _attention_speed(rank)


def _attention64(query, key, value, row, lengths: Sequence[int]) -> torch.Tensor:
    """Sequence by sequence, written out; rotated by the row's own angles, which `rotation`
    looks at."""
    angles = row.angles["full"]
    query, key = _rotate64(query, angles), _rotate64(key, angles)
    shared = query.shape[1] // key.shape[1]
    parts, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        q, k, v = (
            tensor[here].repeat_interleave(times, dim=1).transpose(0, 1)
            for tensor, times in ((query, 1), (key, shared), (value, shared))
        )
        logits = q @ k.mT / query.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        parts.append((logits.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts).flatten(1)


def _rotate64(x: torch.Tensor, angles) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos.double(), angles.sin.double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _packed_row(rank: _Rank, inputs, out, upstream, gradients, lengths: Sequence[int]) -> Line:
    """The same module, given each sequence alone."""
    outs, alone_gradients, start = [], [], 0
    for length in lengths:
        here = slice(start, start + length)
        alone = [tensor.detach()[here].requires_grad_() for tensor in inputs]
        outs.append(rank.attend(*alone, rank.row([length])))
        alone_gradients.append(torch.autograd.grad(outs[-1], alone, upstream[here]))
        start += length
    parts = {"forward": _apart(out, torch.cat(outs))}
    for name, mine, single in zip(
        ("query", "key", "value"), gradients, zip(*alone_gradients, strict=True), strict=True
    ):
        parts[name] = _apart(mine, torch.cat(single))
    return Line(
        name="packed_row_bf16",
        measured=_worst(parts),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16),
        note="a row of sequences against each of them alone, by the same module",
        figures=parts,
    )


def _plain_kernels(kernels: Sequence[str]) -> Line:
    """PyTorch's plain way holds [heads, Q, K] in memory; block by block is slow."""
    return Line(
        name="kernels",
        measured=float(sum(kernel in ("math", "blockwise") for kernel in kernels)),
        predicted=0.0,
        unit="grids that no fused kernel computes",
        bound=Bound(kind="equal", anywhere=False),
        note=", ".join(kernels),
    )


def _attention_speed(rank: _Rank) -> Line:
    """As in a step: rows whose lengths nobody has seen before."""
    rng = np.random.default_rng()
    low, high, total = (512, 2048, 16_384) if rank.visit.on_device else (16, 64, 256)
    rows = []
    for _ in range(3):
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(int(rng.integers(low, high)), total - sum(lengths)))
        rows.append((lengths, rank.row(lengths)))
    inputs = rank.heads(total, torch.bfloat16)
    figures = row_seconds(rank.attend, inputs, rows, rank.visit)
    flops = 3.5 * sum(2 * rank.facts.num_heads * rank.facts.head_dim * n * n for n in rows[-1][0])
    return Line(
        name="attention_speed",
        measured=flops / figures["seconds"] / 1e12,
        unit="TFLOP/s",
        note=f"forward and backward of a row of {total} tokens; new_shape_s: at first sight of its "
        "lengths; flash_s: PyTorch's flash kernel enforced; varlen_s: the same kernel, over the "
        "row as it lies",
        figures=figures,
    )


def _norm(rank: _Rank) -> Line:
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
        name: _apart(mine, reference)
        for name, mine, reference in zip(names, run(), references, strict=True)
    }

    def run_fused() -> None:
        out = F.rms_norm(x, (facts.hidden_size,), module.weight, module.eps)
        torch.autograd.grad(out, (x, module.weight), upstream)

    seconds, fused = seconds_of(run, rank.visit), seconds_of(run_fused, rank.visit)
    return Line(
        name="norm_bf16",
        measured=_worst(parts),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16),
        note="fused_s: torch.nn.functional.rms_norm in its place",
        figures=parts | {"seconds": seconds, "fused_s": fused, "bytes": x.nbytes},
    )


def _rotation_lines(rank: _Rank) -> Iterator[Line]:
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
        parts = {"forward": _apart(out, expected), "gradient": _apart(back, given)}

        def run(given=given) -> None:
            torch.autograd.grad(rotate(given, own), given, given.detach())

        yield Line(
            name=f"rotation_{name}",
            measured=_worst(parts),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            note=f"{length} positions",
            figures=parts | {"seconds": seconds_of(run, rank.visit), "bytes": given.nbytes},
        )


def _logprob_lines(rank: _Rank) -> Iterator[Line]:
    for name, dtype, most in (("bf16", torch.bfloat16, BF16), ("fp32", torch.float32, FP32)):
        forward, gradient, figures = _logprobs(rank, dtype)
        yield Line(
            name=f"logprob_{name}",
            measured=_worst(forward),
            unit="relative error",
            bound=Bound(kind="at most", value=FP32),
            note="log-prob and entropy in float32 of logits as they are given",
            figures=forward | figures,
        )
        yield Line(
            name=f"logprob_gradient_{name}",
            measured=_worst(gradient),
            unit="relative error",
            bound=Bound(kind="at most", value=most),
            figures=gradient,
        )


def _logprobs(
    rank: _Rank, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(errors of the results, errors of the gradient, what it takes). The vocabulary is padded as
    under tensor parallelism; tokens in two blocks and a rest."""
    from milescli.train.vocab_parallel import CHUNK_TOKENS, VocabShard, target_logprobs

    vocab = 151_936 if rank.visit.on_device else 1000
    num_tokens = (2 * CHUNK_TOKENS if rank.visit.on_device else CHUNK_TOKENS) + 17
    device = rank.device
    given = (3 * torch.randn(num_tokens, vocab + 64, device=device)).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    weights = torch.randn(2, num_tokens, device=device)
    shard = VocabShard(size=vocab)
    logits = given.clone().requires_grad_()
    if rank.visit.on_device:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # the gradient is written over the logits: a view of a leaf will do, as the layer's output does
    results = target_logprobs(logits * 1, targets, shard=shard, temperature=0.9)
    (gradient,) = torch.autograd.grad(results, logits, [*weights])
    figures = {}
    if rank.visit.on_device:
        held = torch.cuda.max_memory_allocated() - before - given.nbytes
        figures["scratch_bytes"] = float(held)
    errors, norms = torch.zeros(4, device=device).double(), torch.zeros(4, device=device).double()
    for rows in torch.arange(num_tokens, device=device).split(256):
        x = given[rows, :vocab].double() / 0.9
        logs = x.log_softmax(-1)
        p = logs.exp()
        entropy = -(p * logs).sum(-1)
        expected = -weights[0, rows, None] * p
        expected -= weights[1, rows, None] * p * (logs + entropy[:, None])
        expected.scatter_add_(1, targets[rows, None], weights[0, rows, None].double())
        expected /= 0.9
        pairs = (
            (results[0][rows], logs.gather(1, targets[rows, None])[:, 0]),
            (results[1][rows], entropy),
            (gradient[rows, :vocab], expected),
            (gradient[rows, vocab:], torch.zeros_like(gradient[rows, vocab:]).double()),
        )
        for place, (mine, reference) in enumerate(pairs):
            errors[place] += (mine.detach().double() - reference).square().sum()
            norms[place] += reference.square().sum()
    logprob, entropy, of_tokens, of_padding = errors.sqrt().tolist()
    sizes = norms.sqrt().tolist()

    def run() -> None:
        # once more over the same memory, as the numbers do not matter
        (got, _) = target_logprobs(logits * 1, targets, shard=shard)
        got.sum().backward()
        logits.grad = None

    figures |= {"seconds": seconds_of(run, rank.visit, repeats=3), "logits_bytes": given.nbytes}
    return (
        {"logprob": logprob / sizes[0], "entropy": entropy / sizes[1]},
        {"tokens": of_tokens / sizes[2], "padding": of_padding},
        figures,
    )


def _experts(rank: _Rank) -> Line:
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
        measured=_apart(out[:, 0], expected),
        unit="relative error",
        bound=Bound(kind="at most", value=BF16_GRADIENT),
        note=f"{facts.num_experts} experts, {facts.topk} at work: three products, each rounded",
    )


def _apart(mine: torch.Tensor, reference: torch.Tensor) -> float:
    wide = reference.detach().double()
    return float((mine.detach().double() - wide).norm() / wide.norm())


def _worst(parts: dict[str, float]) -> float:
    """NaN where any is."""
    return float(np.max(list(parts.values())))
