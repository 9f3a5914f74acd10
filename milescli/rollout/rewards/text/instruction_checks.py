"""The 25 verifiable instructions of IFEval (arXiv 2311.07911, table 1): for each id a function of
the response and the instruction's own parameters, named as in its data. Written from the published
definitions; sentences are counted by their punctuation, not by a trained model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from threading import Lock

from milescli.core.files import parse_json

Check = Callable[..., bool]

_RELATIONS = ("less than", "at least")
_WORD = re.compile(r"\w+")
_BETWEEN_WORDS = re.compile(
    r"[\s;@#$%&*?!()\[\]{}<>«»“”‘’„`\"\u2012-\u2015]|--|\.{2,}|[:,](?!\d)"  # noqa: RUF001
    r"|(?<=\bCAN)(?=NOT\b)|(?<=\bGON|\bWAN)(?=NA\b)|(?<=\bGOT)(?=TA\b)"
    r"|(?<=[^\s'])(?=(?:'(?:[sSmMdD]|ll|LL|re|RE|ve|VE)|n't|N'T)(?![\w']|-(?!-)))"
)
"""Where the tokenizer that IFEval uses splits words, as far as capitals are concerned."""
_SENTENCE_END = re.compile(r"(?<![.!?。！？…])[.!?。！？…]++[\"'”’)\]]*+(?=\s|$)")  # noqa: RUF001
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|No|Inc|Ltd|Co|approx)|\b[A-Z])\.$"
)
_BULLETS = (
    re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE),
    re.compile(r"^[^\S\n]*-", re.MULTILINE),
)
_HIGHLIGHTS = re.compile(r"\*[^*\n]*\*"), re.compile(r"\*\*[^*\n]*\*\*")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_FIRST_WORD = re.compile(r"'*\"*([^\s.,?!'\"]*)")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_FENCES = ("```json", "```Json", "```JSON", "```")
_LANGUAGE = re.compile(r"[a-z]{2}(?:-[a-z]{2})?")
_LONGEST_ABBREVIATION = 12
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_DETECTING = Lock()
"""The library loads its profiles in the first call, and many threads call it."""


def detected_language(text: str) -> str | None:
    """Return the ISO code of the language, by langdetect; None if the text gives no evidence."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # else it answers by chance
    with _DETECTING:
        try:
            return str(detect(text))
        except LangDetectException:
            return None


def _holds(number: int, relation: str, bound: int) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"the relation is {relation!r}, not one of {', '.join(_RELATIONS)}")
    return number < bound if relation == "less than" else number >= bound


def _count(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """Return True if the text contains all keywords, in any case."""
    return all(keyword.lower() in text.lower() for keyword in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Return True if the number of occurrences of the keyword fits."""
    return _holds(text.lower().count(keyword.lower()), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Return True if no forbidden word occurs as a word."""
    return not any(_count(word, text) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return True if the number of occurrences of the letter, in either case, fits."""
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """Return True if the text is in this language (ISO code), or its language cannot be
    detected."""
    if not _LANGUAGE.fullmatch(language):
        raise ValueError(f"the language is {language!r}, not an ISO code such as en or zh-cn")
    return detected_language(text) in (language, None)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """Return True if the number of sentences fits."""
    return _holds(_num_sentences(text), relation, num_sentences)


def _num_sentences(text: str) -> int:
    count, place = 0, 0
    for match in _SENTENCE_END.finditer(text):
        before = text[max(0, match.end() - _LONGEST_ABBREVIATION) : match.end()]
        if match[0] == "." and _ABBREVIATION.search(before):
            continue
        count += bool(text[place : match.start()].strip())
        place = match.end()
    return count + bool(text[place:].strip())


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Return True if there are exactly this many paragraphs, separated by `***`, none of them
    empty."""
    parts = _parts(text, "***")
    return all(parts) and len(parts) == num_paragraphs


def _parts(text: str, divider: str) -> list[str]:
    """Return the text between the dividers, except for an empty one at the start or the end."""
    parts = [part.strip() for part in text.split(divider)]
    return [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """Return True if the number of words fits."""
    return _holds(len(_WORD.findall(text)), relation, num_words)


def nth_paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Return True if there are exactly this many paragraphs, separated by two line breaks, and the
    n-th begins with the word, before its first quotation mark or punctuation."""
    parts = [part.strip() for part in text.split("\n\n")]
    if len(list(filter(None, parts))) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = _FIRST_WORD.match(parts[nth_paragraph - 1])
    return word is not None and word[1].lower() == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Return True if there are at least this many placeholders like [address]."""
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Return True if the text contains the marker (P.S., P.P.S), in any case and with blanks after
    its dots."""
    marker = _POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(marker, text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Return True if exactly this many lines begin with a single `*` or with `-`."""
    return sum(len(bullet.findall(text)) for bullet in _BULLETS) == num_bullets


def constrained_response(text: str) -> bool:
    """Return True if the text contains one of three given sentences."""
    return any(option in text.strip() for option in _CONSTRAINED)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """Return True if at least this many sections are in `*stars*` or `**stars**`; `***stars***`
    counts as both."""
    marked = (found for pattern in _HIGHLIGHTS for found in pattern.findall(text))
    return sum(bool(found.strip("*").strip()) for found in marked) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Return True if there are at least this many sections, each headed by the word and a number:
    SECTION 1."""
    mark = re.compile(rf"{re.escape(section_spliter.strip())}\s?\d+")
    return len(mark.findall(text)) >= num_sections


def json_format(text: str) -> bool:
    """Return True if the whole text is JSON, in a code block or not."""
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        parse_json(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    """Return True if the text has a title in <<double angular brackets>>."""
    inner = (line.rpartition(">>")[0].partition("<<")[2] for line in text.split("\n"))
    return any(one.lstrip("<").rstrip(">").strip() for one in inner)


def two_responses(text: str) -> bool:
    """Return True if there are exactly two different responses with six asterisks between."""
    parts = _parts(text, "******")
    return all(parts) and len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Return True if the text begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Return True if the text ends in the phrase, ignoring quotation marks around the whole."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Return True if the whole text is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Return True if the number of words in capitals fits: `NASA's` has one, `DON'T` two."""
    number = sum(word.isupper() for word in _BETWEEN_WORDS.split(text))
    return _holds(number, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Return True if the text is English, and in capitals only. The language is detected in lower
    case, since capitals mislead."""
    return text.isupper() and detected_language(text.lower()) in ("en", None)


def english_lowercase(text: str) -> bool:
    """Return True if the text is English, and in lower case only."""
    return text.islower() and detected_language(text) in ("en", None)


def no_comma(text: str) -> bool:
    """Return True if the text has no comma."""
    return "," not in text


CHECKS: dict[str, Check] = {
    "keywords:existence": keywords,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
DETECTING = tuple(name for name in CHECKS if "language" in name or "english" in name)
"""Instructions that need langdetect."""
