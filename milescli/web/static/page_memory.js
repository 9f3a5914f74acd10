// Memory: what the plan expects of a device, what was measured there, and the processes over time.

import { Chart } from "./chart.js";
import { h, show } from "./dom.js";
import { bytes, percent, words } from "./format.js";
import { withCode } from "./verdict.js";
import { empty, Loaded } from "./states.js";

const MOST_LINES = 6;
const COLOURS = ["rollout", "train", "publish", "pack", "eval", "save", "accent"];

export function open(root, context) {
  let chart = null;
  const [planned, measured, over] = [h("div", {}), h("div", {}), h("div", {})];
  show(root, planned, measured, over);
  const loaded = new Loaded(root, {
    load: (signal) => Promise.all([
      context.ask("memory", null, { signal }),
      context.ask("plan", null, { signal }),
    ]),
    draw: ([answer, plan]) => {
      if (!root.contains(over)) show(root, planned, measured, over);
      show(planned, plans(answer, plan));
      show(measured, devices(answer, context.summary));
      chart = drawOver(over, answer.over_time, chart);
    },
  });
  loaded.refresh();
  return {
    refresh: () => loaded.refresh(),
    close: () => {
      loaded.close();
      chart?.close();
    },
  };
}

function plans(answer, plan) {
  if (!answer.planned.length) {
    const reason = plan.decisions?.find((one) => one.key === "memory");
    return h(
      "section",
      { class: "card", "aria-label": "What the plan expects" },
      h("h2", {}, "What the plan expects"),
      reason
        ? [h("p", { class: "big" }, reason.value),
          h("p", { class: "muted" }, withCode(reason.reason))]
        : h("p", { class: "muted" }, "This plan forecasts no memory."),
    );
  }
  const whole = answer.memory_bytes;
  return h(
    "section",
    { class: "card stack", "aria-label": "What the plan expects" },
    h("h2", {}, `What the plan expects of one ${answer.device ?? "device"}, of ${bytes(whole)}`),
    answer.planned.map((phase) => phaseParts(phase, whole)),
  );
}

function phaseParts({ phase, parts }, whole) {
  const shown = parts.filter((part) => part.size_bytes > 0);
  const used = shown.reduce((sum, part) => sum + part.size_bytes, 0);
  const fill = (at) =>
    `var(--${shown[at].name === "margin" ? "other" : COLOURS[at % COLOURS.length]})`;
  return h(
    "div",
    {},
    h("h3", {}, `While ${phase === "rollout" ? "engines generate" : "the trainer works"}: `,
      `${bytes(used)}${whole ? ` (${percent(used / whole)})` : ""}`),
    h("div", { class: "bar", "aria-hidden": "true" },
      shown.map((part, at) => h("span", { title: `${part.name} ${bytes(part.size_bytes)}`,
        style: { "flex-grow": part.size_bytes, background: fill(at) } })),
      whole > used && h("span", { class: "free", style: { "flex-grow": whole - used } })),
    h("ul", { class: "keys" }, shown.map((part, at) =>
      h("li", {}, h("span", { class: "swatch", style: { background: fill(at) } }), ` ${part.name} `,
        h("b", {}, bytes(part.size_bytes)), h("span", { class: "muted" }, ` ${part.basis}`)))),
  );
}

function devices({ measured: told }, summary) {
  const planned = new Map((summary?.memory ?? []).map((one) => [one.worker, one.planned_bytes]));
  const measured = told.map((one) => ({ ...one, planned_bytes: planned.get(one.worker) }));
  if (!measured.length) {
    return h("section", { class: "card", "aria-label": "What was measured" },
      h("h2", {}, "What was measured"),
      h("p", { class: "muted" },
        "No process told of the memory of a device. On a CPU all is in main "
        + "memory: see below. On GPUs, ranks and engines tell here what they hold as the run "
        + "goes on."));
  }
  const names = [...new Set(measured.flatMap((one) => Object.keys(one)))].filter(
    (name) => name !== "worker" && measured.some((one) => one[name] !== null
      && one[name] !== undefined));
  const say = (name, value) => (name.endsWith("_bytes") ? bytes(value) : String(value ?? ""));
  return h(
    "section",
    { class: "card", "aria-label": "What was measured" },
    h("h2", {}, "What was measured last"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Measured, by worker" },
      h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Worker"), names.map((name) =>
          h("th", { scope: "col" }, words(name.replace(/_bytes$/, "")))))),
        h("tbody", {}, measured.map((one) => h("tr", {}, h("th", { scope: "row" }, one.worker),
          names.map((name) => h("td", {}, say(name, one[name])))))))),
  );
}

/** Main memory of the largest processes, over time. */
function drawOver(root, points, chart) {
  if (points.length < 2) {
    chart?.close();
    show(root, empty("No record over time yet",
      "What each process holds in main memory is written down every ten seconds."));
    return null;
  }
  const most = new Map();
  for (const point of points) {
    for (const [name, size] of Object.entries(point.resident_bytes)) {
      most.set(name, Math.max(most.get(name) ?? 0, size));
    }
  }
  const names = [...most].sort((a, b) => b[1] - a[1]).slice(0, MOST_LINES).map(([name]) => name);
  const begin = points[0].time_s;
  const xs = points.map((point) => point.time_s - begin);
  const lines = names.map((name, place) => ({ name, place, xs,
    ys: points.map((point) => point.resident_bytes[name] ?? null) }));
  const options = { title: "Main memory by process", isTime: true, say: bytes,
    about: `The ${names.length} largest of ${most.size} processes` };
  if (chart) {
    chart.update(lines, options);
    return chart;
  }
  show(root);
  return new Chart(root, lines, options);
}
