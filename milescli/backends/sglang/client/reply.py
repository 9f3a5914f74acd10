"""Parses the replies of an engine's /generate, and joins the parts of a response that was paused.
Pure."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from milescli.backends.sglang.inside.routing import request_id, unpacked
from milescli.core.errors import MachineError, MismatchError
from milescli.core.types import (
    NO_GUESSES,
    Guesses,
    ImageSpan,
    RoutedExperts,
    StopReason,
    VersionSpan,
    WeightVersion,
)
from milescli.data.images import collapsed
from milescli.rollout.base import Completion, GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Holds one engine's reply to one request."""

    token_ids: list[int]
    """[num_tokens] new tokens."""
    logprobs: array[float]
    """[num_tokens] of the sampled tokens."""
    stop_reason: StopReason
    spans: list[VersionSpan]
    """Weight versions, at positions relative to this reply."""
    routed_experts: bytes | None
    """`routing.packed` rows from the first one requested to the token before the last."""
    guesses: Guesses = NO_GUESSES
    num_prompt_tokens: int | None = None
    """Length of the prompt as the engine counts, with image tokens; None if unknown."""

    def all_of(self, version: WeightVersion) -> Reply:
        """Return the same reply with every token attributed to this version."""
        whole = [VersionSpan(start=0, end=len(self.token_ids), version=version)]
        return replace(self, spans=whole if self.token_ids else [])


def read_reply(raw: dict[str, Any]) -> Reply:
    """Parse the JSON of /generate (with return_logprob)."""
    meta = raw["meta_info"]
    token_ids = list(raw.get("output_ids") or [])
    chosen = meta.get("output_token_logprobs") or []
    assert len(chosen) == len(token_ids), (
        f"engine sent {len(token_ids)} tokens and {len(chosen)} logprobs"
    )
    routed = meta.get("routed_experts")
    return Reply(
        token_ids=token_ids,
        logprobs=array("f", (entry[0] for entry in chosen)),
        stop_reason=StopReason(meta["finish_reason"]["type"]),
        spans=_spans(meta, len(token_ids)),
        routed_experts=base64.b64decode(routed) if routed else None,
        num_prompt_tokens=meta.get("prompt_tokens"),
        guesses=Guesses(
            num_passes=meta.get("spec_verify_ct") or 0,
            num_guessed=meta.get("spec_num_proposed_drafts") or 0,
            num_right=meta.get("spec_num_correct_drafts") or 0,
        ),
    )


def _spans(meta: dict[str, Any], num_tokens: int) -> list[VersionSpan]:
    """Return the engine's record of which weights sampled which token; one span for all tokens if
    it has none."""
    if num_tokens == 0:
        return []
    recorded = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    ]
    return [
        VersionSpan(
            start=span["start"], end=span["end"], version=WeightVersion(int(span["version"]))
        )
        for span in recorded
    ]


def prompt_logprobs(raw: dict[str, Any]) -> array[float]:
    """Return [num_prompt_tokens - 1] from the JSON of /generate with logprob_start_len=0; the first
    token has none."""
    entries = raw["meta_info"]["input_token_logprobs"][1:]
    return array("f", (entry[0] for entry in entries))


def image_data(images: Sequence[tuple[ImageSpan, bytes]]) -> list[str]:
    """Return the PNG files of images as data URLs, in their order."""
    return [f"data:image/png;base64,{base64.b64encode(png).decode()}" for _, png in images]


@dataclass(slots=True, kw_only=True)
class PartialResponse:
    """Accumulates one response, one Reply at a time."""

    request: GenerateRequest
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end the response, besides those that the engine knows by itself."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[VersionSpan] = field(default_factory=list)
    routed_experts: bytes = b""
    """Rows after those that the caller already has."""
    routed_rows: int = field(init=False)
    """Number of prompt and response tokens whose experts are known: the caller's, then those of
    `routed_experts`."""
    guesses: Guesses = NO_GUESSES

    def __post_init__(self) -> None:
        self.routed_rows = self.request.num_known_routes

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the next /generate: its prompt is everything so far, its limit the
        remaining budget. The sampler hashes seed and position, so equal weights give the tokens of
        an uninterrupted run."""
        wanted = self.request
        sampling: dict[str, Any] = {
            "max_new_tokens": wanted.max_new_tokens - len(self.token_ids),
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "top_k": wanted.top_k,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        if wanted.stop:
            sampling["stop"] = wanted.stop
        if stop_ids := [*self.stop_ids, *wanted.stop_ids]:
            sampling["stop_token_ids"] = stop_ids
        if wanted.seed is not None:
            sampling["sampling_seed"] = wanted.seed & 0x7FFF_FFFF_FFFF_FFFF
        # one token for each image, which the engine expands; sent expanded, the engine may hang
        spans = [span for span, _ in wanted.images]
        shown = {"image_data": image_data(wanted.images)} if spans else {}
        named = {"rid": request_id(self.routed_rows)} if wanted.want_routed_experts else {}
        return {
            "input_ids": [*collapsed(wanted.prompt_ids, spans), *self.token_ids],
            "sampling_params": sampling,
            "return_logprob": True,
            **named,
            **shown,
        }

    def extend(self, reply: Reply) -> None:
        """Append a reply. Routing rows that are known are not requested again: they belong to the
        weights that sampled. Raises MismatchError if engine and trainer count different numbers of
        image tokens."""
        offset = len(self.token_ids)
        if self.request.images and reply.token_ids:
            self._require_same_prompt(reply.num_prompt_tokens)
        self.token_ids += reply.token_ids
        self.logprobs.extend(reply.logprobs)
        self.guesses += reply.guesses
        for span in reply.spans:
            self._append_span(
                VersionSpan(start=span.start + offset, end=span.end + offset, version=span.version)
            )
        if reply.routed_experts is not None and reply.token_ids:
            self.routed_experts += reply.routed_experts
            self.routed_rows = len(self.request.prompt_ids) + len(self.token_ids) - 1

    def drop_begun(self) -> None:
        """Remove the last tokens, if a stop string may begin with them: they are sampled again. An
        engine does not find a stop string that begins in its prompt."""
        count = self.request.num_begun(self.token_ids) if self.request.num_begun else 0
        if not count:
            return
        kept = len(self.token_ids) - count
        del self.token_ids[kept:], self.logprobs[kept:]
        self.spans = [
            replace(span, end=min(span.end, kept)) for span in self.spans if span.start < kept
        ]
        known = self.request.num_known_routes
        if (num_rows := self.routed_rows - known) and self.routed_experts:
            left = max(num_rows - count, 0)
            row_bytes = len(self.routed_experts) // num_rows
            self.routed_experts = self.routed_experts[: left * row_bytes]
            self.routed_rows = known + left

    def _require_same_prompt(self, count: int | None) -> None:
        """Raise MismatchError if the engine counts another prompt length: SGLang tokenises again,
        and only logs a warning if its processor counts image tokens in another way."""
        own = len(self.request.prompt_ids) + len(self.token_ids)
        if count not in (None, own):
            raise MismatchError(
                f"an engine counted {count} tokens in a prompt with images that has {own}",
                why="its image processor or tokenizer differs from that of the run",
                fix="compare the model's tokenizer, template and preprocessor_config.json with "
                "those of its release",
            )

    def _append_span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == span.version and last.end == span.start:
            self.spans[-1] = VersionSpan(start=last.start, end=span.end, version=span.version)
        else:
            self.spans.append(span)

    @property
    def is_full(self) -> bool:
        """Return True if the budget is used up."""
        return len(self.token_ids) >= self.request.max_new_tokens

    def completion(
        self, stop_reason: StopReason, *, routing_shape: tuple[int, int] | None
    ) -> Completion:
        """Return the whole response. `routing_shape` is the model's (layers, topk), for the routing
        record."""
        return Completion(
            response_ids=self.token_ids,
            logprobs=self.logprobs,
            stop_reason=stop_reason,
            version_spans=self.spans,
            routed_experts=self._routed(routing_shape),
            guesses=self.guesses,
        )

    def _routed(self, shape: tuple[int, int] | None) -> RoutedExperts | None:
        num_rows = self.routed_rows - self.request.num_known_routes
        if not self.request.want_routed_experts or not self.token_ids:
            return None
        assert shape is not None, (
            "routed experts were asked for, but the fleet does not know the model's shape"
        )
        layers, topk = shape
        indices = unpacked(self.routed_experts, num_rows=num_rows, numbers=layers * topk)
        if topk > 1 and not self.routed_experts.strip(b"\0"):
            raise MachineError(
                "the engines do not record the experts that they choose",
                why=f"it is empty after {num_rows} tokens: SGLang's kernels for this model do "
                "not report the experts that they choose",
                fix="--set train.routing_replay=false",
            )
        return RoutedExperts(indices=indices, num_tokens=num_rows, num_layers=layers, topk=topk)
