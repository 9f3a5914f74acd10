"""Which tokens of a chat are learned, for the shapes that chat templates have."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from milescli.data.chat_masks import (
    mark_chat,
    mark_chat_as_one,
    mark_response,
    mark_text,
    require_no_stop,
    tokenize_marked,
    turn_end_ids,
)
from milescli.data.tokenizer import ChatTokenizer
from milescli.data.turn_places import Turn
from tests.data.chat_templates import CHATML, FAMILIES, KINDS, tokenizer_of


def user(text: str) -> Turn:
    """A turn."""
    return {"role": "user", "content": text}


def said(text: str, *, why: str = "") -> Turn:
    """A turn of the assistant; `why` under all names that families have for it."""
    thought = {"reasoning_content": why, "thinking": why} if why else {}
    return {"role": "assistant", "content": text, **thought}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
ONE = [user("hi"), said("hello")]
MANY = [user("hi"), said("hello"), user("more"), said("well\n")]
SYSTEM = [{"role": "system", "content": "be brief"}, *ONE]
TOOLS = [user("hi"), CALL, {"role": "tool", "content": "2"}, said("two")]
REASONED = [user("hi"), said("hello", why="first"), user("more"), said("well", why="second")]
CALLED = '<tool>add({"a": 1})</tool>'
REASONS = [("first", "hello"), ("second", "well")]
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, ChatTokenizer]:
    """By family."""
    return {
        name: tokenizer_of(
            family.template, special=family.special, eos=family.eos, added=family.added
        )
        for name, family in KINDS.items()
    }


def learned(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    *,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """The parts on the loss mask, as the tokens of it say, of all sequences."""
    lines = tokenize_marked(tokenizer, mark_chat(tokenizer, turns, first=first, tools=tools))
    parts: list[list[int]] = []
    for line in lines:
        for place, on in enumerate(line.loss_mask):
            if on and not line.loss_mask[place - 1]:
                parts.append([])
            if on:
                parts[-1].append(line.token_ids[place])
    return [str(tokenizer.inner.decode(ids)) for ids in parts]


EXPECTED: dict[str, dict[str, list[str]]] = {
    "chatml": {
        "one": ["hello<|im_end|>"],
        "many": ["hello<|im_end|>", "well\n<|im_end|>"],
        "system": ["hello<|im_end|>"],
        "tools": [f"{CALLED}<|im_end|>", "two<|im_end|>"],
    },
    "marked": {
        "one": ["hello<|im_end|>"],
        "many": ["hello<|im_end|>", "well\n<|im_end|>"],
        "system": ["hello<|im_end|>"],
        "tools": [f"{CALLED}<|im_end|>", "two<|im_end|>"],
    },
    "llama 3": {
        "one": ["hello<|eot_id|>"],
        "many": ["hello<|eot_id|>", "well<|eot_id|>"],
        "system": ["hello<|eot_id|>"],
        "tools": [f"{CALLED}<|eot_id|>", "two<|eot_id|>"],
    },
    "qwen 3": {
        "one": [f"{EMPTY}hello<|im_end|>"],
        "many": ["hello<|im_end|>", f"{EMPTY}well\n<|im_end|>"],
        "system": [f"{EMPTY}hello<|im_end|>"],
        "tools": [f"{CALLED}<|im_end|>", f"{EMPTY}two<|im_end|>"],
        "reasoned": [f"<think>\n{why}\n</think>\n\n{text}<|im_end|>" for why, text in REASONS],
    },
    "qwen 3.5": {
        "one": ["\n</think>\n\nhello<|im_end|>"],
        "many": [f"\n</think>\n\n{text}<|im_end|>" for text in ("hello", "well\n")],
        "system": ["\n</think>\n\nhello<|im_end|>"],
        "tools": [f"\n</think>\n\n{CALLED}<|im_end|>", "\n</think>\n\ntwo<|im_end|>"],
        "reasoned": [f"{why}\n</think>\n\n{text}<|im_end|>" for why, text in REASONS],
    },
    "qwen 3.5 short": {
        "one": ["hello<|im_end|>"],
        "many": ["hello<|im_end|>", "well\n<|im_end|>"],
        "system": ["hello<|im_end|>"],
        "tools": [f"{CALLED}<|im_end|>", "two<|im_end|>"],
        "reasoned": [f"{why}\n</think>\n\n{text}<|im_end|>" for why, text in REASONS],
    },
    "deepseek v3": {
        "one": ["hello<|eos|>"],
        "many": ["hello<|eos|>", "well\n<|eos|>"],
        "system": ["hello<|eos|>"],
        "tools": [f"{CALLED}<|eos|>", "two<|eos|>"],
    },
    "glm 4.5": {
        "one": ["\n<think></think>\nhello<|user|>"],
        "many": [f"\n<think></think>\n{text}<|user|>" for text in ("hello", "well")],
        "system": ["\n<think></think>\nhello<|user|>"],
        "tools": [
            f"\n<think></think>\n{CALLED}<|observation|>",
            "\n<think></think>\ntwo<|user|>",
        ],
        "reasoned": [f"\n<think>{why}</think>\n{text}<|user|>" for why, text in REASONS],
    },
    "gpt-oss": {
        "one": ["<|channel|>final<|message|>hello<|return|>"],
        "many": [
            "<|channel|>final<|message|>hello<|end|>",
            "<|channel|>final<|message|>well\n<|return|>",
        ],
        "system": ["<|channel|>final<|message|>hello<|return|>"],
        "tools": [
            ' to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>',
            "<|channel|>final<|message|>two<|return|>",
        ],
        "reasoned": [
            f"<|channel|>analysis<|message|>{why}<|end|>"
            f"<|start|>assistant<|channel|>final<|message|>{text}<|return|>"
            for why, text in REASONS
        ],
    },
    "gemma": {
        "one": ["hello<end_of_turn>"],
        "many": ["hello<end_of_turn>", "well<end_of_turn>"],
    },
    "nemotron": {
        "one": ["</think>hello<|im_end|>"],
        "many": ["</think>hello<|im_end|>", "</think>well\n<|im_end|>"],
        "system": ["</think>hello<|im_end|>"],
        "tools": [f"</think>{CALLED}<|im_end|>", "</think>two<|im_end|>"],
        "reasoned": [f"{why}\n</think>\n{text}<|im_end|>" for why, text in REASONS],
    },
    "kimi": {
        "one": ["hello<|im_end|>"],
        "many": ["hello<|im_end|>", "well\n<|im_end|>"],
        "system": ["hello<|im_end|>"],
        "tools": [f"{CALLED}<|im_end|>", "two<|im_end|>"],
    },
}
CHATS = {"one": ONE, "many": MANY, "system": SYSTEM, "tools": TOOLS, "reasoned": REASONED}


def test_every_family_is_asked_all_that_it_knows() -> None:
    for name, family in FAMILIES.items():
        wanted = {
            "one": True,
            "many": True,
            "system": family.has_system,
            "tools": family.has_tools,
            "reasoned": family.has_reasoning,
        }
        assert list(EXPECTED[name]) == [chat for chat, known in wanted.items() if known], name


@pytest.mark.parametrize(
    ("family", "chat"), [(family, chat) for family in EXPECTED for chat in EXPECTED[family]]
)
def test_what_the_assistant_said_is_learned_and_nothing_else(
    tokenizers: dict[str, ChatTokenizer], family: str, chat: str
) -> None:
    assert learned(tokenizers[family], CHATS[chat]) == EXPECTED[family][chat]


@pytest.mark.parametrize("family", EXPECTED)
def test_a_response_is_learned_without_the_turns_of_its_prompt(
    tokenizers: dict[str, ChatTokenizer], family: str
) -> None:
    assert learned(tokenizers[family], MANY, first=3) == EXPECTED[family]["many"][1:]


@pytest.mark.parametrize("family", EXPECTED)
def test_what_is_not_learned_is_the_prompt_that_an_engine_would_see(
    tokenizers: dict[str, ChatTokenizer], family: str
) -> None:
    """But for reasoning that a template opens, and a row without any closes in one piece."""
    tokenizer = tokenizers[family]
    (marked,) = mark_chat(tokenizer, MANY, first=3)
    prompt = tokenizer.render(MANY[:3])
    given = marked.text[: marked.spans[0][0]]
    closed = {"nemotron": prompt.replace("<think>\n", "<think>")}
    assert given == closed.get(family, prompt)


RESULT = {"role": "tool", "content": "2"}
BOTH = [user("hi"), {**CALL, "content": "wait"}, RESULT, said("two")]
ROUNDS = [user("hi"), CALL, RESULT, CALL, RESULT, said("two")]
THOUGHT_CALL = [user("hi"), {**CALL, "thinking": "first"}, RESULT, said("two", why="second")]
INLINE = [user("hi"), said("<think>\nfirst\n</think>\n\nhello")]
FOLDED_CALL = '<|call>add{"a": 1}<call|>'


@pytest.mark.parametrize(
    ("kind", "turns", "expected"),
    [
        ("folded", TOOLS, [f"{FOLDED_CALL}<|response>", "two<turn|>"]),
        ("folded", BOTH, [FOLDED_CALL, "waittwo<turn|>"]),
        ("rounds", ROUNDS, [f"{CALLED}<|eos|>", f"{CALLED}<|eos|>", "two<|eos|>"]),
        (
            "r1 distill",
            [user("hi"), CALL],
            ['<|calls|>{"name": "add", "arguments": {"a": 1}}<|/calls|><|eos|>'],
        ),
        ("r1 distill", MANY, ["hello<|eos|>", "well\n<|eos|>"]),
        ("last tools", MANY, [" hello</s>", " well\n</s>"]),
        ("twice closed", MANY, ["hello<|ANSWERED|><|END|>", "well\n<|ANSWERED|><|END|>"]),
        ("drops calls", MANY, ["hello<|end|>", "well\n<|end|>"]),
        (
            "call channels",
            THOUGHT_CALL,
            [
                "<|channel|>analysis<|message|>first<|end|><|start|>assistant to=functions.add"
                '<|channel|>commentary<|message|>{"a": 1}<|call|>',
                "<|channel|>analysis<|message|>second<|end|>"
                "<|start|>assistant<|channel|>final<|message|>two<|return|>",
            ],
        ),
        ("llama 3", INLINE, ["<think>\nfirst\n</think>\n\nhello<|eot_id|>"]),
    ],
)
def test_what_templates_write_otherwise_is_learned_as_it_was_generated(
    tokenizers: dict[str, ChatTokenizer], kind: str, turns: Sequence[Turn], expected: list[str]
) -> None:
    assert learned(tokenizers[kind], turns) == expected


@pytest.mark.parametrize(
    ("kind", "turns", "lost"),
    [
        ("drops calls", TOOLS, "`tool_calls` of turn 2"),
        ("r1 distill", BOTH, "`content` of turn 2"),
        ("r1 distill", INLINE, "`content` of turn 2"),
        ("deepseek v3", INLINE, "`content` of turn 2"),
        ("llama 3", REASONED, "`reasoning_content`, `thinking` of turn 4"),
        (
            "gpt-oss",
            [user("hi"), {**said("hello"), "reasoning_content": "first"}],
            "`reasoning_content` of turn 2, or a part of it: it reads reasoning as `thinking`",
        ),
    ],
)
def test_a_row_of_which_the_template_loses_a_part_is_refused_by_its_name(
    tokenizers: dict[str, ChatTokenizer], kind: str, turns: Sequence[Turn], lost: str
) -> None:
    with pytest.raises(ValueError, match=f"the chat template omits {lost}"):
        mark_chat(tokenizers[kind], turns)


def test_a_row_whose_question_the_template_loses_is_refused() -> None:
    only = "{%- for m in messages if m.role != 'system' -%}{{ m.content }}<|im_end|>{%- endfor -%}"
    tokenizer = tokenizer_of(only, special=CHATML.special, eos=CHATML.eos)
    with pytest.raises(ValueError, match=r"omits turn 1 \(system\)"):
        mark_chat(tokenizer, SYSTEM)


STOPS = "a <|im_end|> b"


@pytest.mark.parametrize(
    "turn",
    [
        {"content": STOPS},
        {"content": [{"type": "text", "text": STOPS}]},
        {"content": "a", "reasoning_content": STOPS},
        {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [STOPS]}}}]},
    ],
)
def test_a_learned_text_holds_no_token_at_which_engines_stop(
    tokenizers: dict[str, ChatTokenizer], turn: dict[str, Any]
) -> None:
    turns = [user("hi"), {"role": "assistant", **turn}]
    with pytest.raises(ValueError, match=r"text of turn 2 \(assistant\) contains `<\|im_end\|>`"):
        mark_chat(tokenizers["qwen 3"], turns)
    later = [*turns, user("more"), said("hello")]
    require_no_stop(tokenizers["qwen 3"], later, first=3)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("chatml", {"<|im_end|>"}),
        ("glm 4.5", {"<|user|>", "<|observation|>"}),
        ("call channels", {"<|return|>", "<|call|>"}),
        ("drops calls", {"<|end|>"}),
    ],
)
def test_engines_are_told_of_each_token_that_a_turn_is_taught_to_end_with(
    tokenizers: dict[str, ChatTokenizer], kind: str, ends: set[str]
) -> None:
    tokenizer = tokenizers[kind]
    assert set(tokenizer.inner.convert_ids_to_tokens([*turn_end_ids(tokenizer)])) == ends


def test_a_pair_takes_one_sequence(tokenizers: dict[str, ChatTokenizer]) -> None:
    assert mark_chat_as_one(tokenizers["qwen 3"], REASONED, first=3).spans
    with pytest.raises(ValueError, match="need 2 sequences, but only one is allowed here"):
        mark_chat_as_one(tokenizers["qwen 3"], REASONED)


def test_a_template_that_refuses_the_chat_says_so(tokenizers: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(Exception, match="Roles must alternate"):
        mark_chat(tokenizers["gemma"], SYSTEM)


COUNTS = (
    "{%- for m in messages -%}{{ m.content | length ~ m.content ~ '<|im_end|>' }}{%- endfor -%}"
)
"""Nothing that is put in place of a turn comes out as it went in."""


def test_a_template_that_does_not_tell_is_refused_unless_it_marks_turns() -> None:
    tokenizer = tokenizer_of(COUNTS, special=CHATML.special, eos=CHATML.eos)
    with pytest.raises(ValueError, match=r"where a turn begins and ends.*\{% generation %\}"):
        mark_chat(tokenizer, MANY, first=3)
    marked = COUNTS.replace("{{ m", "{% generation %}{{ m").replace("}}", "}}{% endgeneration %}")
    tokenizer = tokenizer_of(marked, special=CHATML.special, eos=CHATML.eos)
    assert learned(tokenizer, ONE, first=1) == ["5hello<|im_end|>"]


def test_a_response_without_a_template_is_all_that_follows_the_prompt(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    tokenizer = tokenizers["chatml"]
    lines = tokenize_marked(tokenizer, [mark_response("2 + 2 = ", "4"), mark_text("ab")])
    masks = [list(line.loss_mask) for line in lines]
    assert masks == [[0] * 8 + [1, 1], [0, 1, 1]]
    assert all(line.token_ids[-1] == tokenizer.eos_id for line in lines)


def test_a_prompt_is_tokenised_as_engines_read_it(tokenizer: ChatTokenizer) -> None:
    """Alone, where a token would reach from it into the response."""
    word = next(
        text
        for text in (" of", "What", " sum", "the")
        if len(tokenizer.inner(text, add_special_tokens=False)["input_ids"]) == 1
    )
    prompt, response = f"is {word[:1]}", f"{word[1:]} 4"
    (line,) = tokenize_marked(tokenizer, [mark_response(prompt, response)])
    before = tokenizer.encode_text(prompt)
    assert list(line.token_ids) == [*before, *tokenizer.encode_response(response)]
    assert list(line.loss_mask) == [0] * len(before) + [1] * (line.num_tokens - len(before))


TRL = importlib.util.find_spec("trl")
SHIPPED = {
    "gemma": "gemma",
    "llama3": "llama 3",
    "qwen3": "qwen 3",
    "qwen3_5_think": "qwen 3.5",
    "qwen3_5_nothink": "qwen 3.5 short",
    "deepseekv3": "deepseek v3",
    "glm4moe": "glm 4.5",
    "gptoss": "gpt-oss",
    "nemotron_3_nano": "nemotron",
    "qwen3_instruct_2507": "chatml",
}
"""Templates of the families themselves, which `trl` ships unchanged, and ours of the same shape."""
DIALECT = {
    "bos_token": "'<|begin_of_text|>'",
    "<\uff5cAssistant\uff5c>": "<|Assistant|>",
    "<\uff5cUser\uff5c>": "<|User|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>": "<|eos|>",
}
"""What theirs call what ours calls otherwise."""
PLAIN = [*MANY[:-1], said("well")]
"""MANY without what some of them trim."""


@pytest.mark.skipif(TRL is None, reason="the bench extra is not installed: no trl")
@pytest.mark.parametrize("name", SHIPPED)
def test_templates_of_the_families_themselves_give_the_same_masks(name: str) -> None:
    assert TRL is not None and TRL.origin is not None
    file = Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja"
    shape = FAMILIES[SHIPPED[name]]
    template = file.read_text(encoding="utf-8")
    for theirs, ours in DIALECT.items():
        template = template.replace(theirs, ours)
    tokenizer = tokenizer_of(template, special=shape.special, eos=shape.eos)
    for chat in ("one", "plain", "reasoned"):
        if expected := EXPECTED[SHIPPED[name]].get(chat if chat != "plain" else "many"):
            got = learned(tokenizer, CHATS.get(chat, PLAIN))
            # Nemotron 3 leaves an empty line where it leaves reasoning out
            assert [text.lstrip("\n") for text in got] == [
                text.lstrip("\n").replace("well\n", "well") for text in expected
            ], chat
