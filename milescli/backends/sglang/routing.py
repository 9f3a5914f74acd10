"""Which experts an engine chose, in as few bytes as can be: asked for request by request, of tokens
that nobody knows it of yet, and one byte for each expert's number, or two. Installed by the plug-in
where EngineSpec.return_routed_experts.

sglang-router 0.3.2 drops `return_routed_experts` and `routed_experts_start_len` from the requests
that it passes on, and SGLang has one such pair for all requests of a call. A request's `rid` gets
through, and each has its own: so it says what is wanted, and is made unique here.
"""

from __future__ import annotations

import uuid
from pathlib import Path

ROUTING_VARIABLE = "MILES_RETURN_ROUTED_EXPERTS"
"""Set to 1 by EngineServer where EngineSpec.return_routed_experts."""
_WANTED = "routes-from-"
NARROW_EXPERTS = 256
"""So many have numbers of one byte; more take two."""


def request_id(known_rows: int) -> str:
    """The `rid` of a request whose record is wanted, without its first `known_rows` rows."""
    return f"{_WANTED}{known_rows}"


def wanted_from(rid: str | None) -> int | None:
    """The first row that is wanted; None: no record is."""
    head, _, _ = (rid or "").partition("/")
    return int(head.removeprefix(_WANTED)) if head.startswith(_WANTED) else None


def install() -> None:
    """Heed the ids of requests; narrow the record where it is taken out of the cache."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

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
        self.miles_dtype = _dtype_of(Path(model_config.model_path))

    def get_topk(self, *arguments, **settings):
        rows = take(self, *arguments, **settings)
        return rows if rows is None else rows.to(self.miles_dtype)

    TokenizerManager.generate_request = generate_request
    TokenizerManager._create_tokenized_object = create_tokenized_object
    RoutedExpertsCapturer.__init__, RoutedExpertsCapturer.get_topk = init, get_topk


def _unique(rid: str) -> str:
    """Ours are not, and an empty one stands for none; those of other callers stay as they are."""
    is_ours = not rid or wanted_from(rid) is not None
    return f"{rid}/{uuid.uuid4().hex}" if is_ours else rid


def _dtype_of(folder: Path):
    """Of the numbers of this model's experts."""
    import torch

    from milescli.models import load_facts

    narrow = load_facts(folder).num_experts <= NARROW_EXPERTS
    return torch.uint8 if narrow else torch.int16  # torch cannot send uint16 between processes
