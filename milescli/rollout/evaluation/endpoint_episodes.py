"""Runs prompts against a model behind an OpenAI-compatible endpoint: chat completions, scored
as the recipe says. `miles eval URL` calls it; nothing is trained on them, so token ids are not
needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from milescli.core.errors import EndpointError, RecipeError
from milescli.core.files import parse_json
from milescli.core.types import Prompt, Sample, StopReason
from milescli.recipe.evaluation import EndpointSettings
from milescli.recipe.schema import Recipe
from milescli.rollout.endpoint import CHAT_PATH, Endpoint, text_outside_content
from milescli.rollout.episode.episode import score_alone, score_together
from milescli.rollout.rewards.scoring import Scoring

SECTION = "eval.endpoint"
_MODELS = "/models"
Reply = dict[str, Any]
"""`text`, `stop_reason`, `num_tokens`; `elsewhere`: the field that has the text of a reply without
content."""


class ReplyCache:
    """Replies on disk by request, so that a stopped evaluation need not request, and pay for, them
    again."""

    def __init__(self, file: Path) -> None:
        """Read `file` if it exists, and remove an incomplete last line."""
        self._file = file
        self._by_request: dict[str, Reply] = {}
        if not file.exists():
            return
        text = file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            file.write_bytes(whole)
        for line in whole.decode().splitlines():
            kept = parse_json(line)
            self._by_request[kept.pop("request")] = kept

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request: str) -> Reply | None:
        """Return the recorded reply; None if there is none."""
        return self._by_request.get(request)

    def add(self, request: str, reply: Reply) -> None:
        """Write a reply to disk at once."""
        self._by_request[request] = reply
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"request": request, **reply}) + "\n")

    def remove(self) -> None:
        """Delete the file, once all replies are in the result."""
        self._file.unlink(missing_ok=True)


class EndpointEpisodes:
    """Plays prompts as Episodes does. Belongs to one event loop."""

    agent_name = "single_turn"

    def __init__(
        self, recipe: Recipe, *, endpoint: Endpoint, model: str, scorer: Scoring, kept: ReplyCache
    ) -> None:
        """Evaluate `model`, by its name at the endpoint."""
        evaluation, rollout = recipe.eval, recipe.rollout
        self._endpoint, self._scorer, self._kept = endpoint, scorer, kept
        self._settings: dict[str, Any] = {
            "model": model,
            "max_tokens": evaluation.max_response_tokens or rollout.max_response_tokens,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
        }
        if rollout.stop:
            self._settings["stop"] = list(rollout.stop)
        self._extra = extra_fields(evaluation.endpoint)
        self._free = asyncio.Semaphore(evaluation.endpoint.concurrency)
        self.num_replies = 0
        self.without_content = Counter[str]()
        """Replies without content, by the field that has their text; "": none has."""

    async def play(
        self, prompt: Prompt, *, sample_index: int, seed: int, greedy: bool = False
    ) -> Sample:
        """Send one request, or take its recorded reply, and score it as Episodes does. Raises
        EndpointError or RewardError."""
        messages = _with_linked_calls(prompt.messages)
        body: dict[str, Any] = {**self._settings, "messages": messages, "seed": seed}
        if greedy:
            body["temperature"] = 0.0
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        body |= self._extra
        body = {name: value for name, value in body.items() if value is not None}
        request = _digest(body, sample_index)
        if (reply := self._kept.get(request)) is None:
            async with self._free:
                reply = self._read(await self._endpoint.post(body, CHAT_PATH))
            self._kept.add(request, reply)
        self.num_replies += 1
        if not reply["text"]:
            self.without_content[reply.get("elsewhere") or ""] += 1
        sample = Sample(
            sample_index=sample_index,
            seed=seed,
            trajectories=[],
            text=reply["text"],
            stop_reason=StopReason(reply["stop_reason"]),
            num_counted_tokens=reply["num_tokens"],
        )
        return await score_alone(self._scorer, prompt, sample)

    async def score_samples(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """Score the samples as Episodes does."""
        return await score_together(self._scorer, prompt, samples)

    def score_warning(self) -> str | None:
        """Return a warning about the scores: how many replies have no content, and which field has
        their text; None if all have content."""
        if not self.without_content:
            return None
        fields = [
            f"{number} have their text in `{name}`" if name else f"{number} say nothing at all"
            for name, number in self.without_content.most_common()
        ]
        advice = ""
        if {"reasoning_content", "reasoning"} & set(self.without_content):
            advice = (
                "; the server's reasoning parser took it: give it more tokens to end its thinking "
                "(--set eval.max_response_tokens=N), or serve the model without that parser"
            )
        return (
            f"{self.without_content.total()} of {self.num_replies} replies have no content, and "
            f"were scored as empty responses: {', '.join(fields)}{advice}"
        )

    def _read(self, reply: Any) -> Reply:
        try:
            choice = reply["choices"][0]
            message = choice["message"]
            said = message.get("content") or ""
            elsewhere = None if said else text_outside_content(message)
            ended = choice.get("finish_reason")
            usage = reply.get("usage") or {}
            assert isinstance(said, str), "its content is no text"
            return {
                "text": said,
                "stop_reason": (StopReason.LENGTH if ended == "length" else StopReason.STOP).value,
                "num_tokens": int(usage.get("completion_tokens") or 0),
                **({"elsewhere": elsewhere} if elsewhere else {}),
            }
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, AssertionError):
            raise self._endpoint.failure(
                f"its reply is none of a chat completion: {reply!r:.200}"
            ) from None


def endpoint_of(url: str, settings: EndpointSettings) -> Endpoint:
    """Return the endpoint to query. Raises RecipeError if the environment lacks the key."""
    return Endpoint(
        caller="the evaluation",
        section=SECTION,
        error=EndpointError,
        url=url,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        api_key_env=settings.api_key_env,
    )


async def served_model(endpoint: Endpoint, wanted: str | None) -> str:
    """Return the model's name at the endpoint: `wanted`, or the only one that it serves. Raises
    RecipeError if it serves several, or not the wanted one; EndpointError if none is wanted and the
    endpoint does not list its models."""
    try:
        reply = await endpoint.get(_MODELS)
    except EndpointError:
        if wanted is None:
            raise
        return wanted  # many a proxy has no list
    try:
        names = [str(model["id"]) for model in reply["data"]]
    except (KeyError, TypeError):
        raise endpoint.failure(f"its reply is no list of models: {reply!r:.200}") from None
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    shown = ", ".join(names[:12]) or "none"
    raise RecipeError(
        f"there is no model `{wanted}` at {endpoint.url}"
        if wanted
        else f"the model at {endpoint.url} must be named",
        why=f"{endpoint.url} has {len(names)}: {shown}",
        fix=[f"--set {SECTION}.model={name}" for name in names[:3]]
        or f"curl -i {endpoint.url}{_MODELS}",
    )


def extra_fields(settings: EndpointSettings) -> Mapping[str, Any]:
    """Return the fields of `eval.endpoint.extra`. Raises RecipeError."""
    fields = {}
    for text in settings.extra:
        name, sign, value = text.partition("=")
        try:
            fields[name.strip()] = parse_json(value)
        except json.JSONDecodeError as error:
            raise RecipeError(
                f"`{SECTION}.extra` cannot be read: {text}",
                why=f"behind = stands no JSON: {error}" if sign else "it is not NAME=JSON",
                fix=f"""--set '{SECTION}.extra=["{name.strip() or "NAME"}=1"]'""",
            ) from None
    return fields


def _with_linked_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls as an endpoint accepts them: arguments as JSON text, and
    an id for each call, which the tool's turn names. Chat templates need neither, so rows of data
    may lack them."""
    linked = [dict(message) for message in messages]
    number = 0
    for place, message in enumerate(linked):
        if not (calls := message.get("tool_calls")):
            continue
        after = linked[place + 1 :]
        results = list(takewhile(lambda turn: turn.get("role") == "tool", after))
        ids = [call.get("id") for call in calls]
        for at in range(len(ids)):
            result_id = results[at].get("tool_call_id") if at < len(results) else None
            while f"call_{number}" in ids:
                number += 1
            ids[at] = ids[at] or (result_id not in ids and result_id) or f"call_{number}"
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": _with_text_arguments(call)}
            for call, id_ in zip(calls, ids, strict=True)
        ]
        answered = {result.get("tool_call_id") for result in results}
        unanswered = (id_ for id_ in ids if id_ not in answered)
        for result in results:
            if not result.get("tool_call_id"):
                result["tool_call_id"] = next(unanswered, ids[-1])
    return linked


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": function.get("name"), "arguments": text}


def _digest(body: Mapping[str, Any], sample_index: int) -> str:
    told = json.dumps([body, sample_index], sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
