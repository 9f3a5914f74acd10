"""SGLang's parsers, as a session asks them: by family, and what becomes of a model's mistakes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from milescli.backends.sglang.client.parsers import ReplyForm, SglangReplies, check_parsers
from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Parsed, ToolCall
from milescli.rollout.episode.text_pieces import sure_parts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
]
CALL = '{"name": "add", "arguments": {"a": 1}}'
QWEN = f"<tool_call>\n{CALL}\n</tool_call>"


class Replies:
    """Parsers of several families, which share an event loop and a process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.last: SglangReplies | None = None

    def parse(
        self,
        text: str,
        *,
        tool_parser: str = "none",
        reasoning_parser: str = "none",
        template: str | None = None,
        special_texts: tuple[str, ...] = (),
        tools: list[dict[str, Any]] = TOOLS,
        prompt_end: str = "",
    ) -> Parsed:
        """By SGLang."""
        parser = self.made(
            tool_parser,
            reasoning_parser=reasoning_parser,
            template=template,
            special_texts=special_texts,
        )
        return self.runner.run(parser.parse(text, tools, prompt_end=prompt_end))

    def made(
        self,
        tool_parser: str,
        *,
        reasoning_parser: str = "none",
        template: str | None = None,
        special_texts: tuple[str, ...] = (),
    ) -> SglangReplies:
        """A parser in the process of all."""
        form = ReplyForm(
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            template=template,
            special_texts=special_texts,
        )
        shared = self.last.process if self.last else None
        self.last = SglangReplies(form, process=shared)
        return self.last

    def close(self) -> None:
        """End the process."""
        if self.last is not None:
            self.last.close()
        self.runner.close()


@pytest.fixture(scope="module")
def replies() -> Iterator[Replies]:
    """One process for all tests here."""
    made = Replies()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tool_parser", "text", "content"),
    [
        ("qwen25", QWEN, ""),
        ("qwen25", f"So: {QWEN}", "So:"),
        ("hermes", f"<tool_call>{CALL}</tool_call>", ""),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ""),
        ("mistral", f"[TOOL_CALLS] [{CALL}]", ""),
        (
            "glm45",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            "",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "",
        ),
    ],
)
def test_calls_are_read_as_the_family_writes_them(
    replies: Replies, tool_parser: str, text: str, content: str
) -> None:
    parsed = replies.parse(text, tool_parser=tool_parser)
    assert [(call.name, call.arguments.replace(" ", "")) for call in parsed.calls] == [
        ("add", '{"a":1}')
    ]
    assert (parsed.content.strip(), parsed.malformed) == (content, None)


def test_a_tool_that_is_not_there_is_a_call_all_the_same(replies: Replies) -> None:
    parsed = replies.parse(QWEN.replace("add", "subtract"), tool_parser="qwen25")
    assert parsed.calls == [ToolCall(name="subtract", arguments='{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>\n{"name": "add", "arguments"\n</tool_call>', "could not be read"),
        (QWEN[:-12], "could not be read"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "no object"),
        ("<tool_call>\n[1, 2]\n</tool_call>", "AttributeError"),
    ],
)
def test_a_call_that_cannot_be_read_is_said_to_be_malformed(
    replies: Replies, text: str, why: str
) -> None:
    assert why in (replies.parse(text, tool_parser="qwen25").malformed or "")


def test_reasoning_is_told_apart_also_where_the_prompt_opened_it(replies: Replies) -> None:
    whole = replies.parse("<think>\nhm\n</think>\n\nyes", reasoning_parser="qwen3")
    assert ((whole.reasoning or "").strip(), whole.content.strip()) == ("hm", "yes")
    opened = replies.parse("hm</think>yes", reasoning_parser="qwen3", prompt_end="<think>\n")
    assert (opened.reasoning, opened.content) == ("hm", "yes")
    plain = replies.parse("yes", reasoning_parser="qwen3")
    assert (plain.reasoning, plain.content) == (None, "yes")


def test_reasoning_is_left_out_before_calls_are_read(replies: Replies) -> None:
    text = f"<think>\n{QWEN}\n</think>\n{QWEN}"
    parsed = replies.parse(text, tool_parser="qwen25", reasoning_parser="qwen3")
    assert len(parsed.calls) == 1 and parsed.reasoning is not None


def test_without_tools_nothing_is_a_call(replies: Replies) -> None:
    assert replies.parse(QWEN, tool_parser="qwen25", tools=[]).content == QWEN


def test_auto_knows_a_family_by_its_template(replies: Replies) -> None:
    section = "<|tool_calls_section_begin|>"
    known = replies.parse(
        f'{section}<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{{"a": 1}}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        tool_parser="auto",
        template="{{ messages }}",
        special_texts=(section,),
    )
    unknown = replies.parse(QWEN, tool_parser="auto", template="{{ messages }}")
    assert len(known.calls) == 1
    assert unknown.content == QWEN and not unknown.calls


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_killed_or_hangs_is_replaced(
    replies: Replies, end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milescli.backends.sglang.client.parsers.PARSE_TIMEOUT_S", 3.0)
    parser = replies.made("qwen25")
    assert len(replies.runner.run(parser.parse(QWEN, TOOLS)).calls) == 1
    assert parser.process.pid is not None
    os.kill(parser.process.pid, end)
    assert len(replies.runner.run(parser.parse(QWEN, TOOLS)).calls) == 1


def test_a_name_that_sglang_does_not_have_is_refused_with_a_near_one(replies: Replies) -> None:
    with pytest.raises(RecipeError, match="has no parser `qwen26`") as caught:
        replies.parse("x", tool_parser="qwen26")
    assert caught.value.fixes == ["--set rollout.tool_parser=qwen25"]


def test_the_same_name_is_refused_without_sglang() -> None:
    check_parsers(Rollout(tool_parser="kimi_k2", reasoning_parser="deepseek-r1"))
    with pytest.raises(RecipeError, match="has no parser `qwen26`"):
        check_parsers(Rollout(tool_parser="qwen26"))
    with pytest.raises(RecipeError, match="has no parser `qwen33`") as caught:
        check_parsers(Rollout(reasoning_parser="qwen33"))
    assert caught.value.fixes == ["--set rollout.reasoning_parser=qwen3"]


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "text"),
    [
        ("qwen25", "qwen3", f"<think>\na < b, so [1] follows\n</think>\n\nI add: {QWEN}"),
        ("hermes", "none", f"It is [so] and {{that}} <b>now</b>:\n<tool_call>{CALL}</tool_call>"),
        ("llama3", "none", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("llama3", "none", '{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", "none", f"I add. [TOOL_CALLS] [{CALL}]"),
        ("pythonic", "none", "[add(a=1)]"),
        ("deepseekv3", "deepseek-r1", "It thinks.\n</think>\n\nIt adds up to 3 in the end."),
        ("kimi_k2", "kimi_k2", "<think>why not</think>So it is 3, as <b>I</b> said above."),
        (
            "gpt-oss",
            "gpt-oss",
            "<|channel|>analysis<|message|>1 and 2 is 3<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 3, and nothing else.",
        ),
    ],
)
def test_pieces_are_the_beginnings_of_what_the_whole_is(
    replies: Replies, tool_parser: str, reasoning_parser: str, text: str
) -> None:
    names = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    is_opened = tool_parser == "deepseekv3"
    asked = {**names, "prompt_end": "<think>\n" if is_opened else ""}
    for tools in ([], TOOLS):
        whole = replies.parse(text, **asked, tools=tools)
        parts = {"reasoning_content": whole.reasoning or "", "content": whole.content}
        told = {"reasoning_content": "", "content": ""}
        for end in range(1, len(text)):
            # what `Pieces` would tell, if the text ended here
            parsed = replies.parse(text[:end], **asked, tools=tools)
            for part, piece in sure_parts(parsed, has_tools=bool(tools)):
                beginnings = (parts[part], parts[part].lstrip() if tools else "")
                assert any(one.startswith(piece) for one in beginnings), (end, part, piece)
                told[part] = max(told[part], piece, key=len)
        if not whole.calls and not {*"<[{"} & {*whole.content}:
            assert len(told["content"]) >= len(whole.content) / 3
