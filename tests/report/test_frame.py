"""HTML that is made of text: nothing of it is markup unless it was made here."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from milescli.report.frame import el, table


@given(said=st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=40))
def test_any_text_comes_back_as_it_was(said: str) -> None:
    seen: list[str] = []
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            seen.append(data)

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            seen.extend(value or "" for _, value in attrs)

    Reader().feed(el("p", said, cls=f"x{said}"))
    assert tags == ["p"] and "".join(seen) == f"x{said}{said}"


def test_tables_know_numbers_from_words() -> None:
    made = table(["a", "b"], [("12%", "word"), ("-3", None)])
    assert made.count('class="number"') == 2 and '<th scope="col">a</th>' in made
    assert el("p", None, "a < b", cls="", id="x") == '<p id="x">a &lt; b</p>'
