"""README and docs read as a native technical writer would write them: none of the phrases below,
which follow German word order or no usage of the field, returns.

A phrase is here only if correct English never needs it. Text of commands and generated tables is
not looked at on a page: it is the program's, and checked where it comes from (`SOURCES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.english_texts import FORBIDDEN, texts_of_the_program

ROOT = Path(__file__).resolve().parents[1]

PHRASES: tuple[tuple[str, str, str], ...] = (
    # (pattern, what to write instead, a sentence that it finds)
    (r"(?:is|are|was|were) told of", "reports; mentions", "A failure is told of once."),
    (r"(?:is|are) told by (?:its|the|their)", "shows", "A run on rows is told by its loss."),
    (r"tells? of (?:each|every|the|all)", "reports", "Memory tells of each process."),
    (r"who sets .{1,40} is told", "if you set ..., miles says", "Who sets it there is told so."),
    (r"(?:told|asked) with what (?:went|goes)", "with the cause", "Told with what went wrong."),
    (r"refused by name", "is an error", "Other families are refused by name."),
    (
        r"held (?:against|beside) (?:a|an|the|those|others?|any|real|published|TRL)",
        "compared with",
        "Bytes were held against real ranks.",
    ),
    (r"held against others", "compared with", "Held against others, in tests."),
    (
        r"bears? (?:its|the|their|this) contract",
        "satisfies the protocol",
        "The agent bears its contract.",
    ),
    (r"must bear", "must satisfy", "What every reward must bear."),
    (r"what exp\(\) bears", "overflows", "Ratios beyond what exp() bears."),
    (r"without your word", "by default", "It is not trained without your word."),
    (r"is what is trained on", "training uses", "What it gave is what is trained on."),
    (
        r"what (?:it|the \w+) was given and gave",
        "received and sampled",
        "What the engine was given and gave.",
    ),
    (r"what becomes of (?:it|the|a|them)", "what happens to", "What becomes of the run."),
    (r"waited (?:for )?[^.]{0,60}\bin vain", "timed out waiting for", "It waited for it in vain."),
    (r"in vain", "without effect", "Nothing is sampled in vain."),
    (r"(?:is|are|was|were) there again", "is back", "The engine is there again."),
    (
        r"the one of [^.]{1,200} that is there",
        "the first that exists",
        "The one of prompt, messages that is there.",
    ),
    (
        r"that is not there (?:yet )?(?:is|are) refused",
        "a missing ... is an error",
        "One that is not there is refused.",
    ),
    (r"mend(?:s|ed|ing)?", "fix", "The command that mends it."),
    (r"anew", "again", "Its prompt is begun anew."),
    (r"(?:is|are|was|were|be) begun", "is started", "It is begun by the driver."),
    (r"for want of", "for lack of", "It ended for want of memory."),
    (r"parted by", "separated by", "Fields are parted by tabs."),
    (
        r"(?:set-up|start-up|case|punctuation|white space|thinking|its run) (?:aside|apart)",
        "without; except",
        "Two minutes, set-up aside.",
    ),
    (
        r"other work (?:ran )?beside",
        "with other work on the machine",
        "Two cores, other work beside.",
    ),
    (
        r"beside (?:other|more|much other) work",
        "with other work on the machine",
        "Runs beside other work.",
    ),
    (r"the same of (?:a|an|the)\b", "the same for", "The same of a random model."),
    (
        r"(?:recipes?|polic(?:y|ies)|versions?|weights|those) of (?:now|before)",
        "earlier; current",
        "Recipes of before said so.",
    ),
    (
        r"how far (?:both|the two|\w+ and \w+) are apart",
        "the difference between",
        "It says how far both are apart.",
    ),
    (r"stands? in the place of", "replaces", "It stands in the place of a reward."),
    (
        r"(?:run|one|that) (?:that|which) nobody (?:hurt|killed|stopped|looked at)",
        "an uninterrupted run",
        "The weights of the run that nobody hurt.",
    ),
    (
        r"(?:run|one|that) that was left alone",
        "an undisturbed run",
        "Equal to a run that was left alone.",
    ),
    (r"it is of (?:single|whole|one)\b", "this applies to", "It is of single responses."),
    (r"what goes together", "feature combinations", "What goes together."),
    (r"is (?:its|his|their|your) matter", "is up to", "What that contains is its matter."),
    (r"could not be had", "was not available", "It could not be had in a real run."),
    (r"(?:that|which) (?:is|are) other than", "different", "Data that is other than its own."),
    (
        r"so (?:it|they) (?:is|does|are|do) where|it is so where",
        "the same applies if",
        "So it does where the budget is spent.",
    ),
    (r"illness(?:es)?", "fault", "It plants each of these illnesses."),
    (r"this room's own", "miles' own", "In this room's own layers."),
    (
        r"of several adapters each",
        "with several adapters, each",
        "Of several adapters each has one.",
    ),
    (
        r"who (?:guesses|waits for whom|died of)",
        "the drafter; which process",
        "The weights of who guesses.",
    ),
    (r"guess(?:es|ed|ing)? (?:tokens )?ahead", "speculative decoding", "It may guess ahead."),
    (r"(?:looked at|a look at \w+) each second", "checked every second", "Looked at each second."),
    (r"(?:blotted|rubbed) out of", "removed from", "Values are blotted out of it."),
    (r"(?:kernel's|teacher's|server's last) words?", "message; output", "The kernel's word on it."),
    (r"(?:testif(?:y|ies)|testified)\b", "is compared", "It is patched before it testifies."),
    (r"has them no more", "no longer has", "The package has them no more."),
    (
        r"no token gets wrong",
        "no token becomes wrong",
        "It guesses worse, and no token gets wrong.",
    ),
    (r"wants of the label", "needs", "What a reward wants of the label."),
    (
        r"(?:replaced|drawn|works?|fast|exact|runs) as ever",
        "as usual",
        "Ranks are replaced as ever.",
    ),
    (r"held to (?:no speed|the median)", "compared with", "A mixture is held to the median alone."),
    (r"give who", "give the process that", "Give who imports it the whole of it."),
    (r"(?<=[.:;(] )held by `", "... checks this", "This is exact. Held by `tests/x.py`."),
    (r"tokens are never made again", "never tokenizes again", "Tokens are never made again."),
)
"""Matched without case, between word boundaries, over text whose line breaks became spaces."""

_GENERATED = re.compile(r"<!-- (?!end of)([^>:]+?)(?::[^>]*)? -->.*?<!-- end of \1 -->", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
_SPAN = re.compile(r"`[^`]*`")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the prose of each page that people wrote."""
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))):
        if page.name != "CHANGELOG.md":
            yield page.relative_to(ROOT).as_posix(), _prose(page.read_text(encoding="utf-8"))


SOURCES: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (pages, texts_of_the_program)
"""What is checked: functions that yield (where, text)."""


def _prose(page: str) -> str:
    for passed_over in (_GENERATED, _FENCED, _INDENTED):
        page = passed_over.sub("", page)
    return _SPAN.sub("`code`", page)


def _found(text: str) -> list[str]:
    flat = " ".join(text.split())
    return [
        f"`{hit[0]}`: write `{instead}`"
        for pattern, instead, _ in PHRASES
        if (hit := _compiled(pattern).search(flat))
    ]


def _compiled(pattern: str) -> re.Pattern[str]:
    start = r"\b" if pattern[0].isalnum() or pattern[0] == "(" else ""
    end = r"\b" if pattern[-1].isalnum() or pattern[-1] == ")" else ""
    return re.compile(f"{start}(?:{pattern}){end}", re.IGNORECASE)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_no_phrase_of_the_list_returns(source: Callable[[], Iterator[tuple[str, str]]]) -> None:
    texts = list(source())
    wrong = {where: found for where, text in texts if (found := _found(text))}
    assert texts and not wrong


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase[0])
def test_each_phrase_is_found_in_its_example(phrase: tuple[str, str, str]) -> None:
    pattern, _, example = phrase
    assert _compiled(pattern).search(example)


CORRECT = (
    "Each adapter has its own loop, and no process waits in another's place.",
    "The run is told to stop. Ask the server for a model; it holds the lock.",
    "A value that is other data is an error, and the repaired file is read again.",
    "Set model.path; whoever reads it is asked to lower the learning rate.",
    "An interrupted run continues as usual. What happens to the others?",
    "The recommended amendment depends on what the driver reports.",
    "No engine bears the load alone. Hold the key, and compare it with the original.",
)


@pytest.mark.parametrize("sentence", CORRECT)
def test_correct_english_is_left_alone(sentence: str) -> None:
    assert not _found(sentence)


def test_prose_of_a_page_is_without_commands_and_generated_tables() -> None:
    page = (
        "Keep `in vain`.\n\n    in vain\n\n```\nin vain\n```\n"
        "<!-- a b -->\nin vain\n<!-- end of a b -->\n"
    )
    assert not _found(_prose(page)) and _found(_prose("It waits\nin vain."))


PROGRAM = list(texts_of_the_program())
"""Short texts, in which more than those phrases is wrong: a fix, a reason, a line of help."""


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_no_help_or_error_uses_a_forbidden_phrase(phrase: str) -> None:
    found = [f"{where}: {text}" for where, text in PROGRAM if re.search(phrase, text)]
    assert not found, "\n".join(found)


def test_texts_of_each_kind_are_found() -> None:
    texts = {text for _, text in PROGRAM}
    assert "Train a model from a recipe." in texts  # help of a verb
    assert "Train a LoRA adapter of this rank (train.lora.rank)." in texts  # of a flag
    assert "Memory limit of each process." in texts  # of a key
    assert "there is no recipe `{}`" in texts  # an error, with a placeholder
    assert "--set model.path=Qwen/Qwen3-0.6B" in texts  # its fix, in a list


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("models are not trained without your word", "disabled by default"),
        ("`{}` is no adapter", "there is no adapter `{}`"),
        ("it is no number", "it is no longer running"),
        ("Of one call.", "Time limit of one call."),
        ("no recipe is called `{}`", "two tools have the name `{}`"),
        ("the file is not there", "the file is not therefore wrong"),
        ("Which is asked with an API key.", "asks for confirmation"),
        ("`{}` is there already", "`{}` already exists"),
    ],
)
def test_a_phrase_is_found_and_correct_english_is_not(wrong: str, right: str) -> None:
    assert any(re.search(phrase, wrong) for phrase in FORBIDDEN)
    assert not any(re.search(phrase, right) for phrase in FORBIDDEN)
