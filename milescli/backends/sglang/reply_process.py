"""In a process of its own (`replies` starts it): SGLang's parsers of reasoning and tool calls, by
the names that SGLang gives them. SGLang takes seconds to import, and no driver waits for that."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from milescli.backends.sglang.reply_names import AUTO, NONE, no_parser
from milescli.rollout.base import Parsed, ToolCall

_CPU_PATH = Path(__file__).parent / "cpu_path"
"""Stands in for packages that SGLang imports and that a computer without a GPU lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """How a model writes its responses."""

    tool_parser: str
    """As SGLang names it; auto: by the template and the special tokens; none."""
    reasoning_parser: str
    """Likewise."""
    template: str | None
    """Of chats."""
    special_texts: tuple[str, ...] = ()
    """Special tokens."""

    def get_vocab(self) -> dict[str, int]:
        """As SGLang's detection asks a tokenizer; it looks for special tokens alone."""
        return dict.fromkeys(self.special_texts, 0)


async def parse_there(
    form: ReplyForm,
    text: str,
    prompt_end: str,
    tools: Sequence[Mapping[str, Any]],
) -> Parsed:
    """Raises RecipeError for a name that SGLang does not know."""
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
    found = []
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
            found.append(detect(form.template, form, config, forced))
        elif name == NONE:
            found.append(None)
        elif name in known:
            found.append(name)
        else:
            raise no_parser(name, key=key, known=known)
    return found[0], found[1]


def _make_importable() -> None:
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(_CPU_PATH))
    # a tool that is not there is the model's mistake, which it is told of; our log is not
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


def _reasoning(name: str, text: str, prompt_end: str) -> tuple[str | None, str]:
    """(reasoning, the rest). A template may have opened the reasoning already, in the prompt."""
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

    return [Tool.model_validate(tool) for tool in json.loads(tools)]


def _bad_arguments(calls: Sequence[ToolCall]) -> str | None:
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            return f"the arguments of `{call.name}` are no JSON: {error}"
        if not isinstance(arguments, dict):
            return f"the arguments of `{call.name}` are no object: {call.arguments:.80}"
    return None
