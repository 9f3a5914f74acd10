// The share of each phase over steps, as a stack of areas.

import { h, show } from "./dom.js";
import { counted, percent } from "./format.js";
import { phaseColour, swatch } from "./phases.js";
import { numRecent } from "./series.js";
import { empty } from "./states.js";
import { colour } from "./switch.js";

/** Draw it; returns {close}. `answer` holds time/PHASE_s and time/step_s; `newest` the phases of a
 * summary: what is told while the cursor is not over a step. */
export function drawShares(root, answer, phases, newest) {
  const whole = answer.columns["time/step_s"] ?? [];
  const spent = new Map(phases.map((name) => [name, answer.columns[`time/${name}_s`] ?? []]));
  const shown = phases.filter((name) => spent.get(name).some((value) => value > 0));
  if (answer.steps.length === 0 || !shown.length) {
    show(root, empty("No step is done yet", "Shares show up with the first steps."));
    return { close() {} };
  }
  const shares = shown.map((name) => answer.steps.map((_, at) => {
    const share = spent.get(name)[at] / whole[at];
    return Number.isFinite(share) ? share : 0;
  }));
  const values = shown.map(() => h("b", {}, ""));
  const shareOf = new Map(newest.map((one) => [one.name, one.share]));
  const resting = shown.map((name) => shareOf.get(name) ?? 0);
  const inWords = shown.map((name, at) => `${name} ${percent(resting[at])}`);
  const window = `mean of the last ${counted(numRecent(answer.num_steps), "step")}`;
  const which = h("span", { class: "muted" }, "");
  const place = h("div", { class: "plot", role: "img",
    "aria-label": `Shares of a step, ${window}: ${inWords.join(", ")}` });
  show(
    root,
    h("ul", { class: "keys" }, shown.map((name, at) =>
      h("li", {}, swatch(name), ` ${name} `, values[at])), h("li", {}, which)),
    place,
  );
  const tell = (index) => {
    const isResting = index === null || index === undefined;
    which.textContent = isResting ? window : `step ${answer.steps[index]}`;
    shown.forEach((_, at) => {
      values[at].textContent = percent(isResting ? resting[at] : shares[at][index]);
    });
  };
  const plot = new uPlot(settings(place.clientWidth, shown, tell),
    [answer.steps, ...stacked(shares)], place);
  tell(null);
  const observer = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  });
  observer.observe(place);
  const redraw = () => plot.redraw(false, true);
  addEventListener("theme", redraw);
  return { close() {
    removeEventListener("theme", redraw);
    observer.disconnect();
    plot.destroy();
  } };
}

/** The highest first, so that each covers the lower part of the one before. */
function stacked(shares) {
  const sums = [];
  let below = shares[0].map(() => 0);
  for (const share of shares) {
    below = share.map((value, at) => Math.min(1, value + below[at]));
    sums.push(below);
  }
  return sums.reverse();
}

function settings(width, shown, tell) {
  const grid = { stroke: () => colour("line"), width: 1 };
  const axis = { stroke: () => colour("muted"), grid, ticks: { ...grid, size: 4 },
    font: "12px system-ui, sans-serif" };
  const whole = (_, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));
  return {
    width: width || 600,
    height: 190,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [{ ...axis, size: 28, values: whole },
      { ...axis, size: 58, values: (_, splits) => splits.map((value) => percent(value)) }],
    series: [{}, ...[...shown].reverse().map((name) => ({
      fill: () => colour(phaseColour(name)),
      width: 0,
      points: { show: false },
    }))],
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    hooks: { setCursor: [(plot) => tell(plot.cursor.idx)] },
  };
}
