r"""Normalises mathematical text to one spelling, which `answer` reads: LaTeX and plain text,
Unicode signs, fractions and spaces. Pure text; runs in the `math` reward's processes."""

# ruff: noqa: RUF001
from __future__ import annotations

import re
import unicodedata

WORD = "\ue000"
r"""Precedes each word that was in `\text{}` or similar: text is no product of variables."""

_SIGNS = {
    "−": r"-",
    "–": r"-",
    "—": r"-",
    "‒": r"-",
    "﹣": r"-",
    "⋅": r" \cdot ",
    "·": r" \cdot ",
    "∙": r" \cdot ",
    "×": r" \times ",
    "÷": r"/",
    "∕": r"/",
    "⁄": r"/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3] ",
    "≤": r" \le ",
    "≥": r" \ge ",
    "≠": r" \ne ",
    "≈": r" \approx ",
    "∈": r" \in ",
    "∪": r" \cup ",
    "∩": r" \cap ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "…": r"...",
    "∨": r" \lor ",
    "∧": r" \land ",
    "\xa0": r" ",
    "\u202f": r" ",
    "\u2009": r" ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "λ": r"\lambda ",
    "φ": r"\phi ",
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp"
_SAME = (
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
    (r"\\leqslant(?![a-zA-Z])|\\leq(?![a-zA-Z])|<=", r" \\le "),
    (r"\\geqslant(?![a-zA-Z])|\\geq(?![a-zA-Z])|>=", r" \\ge "),
    (r"\\neq(?![a-zA-Z])|!=", r" \\ne "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
    (r"\\(?:land|wedge)(?![a-zA-Z])", " and "),
    (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?", r"\\binom{\1}{\2}"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset "),
    (r"\\(?:ldots|dots|cdots)(?![a-zA-Z])", "..."),
    (r"\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
    (r"\\(?:qquad|quad)(?![a-zA-Z])", " "),
    # thousands: 1{,}234, 1\,234, 1,\!234
    (r"(?<=\d)(?:\{,\}|,?\\[,!;: ]|~)(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[,;:! ]|~", " "),
    (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    # sin(x), ln 2; but 5 sec
    (
        rf"(?<![a-zA-Z\\])({FUNCTIONS})(?=\s*[({{^\\_]|\s+[a-zA-Z0-9])",
        r"\\\1 ",
    ),
    (r"(?<![a-zA-Z\\])C\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?<=\d)\s*\\equiv(?![a-zA-Z])|\\(?:equiv|cong)(?![a-zA-Z])", " = "),
    (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
)
_RULES = tuple((re.compile(pattern), by) for pattern, by in _SAME)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*"
    r"\{([^{}]*)\}"
)
_BARE_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))")
_BARE_SQRT = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+(?:\.\d+)?|[a-zA-Z])")
_GROUPS = re.compile(r"(?<![\d.,\\])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/])")
_DOLLARS = re.compile(r"(?<!\\)\$\$?")


def normalized(text: str) -> str:
    """Return the text in one spelling; equal texts stay equal, and different ones different."""
    text = without_delimiters(_in_ascii(text))
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    text = _TEXT.sub(_words, text)
    text = _BARE_FRAC.sub(lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _BARE_SQRT.sub(lambda m: f"\\sqrt{m[1] or ''}{{{m[2]}}}", text)
    return trimmed(_joined_groups(text))


def without_delimiters(text: str) -> str:
    r"""Remove `$...$`, `\(...\)` and `\[...\]`; a single `$` is a currency, and is escaped."""
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    count = len(_DOLLARS.findall(text))
    return _DOLLARS.sub(" ", text) if count % 2 == 0 else _DOLLARS.sub(r"\\$", text)


def trimmed(text: str) -> str:
    """Remove blanks, a full stop and the like at the ends, and braces around the whole."""
    text = text.strip(" \t\r\n").rstrip(",;:")
    if not text.endswith("..."):
        text = text.rstrip(".").rstrip()
    while text[:1] == "{" and _closes_at(text) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closes_at(text: str) -> int:
    depth = 0
    for place, sign in enumerate(text):
        if sign in "{}" and text[place - 1 : place] != "\\":
            depth += 1 if sign == "{" else -1
            if depth == 0:
                return place
    return -1


def _in_ascii(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    # 2½ is a mixed number: its parts stay apart
    text = re.sub(r"[¼½¾⅐-⅞]", lambda m: f" {unicodedata.normalize('NFKC', m[0])}", text)
    for sign, spelling in _SIGNS.items():
        text = text.replace(sign, spelling)
    return unicodedata.normalize("NFKC", text)


def _words(match: re.Match[str]) -> str:
    """Mark the words: single letters are words after a number (7 m), and variables or choices
    elsewhere."""
    is_unit = match.string[: match.start()].rstrip()[-1:].isdigit()
    word = r"[^\W\d_]+" if is_unit else r"[^\W\d_]{2,}"
    return " " + re.sub(rf"(?<!\\)\b{word}", _word, match[1]) + " "


def _word(match: re.Match[str]) -> str:
    """Mark a word as such; functions and the constants e and i stay mathematics."""
    if re.fullmatch(FUNCTIONS, match[0]):
        return f"\\{match[0]}"
    return match[0] if match[0] in ("e", "i") else f"{WORD}{match[0]}"


def _joined_groups(text: str) -> str:
    """Join digit groups that stand alone: 1,234 and 1 234 become 1234, but (1,234) is a pair."""
    if re.search(r"(?:[\[(]|\\\{)\s*-?\d{1,3}(?:,\d{3})+\s*(?:[,\])]|\\\})", text):
        return text
    text = _GROUPS.sub(lambda m: m[0].replace(",", ""), text)
    return _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
