"""SGLang's parsers of reasoning and tool calls. `SglangReplies` calls them for a session;
`parse_in_process` does the work in a separate process, which is bounded as the user's code is:
SGLang takes seconds to import, for which no driver waits. The parsers' names are read from SGLang's
source, so that a wrong name is refused before anything starts."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError, WorkerDied, nearest
from milescli.core.files import parse_json
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Parsed, ToolCall
from milescli.workers.async_worker import AsyncWorker
from milescli.workers.worker import CallFailed

_CPU_PATH = Path(__file__).parents[1] / "cpu_path"
"""Stands in for packages that SGLang imports and that a computer without a GPU lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """Describes how a model writes its responses."""

    tool_parser: str
    """SGLang's name of the parser; auto: chosen by the template and the special tokens; none."""
    reasoning_parser: str
    """Likewise."""
    template: str | None
    """Chat template."""
    special_texts: tuple[str, ...] = ()
    """Special tokens."""

    def get_vocab(self) -> dict[str, int]:
        """Return the special tokens, the only part of a tokenizer that SGLang's detection needs."""
        return dict.fromkeys(self.special_texts, 0)


async def parse_in_process(
    form: ReplyForm,
    text: str,
    prompt_end: str,
    tools: Sequence[Mapping[str, Any]],
) -> Parsed:
    """Parse a response with SGLang's parsers. Raises RecipeError for a name that SGLang does not
    know."""
    tool_parser, reasoning_parser = _parsers(form)
    reasoning, content = None, text
    try:
        if reasoning_parser is not None:
            reasoning, content = _reasoning(reasoning_parser, text, prompt_end)
        if tool_parser is None or not tools:
            return Parsed(content=content, reasoning=reasoning)
        return _calls(tool_parser, content, reasoning, tools)
    except Exception as error:  # of whatever a model writes; each family's parser has its own
        why = f"{type(error).__name__}: {error}"
        return Parsed(content=content, reasoning=reasoning, malformed=why)


@cache
def _parsers(form: ReplyForm) -> tuple[str | None, str | None]:
    _make_importable()
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser import template_detection as detection
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    forced, config = detection.detect_reasoning_pattern(form.template)
    chosen = []
    for name, key, known, detect in (
        (
            form.tool_parser,
            "tool_parser",
            FunctionCallParser.ToolCallParserEnum,
            detection.detect_tool_call_parser,
        ),
        (
            form.reasoning_parser,
            "reasoning_parser",
            ReasoningParser.DetectorMap,
            detection.detect_reasoning_parser,
        ),
    ):
        if name == AUTO:
            chosen.append(detect(form.template, form, config, forced))
        elif name == NONE:
            chosen.append(None)
        elif name in known:
            chosen.append(name)
        else:
            raise unknown_parser_error(name, key=key, known=known)
    return chosen[0], chosen[1]


def _make_importable() -> None:
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(_CPU_PATH))
    # a tool that is not there is the model's mistake, which it is told of; our log is not
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


def _reasoning(name: str, text: str, prompt_end: str) -> tuple[str | None, str]:
    """Return (reasoning, the rest of the response). A template may have opened the reasoning
    already, in the prompt."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    opening = getattr(ReasoningParser(name).detector, "think_start_token", None)
    is_open = bool(opening) and prompt_end.rstrip().endswith(opening)
    parser = ReasoningParser(name, False, True if is_open else None)
    reasoning, rest = parser.parse_non_stream(text)
    return reasoning or None, rest or ""


def _calls(
    name: str, text: str, reasoning: str | None, tools: Sequence[Mapping[str, Any]]
) -> Parsed:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser(_validated(json.dumps(list(tools))), name)
    if not parser.has_tool_call(text):
        return Parsed(content=text, reasoning=reasoning)
    content, items = parser.parse_non_stream(text)
    calls = [ToolCall(name=item.name or "", arguments=item.parameters) for item in items]
    if not calls:
        why = "a tool call was begun that could not be read as one"
        return Parsed(content=text, reasoning=reasoning, malformed=why)
    return Parsed(
        content=content, reasoning=reasoning, calls=calls, malformed=_bad_arguments(calls)
    )


@cache
def _validated(tools: str) -> list[Any]:
    from sglang.srt.entrypoints.openai.protocol import Tool

    return [Tool.model_validate(tool) for tool in parse_json(tools)]


def _bad_arguments(calls: Sequence[ToolCall]) -> str | None:
    for call in calls:
        try:
            arguments = parse_json(call.arguments)
        except ValueError as error:
            return f"the arguments of `{call.name}` are no JSON: {error}"
        if not isinstance(arguments, dict):
            return f"the arguments of `{call.name}` are no object: {call.arguments:.80}"
    return None


START_TIMEOUT_S = 150.0
"""Bound on the first response, which waits for SGLang's import."""
PARSE_TIMEOUT_S = 20.0
"""Bound on each later one, which takes less than a millisecond; many arrive at once."""
_PROMPT_END = 64
"""Characters of the prompt that tell whether reasoning was opened."""


class SglangReplies:
    """Implements milescli.rollout.base.ReplyParser. Belongs to one event loop."""

    def __init__(self, form: ReplyForm, *, process: AsyncWorker | None = None) -> None:
        """Parse in `process`, shared with another instance; None creates one at the first
        response."""
        self._form = form
        self._num_ended, self._has_replied = 0, False
        """Number of processes that ended, or did not reply; whether the current one ever has."""
        self.process = process or AsyncWorker(f"{__name__}:parse_in_process")

    async def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt_end: str = ""
    ) -> Parsed:
        """Parse a response. A process that has ended, or does not reply, is replaced once per
        response. Raises WorkerDied."""
        arguments = (self._form, text, prompt_end[-_PROMPT_END:], list(tools))
        return await self._call(arguments) or await self._call(arguments, is_last=True)

    async def _call(self, arguments: tuple[Any, ...], *, is_last: bool = False) -> Any:
        """Return the parsed response; None if the process fails, unless it is the last try, which
        raises."""
        num_ended = self._num_ended
        bound_s = PARSE_TIMEOUT_S if self._has_replied else START_TIMEOUT_S
        try:
            async with asyncio.timeout(bound_s):
                parsed = await self.process.call(*arguments, answer=_nothing)
            self._has_replied = True
            return parsed
        except (CallFailed, TimeoutError) as error:
            if num_ended == self._num_ended:  # the first of those that it took along
                self._num_ended, self._has_replied = num_ended + 1, False
                self.process.close()
            if not is_last:
                return None
            raise WorkerDied(
                "the process that parses the model's tool calls failed twice on a response",
                why=str(error) or f"it did not reply within {bound_s:g} s",
                fix="--set rollout.tool_parser=none   # or another of SGLang's parsers",
            ) from None

    def close(self) -> None:
        """End its process."""
        self.process.close()


async def _nothing(*arguments: object) -> None:
    """Return None: the parsers request nothing."""


AUTO, NONE = "auto", "none"
_TABLES = {
    "tool_parser": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("parser/reasoning_parser.py", "DetectorMap"),
}
"""Recipe key -> file below `sglang/srt`, and the table in it."""


def check_parsers(rollout: Rollout) -> None:
    """Raise RecipeError if `rollout.tool_parser` or `rollout.reasoning_parser` names no parser."""
    for key in _TABLES:
        name = getattr(rollout, key)
        known = parser_names(key) if name not in (AUTO, NONE) else ()
        if known and name not in known:
            raise unknown_parser_error(name, key=key, known=known)


def parser_names(key: str) -> list[str]:
    """Return the names of SGLang's parsers; empty if SGLang has moved them, in which case it
    reports unknown names itself."""
    file, table = _TABLES[key]
    spec = find_spec("sglang")
    roots = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(roots), "")) / "srt" / file if roots else None
    if path is None or not path.is_file():
        return []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            named = isinstance(node.target, ast.Name) and node.target.id == table
            if named:
                keys = [item for item in node.value.keys if isinstance(item, ast.Constant)]
                return [str(item.value) for item in keys]
    return []


def unknown_parser_error(name: str, *, key: str, known: Iterable[str]) -> RecipeError:
    """Return the error for the name of a parser that SGLang does not have."""
    names = sorted(known)
    return RecipeError(
        f"SGLang has no parser `{name}`",
        why=f"`rollout.{key}` must be {AUTO}, {NONE} or one of {', '.join(names)}",
        fix=f"--set rollout.{key}={nearest(name, names) or AUTO}",
    )
