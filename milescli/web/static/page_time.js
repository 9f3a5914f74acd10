// Time: who did what from when to when, the share of each phase over steps, and what happened.

import { h, settled, show } from "./dom.js";
import { field } from "./field.js";
import { bytes, moment, number, seconds } from "./format.js";
import { runBar, runPhase, swatch } from "./phases.js";
import { drawShares } from "./shares.js";
import { empty, Loaded } from "./states.js";
import { Timeline } from "./timeline.js";
import { NoticeList } from "./notice_list.js";
import { view } from "./view.js";

const PHASES = ["rollout", "pack", "train", "save", "publish"];
const ROWS = 400;
const TYPED_MS = 700;

export function open(root, context) {
  return new TimePage(root, context);
}

class TimePage {
  constructor(root, context) {
    Object.assign(this, { root, context, timeline: null, shares: null });
    const body = () => h("div", {});
    const [whole, lanes, shares, notices] = [body(), body(), body(), body()];
    this.tools = h("div", { class: "tools" });
    this.makeTools();
    show(
      root,
      whole,
      h("section", { class: "card", "aria-label": "Timeline" },
        h("div", { class: "row between" }, h("h2", {}, "Timeline"), this.tools), lanes),
      h("section", { class: "card", "aria-label": "Share of each phase" },
        h("h2", {}, "Share of each phase over steps"), shares),
      h("section", { class: "card", "aria-label": "What happened" }, h("h2", {}, "What happened"),
        notices),
    );
    this.lanes = new Loaded(lanes, {
      load: (signal) => context.ask("timeline",
        { first: view.get("first"), last: view.get("last") },
        { signal }),
      draw: (answer) => this.drawLanes(answer, lanes),
    });
    this.sharesLoaded = new Loaded(shares, {
      load: (signal) => Promise.all([
        context.ask("columns", { points: 1000,
          name: [...PHASES, "step"].map((name) => `time/${name}_s`) }, { signal }),
        context.summary ?? context.ask("summary", null, { signal }),
      ]),
      draw: ([answer, summary]) => {
        this.shares?.close();
        this.shares = drawShares(shares, answer, PHASES, summary.phases ?? []);
        show(whole, wholeRun(summary.run_phases));
      },
    });
    this.notices = new NoticeList(notices, context);
    this.later = settled(() => this.lanes.refresh(), 150);
    this.refresh();
  }

  refresh() {
    for (const one of [this.lanes, this.sharesLoaded, this.notices]) one.renew();
  }

  changed() {
    for (const one of this.fields) one.fill();
    const asked = this.asked();
    if (asked !== this.shown) this.later();
    this.shown = asked;
    this.notices.changed();
  }

  asked() {
    return `${view.get("first")}|${view.get("last")}`;
  }

  /** Made once, so that what is being typed stays, whatever is drawn anew. */
  makeTools() {
    const input = (name, otherwise) => h("input", { type: "number", min: 0, class: "number",
      id: `timeline-${name}`, placeholder: otherwise });
    const bound = { wait_ms: TYPED_MS, replace: false };
    this.fields = [field("first", input("first", "50 before"), bound),
      field("last", input("last", "newest"), bound)];
    const [first, last] = this.fields;
    const button = (text, label, act) =>
      h("button", { "aria-label": label, title: label, on: { click: act } }, text);
    show(
      this.tools,
      h("label", { class: "small" }, "Steps from", first.input),
      h("label", { class: "small" }, "to", last.input),
      h("button", { on: { click: () => this.showWholeRun() } }, "Whole run"),
      h("span", { class: "several", role: "group", "aria-label": "Zoom of the timeline" },
        button("−", "Zoom out", () => this.timeline?.zoom(1 / 1.6)),
        button("Fit", "Show all of these steps", () => this.timeline?.steps()),
        button("+", "Zoom in", () => this.timeline?.zoom(1.6))),
    );
    this.shown = this.asked();
  }

  /** From its start, before the first step, to its end. */
  showWholeRun() {
    view.set({ first: "0", last: null });
    this.timeline?.whole();
  }

  drawLanes(lanes, root) {
    const answer = { ...lanes, intervals: lanes.intervals.map((one) =>
      (one.actor === "run" ? { ...one, what: runPhase(one.what) } : one)) };
    if (!answer.intervals.length || !this.lanes.isDrawn) {
      this.timeline?.close();
      this.timeline = null;
    }
    if (!answer.intervals.length) {
      show(root, view.get("first") || view.get("last")
        ? empty("Nothing between these steps", "Choose others, or the whole run.")
        : empty("Nothing to show yet",
          "Each phase of a step shows up here when the step is done."));
      return;
    }
    if (!this.timeline) {
      const box = h("div", {});
      this.table = h("details", { on: { toggle: () => this.drawTable() } },
        h("summary", {}, "As a table"));
      this.keys = h("ul", { class: "keys" });
      this.profiles = h("div", {});
      show(root, this.keys, box, this.profiles, this.table);
      this.timeline = new Timeline(box, answer);
      if (view.get("first") === "0") this.timeline.whole();
    } else this.timeline.update(answer);
    this.answer = answer;
    const names = [...new Set(answer.intervals.map((one) => one.what))];
    show(this.keys, names.map((name) => h("li", {}, swatch(name), ` ${name}`)));
    show(this.profiles, (answer.profiles ?? []).map(profileWords));
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
    for (const one of [this.lanes, this.sharesLoaded, this.notices]) one.close();
    this.timeline?.close();
    this.shares?.close();
  }
}

/** Where a profile lies, and what opens it. */
function profileWords({ number: which, time_s: time, files }) {
  const sizes = files.map((one) => `${one.name} ${bytes(one.size_bytes)}`).join(", ");
  return h("p", { class: "small" }, h("b", {}, `Profile ${which}`),
    h("span", { class: "muted" }, ` done at ${moment(time)}, in `), h("code", {},
      `profiles/${which}`), sizes ? `: ${sizes}. ` : ". ",
    h("span", { class: "muted" },
      "Open a trace in https://ui.perfetto.dev or chrome://tracing."));
}

/** Of a server of an older miles, none. */
function wholeRun(phases) {
  if (!phases?.length) return null;
  return h("section", { class: "card", "aria-label": "The whole run" },
    h("h2", {}, "The whole run"),
    runBar(phases));
}
