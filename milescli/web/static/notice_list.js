// What happened in a run: notices, phases, checkpoints, losses; with filters, newest first.

import { h, show } from "./dom.js";
import { field } from "./field.js";
import { moment, number, seconds } from "./format.js";
import { Loaded } from "./states.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const LIMIT = 200;
const MOST = 5000; // the server gives no more at once
const TYPED_MS = 200;
const KINDS = [
  ["", "Everything"],
  ["Notice", "Notices"],
  ["PhaseStarted", "Phases"],
  ["CheckpointSaved", "Checkpoints"],
  ["WorkerSilent", "Silences"],
  ["WorkerLost", "Losses"],
  ["WorkerReplaced", "Replacements"],
  ["RunEnded", "Ends"],
];
const LEVELS = [["", "All levels"], ["warning", "Warnings"], ["error", "Errors"]];

export class NoticeList {
  constructor(root, context) {
    Object.assign(this, { context, more: 0 });
    this.list = h("div", {});
    show(root, this.makeTools(), this.list);
    this.asked = this.query();
    this.loaded = new Loaded(this.list, {
      load: (signal) => this.load(signal),
      draw: (answer) => this.draw(answer),
    });
  }

  query() {
    return JSON.stringify(["kind", "level", "notice"].map((name) => view.get(name)));
  }

  /** The newest that fit, and as many before as were asked for. */
  async load(signal) {
    const fit = { kind: view.get("kind"), level: view.get("level"), q: view.get("notice") };
    const { total } = await this.context.ask("notices", { ...fit, limit: 1 }, { signal });
    const limit = Math.min(MOST, LIMIT * (1 + this.more));
    const offset = Math.max(0, total - limit);
    const answer = await this.context.ask("notices", { ...fit, offset, limit }, { signal });
    return { ...answer, offset };
  }

  renew() {
    this.loaded.renew();
  }

  changed() {
    for (const one of this.fields) one.fill();
    const now = this.query();
    if (now === this.asked) return;
    Object.assign(this, { asked: now, more: 0 });
    this.loaded.refresh();
  }

  makeTools() {
    const select = (name, label, list) => field(name, h("select", { "aria-label": label },
      list.map(([value, text]) => h("option", { value }, text))));
    const search = h("input", { type: "search", placeholder: "Search what happened",
      "aria-label": "Search what happened" });
    this.fields = [select("kind", "Kind", KINDS), select("level", "Level", LEVELS),
      field("notice", search, { wait_ms: TYPED_MS })];
    const [kind, level] = this.fields;
    return h("div", { class: "tools" }, kind.input, level.input,
      h("span", { class: "grow" }, search));
  }

  draw({ total, notices, offset }) {
    if (!notices.length) {
      show(this.list, h("p", { class: "muted empty" }, this.asked === '["","",""]'
        ? "Nothing happened yet." : "Nothing fits the filter."));
      return;
    }
    show(
      this.list,
      h("p", { class: "muted small" }, `${number(notices.length)} of ${number(total)}, newest first`),
      h("ul", { class: "notices" }, [...notices].reverse().map(row)),
      offset > 0 && notices.length < MOST && h("button", { on: { click: () => {
        this.more += 1;
        this.loaded.refresh();
      } } }, "Show older ones"),
    );
  }

  close() {
    this.loaded.close();
  }
}

function row(one) {
  const level = one.level === "info" ? "" : one.level;
  return h(
    "li",
    { class: level },
    h("span", { class: "muted when" }, moment(one.time_s)),
    h("span", {}, level && [h("span", { class: `pill ${level}` }, level), " "], visible(one.text)),
    h("span", { class: "muted small" },
      [one.step ? `step ${one.step}` : "", one.seconds ? seconds(one.seconds) : ""]
        .filter(Boolean).join(" · ")),
  );
}
