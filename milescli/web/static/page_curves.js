// Curves: any figures of steps, of several runs over each other.

import { Chart } from "./chart.js";
import { chooser } from "./chooser.js";
import { h, keepingFocus, settled, show } from "./dom.js";
import { number } from "./format.js";
import { fetchLines } from "./lines.js";
import { nearest } from "./series.js";
import { adaptersCard, empty, Loaded, problem } from "./states.js";
import { view } from "./view.js";

const FIRST = [
  "rollout/reward_mean",
  "eval/accuracy",
  "train/loss",
  "train/entropy",
  "train/grad_norm",
  "rollout/response_tokens_mean",
  "train/logprob_diff_max",
  "time/step_s",
];
const NUM_FIRST = 6;
const MOST = 24;
const MOST_POINTS = 20_000; // of a table that is saved

export function open(root, context) {
  return new Curves(root, context);
}

class Curves {
  constructor(root, context) {
    Object.assign(this, { root, context, charts: new Map(), columns: [], steps: [] });
    this.tools = h("div", { class: "tools card" });
    this.slider = h("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: 0,
      on: { input: ({ target }) =>
        view.set({ smooth: Number(target.value) || null }, { replace: true }) } });
    this.smooth = h("output", {});
    this.list = h("div", { class: "chooser" });
    this.grid = h("div", { class: "charts" });
    show(root, this.tools, h("div", { class: "curves" }, this.list, this.grid));
    this.loaded = new Loaded(this.grid, {
      load: (signal) => this.load(signal),
      draw: (answer) => this.draw(answer),
    });
    this.later = settled(() => this.loaded.refresh(), 60);
    this.onKey = (event) => this.key(event.detail);
    addEventListener("page-key", this.onKey);
    this.grid.setAttribute("aria-busy", "true");
    this.start();
  }

  async start() {
    try {
      this.columns = await this.names();
    } catch (error) {
      this.grid.removeAttribute("aria-busy");
      show(this.grid, problem(error, () => this.start()));
      return;
    }
    if (this.loaded.isClosed) return;
    this.drawTools();
    this.drawList();
    this.shown = this.signature();
    this.loaded.refresh();
  }

  async names() {
    const ids = [this.context.run, ...this.context.compared];
    const all = await Promise.all(
      ids.map(async (id) => {
        const [names, measured] = await Promise.all([
          this.context.askOf(id, "names"),
          this.context.askOf(id, "evaluations"),
        ]);
        const of = (list, section) =>
          [...new Set(list.flatMap((one) => Object.keys(one.figures ?? {})))].map((name) =>
            `${section}/${name}`);
        const more = [
          ...(measured.evaluations.length ? ["eval/accuracy"] : []),
          ...of(measured.evaluations, "eval"),
          ...(measured.validations.length ? ["validation/loss"] : []),
          ...of(measured.validations, "validation"),
        ];
        const extra = more.map((name) => ({ name, section: name.split("/")[0], unit: "",
          about: "" }));
        return [...names.columns, ...extra];
      }),
    );
    return [...new Map(all.flat().map((column) => [column.name, column])).values()];
  }

  chosen() {
    const asked = view.list("columns");
    const known = new Set(this.columns.map((column) => column.name));
    if (asked.length) return asked.filter((name) => known.has(name)).slice(0, MOST);
    if (view.get("columns") === "-") return [];
    return FIRST.filter((name) => known.has(name)).slice(0, NUM_FIRST);
  }

  signature() {
    const names = ["columns", "smooth", "x", "log", "from", "to", "marks"];
    return names.map((name) => view.get(name)).join("|");
  }

  changed() {
    const now = this.signature();
    if (now !== this.shown) {
      this.shown = now;
      this.drawTools();
      this.drawList();
      this.grid.setAttribute("aria-busy", "true");
      this.later();
    }
    const at = this.at();
    if (at === this.marked) return;
    this.marked = at;
    this.drawStep();
    for (const chart of this.charts.values()) chart.mark(at);
  }

  async refresh() {
    if (this.columns.length === 0) {
      this.start();
      return;
    }
    const isOpen = this.loaded.isDrawn; // else the figures were asked for a moment ago
    this.loaded.renew();
    if (isOpen) await this.findNew();
  }

  /** Figures that came since, such as those of the first evaluation. */
  async findNew() {
    const columns = await this.names().catch(() => this.columns); // `loaded` tells of what fails
    if (columns.length === this.columns.length || this.loaded.isClosed) return;
    this.columns = columns;
    this.drawList();
    this.loaded.renew();
  }

  /** With the names that were asked for: others may be chosen before the answer is there. */
  async load(signal) {
    const names = this.chosen();
    return { names, ...(await this.fetch(names, { signal })) };
  }

  fetch(names, options) {
    const [first, last] = [view.number("from"), view.number("to")];
    const isTime = view.get("x") === "time";
    return fetchLines(this.context, names, { first, last, isTime, ...options });
  }

  draw({ names, lines, steps, times }) {
    Object.assign(this, { steps, times });
    if (!names.length) {
      this.forget();
      const { adapters } = this.context;
      if (adapters.length && !this.columns.length) {
        show(this.grid, adaptersCard(adapters, (id) => view.href({ run: id })));
        return;
      }
      show(this.grid, this.columns.length
        ? empty("No curve is chosen", "Tick some in the list.")
        : empty("No figures yet", "Curves show up here with the first step that is done."));
      return;
    }
    const isLess = [...this.charts.keys()].some((name) => !names.includes(name));
    if (isLess || !this.charts.size || !this.loaded.isDrawn) {
      this.forget();
      show(this.grid);
    }
    const range = this.range() ?? shared(names.flatMap((name) => lines.get(name)));
    for (const name of names) {
      const options = { ...this.options(name), range };
      const chart = this.charts.get(name);
      if (chart) chart.update(lines.get(name), options);
      else this.charts.set(name, new Chart(this.grid, lines.get(name), options));
    }
  }

  options(name) {
    const column = this.columns.find((one) => one.name === name);
    const marks = view.get("marks").split("-").map(Number);
    return {
      title: name,
      about: column.about,
      unit: column.unit,
      smooth: view.number("smooth", 0),
      isLog: view.get("log") === "1",
      isTime: view.get("x") === "time",
      marks: marks.length === 2 && marks.every(Number.isFinite) ? marks.map((s) => this.toX(s))
        : null,
      at: this.at(),
      sync: "curves",
      onZoom: (low, high) => {
        const [from, to] = [low, high].map((x) => this.toStep(x));
        view.set({ from, to: to > from ? to : from + 1 });
      },
      onReset: () => view.set({ from: null, to: null }),
      onPick: (x) => view.set({ step: this.toStep(x) }, { replace: true }),
      onCursor: (x) => this.drawStep(x),
      fetchAll: async () => (await this.fetch([name], { points: MOST_POINTS })).lines.get(name),
      remove: () => this.choose(this.chosen().filter((one) => one !== name)),
    };
  }

  /** A step as a place on the axis, and back. */
  toX(step) {
    return view.get("x") === "time" ? this.times[nearest(this.steps, step)] : step;
  }

  toStep(x) {
    return view.get("x") === "time" ? this.steps[nearest(this.times, x)] : Math.round(x);
  }

  at() {
    const step = view.number("step");
    return step === null || !this.steps.length ? null : this.toX(step);
  }

  range() {
    const [from, to] = [view.number("from"), view.number("to")];
    return from === null || to === null ? null : [this.toX(from), this.toX(to)];
  }

  forget() {
    for (const chart of this.charts.values()) chart.close();
    this.charts.clear();
  }

  choose(names) {
    view.set({ columns: names.length ? names : "-" }, { replace: true });
  }

  drawList() {
    chooser(this.list, this.columns, this.chosen(), (names) => this.choose(names));
  }

  drawTools() {
    const smooth = view.number("smooth", 0);
    if (Number(this.slider.value) !== smooth) this.slider.value = smooth;
    this.smooth.textContent = number(smooth);
    const now = ["x", "log", "from", "to", "marks"].map((name) => view.get(name)).join("|");
    if (now === this.drawnTools) return; // a slider that is dragged would be let go
    this.drawnTools = now;
    const toggle = (text, name, value) =>
      h("button", { "aria-pressed": String(view.get(name) === value),
        on: { click: () => view.set({ [name]: view.get(name) === value ? null : value, from: null,
          to: null }, { replace: true }) } }, text);
    this.step = h("span", { class: "step-link" });
    keepingFocus(this.tools, () => show(
      this.tools,
      h("label", {}, "Smooth", this.slider, this.smooth),
      h("span", { class: "several", role: "group", "aria-label": "Axes" },
        toggle("Time", "x", "time"), toggle("Log y", "log", "1")),
      h("span", { class: "several", role: "group", "aria-label": "Range of steps" }, "Steps",
        this.bound("from"), "to", this.bound("to")),
      view.get("from") && h("button", { on: { click: () => view.set({ from: null, to: null }) } },
        "Whole run"),
      view.get("marks") && h("button", { on: { click: () => view.set({ marks: null }) } },
        "Without marks"),
      h("span", { class: "muted small wide-only" },
        "Drag to zoom, double-click for the whole run."),
      this.step,
    ));
    this.drawStep();
  }

  bound(name) {
    return h("input", { type: "text", inputmode: "numeric", class: "number", id: `steps-${name}`,
      "aria-label": name === "from" ? "From step" : "To step",
      placeholder: name === "from" ? "first" : "last", value: view.get(name),
      on: { change: (event) => {
        const step = Number.parseInt(event.target.value, 10);
        const other = name === "from" ? "to" : "from";
        const end = name === "from" ? this.steps.at(-1) : this.steps[0];
        // a range has two ends
        view.set({ [name]: Number.isFinite(step) ? step : null,
          [other]: Number.isFinite(step) ? view.number(other, end) : null });
      } } });
  }

  /** The step under the cursor, else the marked one, with the way to its samples. */
  drawStep(x = null) {
    if (!this.step) return;
    const step = x === null ? view.number("step") : this.toStep(x);
    if (step === this.shownStep && this.step.childNodes.length) return;
    this.shownStep = step;
    const rows = this.context.summary?.learns_from_rows;
    show(
      this.step,
      step === null || step === undefined
        ? h("span", { class: "muted small" }, "Click on a chart to mark a step.")
        : [`Step ${number(step)} `, !rows && h("a", { href: view.href({ page: "samples", step }) },
          "its samples")],
    );
  }

  key(key) {
    if (key === "Escape") view.set({ from: null, to: null });
    const by = { j: 1, k: -1 }[key];
    if (!by || !this.steps.length) return;
    const marked = view.number("step");
    const place = marked === null ? this.steps.length - 1 : nearest(this.steps, marked) + by;
    const step = this.steps[Math.max(0, Math.min(this.steps.length - 1, place))];
    view.set({ step }, { replace: true });
  }

  close() {
    removeEventListener("page-key", this.onKey);
    this.loaded.close();
    this.forget();
  }
}

/** From the first to the last place of all lines, so that charts can be read one below another. */
function shared(lines) {
  const xs = lines.flatMap((line) => [line.xs[0], line.xs.at(-1)]).filter(Number.isFinite);
  if (!xs.length) return null;
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return low < high ? [low, high] : [low - 1, high + 1];
}
