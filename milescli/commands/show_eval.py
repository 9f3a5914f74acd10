"""Results of `miles eval` on the screen and as JSON: a table of figures, one by domain, and the
curve over the steps that were evaluated so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from milescli.console import theme
from milescli.console.columns import percent
from milescli.console.output import Output
from milescli.core.units import format_duration
from milescli.rollout.evaluation.statistics import LEVEL, Estimate
from milescli.runtime.evaluation.results import Comparison, SetResult, folder_of, results_of

_CURVE_WIDTH = 40


def show_results(results: Sequence[SetResult], *, folder: Path, output: Output) -> None:
    """`folder`: of the run, or wherever `eval/` was made."""
    for result in results:
        fields = asdict(result)
        del fields["rewards"]
        output.json("eval", {"run": str(folder), "fingerprint": result.fingerprint, **fields})
    names = list(dict.fromkeys(name for result in results for name in result.estimates))
    output.table(
        ["step", "set", "prompts", *names, "truncated", "tokens", "took"],
        [
            [
                result.step,
                result.set,
                result.num_prompts,
                *(_shown(result.estimates.get(name)) for name in names),
                f"{result.truncated_fraction:.1%}",
                _tokens(result),
                format_duration(result.seconds),
            ]
            for result in results
        ],
        title=f"evaluation of {results[0].model} (±: half of the {LEVEL:.0%} interval)",
    )
    _show_domains(results, output)
    _show_curves(results, folder, output)
    output.note(f"samples and results: {folder / Path(results[-1].path).parent}")


def show_comparisons(comparisons: Sequence[Comparison], *, output: Output) -> None:
    """A plain sentence for each set."""
    output.blank()
    for one in comparisons:
        output.json("comparison", asdict(one))
        output.text(f"{one.set}: {one.sentence}")
        if one.other_settings:
            output.warn(
                f"{one.set}: the two were asked otherwise, by {', '.join(one.other_settings)}"
            )


def _shown(estimate: Estimate | None) -> str | None:
    """61.2% ±3.0; of rewards that are no shares 2.412 ±0.201"""
    if estimate is None:
        return None
    half = (estimate.high - estimate.low) / 2
    spread = f"{100 * half:.1f}" if 0.0 <= estimate.value <= 1.0 else f"{half:.3f}"
    return f"{percent(estimate.value)} ±{spread}"


def _tokens(result: SetResult) -> str | None:
    mean = result.response_tokens_mean
    return None if mean is None else f"{mean:.0f}"


def _show_domains(results: Sequence[SetResult], output: Output) -> None:
    rows = [
        [result.step, result.set, name, score.num_prompts, _shown(score.accuracy)]
        for result in results
        for name, score in result.domains.items()
    ]
    if rows:
        output.blank()
        output.table(["step", "set", "domain", "prompts", "accuracy"], rows, title="by domain")


def _show_curves(results: Sequence[SetResult], folder: Path, output: Output) -> None:
    """Of the sets that were asked under the same settings at several steps, now or before."""
    rows = []
    for latest in {result.set: result for result in results}.values():
        kept = results_of(folder / "eval", folder_of(latest.set))
        points = [one for one in kept if one.fingerprint == latest.fingerprint]
        if len(points) > 1:
            curve = theme.sparkline([one.accuracy for one in points], _CURVE_WIDTH)
            first, last = points[0], points[-1]
            said = (
                f"{percent(first.accuracy)} at step {first.step}, "
                f"{percent(last.accuracy)} at {last.step}"
            )
            rows.append([latest.set, curve, said])
    if rows:
        output.blank()
        output.table(["set", "curve", "accuracy"], rows, title="over steps")
