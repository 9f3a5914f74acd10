"""Tests of IFEval's 25 instructions: of each a response that follows it and one that does not, and
the labels that name them."""

from __future__ import annotations

import importlib.util
import json

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.rewards import InstructionSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.text import instruction_checks
from milescli.rollout.rewards.text.instruction_checks import CHECKS, DETECTING
from milescli.rollout.rewards.text.instructions import instructions

HAS_LANGDETECT = importlib.util.find_spec("langdetect") is not None
ENGLISH = "this is a rather long sentence about the weather of today and of tomorrow"
GERMAN = "Dies ist ein ziemlich langer Satz über das Wetter von heute und von morgen"
AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}

CASES: dict[str, list[tuple[dict[str, object], str, str]]] = {
    "keywords:existence": [({"keywords": ["sun", "Moon"]}, "The SUN and the moon", "The sun")],
    "keywords:frequency": [
        ({"keyword": "sun", "frequency": 2, **AT_LEAST}, "Sun, sun", "sun"),
        ({"keyword": "sun", "frequency": 2, **LESS}, "sun", "sun sun"),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["sun"]}, "a sunny day", "the Sun.")],
    "keywords:letter_frequency": [
        ({"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Qq", "q"),
        ({"letter": "!", "let_frequency": 1, "let_relation": "less than"}, "a", "a!"),
    ],
    "language:response_language": [({"language": "de"}, GERMAN, ENGLISH)],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, **AT_LEAST}, "One is. Two is!", "Dr. Who is one."),
        ({"num_sentences": 3, **LESS}, "It costs 3.50 dollars. Yes?", "A is. B is. C is"),
        ({"num_sentences": 2, **LESS}, "!" * 200_000 + "x", "A is. B is."),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "one\n\n***\n\ntwo", "one\n\ntwo"),
        ({"num_paragraphs": 3}, "one *** two *** three", "one *** *** three"),
        ({"num_paragraphs": 3.0}, "one *** two *** three", "one *** *** three"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, **AT_LEAST}, "one, two three", "one two"),
        ({"num_words": 3, **LESS}, "one two", "one two three"),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
            'First.\n\n"then" it went',
            "Then.\n\nFirst",
        ),
        ({"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"}, "A.\n\nb", "A.\n\nb\n\nc"),
        (
            {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "it"},
            "It's\n\nb",
            "*It* is\n\nb",
        ),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "[name] of []", "[name] of ]["),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye\nP. S. more", "Bye, PS: not"),
        ({"postscript_marker": "P.S."}, "Bye. p.s. more", "Bye\nP.S: not"),
        ({"postscript_marker": "P.P.S"}, "Bye\n\nP.P.S more", "Bye\nP.S. more"),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, "list:\n* one\n- two", "* one\n* two\n* three"),
        ({"num_bullets": 1}, "**bold**\n* one", "**bold**"),
        ({"num_bullets": 2}, "-\n  - one", "*\n- one\n* two\n* three"),
    ],
    "detectable_format:constrained_response": [({}, "My answer is maybe.", "Maybe.")],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
        ({"num_highlights": 2}, "***one***", "**one**"),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            "SECTION 1\na\nSECTION 2\nb",
            "SECTION 1\na\nSECTION b",
        ),
        ({"section_spliter": "SECTION", "num_sections": 1}, "SECTION1", "SECTION  1"),
    ],
    "detectable_format:json_format": [
        ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ({}, '```JSON\n{"a": 1}', "```js\n{}\n```"),
    ],
    "detectable_format:title": [
        ({}, "<<Of the sun>>\ntext", "<< >>\n<text>"),
        ({}, "so <<a < b>>", "<<no end\n>>"),
    ],
    "combination:two_responses": [
        ({}, "one\n******\ntwo", "one\n******\none"),
        ({}, "one ****** two", "one ****** two ****** three"),
        ({}, "****** one ****** two", "****** ****** one ****** two"),
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Write a poem."}, "write a poem. Roses", "Roses. Write a poem.")
    ],
    "startend:end_checker": [({"end_phrase": "The end."}, '"It was. the end."', "The end. Or not")],
    "startend:quotation": [({}, '"all of it"', '"some" of it')],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "NO, never EVER", "No EVER"),
        ({"capital_frequency": 1, "capital_relation": "less than"}, "no 42", "NO 42"),
        (
            {"capital_frequency": 3, "capital_relation": "at least"},
            "I'm sure I'll go, and NASA's fine.",
            "I go to NASA, it's OK-ish.",
        ),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "DON'T", "I'd go, don't!"),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "CANNOT", "GOTTAX, U.s."),
    ],
    "change_case:english_capital": [({}, ENGLISH.upper(), ENGLISH)],
    "change_case:english_lowercase": [({}, ENGLISH, ENGLISH.capitalize())],
    "punctuation:no_comma": [({}, "one and two", "one, two")],
}
ROWS = [
    pytest.param(
        name,
        kwargs,
        followed,
        broken,
        marks=pytest.mark.skipif(
            name in DETECTING and not HAS_LANGDETECT,
            reason="needs pip install 'miles-cli[instructions]'",
        ),
    )
    for name, cases in CASES.items()
    for kwargs, followed, broken in cases
]


def _label(*asked: tuple[str, dict[str, object]]) -> str:
    ids, kwargs = zip(*asked, strict=True)
    return json.dumps({"instruction_id_list": ids, "kwargs": kwargs})


def _score(response: str, label: str, **settings: str) -> float:
    rollout = Rollout(instructions=InstructionSettings(**settings))  # type: ignore[arg-type]
    return instructions.with_settings(rollout)(prompt="", response=response, label=label)


def test_all_published_instructions_are_there_and_tried() -> None:
    assert len(CHECKS) == 25 and set(CASES) == set(CHECKS)


@pytest.mark.parametrize(("name", "kwargs", "followed", "broken"), ROWS)
def test_an_instruction_is_followed_or_not(
    name: str, kwargs: dict[str, object], followed: str, broken: str
) -> None:
    label = _label((name, {**kwargs, "num_of_something_else": None}))
    assert instructions.check_label(label) is None
    assert _score(followed, label) == 1.0
    assert _score(f"<think>{broken}</think>{followed}", label) == 1.0
    assert _score(broken, label) == _score("", label) == 0.0


TWO = _label(("punctuation:no_comma", {}), ("startend:quotation", {}))


def test_all_must_be_followed_or_their_share_counts() -> None:
    assert _score("no quotes", TWO) == 0.0
    assert _score("no quotes", TWO, score="share") == 0.5
    assert _score('"both"', TWO) == _score('"both"', TWO, score="share") == 1.0


@pytest.mark.parametrize(
    "response", ['Sure, here it is:\n"text"', '"text"\nHope it helps, friend', '*"text"*']
)
def test_loose_forgives_a_line_around_the_response_and_stars(response: str) -> None:
    assert _score(response, TWO) == 0.0
    assert _score(response, TWO, mode="loose") == 1.0


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("no commas", "it is not JSON like"),
        ('{"instruction_id_list": [], "kwargs": []}', "it is not JSON like"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}', "1 instructions and 0"),
        (_label(("punctuation:no_coma", {})), "nearest is `punctuation:no_comma`"),
        (_label(("length_constraints:number_words", {"num_words": 3})), "lacks relation"),
        (
            _label(("length_constraints:number_words", {"num_words": 3, "relation": "about"})),
            "the relation is 'about'",
        ),
        (_label(("keywords:existence", {"keywords": "cat"})), "is 'cat', not a list of texts"),
        (_label(("keywords:existence", {"keywords": ["cat", 1]})), "not a list of texts"),
        (_label(("length_constraints:number_paragraphs", {"num_paragraphs": "2"})), "'2', not a"),
        (_label(("length_constraints:number_paragraphs", {"num_paragraphs": 1.5})), "not a whole"),
        (_label(("startend:end_checker", {"end_phrase": 3})), "is 3, not a text"),
        (_label(("language:response_language", {"language": "english"})), "not an ISO code"),
    ],
)
def test_a_label_that_names_no_instruction_is_a_fault(label: str, reason: str) -> None:
    assert reason in str(instructions.check_label(label))


def test_without_langdetect_a_language_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(text: str) -> str:
        raise ModuleNotFoundError("langdetect")

    monkeypatch.setattr(instruction_checks, "detected_language", missing)
    with pytest.raises(RecipeError) as refused:
        instructions.check_label(_label(("language:response_language", {"language": "de"})))
    assert refused.value.fixes == ["pip install 'miles-cli[instructions]'"]
    assert "language:response_language" in refused.value.why
