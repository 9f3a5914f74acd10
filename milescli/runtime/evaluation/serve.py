"""Serves a checkpoint at an OpenAI-compatible URL, by engines that are started for it. Called by
`miles serve`. Each request is a session of its own; nothing is measured, stored or learned."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from milescli.agents.openai_forms import ModelRequest
from milescli.agents.proxy import SessionProxy
from milescli.core.types import Prompt
from milescli.rollout.base import GenerateRequest, SessionAddress
from milescli.rollout.episode.session import turn_seed
from milescli.runtime.evaluation.chat import SETTINGS
from milescli.runtime.evaluation.evaluate import episodes_of, parser_started

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.rollout.episode.session import RecordingSession
    from milescli.runtime.evaluation.results import SetResult
    from milescli.runtime.evaluation.sets import LoadedSet
    from milescli.runtime.recovery.engines import Engines
    from milescli.runtime.spec import RunSpec

NO_STOP = "(the stop strings of each request)"
"""The only stop string of a recipe that has none. An engine only obeys the stop strings of requests
if its recipe has one, because it then has a tokenizer; no request contains this one."""
_NEUTRAL = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}
"""The only values of these fields that are served: with others, log-probs would not be those of the
policy."""
_BOUNDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], bool], str]] = {
    "temperature": ((int, float), lambda value: 0 <= value <= 10, "a number from 0 to 10"),
    "top_p": ((int, float), lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (int, lambda value: value == -1 or value >= 1, "-1 or a whole number from 1"),
    "seed": (int, lambda value: 0 <= value < 2**31, f"a whole number from 0 to {2**31 - 1}"),
}
"""Field -> (types, condition, the condition in words)."""


def serve_settings(*, tokens: int, has_stop: bool) -> list[str]:
    """Return the changes to a recipe with which its model is served. `tokens`: limit of a response;
    `has_stop`: True if the recipe has stop strings, which apply to requests that bring none."""
    limits = {"rollout.max_response_tokens": tokens, "eval.max_response_tokens": tokens}
    stop = {} if has_stop else {"rollout.stop": f'["{NO_STOP}"]'}
    settings = SETTINGS | limits | {"rollout.max_turn_tokens": tokens} | stop
    return [f"{key}={value}" for key, value in settings.items()]


def with_request_sampling(
    settings: GenerateRequest, sampling: Mapping[str, Any]
) -> GenerateRequest:
    """Return the settings with the fields of a request (`ModelRequest.sampling`) in their place.
    Raises ValueError for one that is not supported or out of bounds."""
    for name, neutral in _NEUTRAL.items():
        if sampling.get(name, neutral) != neutral:
            raise ValueError(f"`{name}` is not supported: it must be {neutral}")
    for name, (types, is_allowed, words) in _BOUNDS.items():
        value = sampling.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types) or not is_allowed(value):
            raise ValueError(f"`{name}` must be {words}")
    changes = {name: sampling[name] for name in _BOUNDS if name in sampling and name != "seed"}
    return replace(settings, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Serves engines until Ctrl-C, SIGTERM or SIGHUP; `use_engines` is an `EngineUse`."""

    listener: socket
    """Socket for requests; those that arrive before the engines are ready wait."""
    model: str | None
    """Name of the model; None: RUN@STEP."""
    ready: Callable[[str, SessionAddress], None]
    """Called once with the name of the model and the key, when requests can be answered."""

    async def use_engines(
        self,
        spec: RunSpec,
        loaded_sets: Sequence[LoadedSet],
        engines: Engines,
        *,
        name: str,
        step: int,
        output: Output,
    ) -> list[SetResult]:
        """Serve until a signal, which ends it without an error (an `EngineUse`)."""
        recipe = loaded_sets[0].set.recipe
        episodes = episodes_of(spec, recipe, engines, output=output)
        usual = episodes.settings
        if usual.stop == [NO_STOP]:
            usual = replace(usual, stop=[])
        numbers = itertools.count()

        def session_of(request: ModelRequest) -> RecordingSession:
            settings, number = with_request_sampling(usual, request.sampling), next(numbers)
            seed = request.sampling.get("seed", turn_seed(recipe.run.seed, number))
            prompt = Prompt(index=number, token_ids=[], text="")
            return episodes.session(prompt, seed=seed, settings=settings, cuts_stop=True)

        proxy = SessionProxy(
            tokenizer=spec.inputs.tokenizer,
            model=self.model or f"{Path(name).name}@{step}",
            max_model_len=episodes.max_tokens,
            listener=self.listener,
            session_of=session_of,
        )
        self.ready(proxy.model, proxy.open(session_of(ModelRequest())))
        try:
            with suppress(asyncio.CancelledError):  # by the signal: the end that is expected
                async with parser_started(episodes):
                    await asyncio.Event().wait()
        finally:
            await proxy.stop()
        return []
