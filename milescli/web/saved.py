"""Writes the live page as one file: its own scripts and styles, and the server's replies inside, so
that a browser shows a run, a comparison of two, or a sweep, without a server and a network. `miles
report` writes it. Secrets, logins and paths of the machine are left out."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import cast

from milescli import __version__
from milescli.checkpoint.run_dir import RunDir
from milescli.core.history import History
from milescli.insight.samples import read_image
from milescli.insight.timeline import STEP_ACTORS
from milescli.report.chosen_samples import ShownStep
from milescli.report.compare import ALIKE, RunsCompared, figure_rows
from milescli.report.formats import signature
from milescli.report.make import HTML_MARK, without_places
from milescli.report.subject import Subject
from milescli.web import columns, endpoints, evaluations
from milescli.web.files import STATIC, VENDORED
from milescli.web.histories import Histories
from milescli.web.responses import to_json
from milescli.web.run_request import Json, Query, RunRequest
from milescli.web.shown import ShownRun

MAX_STEPS = 1000
"""Largest number of steps whose figures are in the file; if there are more, those with the extremes
of each figure."""
MAX_TIMED_STEPS = 200
"""Number of the newest steps whose phases are in the file."""
MAX_NOTICES = 2000
MAX_POINTS = 300
"""Largest number of points of memory over time."""
MAX_IMAGE_BYTES = 2 * 2**20
"""Largest size of one picture in the file."""
_DIGITS = 5
_OF_PLAN = (
    *("decisions", "slots", "trainer", "engines", "roles", "alternatives", "max_staleness"),
    *("batch", "device_kind", "precision", "colocated"),
)
"""Keys that the page draws; the addresses of nodes are not among them."""
_OF_MANIFEST = (
    *("machine", "miles", "commit", "python", "packages", "data", "seed", "created"),
    "plan_fingerprint",
)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s,;]+")


def run_page(subject: Subject) -> str:
    """Return the page of one run, and of each of its adapters."""
    content = _runs({subject.name: subject})
    return _page(subject.name, content, images=_images([subject]), made_s=subject.made_s)


def compare_page(compared: RunsCompared) -> str:
    """Return the page of two runs, which opens at their comparison."""
    names = compared.a_name, compared.b_name
    both = dict(zip(names, (compared.a, compared.b), strict=True))
    comparison = {
        "names": names,
        "headline": compared.headline,
        "is_seen": compared.is_significant,
        "sentences": compared.sentences,
        "notes": compared.notes,
        "figures": list(figure_rows(compared)),
        "differing": [asdict(one) for one in compared.differing],
        "alike": ALIKE,
        "verdicts": [one.verdict.headline for one in both.values()],
    }
    title = " and ".join(names)
    return _page(
        title,
        {**_runs(both), "comparison": comparison},
        images=_images([compared.a, compared.b]),
        made_s=compared.a.made_s,
    )


def sweep_page(sweep: Json, subjects: Sequence[Subject], *, made_s: float) -> str:
    """Return the page of a sweep, which opens at its trials. `sweep`: the data about all trials;
    `subjects`: the included runs, the most accurate first."""
    content = {**_runs({one.name: one for one in subjects}), "sweep": sweep}
    return _page(str(sweep["name"]), content, images=_images(subjects), made_s=made_s)


# --- what the page asks for


def _runs(subjects: Mapping[str, Subject]) -> Json:
    """Return the list of runs, and by id the replies to all requests of the page about one."""
    listed, answers = [], dict[str, Json]()
    for name, subject in subjects.items():
        adapters = {f"{name}:{one.history.name}": one for one in subject.adapters}
        listed.append(_line(name, subject, adapters=[*adapters]))
        answers[name] = _replies(ShownRun(id=name, run=subject.run), subject, {})
        for own_id, own in adapters.items():
            shown = ShownRun(id=own_id, run=own.run, parent=subject.run)
            answers[own_id] = _replies(shown, own, {subject.run.path: subject.history})
    return {"runs": listed, "answers": answers}


def _line(name: str, subject: Subject, *, adapters: Sequence[str]) -> Json:
    summary = subject.summary
    return {
        "id": name,
        "adapters": adapters,
        "name": name,
        "state": summary.state,
        "step": summary.step,
        "num_steps": summary.num_steps,
        "reward": summary.reward.last if summary.reward else None,
        "accuracy": summary.accuracy.last if summary.accuracy else None,
        "changed_s": summary.last_s,
    }


@dataclass(frozen=True, slots=True)
class _GivenHistories:
    """Provides histories that were read already, in place of `Histories`."""

    by_path: Mapping[Path, History]

    @contextmanager
    def reading(self, run: RunDir) -> Iterator[History]:
        """Provide the history of a run."""
        yield self.by_path[run.path]


def _replies(shown: ShownRun, subject: Subject, above: Mapping[Path, History]) -> Json:
    read = _GivenHistories({**above, subject.run.path: subject.history})

    def request(**query: object) -> RunRequest:
        pairs = tuple((name, str(value)) for name, value in query.items())
        histories = cast(Histories, read)
        return RunRequest(shown=shown, histories=histories, query=Query(pairs))

    notices = [asdict(one) for one in subject.history.notices[-MAX_NOTICES:]]
    return {
        "summary": {**asdict(subject.summary), "error": subject.history.error},
        "why": endpoints.why(request()),
        "beginning": endpoints.beginning(request()),
        "names": columns.names(request()),
        "columns": _columns(subject.history),
        "notices": {"notices": [{**one, "text": _URL.sub("…", one["text"])} for one in notices]},
        "timeline": _timeline(request(first=0), newest=subject.history.step),
        "memory": _memory(request(), subject),
        "recipe": {
            "keys": [
                {"key": one.name, "value": one.value, "origin": one.origin} for one in subject.keys
            ]
        },
        "plan": _select(endpoints.plan(request()), _OF_PLAN),
        "manifest": _select(endpoints.manifest(request()), _OF_MANIFEST),
        "sample-steps": {"steps": [one.step for one in subject.samples]},
        "samples": {one.step: _samples(one) for one in subject.samples},
        "evaluations": _evaluations(request(), subject),
    }


def _select(answer: Json, names: Sequence[str]) -> Json:
    return {name: answer[name] for name in names if name in answer}


def _columns(history: History) -> Json:
    drawn = columns.chart_columns(history.columns, list(history.columns), points=MAX_STEPS)
    short = {
        name: [float(f"{value:.{_DIGITS}g}") for value in values]
        for name, values in drawn["columns"].items()
    }
    return {**drawn, "columns": short}


def _timeline(request: RunRequest, *, newest: int) -> Json:
    answer = endpoints.timeline(request)
    intervals = [
        one
        for one in answer["intervals"]
        if one["actor"] not in STEP_ACTORS or one["step"] > newest - MAX_TIMED_STEPS
    ]
    return {"intervals": intervals, "profiles": answer["profiles"]}


def _memory(request: RunRequest, subject: Subject) -> Json:
    answer, whole = endpoints.memory(request), None
    if subject.memory is not None and subject.memory.curve:
        most = max(size for _, size in subject.memory.curve)
        whole = {"most_bytes": most, "oom_kills": subject.memory.oom_kills}
    points = answer["over_time"]
    return {**answer, "whole": whole, "over_time": points[:: 1 + len(points) // MAX_POINTS]}


def _samples(one: ShownStep) -> Json:
    """Return the best and the worst sample of a step's group whose rewards differ most."""
    samples = [
        {
            "response": sample.text,
            "reward": sample.reward,
            "stop_reason": sample.stop_reason,
            "returned_images": sample.returned_images,
        }
        for sample in one.samples
    ]
    group = {
        "prompt_index": one.prompt_index,
        "prompt": one.prompt,
        "images": one.images,
        "label": one.label,
    }
    return {"step": one.step, "groups": [{**group, "rewards": one.rewards, "samples": samples}]}


def _images(subjects: Iterable[Subject]) -> dict[str, str]:
    """Return the pictures of the samples that are shown, as data URLs by hash. One that is too
    large for a page is left out."""
    found = dict[str, str]()
    for subject in (part for one in subjects for part in (one, *one.adapters)):
        shown = (
            sha256
            for step in subject.samples
            for images in (step.images, *(sample.returned_images for sample in step.samples))
            for sha256 in images
        )
        for sha256 in shown:
            png = read_image(subject.run, sha256)
            if png is not None and len(png) <= MAX_IMAGE_BYTES:
                found[sha256] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return found


def _evaluations(request: RunRequest, subject: Subject) -> Json:
    """Return the results without the files of their samples, which are not in the page."""
    answer = evaluations.evaluations(request)
    intervals = {one.step: one.interval for one in subject.evaluations if one.interval}
    for one in answer["evaluations"]:
        if (interval := intervals.get(one["step"])) is not None:
            one["interval"] = asdict(interval)
    for one in (*answer["evaluations"], *answer["sets"]):
        one.pop("path", None)
    return answer


# --- the file


def _page(title: str, content: Json, *, images: Mapping[str, str], made_s: float) -> str:
    """Return the whole file. Its content policy allows only its own script and style, by their
    hashes; no text in it can end the element that contains it."""
    note = (
        f"{signature(made_s)} One file: it loads nothing from anywhere. Paths, logins and secrets "
    )
    content = without_places({**content, "note": f"{note}are left out."})
    data = to_json({**content, "images": images}).decode()
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    style = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (VENDORED / "uplot/uPlot.min.css", STATIC / "style.css", STATIC / "pages.css")
    )
    chart = (VENDORED / "uplot/uPlot.iife.min.js").read_text(encoding="utf-8")
    licence = (VENDORED / "uplot/LICENSE").read_text(encoding="utf-8")
    script = f"/*\n{licence}*/\n{chart}\n{_script('theme.js')}\n{_bundle()}"
    for text in (style, script):
        assert not re.search(r"</(script|style)|<!--", text, re.IGNORECASE)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    frame = index[index.index("<body>") : index.index("<noscript>")]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            HTML_MARK,
            f'<meta name="miles-version" content="{escape(__version__)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}: report</title>",
            f"<style>{style}</style>",
            "</head>",
            f"{frame}<noscript>This page needs JavaScript to draw what it holds.",
            "<code>miles report RUN</code> says the same as text.</noscript>",
            f'<script type="application/json" id="saved">{data}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


_MARGIN = re.compile(r"^ *((//[^\n]*|/\*\*.*?\*/)\n)?", re.MULTILINE | re.DOTALL)


def _script(name: str) -> str:
    """Return a script of the page without its comments and indentation."""
    return _MARGIN.sub("", (STATIC / name).read_text(encoding="utf-8"))


def _bundle() -> str:
    """Return the page's modules as one script, because a browser refuses imports in a page opened
    from a file: each module becomes a function that fills `exports`, called at its first import."""
    modules = "\n".join(
        f'"{file.name}"(exports, need) {{\n{_as_function(_script(file.name))}}},'
        for file in sorted(STATIC.glob("*.js"))
        if file.name != "theme.js"
    )
    return (
        f'"use strict";\n(() => {{\nconst modules = {{\n{modules}\n}};\nconst made = {{}};\n'
        "function need(name) {\n"
        "  if (!made[name]) modules[name](made[name] = {}, need);\n"
        '  return made[name];\n}\nneed("app.js");\n})();'
    )


def _as_function(text: str) -> str:
    """Rewrite a module's imports and exports, which must be at the beginning of a line."""
    rules = (
        (r"^import \* as (\w+) from \"\./([\w.]+)\";", r'const \1 = need("\2");'),
        (r"^import (\{[^}]*\}) from \"\./([\w.]+)\";", r'const \1 = need("\2");'),
        (r"^export (async function|function) (\w+)", r"exports.\2 = \2;\n\1 \2"),
        (r"^export class (\w+)", r"const \1 = exports.\1 = class \1"),
        (r"^export const (\w+)", r"const \1 = exports.\1"),
        (r"import\(`\./([^`]+)`\)", r"Promise.resolve().then(() => need(`\1`))"),
    )
    for pattern, rewritten in rules:
        text = re.sub(pattern, rewritten, text, flags=re.MULTILINE)
    left = re.search(r"^(import|export)\b", text, re.MULTILINE)
    assert left is None, text[left.start() : left.start() + 80] if left else ""
    return text
