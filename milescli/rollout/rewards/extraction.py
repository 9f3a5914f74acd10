r"""Extracts the answer from a response, for every reward: from the text after the thinking, without
Markdown, the box, tag, mark, JSON or sentence that states the answer; or the code block that
defines the tested function. Pure text, no mathematics: the rewards compare the extracted
answers."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from milescli.core.files import parse_json
from milescli.core.thinking import (
    ANALYSIS_CHANNEL,
    ENDS_THINKING,
    FINAL_CHANNEL,
    OPENS_THINKING,
    TAGS,
)

_CLOSES = {*TAGS.values()}
_THINKING_TAG = re.compile("|".join(map(re.escape, [*TAGS, *_CLOSES])))

MARK = re.compile(r"(?<!#)####(?!#)")
"""GSM8K: the answer follows it."""
_ANSWER_TAG = re.compile(r"<(/?)(?:answer|final_answer)>", re.IGNORECASE)

_BOXES = re.compile(
    r"""(?P<box> \\ (?:boxed|fbox) \s* \{ )
      | \\\\ (?! boxed | fbox )   # a line break, not the escape of a brace behind it
      | \\ [{}]                   # an escaped brace stands for itself
      | [{}]
    """,
    re.VERBOSE,
)
_BOX_OPENS = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINS = re.compile(r"[\s$*]*+(?:,|;|&|,?\s*\b(?:or|and)\b)[\s$*]*")

_EMPHASIS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<!`)`{1,3}([^`\n]+)`{1,3}",
        r"(?<![\w*)\]}])\*{2,3}(?=[^\s*])([^\n]{0,200}?[^\s*])\*{2,3}(?![\w*(])",
        r"(?<![\w_)\]}])_{2,3}(?=[^\s_])([^\n]{0,200}?[^\s_])_{2,3}(?!\w)",
        r"(?<![\w*)\]}\\])\*(?=[^\s*])([^*\n]{0,200}?[^\s*\\])\*(?![\w*(])",
        r"(?<![\w_)\]}\\])_(?=[^\s_{])([^_\n]{0,200}?[^\s_\\])_(?!\w)",
    )
)
_HEADING = re.compile(r"^[ \t]*#{1,6}[ \t]+", re.MULTILINE)
_PICTURES = re.compile("[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")

_IS = (
    r"(?:\s+(?:is|are|should be|would be|will be|must be|equals)\b\s*:?"
    r"|\s*+(?:[\"'”’]\s*+)?(?::|：|=))"  # noqa: RUF001
)
_SAYS = re.compile(
    rf"\banswers?(?:\s*\([^()\n]*\))?{_IS}|^[^\w\n]{{0,8}}A\s*[:：]|答案\s*(?:是|为|[:：])",  # noqa: RUF001
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_HEADING = re.compile(
    r"(?:final\s+)?answer\b|(?:the\s+)?(?:final|correct)\s+answer\b", re.IGNORECASE
)
_BEFORE_ANSWER = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct)\s+)?", re.IGNORECASE
)
_NAMES = re.compile(r"\banswers?\b\s*", re.IGNORECASE)
"""Matches `answer` without a verb: a heading `Answer`, `Answer 72`."""
_MAX_SENTENCES, _SENTENCE_CHARS = 20, 2000
"""How many of the last places that name the answer are read, and how far: the time is bounded."""
_ANSWER_KEYS = ("answer", "final_answer", "final answer", "choice", "result")
_NUMBERED = re.compile(r"\d+[.)]\s+[^\W\d_]{2,}")
_STARTS_WITH_WORD = re.compile(r"[^\W\d_]{2,}")


def after_thinking(response: str) -> str:
    """Return what follows the thinking: the whole response if there is none, nothing if it is not
    closed. A response may begin inside the thinking, as some chat templates write the opening tag.
    A tag that opens in the middle of a line only mentions it, and so does one that closes nothing.
    """
    start = response.rfind(FINAL_CHANNEL)
    if start >= 0:
        return response[start + len(FINAL_CHANNEL) :].partition("<|")[0]
    if response.lstrip().startswith(ANALYSIS_CHANNEL):
        return ""
    closing, start, is_open, before = "", 0, False, 0
    for number, tag in enumerate(_THINKING_TAG.finditer(response)):
        text = tag[0]
        if text in _CLOSES:
            if (is_open and text == closing) or number == 0:
                is_open, start = False, tag.end()
        elif not is_open:
            _, is_new_line, indent = response[before : tag.start()].rpartition("\n")
            if (is_new_line or before == start) and not indent.strip():
                is_open, closing = True, TAGS[text]
        before = tag.end()
    return "" if is_open else response[start:]


def answer_after_one_thinking(response: str) -> str | None:
    """Return what follows the one `</think>`; None if thinking is not closed exactly once, is
    opened elsewhere than at the start, or is empty."""
    text = response.strip()
    thought, closes, rest = text.partition(ENDS_THINKING)
    thought = thought.removeprefix(OPENS_THINKING)
    is_once = ENDS_THINKING not in rest and OPENS_THINKING not in thought + rest
    return rest.strip() if closes and is_once and thought.strip() else None


def part_of(response: str, where: str) -> str | None:
    r"""Return the part of a response that is compared; None if it is missing. `where`: whole, tags
    (the last `<answer>...</answer>`), boxed (the last `\boxed{}`) or last_line (the last with a
    word). Thinking is never part of it."""
    text = after_thinking(response).strip()
    if where == "tags":
        return tagged_answer(text)
    if where == "boxed":
        return last_boxed(text)
    if where == "last_line":
        return text.rpartition("\n")[2].strip()
    return text


def texts_of(label: str) -> list[str]:
    """Return the texts that are right: those of a JSON list of texts, or the label itself."""
    if label.lstrip().startswith("["):
        try:
            listed = parse_json(label)
        except ValueError:
            return [label]
        if listed and all(isinstance(text, str) for text in listed):
            return listed
    return [label]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{}` or `\fbox{}` that is not empty, boxes
    within it opened; None if there is none. A box whose brace never closes, or with nothing in it,
    is no result: `\boxed{7}, as asked in \boxed{}` states 7. One pass over the text, whatever its
    braces."""
    boxes = _boxes(text)
    return boxes[-1].content if boxes else None


def last_boxes(text: str) -> str | None:
    r"""Return the last box as `last_boxed` does, with those before it that `and`, `or` or a comma
    joins to it: `\boxed{3} and \boxed{4}` is `3, 4`."""
    boxes = _boxes(text)
    if not boxes:
        return None
    taken = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if box.end > taken[0].start or not _JOINS.fullmatch(text, box.end, taken[0].start):
            break
        taken.insert(0, box)
    return ", ".join(box.content for box in taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Holds a box, a formula or a number that was found in a text."""

    content: str
    start: int
    end: int


def _boxes(text: str) -> list[_Found]:
    """Return the boxes that are not empty, by where they close; none within another."""
    open_braces: list[tuple[int, int] | None] = []  # start and content of a box; None: a brace
    boxes = list[_Found]()
    for token in _BOXES.finditer(text):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and (content := _opened(text[opened[1] : token.start()])):
                while boxes and boxes[-1].start > opened[0]:
                    boxes.pop()
                boxes.append(_Found(content=content, start=opened[0], end=token.end()))
    return boxes


def _opened(content: str) -> str:
    opened = _BOX_OPENS.sub("{", content).strip()
    return opened if opened.strip("{} \t\n") else ""


def without_markdown(text: str) -> str:
    """Return the text without emphasis, inline code and emoji. Signs that multiply
    or index (`5*c`, `2**3`, `x_1`) stay."""
    text = _PICTURES.sub("", text)
    for pattern in _EMPHASIS:
        text = pattern.sub(r"\1", text)
    return text


def marked_answers(text: str) -> Iterator[str]:
    """Yield what follows each `####`, the last first, without Markdown: the rest of its line, or
    the next one. A heading (`#### Step 2` with text below) states no answer and is left out."""
    for mark in list(MARK.finditer(text))[: -_MAX_SENTENCES - 1 : -1]:
        after = text[mark.end() : mark.end() + _SENTENCE_CHARS]
        line, _, below = after.lstrip(" \t").partition("\n")
        if not line.strip():
            line, _, below = below.lstrip().partition("\n")
        line = without_markdown(line).strip()
        if not line:
            yield ""
            continue
        start = _BEFORE_ANSWER.match(line).end()  # type: ignore[union-attr]
        if _SAYS.match(line, start) or _ANSWER_HEADING.match(line):
            stated = next(sentences_that_answer(line), "") or line.partition(":")[2]
            yield stated.strip() or without_markdown(below.strip().partition("\n")[0]).strip()
        elif not (below.strip() and _is_heading(line)):
            yield line


def _is_heading(line: str) -> bool:
    return bool(_NUMBERED.match(line) or _STARTS_WITH_WORD.match(line))


def tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` or `<final_answer>`; None if there is none."""
    tags = list(_ANSWER_TAG.finditer(text))
    for opening, closing in reversed(list(pairwise(tags))):
        if closing[1] and not opening[1]:
            return text[opening.end() : closing.start()].strip()
    return None


def answer_in_json(text: str) -> str | None:
    """Return the value of `answer` (or `final_answer`, `choice`, `result`) if the text, or a code
    block at its end, is a JSON object; None if it is not."""
    blocks = _blocks(text)
    for candidate in (text, blocks[-1].text if blocks else ""):
        candidate = candidate.strip()
        if not (candidate.startswith("{") and candidate.endswith("}")) or len(candidate) > 100_000:
            continue
        try:
            read = parse_json(candidate)
        except ValueError:
            continue
        found = {str(key).lower(): value for key, value in read.items()}
        for key in _ANSWER_KEYS:
            if isinstance(value := found.get(key), str | int | float | list):
                items = value if isinstance(value, list) else [value]
                return ", ".join(map(str, items))
    return None


def sentences_that_answer(text: str) -> Iterator[str]:
    """Yield what follows each place that names the answer, the last first: those that say what it
    is (`the answer is 7`, `Answer: 7`), then those that only name it (`Answer` as a heading)."""
    for pattern in (_SAYS, _NAMES):
        for match in list(pattern.finditer(text))[: -_MAX_SENTENCES - 1 : -1]:
            yield text[match.end() : match.end() + _SENTENCE_CHARS].lstrip(" \t\"'“”:：*")  # noqa: RUF001


_SHORT = 80
"""Characters of a text that may be an answer and nothing else."""
_OPENS_FORMULA = re.compile(r"\$\$|(?<!\\)(?:\$|\\\(|\\\[)")
"""The `\\[` of a line break such as `\\\\[4pt]` opens none."""
_CLOSES_FORMULA = {
    "$$": re.compile(r"\$\$"),
    "$": re.compile(r"(?<!\\)\$"),
    r"\(": re.compile(r"\\\)"),
    r"\[": re.compile(r"\\\]"),
}
_SENTENCE_END = re.compile(r"(?<!\.)\.(?=\s|$)|\n|(?:,|(?<!\s))\s++(?:because|since|so|which)\b")
_NUMBER = re.compile(
    r"(?:[-\u2212][$€£]?|[$€£]|(?<!\d))\d++(?:,\d{3})*(?:\.\d++)?(?:[eE][-+]?\d++)?"
    r"(?:\s*/\s*\d++)?\s*%?(?!\w)"
)
_JOINED = re.compile(r"\s*(?:,|;|(?:,\s*)?(?:or|and)\b)\s*")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\w*\s*\{[^{}]*\}")
_NOT_WORDS = re.compile(r"\\(?:[a-zA-Z]+|.)|[^a-zA-Z\\]+", re.DOTALL)
_PLAIN_WORD = re.compile(r"or|and|sqrt|pi|sin|cos|tan|log|ln|exp|percent|degrees", re.IGNORECASE)
_MAX_WORDS = 3


def stated_answer(response: str) -> str:
    r"""Return the text of a response's mathematical answer; empty if there is none. It is the first
    of these that the response has: its last `\boxed{}` (and boxes that `and` or a comma joins to
    it), its last `<answer>`, the `answer` of its JSON, what follows its last `####`, the sentence
    that names the answer, its last formula, its last number. Numbers and formulas that are joined
    (`7 or 8`) are one answer."""
    text = after_thinking(response)
    if (boxed := last_boxes(text)) is not None:
        return boxed
    if (tagged := tagged_answer(text)) is not None:
        text = without_markdown(tagged)
        return next(filter(None, map(_said, sentences_that_answer(text))), "") or _said(text)
    if (value := answer_in_json(text)) is not None:
        return value
    if (marked := next(marked_answers(text), None)) is not None:
        return _bracketed(marked)
    text = _HEADING.sub("", without_markdown(text)).strip()
    for sentence in sentences_that_answer(text):
        if answer := _said(_SENTENCE_END.split(sentence.lstrip(), maxsplit=1)[0]):
            return answer
    return _within(text, is_said=False)


def _said(text: str) -> str:
    return _within(_bracketed(text.strip()), is_said=True) if text.strip() else ""


def _bracketed(text: str) -> str:
    """Return the text without angle brackets or quotation marks around the whole."""
    match = re.fullmatch(r"<([^<>=]+)>|[\"“]([^\"”]+)[\"”]", text.rstrip("."))
    return (match[1] or match[2]).strip() if match else text


def _within(text: str, *, is_said: bool) -> str:
    """Return the answer in a text. `is_said`: the response calls the text its answer."""
    text = text.strip()
    formulas = _formulas(text)
    if len(formulas) == 1 and formulas[0].start == 0 and formulas[0].end == len(text.rstrip(".")):
        return formulas[0].content
    if not formulas and len(text) <= _SHORT and "\n" not in text and _is_bare(text, is_said):
        return text
    return _last_joined(text, formulas or _numbers(text))


def _formulas(text: str) -> list[_Found]:
    """Return the formulas of the text, none within another. One pass over the text: an opening sign
    whose closing one was not found once is not searched for again."""
    found, place, unclosed = list[_Found](), 0, set[str]()
    while opening := _OPENS_FORMULA.search(text, place):
        start = opening.start()
        place = start + 1
        is_single = opening[0] == "$$" and text[start - 1 : start] != "\\"
        for sign in (opening[0], "$") if is_single else (opening[0],):
            begins = start + len(sign)
            if sign in unclosed:
                continue
            closing = _CLOSES_FORMULA[sign].search(text, begins + 1)
            if closing is not None:
                content, place = text[begins : closing.start()], closing.end()
                found.append(_Found(content=content, start=start, end=place))
                break
            unclosed.add(sign)
    return found


def _numbers(text: str) -> list[_Found]:
    return [
        _Found(content=match[0], start=match.start(), end=match.end())
        for match in _NUMBER.finditer(text)
    ]


def _is_bare(text: str, is_said: bool) -> bool:
    """Return True if the text is only an answer: mathematics, a number and a few words, or a few
    words that the response calls the answer."""
    words = [
        word
        for word in _NOT_WORDS.sub(" ", _TEXT.sub(" ", text)).split()
        if len(word) > 1 and not _PLAIN_WORD.fullmatch(word)
    ]
    starts_as_one = not text[:1].isalpha() or (is_said and not re.search(r"\d", text))
    return not words or (starts_as_one and len(words) <= _MAX_WORDS)


def _last_joined(text: str, found: list[_Found]) -> str:
    """Return the last one found, with those before it that `or`, `and` or a comma joins to it."""
    if not found:
        return ""
    taken = [found[-1]]
    for one in reversed(found[:-1]):
        if not _JOINED.fullmatch(text, one.end, taken[-1].start):
            break
        taken.append(one)
    return ", ".join(one.content for one in reversed(taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    language: str
    text: str


_FENCE = re.compile(r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)$", re.MULTILINE)
_MAX_ENDS = 8
"""Number of fences to try as the end of a block: more of them within one program's strings are not
code."""
_PYTHON = frozenset({"", "python", "py", "python3", "py3", "python2", "pycon", "ipython", "sage"})
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0|\bos\.read\b|\bfileinput\b")


def code_of(response: str, *, names: Iterable[str] = ()) -> str:
    """Return the program of a response: the last of its Python blocks that defines one of `names`,
    else the last that is a program (preferably one that reads standard input); the whole response
    if it has no block. Blocks after the solution, as a call of it, its output or a command that
    runs it, do not count."""
    text = after_thinking(response)
    blocks = _blocks(text)
    if not blocks:
        return text
    python = [block.text for block in blocks if block.language in _PYTHON]
    before = text[: _FENCE.search(text).start()]  # type: ignore[union-attr]
    if not any(code.strip() for code in python) and _tree(before) is not None:
        return before  # a fence that closes what none opened
    wanted = set(names)
    if defining := [code for code in python if wanted & _defined(code)]:
        return defining[-1]
    programs = [code for code in python if _is_program(code)]
    reading = [code for code in programs if _READS.search(code)]
    candidates = reading or programs or [code for code in python if code.strip()]
    return candidates[-1] if candidates else blocks[-1].text


def _blocks(text: str) -> list[_Block]:
    """Return the fenced blocks, including one that is not closed; a fence within a Python string
    closes nothing."""
    fences, blocks, place = list(_FENCE.finditer(text)), list[_Block](), 0
    while place < len(fences):
        opening = fences[place]
        info = opening["info"].strip().lower()
        language = re.split(r"[\s{,:]", info, maxsplit=1)[0] if info else ""
        ends = list[int]()
        for number in range(place + 1, len(fences)):
            other = fences[number]
            if other["info"].strip() and other["fence"][0] == opening["fence"][0]:
                if not ends:
                    break  # the next block begins: this one was never closed
                continue
            if other["fence"].startswith(opening["fence"]):
                ends.append(number)
                if len(ends) == (_MAX_ENDS if language in _PYTHON else 1):
                    break
        codes = [_inner(text, opening, fences[end].start()) for end in ends]
        if language in _PYTHON - {""}:
            chosen = next((n for n, code in enumerate(codes) if _tree(code) is not None), 0)
        else:
            chosen = 0
        if ends:
            blocks.append(_Block(language=language, text=codes[chosen]))
            place = ends[chosen] + 1
        else:
            following = fences[place + 1 : place + 2]
            end = following[0].start() if following else len(text)
            code = _inner(text, opening, end)
            blocks.append(_Block(language=language, text=code))
            place += 1
    return blocks


def _inner(text: str, opening: re.Match[str], end: int) -> str:
    code = text[opening.end() : end].lstrip("\n")
    if not opening["indent"]:
        return code
    lines = code.split("\n")
    indent = opening["indent"]
    if all(line.startswith(indent) for line in lines if line.strip()):
        return "\n".join(line.removeprefix(indent) for line in lines)
    return textwrap.dedent(code)


def _tree(code: str) -> ast.Module | None:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if tree.body else None


def _defined(code: str) -> set[str]:
    """Return the names that a program defines at its top level, and the methods of `Solution`."""
    tree = _tree(code)
    names = set[str]()
    for statement in tree.body if tree else ():
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        if isinstance(statement, ast.ClassDef) and statement.name == "Solution":
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {one.name for one in statement.body if isinstance(one, functions)}
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _is_program(code: str) -> bool:
    """Return True if the code is a program: it compiles, and calls or defines something."""
    tree = _tree(code)
    kinds = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tree is not None and any(isinstance(node, kinds) for node in ast.walk(tree))
