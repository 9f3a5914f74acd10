"""The report of `miles why` as one page of text."""

from __future__ import annotations

from milescli.autopsy.why import Why


def page(why: Why) -> str:
    """One line where nothing went wrong."""
    if not why.is_bad:
        return why.summary
    lines = [why.summary]
    if why.cause is not None:
        lines += _part("cause", [str(why.cause["error"]), *str(why.cause["why"]).splitlines()])
    if why.first is not None:
        where = f", {why.first_log}" if why.first_log else ", of which there is no log here"
        lines += _part(f"died first: {why.first}{where}", why.last_lines.splitlines())
    lines += _part(
        f"attempt {why.attempt} (UTC)",
        [f"{time[11:19]:8}  {text}" for time, text in why.timeline],
    )
    if why.memory is not None:
        lines += _part("memory", why.memory.lines())
    kernel = ["its log may not be read by this user"] if why.kernel is None else why.kernel
    lines += _part("kernel", kernel or ["says nothing of memory or GPUs since the attempt began"])
    lines += _part("next", why.next)
    return "\n".join(lines)


def _part(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []
