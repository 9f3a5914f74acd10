// Time: who did what from when to when, the share of each phase over steps, and what happened.

import { h, settled, show } from "./dom.js";
import { moment, number, seconds } from "./format.js";
import { swatch } from "./phases.js";
import { drawShares } from "./shares.js";
import { empty, Loaded } from "./states.js";
import { Timeline } from "./timeline.js";
import { ToldList } from "./told_list.js";
import { view } from "./view.js";

const PHASES = ["rollout", "pack", "train", "save", "publish"];
const ROWS = 400;

export function open(root, context) {
  return new TimePage(root, context);
}

class TimePage {
  constructor(root, context) {
    Object.assign(this, { root, context, timeline: null, shares: null });
    const body = () => h("div", {});
    const [lanes, shares, told] = [body(), body(), body()];
    this.tools = h("div", { class: "tools" });
    show(
      root,
      h("section", { class: "card", "aria-label": "Timeline" },
        h("div", { class: "row between" }, h("h2", {}, "Timeline"), this.tools), lanes),
      h("section", { class: "card", "aria-label": "Share of each phase" },
        h("h2", {}, "Share of each phase over steps"), shares),
      h("section", { class: "card", "aria-label": "What happened" }, h("h2", {}, "What happened"),
        told),
    );
    this.lanes = new Loaded(lanes, {
      load: (signal) => context.ask("timeline",
        { first: view.get("first"), last: view.get("last") },
        { signal }),
      draw: (answer) => this.drawLanes(answer, lanes),
    });
    this.sharesLoaded = new Loaded(shares, {
      load: (signal) => context.ask("columns", { points: 1000,
        name: [...PHASES, "step"].map((name) => `time/${name}_s`) }, { signal }),
      draw: (answer) => {
        this.shares?.close();
        this.shares = drawShares(shares, answer, PHASES);
      },
    });
    this.told = new ToldList(told, context);
    this.later = settled(() => this.lanes.refresh(), 150);
    this.drawTools();
    this.refresh();
  }

  refresh() {
    this.lanes.refresh();
    this.sharesLoaded.refresh();
    this.told.refresh();
  }

  changed() {
    this.drawTools();
    this.later();
    this.told.changed();
  }

  drawTools() {
    const field = (name, text) =>
      h("label", { class: "small" }, text,
        h("input", { type: "number", min: 1, class: "number", id: `timeline-${name}`,
          placeholder: name === "last" ? "newest" : "50 before", value: view.get(name),
          on: { change: (event) => view.set({ [name]: event.target.value || null }) } }));
    const button = (text, label, act) =>
      h("button", { "aria-label": label, title: label, on: { click: act } }, text);
    if (this.tools.contains(document.activeElement)) return;
    show(
      this.tools,
      field("first", "Steps from"),
      field("last", "to"),
      h("span", { class: "several", role: "group", "aria-label": "Zoom of the timeline" },
        button("−", "Zoom out", () => this.timeline?.zoom(1 / 1.6)),
        button("Whole", "Show all of it", () => this.timeline?.whole()),
        button("+", "Zoom in", () => this.timeline?.zoom(1.6))),
    );
  }

  drawLanes(answer, root) {
    if (!answer.intervals.length) {
      this.timeline?.close();
      this.timeline = null;
      show(root, empty("Nothing to show yet",
        "Each phase of a step shows up here when the step is done."));
      return;
    }
    if (!this.timeline) {
      const box = h("div", {});
      this.table = h("details", { on: { toggle: () => this.drawTable() } },
        h("summary", {}, "As a table"));
      this.keys = h("ul", { class: "keys" });
      show(root, this.keys, box, this.table);
      this.timeline = new Timeline(box, answer);
    } else this.timeline.update(answer);
    this.answer = answer;
    const names = [...new Set(answer.intervals.map((one) => one.what))];
    show(this.keys, names.map((name) => h("li", {}, swatch(name), ` ${name}`)));
    this.drawTable();
  }

  drawTable() {
    if (!this.table.open) return;
    const list = this.answer.intervals.slice(-ROWS);
    const titles = ["Who", "What", "Step", "Begin", "Took"];
    this.table.querySelector("div")?.remove();
    this.table.append(
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Intervals" },
        h("table", {},
          h("caption", { class: "muted small" }, list.length < this.answer.intervals.length
            ? `The last ${ROWS} of ${number(this.answer.intervals.length)} intervals.`
            : `${list.length} intervals.`),
          h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))),
          h("tbody", {}, list.map((one) =>
            h("tr", {},
              h("td", {}, one.actor), h("td", {}, swatch(one.what), ` ${one.what}`),
              h("td", {}, one.step ?? ""), h("td", {}, moment(one.begin_s)),
              h("td", {}, seconds(one.end_s - one.begin_s))))))),
    );
  }

  close() {
    for (const one of [this.lanes, this.sharesLoaded, this.told]) one.close();
    this.timeline?.close();
    this.shares?.close();
  }
}
