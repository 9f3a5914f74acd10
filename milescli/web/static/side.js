// The list of runs: state, step, reward; ticks lay several over each other in the curves.

import { lineStyle } from "./chart.js";
import { h, show } from "./dom.js";
import { number, percent } from "./format.js";
import { saved } from "./saved.js";
import { adapterName } from "./states.js";
import { view } from "./view.js";

/** Draw the list into `side`. `runs`: as /api/runs tells them. */
export function drawSide(side, runs, current, themeButton) {
  const focused = document.activeElement?.id;
  const scroll = side.scrollTop;
  show(
    side,
    h("div", { class: "brand" }, !saved && h("img", { src: "static/icon.svg", alt: "" }), "miles"),
    h("h2", { id: "runs-title" }, title(runs.length)),
    h("ul", { "aria-labelledby": "runs-title" }, runs.map((run) => item(run, current, runs))),
    h("p", { class: "muted small side-note" }, noteText(runs)),
    saved && h("p", { class: "muted small side-note" }, saved.note),
    h(
      "div",
      { class: "row side-foot" },
      themeButton,
      h(
        "button",
        { class: "plain", id: "keys-button",
          on: { click: () => dispatchEvent(new Event("keys")) } },
        "Keys ",
        h("kbd", {}, "?"),
      ),
    ),
  );
  side.scrollTop = scroll;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

/** How many runs there are, with the way to their table. */
function title(count) {
  if (count === 1) return "Run";
  const text = `${count} runs`;
  return saved ? text : h("a", { id: "all-runs", href: view.href({ page: "runs" }) }, text);
}

function noteText(runs) {
  if (runs.length > 1) {
    return saved ? "Tick runs to compare them in the curves."
      : "Tick runs to compare them in the curves. Click the number of runs to see "
        + "all of them in a table.";
  }
  return saved ? "" : "Further runs of this folder show up here by themselves, with a tick to "
    + "compare them in the curves.";
}

function item(run, current, runs) {
  const compared = view.list("with");
  const isCurrent = run.id === current || run.adapters?.includes(current);
  const steps = run.num_steps ? `${run.step ?? 0}/${run.num_steps}` : `${run.step ?? 0}`;
  const gained = [
    Number.isFinite(run.reward) && `reward ${number(run.reward, 3)}`,
    Number.isFinite(run.accuracy) && `accuracy ${percent(run.accuracy, 1)}`,
  ].filter(Boolean);
  const tick = h("input", {
    type: "checkbox",
    id: `with-${run.id}`,
    "aria-label": `Compare ${run.name}`,
    disabled: isCurrent,
    prop: { checked: isCurrent || compared.includes(run.id) },
    on: {
      change: (event) => {
        const others = compared.filter((id) => id !== run.id);
        view.set({ with: event.target.checked ? [...others, run.id] : others });
      },
    },
  });
  return h(
    "li",
    { class: isCurrent ? "run current" : "run" },
    runs.length > 1 && tick,
    h(
      "a",
      {
        id: `run-${run.id}`,
        href: view.href({ run: run.id, with: compared.filter((id) => id !== run.id) }),
        "aria-current": run.id === current ? "true" : null,
      },
      h("span", { class: "name" }, swatchOf(run.id, current, runs), run.name),
      h(
        "span",
        { class: "figures" },
        h("span", {}, h("span", { class: `dot ${run.state}` }), `${run.state} · step ${steps}`),
        gained.map((text) => h("span", { class: "gained" }, text)),
      ),
    ),
    run.adapters?.length > 0 && adapters(run, current),
  );
}

/** The colour of a run's lines in the curves, where there are several. */
export function swatchOf(id, current, runs) {
  const known = new Set(runs.flatMap((run) => [run.id, ...(run.adapters ?? [])]));
  const others = [...view.list("with"), view.get("base")].filter((one) => known.has(one));
  const shown = [...new Set([current, ...others])]; // in the order of the curves
  const place = shown.indexOf(id);
  if (place < 0 || shown.length < 2) return null;
  return h("span", { class: "swatch", "aria-hidden": "true",
    style: { background: lineStyle(place).stroke } });
}

/** Of a run that trains several: each has figures of its own. */
function adapters(run, current) {
  return h(
    "ul",
    { class: "adapters", "aria-label": `Adapters of ${run.name}` },
    run.adapters.map((id) =>
      h("li", {}, h("a", { id: `run-${id}`, href: view.href({ run: id }),
        "aria-current": id === current ? "true" : null }, adapterName(id)))),
  );
}
