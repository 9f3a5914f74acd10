// Memory: what the plan expects of a device, what was measured there, and the processes over time.

import { Chart } from "./chart.js";
import { h, show, showOther, withCode } from "./dom.js";
import { bytes, percent } from "./format.js";
import { empty, Loaded } from "./states.js";

const MOST_LINES = 6;
const MOST_ROWS = 6;
const ALL = "all-processes";
const COLOURS = ["rollout", "train", "publish", "pack", "eval", "save", "accent"];

export function open(root, context) {
  let chart = null;
  let isWhole = false;
  const [planned, measured, over] = [h("div", {}), h("div", {}), h("div", {})];
  show(root, planned, measured, over);
  const loaded = new Loaded(root, {
    load: (signal) => Promise.all([
      context.ask("memory", null, { signal }),
      context.ask("plan", null, { signal }),
    ]),
    draw: ([answer, plan]) => {
      if (!root.contains(over)) show(root, planned, measured, over);
      showOther(planned, plans(answer, plan));
      showOther(measured, devices(answer, context.summary), processes(answer, isWhole, () => {
        isWhole = !isWhole;
        loaded.refresh();
      }));
      chart = drawOver(over, answer.over_time, chart);
    },
  });
  loaded.refresh();
  return {
    refresh: () => loaded.renew(),
    poll: () => loaded.renew(), // it is measured between events, too
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

/** Of GPUs: what each rank or engine reported. The most is never below what is held now. */
function devices({ measured }, summary) {
  const seen = measured.filter((one) => one.total_bytes || one.device !== "cpu");
  if (!seen.length) return null;
  const planned = new Map((summary?.memory ?? []).map((one) => [one.worker, one.planned_bytes]));
  const rows = seen.map((one) => [one.worker, String(one.device ?? ""), one.used_bytes,
    largest([one.used_bytes, one.peak_bytes]), largest([one.reserved_bytes]),
    planned.get(one.worker), one.total_bytes]);
  return measuredCard("Memory of devices: last seen, and the most",
    ["Worker", "Device", "last seen", "most", "reserved", "planned", "of"], rows);
}

/** In main memory: what the watchdog saw, and what the processes themselves reported as their most. */
function processes({ over_time: points, measured, whole }, isWhole, toggle) {
  const seen = new Map();
  const at = (worker) => {
    const name = worker.replaceAll(" ", "-");
    if (!seen.has(name)) seen.set(name, { name, now: null, most: null });
    return seen.get(name);
  };
  for (const point of points) {
    for (const [worker, size] of Object.entries(point.resident_bytes)) {
      const one = at(worker);
      Object.assign(one, { now: size, most: largest([one.most, size]) });
    }
  }
  for (const process of measured.filter((one) => one.device === "cpu")) {
    const one = at(process.worker);
    one.most = largest([one.most, process.used_bytes, process.peak_bytes]);
  }
  const all = [...seen.values()].sort((a, b) => b.most - a.most);
  if (!all.length) {
    return h("section", { class: "card", "aria-label": "What was measured" },
      h("h2", {}, "What was measured"),
      h("p", { class: "muted" }, "Nothing yet: what each process holds in main memory is written "
        + "down every ten seconds, and on GPUs ranks and engines tell what they hold there."));
  }
  const rows = (isWhole ? all : all.slice(0, MOST_ROWS)).map((one) =>
    [one.name, one.now, one.most]);
  const more = all.length > MOST_ROWS && h("button", { class: "link", id: ALL, "aria-expanded":
    String(isWhole), on: { click: toggle } },
  isWhole ? `Only the ${MOST_ROWS} largest` : `Show all ${all.length} processes`);
  const together = whole && h("p", { class: "muted small" },
    `All processes on the driver's computer: ${bytes(whole.most_bytes)} at most`,
    whole.oom_kills > 0 && `; the kernel ended ${whole.oom_kills} of them`, ".");
  return measuredCard("Main memory of each process: last seen, and the most",
    ["Process", "last seen", "most"], rows, [more, together]);
}

/** Columns of which no row has a value are left out. */
function measuredCard(title, heads, rows, more = null) {
  const kept = heads.map((_, at) => at).filter((at) =>
    rows.some((row) => row[at] !== null && row[at] !== undefined && row[at] !== ""));
  const say = (value) => (typeof value === "string" ? value : bytes(value));
  return h(
    "section",
    { class: "card", "aria-label": title },
    h("h2", {}, title),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${title}` },
      h("table", {},
        h("thead", {}, h("tr", {}, kept.map((at) => h("th", { scope: "col" }, heads[at])))),
        h("tbody", {}, rows.map((row) => h("tr", {}, kept.map((at) => at === 0
          ? h("th", { scope: "row" }, row[0]) : h("td", {}, say(row[at])))))))),
    more,
  );
}

function largest(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? Math.max(...known) : null;
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
  const options = { title: "Main memory by process", isTime: true, isBytes: true, say: bytes,
    about: `The ${names.length} largest of ${most.size} processes` };
  if (chart) {
    chart.update(lines, options);
    return chart;
  }
  show(root);
  return new Chart(root, lines, options);
}
