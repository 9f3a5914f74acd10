// Logs: of each process and attempt, from the end, with a search.

import { withQuery } from "./api.js";
import { h, keepingFocus, settled, show, showOther } from "./dom.js";
import { field } from "./field.js";
import { bytes, number } from "./format.js";
import { empty, Loaded } from "./states.js";
import { highlighted } from "./token_view.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const LIMIT = 500;
const MOST = 5000;
const TYPED_MS = 250;

export function open(root, context) {
  return new LogsPage(root, context);
}

class LogsPage {
  constructor(root, context) {
    Object.assign(this, { root, context, attempts: [], limit: LIMIT, isOther: true });
    this.makeTools();
    this.note = h("p", { class: "muted small", role: "status" });
    this.lines = h("div", { class: "log", tabindex: 0, role: "region",
      "aria-label": "Lines of the log" });
    this.files = new Loaded(root, {
      load: (signal) => context.ask("logs", null, { signal }),
      draw: (answer) => this.drawFiles(answer),
    });
    this.loaded = new Loaded(this.lines, {
      load: (signal) => this.load(signal),
      draw: (answer) => this.drawLines(answer),
    });
    this.later = settled(() => this.loaded.refresh(), 60);
    this.files.refresh();
  }

  /** The attempt and the file that are shown. */
  chosen() {
    const withFiles = this.attempts.filter((one) => one.files.length);
    const attempt = this.attempts.find((one) => one.name === view.get("attempt"))
      ?? withFiles.at(-1);
    const files = attempt?.files ?? [];
    const named = (start) => files.find((one) => one.name.startsWith(start));
    const file = files.find((one) => one.name === view.get("file")) ?? this.reason(attempt)
      ?? named("trainer") ?? files[0];
    return { attempt, file };
  }

  /** Of the attempt with which a run failed, the file that says why. */
  reason(attempt) {
    const isLast = attempt === this.attempts.filter((one) => one.files.length).at(-1);
    const isBad = ["failed", "killed"].includes(this.context.summary?.state);
    return isLast && isBad ? attempt?.files.find((one) => one.name === "why.txt") : undefined;
  }

  drawFiles({ attempts }) {
    this.attempts = attempts;
    if (!attempts.some((one) => one.files.length)) {
      show(this.root,
        empty("No logs yet", "Each process of the run writes its own, from its start on."));
      return;
    }
    if (!this.root.contains(this.lines)) show(this.root, this.tools, this.note, this.lines);
    this.fillTools();
    this.asked = this.signature();
    this.loaded.renew();
  }

  /** Made once, so that what is being typed stays; which logs there are is filled in. */
  makeTools() {
    const search = h("input", { type: "search", id: "log-search", placeholder: "Only lines with…",
      "aria-label": "Search this log" });
    this.search = field("q", search, { wait_ms: TYPED_MS });
    this.choices = h("div", { class: "tools" });
    this.wrap = h("button", { on: { click: () =>
      view.set({ wrap: isWrapped() ? "0" : null }, { replace: true }) } }, "Wrap");
    this.tools = h("div", { class: "tools card" }, this.choices,
      h("span", { class: "grow" }, search), this.wrap);
  }

  fillTools() {
    this.search.fill();
    this.wrap.setAttribute("aria-pressed", String(isWrapped()));
    const { attempt, file } = this.chosen();
    const files = attempt?.files ?? [];
    const chosen = `${attempt?.name}/${file?.name}`;
    const now = JSON.stringify([chosen, this.attempts.map((one) => one.name), files]);
    // a list that is open would be closed
    const isInUse = this.choices.contains(document.activeElement) && chosen === this.filledFor;
    if (now === this.filled || isInUse) return;
    Object.assign(this, { filled: now, filledFor: chosen });
    const select = (name, label, list, current, text) =>
      h("label", { class: "small" }, label,
        h("select", { id: `log-${name}`, on: { change: (event) => view.set(name === "attempt"
          ? { attempt: event.target.value, file: null } : { file: event.target.value }) } },
        list.map((one) => h("option", { value: one.name, selected: one === current }, text(one)))));
    keepingFocus(this.choices, () => show(
      this.choices,
      select("attempt", "Attempt", this.attempts, attempt, (one) => one.name.replaceAll("_", " ")),
      select("file", "File", files, file, (one) => `${one.name}, ${bytes(one.size_bytes)}`),
    ));
  }

  signature() {
    return ["attempt", "file", "q"].map((name) => view.get(name)).join("|");
  }

  changed() {
    if (!this.attempts.length) return;
    this.lines.classList.toggle("wrap", isWrapped());
    this.fillTools();
    if (this.signature() === this.asked) return;
    Object.assign(this, { asked: this.signature(), limit: LIMIT, isOther: true });
    this.later();
  }

  refresh() {
    this.files.renew();
  }

  /** Processes write between events, too. */
  poll() {
    this.refresh();
  }

  async load(signal) {
    const { attempt, file } = this.chosen();
    if (!file) return { total: 0, lines: [] };
    const name = file.name.split("/").map(encodeURIComponent).join("/");
    const query = { q: view.get("q"), limit: this.limit, tail: 1 };
    return this.context.ask(withQuery(`logs/${encodeURIComponent(attempt.name)}/${name}`, query),
      null,
      { signal });
  }

  drawLines({ total, lines, is_all: isAll = true }) {
    const wanted = view.get("q").toLowerCase();
    const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
    const reading = this.firstSeen();
    const which = wanted ? `lines with “${view.get("q")}”` : "lines";
    const searched = isAll ? "" : " (the search was ended for time; newest first)";
    showOther(this.note, lines.length
      ? `The last ${number(lines.length)} of ${number(total)} ${which}${searched}`
      : this.emptyText(which, searched));
    const older = lines.length < total && this.limit < MOST &&
      h("button", { class: "link", on: { click: () => {
        this.limit = Math.min(MOST, 4 * this.limit);
        this.loaded.refresh();
      } } }, "Show older lines");
    showOther(this.lines, older, h("ol", {}, lines.map((line) =>
      h("li", { class: levelOf(line.text), data: { number: line.number } },
        h("span", { class: "number" }, line.number),
        h("span", { class: "line" }, visible(plainText(line.text)).flatMap((node) =>
          typeof node === "string" ? highlighted(node, wanted) : [node]))))));
    this.lines.classList.toggle("wrap", isWrapped());
    if (atEnd || this.isOther || !reading) this.lines.scrollTop = this.lines.scrollHeight;
    else this.backTo(reading);
    this.isOther = false;
  }

  /** The first line that is seen, and how far it is below the upper edge. */
  firstSeen() {
    const { top } = this.lines.getBoundingClientRect();
    const all = [...this.lines.querySelectorAll("li")];
    const first = all.find((one) => one.getBoundingClientRect().bottom > top);
    return first && { number: first.dataset.number,
      below: first.getBoundingClientRect().top - top };
  }

  /** Where the same line is now: older ones came above it, or went. */
  backTo({ number: which, below }) {
    const line = this.lines.querySelector(`li[data-number="${which}"]`);
    if (!line) return;
    const { top } = this.lines.getBoundingClientRect();
    this.lines.scrollTop += line.getBoundingClientRect().top - top - below;
  }

  /** Why there are no lines. */
  emptyText(which, searched) {
    const { file } = this.chosen();
    if (file && !file.size_bytes) return "This file is empty: nothing was written into it.";
    return `No ${which}${searched}`;
  }

  close() {
    this.files.close();
    this.loaded.close();
  }
}

/** Long lines are, unless the address says otherwise. */
function isWrapped() {
  return view.get("wrap") !== "0";
}

/** Without the escapes that colour a terminal. */
function plainText(text) {
  return text.replace(/\u001b\[[0-9;]*[A-Za-z]/g, "");
}

function levelOf(text) {
  if (/\b(ERROR|CRITICAL|FATAL|Traceback|Error:)/.test(text)) return "error";
  return /\bWARN(ING)?\b/.test(text) ? "warning" : "";
}
