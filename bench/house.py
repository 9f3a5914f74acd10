"""How large the house is, and how many files its everyday journey crosses:

    python bench/house.py [--json]

Lines of code are those that hold a token other than comments, docstrings and imports."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "milescli"
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
DRY_RUN = ["launch", "--recipe", "quickstart", "--dry-run"]
SHORT_FILE = 60
INLINE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def code_lines(text: str) -> int:
    """Lines of a module that are neither blank, comment, docstring nor import."""
    tree = ast.parse(text)
    left_out = set[int]()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            is_text and isinstance(node.value.value, str)
        ):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - left_out)


def figures_of(folder: Path) -> dict[str, float]:
    """Lines, lines of code and files of all Python below `folder`."""
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    lines = [text.count("\n") for text in texts]
    return {
        "files": len(texts),
        "lines": sum(lines),
        "code": sum(map(code_lines, texts)),
        "median_file": statistics.median(lines),
        "short_files": sum(0 < each < SHORT_FILE for each in lines),
    }


def recipe_keys() -> int:
    """Keys that a recipe may set."""
    from milescli.recipe.schema import Recipe

    def leaves(model: type) -> int:
        fields = getattr(model, "model_fields", {})
        return sum(
            leaves(field.annotation) if hasattr(field.annotation, "model_fields") else 1
            for field in fields.values()
        )

    return leaves(Recipe)


def files_of_dry_run() -> dict[str, int]:
    """Files of the package of which a dry run of the quickstart executes a function; and those of
    which it executes a function or, as it imports them, the body of a class."""
    from milescli.commands.app import main

    seen, with_classes = set[str](), set[str]()

    def note(frame, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":
            return
        with_classes.add(code.co_filename)
        # the body of a class has no locals of its own
        if code.co_flags & inspect.CO_NEWLOCALS and code.co_name not in INLINE:
            seen.add(code.co_filename)

    sys.argv = ["miles", *DRY_RUN]
    sys.setprofile(note)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    sys.setprofile(None)
    ours = [sum(name.startswith(str(PACKAGE)) for name in files) for files in (seen, with_classes)]
    return {"functions": ours[0], "functions_and_classes": ours[1]}


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    figures = {
        "package": figures_of(PACKAGE),
        "tests": figures_of(ROOT / "tests"),
        "recipe_keys": recipe_keys(),
        "dry_run_files": files_of_dry_run(),
    }
    if asked.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        told = (
            ", ".join(f"{k} {v:,.0f}" for k, v in value.items())
            if isinstance(value, dict)
            else value
        )
        print(f"{name:14} {told}")


if __name__ == "__main__":
    main()
