"""Which experts an engine chose, in as few bytes as can be: asked for request by request, of tokens
that nobody knows it of yet, and eight bits for each expert's number, nine, or sixteen. Installed by
the plug-in where EngineSpec.return_routed_experts.

SGLang has one pair of `return_routed_experts` and `routed_experts_start_len` for all requests of a
call. Each has a `rid` of its own: so it says what is wanted, and is made unique here.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROUTING_VARIABLE = "MILES_RETURN_ROUTED_EXPERTS"
"""Set to 1 by EngineServer where EngineSpec.return_routed_experts."""
_WANTED = "routes-from-"
NARROW_EXPERTS = 256
"""Largest number of experts whose numbers fit one byte."""
NINE_BIT_EXPERTS = 512
"""Largest number of experts whose numbers fit nine bits; more take two bytes."""


def request_id(known_rows: int) -> str:
    """Return the `rid` of a request whose routing record is wanted, without its first `known_rows`
    rows."""
    return f"{_WANTED}{known_rows}"


def wanted_from(rid: str | None) -> int | None:
    """Return the first wanted row of the record; None if no record is wanted."""
    head, _, _ = (rid or "").partition("/")
    return int(head.removeprefix(_WANTED)) if head.startswith(_WANTED) else None


def install() -> None:
    """Interpret the ids of requests, and cut the record when it is taken out of the cache."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    from milescli.models import load_facts

    generate, tokenized = (
        TokenizerManager.generate_request,
        TokenizerManager._create_tokenized_object,
    )
    make, take = RoutedExpertsCapturer.__init__, RoutedExpertsCapturer.get_topk

    def generate_request(self, obj, request=None):
        if isinstance(obj.rid, list):
            obj.rid = [_unique(rid) for rid in obj.rid]
        elif obj.rid is not None:
            obj.rid = _unique(obj.rid)
        return generate(self, obj, request)

    def create_tokenized_object(self, obj, *arguments, **settings):
        made = tokenized(self, obj, *arguments, **settings)
        first = wanted_from(made.rid)
        if first is not None:
            made.return_routed_experts, made.routed_experts_start_len = True, first
        return made

    def init(self, model_config, *, max_running_requests, **settings):
        # a pass over guesses has several tokens of each request, which SGLang does not count here
        most = max_running_requests * (get_spec().speculative_num_draft_tokens or 1)
        make(self, model_config, max_running_requests=most, **settings)
        self.miles_num_experts = load_facts(Path(model_config.model_path)).num_experts

    def get_topk(self, *arguments, **settings):
        rows = take(self, *arguments, **settings)
        return rows if rows is None else packed(rows, num_experts=self.miles_num_experts)

    TokenizerManager.generate_request = generate_request
    TokenizerManager._create_tokenized_object = create_tokenized_object
    RoutedExpertsCapturer.__init__, RoutedExpertsCapturer.get_topk = init, get_topk


def _unique(rid: str) -> str:
    """Make ids unique: ours repeat, and an empty one stands for none; other callers' ids stay."""
    is_ours = not rid or wanted_from(rid) is not None
    return f"{rid}/{uuid.uuid4().hex}" if is_ours else rid


def packed(rows: torch.Tensor, *, num_experts: int) -> torch.Tensor:
    """Pack [rows, layers, topk] -> [rows, ...] for `unpacked`. Of nine-bit numbers, the lower eight
    bits of a row come first, one byte each, then the ninth bits, eight to a byte."""
    import numpy as np  # on one thread: torch's would wait for the cores that engines compute on
    import torch

    plain = rows.numpy()
    if num_experts <= NARROW_EXPERTS:
        return torch.from_numpy(plain.astype(np.uint8))
    wide = plain.astype(np.int16)  # torch cannot send uint16 between processes
    if not _has_nine_bits(wide[0].size if len(wide) else 0, num_experts):
        return torch.from_numpy(wide)
    flat = wide.reshape(len(wide), -1)
    ninth = np.packbits(flat > 0xFF, axis=1)
    return torch.from_numpy(np.concatenate([flat.astype(np.uint8), ninth], axis=1))


def _has_nine_bits(numbers: int, num_experts: int) -> bool:
    """Return True if a row of `numbers` is stored in nine bits; a single number would take two
    bytes anyway."""
    return numbers > 1 and num_experts <= NINE_BIT_EXPERTS


def unpacked(sent: bytes, *, num_rows: int, numbers: int) -> bytes:
    """Unpack to one byte, or two, per number; `numbers` is their count per row. Raises
    AssertionError if the number of bytes does not fit."""
    per_row, left = divmod(len(sent), max(num_rows, 1))
    nine = numbers + -(-numbers // 8)
    assert not left and (not num_rows or per_row in (numbers, nine, 2 * numbers)), (
        f"{len(sent)} bytes of routing for {num_rows} rows of {numbers} experts"
    )
    if not num_rows or per_row in (numbers, 2 * numbers):
        return sent
    import numpy as np

    raw = np.frombuffer(sent, np.uint8).reshape(num_rows, nine)
    wide = np.empty((num_rows, numbers, 2), np.uint8)  # the lower byte first
    wide[..., 0] = raw[:, :numbers]
    wide[..., 1] = np.unpackbits(raw[:, numbers:], axis=1, count=numbers)
    return wide.tobytes()
