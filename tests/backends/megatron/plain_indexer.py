"""The loss of the indexers in plain PyTorch: one sequence and one layer at a time, by autograd,
from what the attention is given. Without ranks; used by `indexer_cases`."""

from __future__ import annotations

import itertools

import torch

from milescli.models.facts import ModelFacts


def divergence(
    scores: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor, others: torch.Tensor
) -> torch.Tensor:
    """Of scores [Q, K] from the attention with `logits` [heads, Q, K], at the chosen [Q, K],
    summed over the queries. `others` [heads, Q, M] are logits of what cannot be chosen."""
    total = scores.new_zeros(())
    for query in range(len(scores)):
        which = chosen[query]
        if not which.any():
            continue
        weights = torch.cat([logits[:, query, which], others[:, query]], dim=-1).softmax(dim=-1)
        target = weights[:, : int(which.sum())].sum(dim=0)
        target = (target / target.sum()).detach()
        said = scores[query, which].log_softmax(dim=-1)
        total = total + torch.nn.functional.kl_div(said, target, reduction="sum")
    return total


class Plain:
    """Hooks into the attention of a model of one rank. After a pass with gradients it has the sums
    of the divergences and of their gradients over all positions, as means over the layers that
    share a choice."""

    def __init__(self, model: torch.nn.Module, facts: ModelFacts) -> None:
        self.total, self.facts = 0.0, facts
        self.gradients: dict[str, torch.Tensor] = {}
        self._named = {each: name for name, each in model.named_parameters() if ".indexer." in name}
        self._chosen: dict[object, list] = {}
        layers = facts.layers
        for number, layer in enumerate(model.decoder.layers):
            core = layer.self_attention.core_attention
            if facts.compressed is not None:
                if core.indexer is not None:
                    core.register_forward_pre_hook(self._of_entries, with_kwargs=True)
                continue
            own = [n for n in range(number + 1) if not layers[n].shares_choice][-1]
            following = itertools.takewhile(lambda each: each.shares_choice, layers[own + 1 :])
            core.place = (own, 1 + len(list(following)))
            core.register_forward_pre_hook(self._of_positions, with_kwargs=True)

    def _add(self, loss: torch.Tensor, num_sharing: int = 1) -> None:
        if not loss.requires_grad:  # no query has a choice
            return
        loss = loss / num_sharing
        self.total += float(loss)
        weights = list(self._named)
        for weight, grad in zip(
            weights,
            torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True),
            strict=True,
        ):
            if grad is not None:
                assert torch.isfinite(grad).all()
                name = self._named[weight]
                self.gradients[name] = self.gradients.get(name, 0.0) + grad

    def _of_positions(self, core, given, named) -> None:
        """Of SparseAttention: (query, key, value, mask), x, qr, and the row."""
        query, key = (part.detach() for part in given[:2])
        row, (own, num_sharing) = named["packed_seq_params"], core.place
        if not torch.is_grad_enabled():
            return
        ends = row.cu_seqlens_q.tolist()
        sequences = [slice(a, b) for a, b in itertools.pairwise(ends)]
        if core.indexer is not None:
            x, qr = (named[name].detach()[:, 0] for name in ("x", "qr"))
            self._chosen[own] = [self._scores(core.indexer, x, qr, row, at) for at in sequences]
        for at, (scores, chosen) in zip(sequences, self._chosen[own], strict=True):
            logits = torch.einsum("qhd,khd->hqk", query[at], key[at]) * core.scale
            self._add(divergence(scores, logits, chosen, logits[..., :0]), num_sharing)

    def _scores(self, indexer, x, qr, row, at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.facts.indexer
        angles = row.angles["mla"]
        cos, sin = (part.reshape(len(x), -1)[at] for part in (angles.cos, angles.sin))

        def turned(part: torch.Tensor) -> torch.Tensor:
            """[L, d] rotated in halves."""
            width = cos.shape[-1]
            a, b, rest = part[:, :width], part[:, width : 2 * width], part[:, 2 * width :]
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

        key = torch.nn.functional.layer_norm(
            x[at] @ indexer.linear_wk.weight.T,
            (sizes.head_dim,),
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            sizes.norm_eps,
        )
        key, query = turned(key), qr[at] @ indexer.linear_wq_b.weight.T
        weights = x[at] @ indexer.linear_weights_proj.weight.T / sizes.num_heads**0.5
        scores = 0.0
        for head, part in enumerate(query.split(sizes.head_dim, dim=-1)):
            products = turned(part) @ key.T / sizes.head_dim**0.5
            scores = scores + weights[:, head, None] * products.relu()
        return scores, best(scores, torch.ones_like(scores).tril().bool(), sizes.topk)

    def _of_entries(self, core, given, named) -> None:
        """Of the core of compressed attention: query, key, and projections."""
        query, key, to_compress, to_choose = given
        if not (torch.is_grad_enabled() and to_choose.requires_grad):
            return
        with torch.no_grad():
            entries = core.compressor(to_compress)
        index, index_key, weights = core.indexer(to_choose)
        for number, length in enumerate(named["grid"].lengths):
            places, count = torch.arange(length), length // core.compressor.rate
            complete = torch.arange(count) < (places[:, None] + 1) // core.compressor.rate
            products = torch.einsum(
                "qhd,kd->hqk", index[number, :length], index_key[number, :count]
            )
            products = products.relu() / self.facts.indexer.head_dim**0.5
            scores = (products * weights[number, :length].T[..., None]).sum(dim=0)
            chosen = best(scores, complete, self.facts.indexer.topk)
            q, k = (part[number, :length].detach() for part in (query, key))
            logits = torch.einsum("qhd,kd->hqk", q, entries[number, :count]) * core.scale
            near = torch.einsum("qhd,kd->hqk", q, k) * core.scale
            gap = places[:, None] - places
            near = near.masked_fill((gap < 0) | (gap >= core.window), -torch.inf)
            sinks = core.softmax_offset.detach()[:, None, None].expand(-1, length, 1)
            self._add(divergence(scores, logits, chosen, torch.cat([near, sinks], dim=-1)))


def best(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """[Q, K] bool: the best `topk` of the visible."""
    masked = scores.detach().masked_fill(~visible, -torch.inf)
    places = masked.topk(min(topk, scores.shape[1]), dim=-1).indices
    return torch.zeros_like(visible).scatter_(1, places, True) & visible
