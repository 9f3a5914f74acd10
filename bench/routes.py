"""What the record of chosen experts (R3) takes on its way from an engine to a trainer, beside
SGLang's own form of it, int32 and whole at each turn: `python bench/routes.py [--turns 4]`. Both
sides make the text of a reply from the same rows, read it and lay the batch out; no engine runs,
and nothing is sent. Says, too, what zlib would make of the bytes."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass

import numpy as np
import pybase64
import torch
from pairs import Figures, Machine, Table, command_line, report, take_turns

from milescli.backends.sglang.inside.routing import packed, unpacked
from milescli.core.types import RoutedExperts

POPULARITY = 1.0
"""Standard deviation of the experts' log-odds within a layer: some are chosen ten times as often
as others, as in trained models that are balanced by a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Of the record, all that matters."""

    name: str
    num_layers: int
    num_experts: int
    topk: int


MODELS = (
    Model(name="Qwen3-30B-A3B", num_layers=48, num_experts=128, topk=8),
    Model(name="Kimi-K2", num_layers=61, num_experts=384, topk=8),
)


def rows_of(model: Model, num_tokens: int, *, seed: int) -> np.ndarray:
    """[num_tokens, num_layers, topk] int32, as the engine's cache holds them."""
    rng = np.random.default_rng(seed)
    liked = POPULARITY * rng.standard_normal((model.num_layers, model.num_experts))
    rows = np.empty((num_tokens, model.num_layers, model.topk), np.int32)
    for layer in range(model.num_layers):
        odds = liked[layer] + rng.gumbel(size=(num_tokens, model.num_experts))
        rows[:, layer] = np.argpartition(-odds, model.topk, axis=1)[:, : model.topk]
    return rows


def of_miles(model: Model, rows: np.ndarray, ends: list[int]) -> tuple[Figures, np.ndarray]:
    """One conversation whose turns end at `ends`: each row once, as small as can be."""
    dtype = np.uint8 if model.num_experts <= 256 else np.uint16
    started, sent, known = time.perf_counter(), 0, None
    for start, end in zip([0, *ends], ends, strict=False):
        bits = packed(torch.from_numpy(rows[start:end]), num_experts=model.num_experts)
        text = pybase64.b64encode(bits.numpy().tobytes()).decode()
        sent += len(text)
        part = RoutedExperts(
            indices=unpacked(
                pybase64.b64decode(text),
                num_rows=end - start,
                numbers=model.num_layers * model.topk,
            ),
            num_tokens=end - start,
            num_layers=model.num_layers,
            topk=model.topk,
        )
        known = part if known is None else known.followed_by(part)
    assert known is not None
    batch = np.frombuffer(known.indices, dtype).reshape(rows.shape).copy()
    return _figures(rows, started, sent, batch), batch


def of_peer(rows: np.ndarray, ends: list[int]) -> tuple[Figures, np.ndarray]:
    """The same as SGLang sends it by itself; the last turn's record is the one that counts."""
    started, sent, text = time.perf_counter(), 0, ""
    for end in ends:
        text = pybase64.b64encode(rows[:end].tobytes()).decode()
        sent += len(text)
        batch = np.frombuffer(pybase64.b64decode(text), np.int32)
    batch = batch.reshape(rows.shape).copy()
    return _figures(rows, started, sent, batch), batch


def _figures(rows: np.ndarray, started: float, sent: int, batch: np.ndarray) -> Figures:
    return {
        "ms": 1000 * (time.perf_counter() - started),
        "wire": sent / rows.size,
        "memory": batch.nbytes / rows.size,
    }


def main() -> None:
    """Measure each model and print one table."""
    parser = command_line(__doc__, num_pairs=5)
    parser.add_argument("--tokens", type=int, default=4096, help="of a conversation")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    table = Table(peer="SGLang 0.5.20's own record", machine=Machine.read())
    ends = [options.tokens * turn // options.turns for turn in range(1, options.turns + 1)]
    for model in MODELS:
        rows = rows_of(model, options.tokens, seed=0)
        assert np.array_equal(of_miles(model, rows, ends)[1], of_peer(rows, ends)[1])
        pairs = take_turns(
            lambda _, model=model, rows=rows: of_miles(model, rows, ends)[0],
            lambda _, rows=rows: of_peer(rows, ends)[0],
            num_pairs=options.pairs,
        )
        unit, turns = "bytes per token, layer and expert", f"{options.turns} turns"
        for name, what in (("wire", f"sent in {turns}"), ("memory", "in memory")):
            what = f"{model.name}: {what}"
            table.add(pairs, name=name, what=what, unit=unit, better="neither")
        what = f"{model.name}: {options.tokens} tokens in {turns}"
        table.add(pairs, name="ms", what=what, unit="ms", better="less")
        table.notes.append(_compressed(model, rows))
    report(table, options)


def _compressed(model: Model, rows: np.ndarray) -> str:
    raw = np.sort(rows, axis=-1).astype(np.uint8 if model.num_experts <= 256 else "<u2").tobytes()
    started = time.perf_counter()
    packed = zlib.compress(raw, level=1)
    seconds = time.perf_counter() - started
    return (
        f"{model.name}: zlib (level 1), of numbers in ascending order, leaves "
        f"{len(packed) / len(raw):.2f} of the bytes at {len(raw) / seconds / 1e6:.0f} MB/s"
    )


if __name__ == "__main__":
    main()
