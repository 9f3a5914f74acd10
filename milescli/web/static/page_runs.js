// All runs in a table: searched, filtered, sorted; some ticked for the curves, one the baseline that
// the others are compared with.

import { agoElement } from "./ago.js";
import { post } from "./api.js";
import { h, keepingFocus, show, showOther } from "./dom.js";
import { field } from "./field.js";
import { counted, moment, number, percent } from "./format.js";
import { swatchOf } from "./side.js";
import { empty } from "./states.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const TYPED_MS = 150;
const STATES = ["running", "done", "stopped", "failed", "killed", "not started"];
/** Column -> [title, value to sort by, is a larger one first?]. */
const COLUMNS = {
  name: ["Run", (run) => run.name.toLowerCase(), false],
  state: ["State", (run) => STATES.indexOf(run.state), false],
  step: ["Step", (run) => run.step, true],
  reward: ["Reward", (run) => run.reward, true],
  accuracy: ["Held-out", (run) => run.accuracy, true],
  model: ["Model", (run) => run.model.toLowerCase(), false],
  created: ["Launched", (run) => run.created_s, true],
  changed: ["Last wrote", (run) => run.changed_s, true],
  note: ["Note", (run) => run.note.toLowerCase(), false],
};

export function open(root, context) {
  return new RunsPage(root, context);
}

class RunsPage {
  constructor(root, context) {
    Object.assign(this, { root, context, notes: new Map() });
    const search = h("input", { type: "search", id: "run-search",
      placeholder: "Name, model, note, #tag", "aria-label": "Search runs" });
    this.search = field("q", search, { wait_ms: TYPED_MS });
    this.filter = h("select", { id: "run-state", "aria-label": "Only runs that are", on: {
      change: (event) => view.set({ only: event.target.value }, { replace: true }) } });
    this.count = h("span", { class: "muted small", role: "status" });
    this.list = h("div", { class: "card runs-table" });
    show(root, h("div", { class: "tools card" }, h("span", { class: "grow" }, search), this.filter,
      this.count), this.list);
    this.changed();
  }

  /** Those that fit the search and the filter, in the order that was chosen. */
  shown() {
    const words = view.get("q").toLowerCase().split(/\s+/).filter(Boolean);
    const [, of, isLargeFirst] = COLUMNS[this.order.by];
    const sign = this.order.isBack === isLargeFirst ? 1 : -1;
    const missing = (value) => value === null || value === undefined || value === "";
    return this.context.runs
      .filter((run) => !view.get("only") || run.state === view.get("only"))
      .filter((run) => words.every((word) =>
        `${run.name} ${run.model} ${run.forked_from} ${run.note}`.toLowerCase().includes(word)))
      .sort((a, b) => {
        const [x, y] = [of(a), of(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        return sign * (x < y ? -1 : Number(x > y));
      });
  }

  get order() {
    const [by, back] = view.get("sort").split("-");
    return COLUMNS[by] ? { by, isBack: back === "back" } : { by: "created", isBack: false };
  }

  changed() {
    if ([...this.notes.values()].some(([text]) => text === document.activeElement)) return;
    this.search.fill();
    const all = this.context.runs;
    const found = this.shown();
    const only = view.get("only");
    const states = STATES.filter((one) => one === only || all.some(({ state }) => state === one));
    const isOther = this.filter.value !== only;
    if (isOther || document.activeElement !== this.filter) { // else it may be open
      showOther(this.filter, h("option", { value: "" }, "All states"), states.map((state) =>
        h("option", { value: state },
          `${state} (${all.filter((run) => run.state === state).length})`)));
    }
    this.filter.value = only;
    this.count.textContent = found.length === all.length ? counted(all.length, "run")
      : `${number(found.length)} of ${counted(all.length, "run")}`;
    keepingFocus(this.list, () => show(this.list, found.length ? this.table(found)
      : empty("No run fits", "Search for something else, or show all states.")));
  }

  refresh() {
    this.changed();
  }

  table(found) {
    const base = this.context.runs.find((run) => run.id === view.get("base"));
    return h("table", { class: "wide-table" },
      h("caption", { class: "unseen" }, "Runs"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, h("span", { class: "unseen" }, "Compare and baseline")),
        Object.keys(COLUMNS).map((name) => this.head(name)))),
      h("tbody", {}, found.map((run) => this.row(run, base))));
  }

  head(name) {
    const { by, isBack } = this.order;
    const [title, , isLargeFirst] = COLUMNS[name];
    const isUp = isLargeFirst === isBack;
    return h("th", { scope: "col",
      "aria-sort": by === name ? (isUp ? "ascending" : "descending") : null },
    h("button", { class: "plain", id: `sort-${name}`, on: { click: () => view.set(
      { sort: by === name && !isBack ? `${name}-back` : name }, { replace: true }) } },
    title, by === name && h("span", { "aria-hidden": "true" }, isUp ? " ↑" : " ↓")));
  }

  row(run, base) {
    const isBase = run.id === base?.id;
    const steps = run.num_steps ? `${number(run.step)} / ${number(run.num_steps)}`
      : number(run.step);
    return h("tr", { class: isBase ? "base" : null },
      h("td", { class: "marks" }, this.tick(run),
        h("button", { class: "plain star", id: `base-${run.id}`, "aria-pressed": String(isBase),
          "aria-label": `Baseline ${run.name}`, title: "Compare the others with this one",
          on: { click: () => view.set({ base: isBase ? null : run.id }, { replace: true }) } },
        isBase ? "★" : "☆"), swatchOf(run.id, this.context.run, this.context.runs)),
      h("th", { scope: "row" }, h("a", { href: view.href({ page: "overview", run: run.id }) },
        visible(run.name)),
      run.forked_from && h("div", { class: "muted small" }, "forked from ",
        visible(run.forked_from))),
      h("td", {}, h("span", { class: `pill ${run.state}` }, run.state)),
      h("td", { class: "figure-cell" }, steps),
      h("td", { class: "figure-cell" }, number(run.reward, 3),
        !isBase && base && gain(run.reward, base.reward, (value) => number(value, 2))),
      h("td", { class: "figure-cell" }, percent(run.accuracy, 1),
        !isBase && base && gain(run.accuracy, base.accuracy, (value) =>
          `${(100 * value).toFixed(1)} points`)),
      h("td", {}, visible(run.model)),
      h("td", {}, moment(run.created_s)),
      h("td", {}, agoElement(run.changed_s)),
      h("td", { class: "note-cell" }, this.note(run)));
  }

  tick(run) {
    const others = view.list("with").filter((id) => id !== run.id);
    const isShown = run.id === this.context.run;
    return h("input", { type: "checkbox", id: `tick-${run.id}`, disabled: isShown,
      "aria-label": `Show ${run.name} in the curves`,
      prop: { checked: isShown || others.length < view.list("with").length },
      on: { change: (event) => view.set({ with: event.target.checked ? [...others, run.id]
        : others }, { replace: true }) } });
  }

  note(run) {
    if (!this.context.canControl) return visible(run.note);
    if (this.notes.has(run.id)) return this.notes.get(run.id);
    const edit = h("button", { class: "plain", id: `note-${run.id}`,
      "aria-label": `Write a note about ${run.name}`, on: { click: () =>
        this.edit(run, edit.parentElement) } }, run.note ? "✎" : "Add a note");
    return [visible(run.note), " ", edit];
  }

  /** A field for the note, until it is saved or given up. */
  edit(run, cell) {
    const text = h("input", { type: "search", value: run.note, maxlength: 2000,
      "aria-label": `Note about ${run.name}` });
    const problem = h("p", { class: "small", role: "alert" });
    const end = async (isKept) => {
      if (!this.notes.has(run.id) || text.readOnly) return;
      const hadFocus = document.activeElement === text;
      text.readOnly = true;
      try {
        if (isKept && text.value !== run.note) {
          await post(`api/control/runs/${encodeURIComponent(run.id)}/note`, { note: text.value });
          await this.context.reloadRuns();
        }
        this.notes.delete(run.id);
      } catch (error) {
        problem.textContent = `${error.what}: ${error.why}`;
      }
      text.readOnly = false;
      this.changed();
      if (hadFocus) document.getElementById(`note-${run.id}`)?.focus();
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    text.addEventListener("blur", () => end(true));
    this.notes.set(run.id, [text, problem]);
    show(cell, text, problem);
    text.focus();
  }

  close() {}
}

/** How much more than the baseline. */
function gain(value, base, say) {
  if (!Number.isFinite(value) || !Number.isFinite(base)) return null;
  const by = value - base;
  const text = `${by > 0 ? "+" : by < 0 ? "−" : "±"}${say(Math.abs(by))}`;
  return h("span", { class: `gain ${by > 0 ? "more" : by < 0 ? "less" : ""}` }, ` ${text}`);
}
