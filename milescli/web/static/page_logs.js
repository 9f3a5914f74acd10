// Logs: of each process and attempt, from the end, with a search.

import { withQuery } from "./api.js";
import { h, settled, show } from "./dom.js";
import { bytes, number } from "./format.js";
import { empty, Loaded } from "./states.js";
import { highlighted } from "./token_view.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const LIMIT = 500;
const MOST = 5000;

export function open(root, context) {
  return new LogsPage(root, context);
}

class LogsPage {
  constructor(root, context) {
    Object.assign(this, { root, context, attempts: [], limit: LIMIT });
    this.tools = h("div", { class: "tools card" });
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
    const trainer = files.find((one) => one.name.startsWith("trainer"));
    const file = files.find((one) => one.name === view.get("file")) ?? trainer ?? files[0];
    return { attempt, file };
  }

  drawFiles({ attempts }) {
    this.attempts = attempts;
    if (!attempts.some((one) => one.files.length)) {
      show(this.root,
        empty("No logs yet", "Each process of the run writes its own, from its start on."));
      return;
    }
    if (!this.root.contains(this.lines)) show(this.root, this.tools, this.note, this.lines);
    if (!this.tools.contains(document.activeElement)) this.drawTools();
    this.asked = this.signature();
    this.loaded.refresh();
  }

  drawTools() {
    const { attempt, file } = this.chosen();
    const select = (name, label, list, current, text) =>
      h("label", { class: "small" }, label,
        h("select", { id: `log-${name}`, on: { change: (event) => view.set(name === "attempt"
          ? { attempt: event.target.value, file: null } : { file: event.target.value }) } },
        list.map((one) => h("option", { value: one.name, selected: one === current }, text(one)))));
    show(
      this.tools,
      select("attempt", "Attempt", this.attempts, attempt, (one) => one.name.replaceAll("_", " ")),
      select("file", "File", attempt.files, file, (one) => `${one.name}, ${bytes(one.size_bytes)}`),
      h("span", { class: "grow" },
        h("input", { type: "search", id: "log-search", value: view.get("q"),
          placeholder: "Only lines with…",
          "aria-label": "Search this log",
          on: { input: settled((event) => view.set({ q: event.target.value }, { replace: true }),
            250) } })),
      h("button", { "aria-pressed": String(isWrapped()),
        on: { click: () => view.set({ wrap: isWrapped() ? "0" : null },
          { replace: true }) } }, "Wrap"),
    );
  }

  signature() {
    return ["attempt", "file", "q"].map((name) => view.get(name)).join("|");
  }

  changed() {
    if (!this.attempts.length) return;
    this.lines.classList.toggle("wrap", isWrapped());
    if (!this.tools.contains(document.activeElement) || document.activeElement.type !== "search") {
      const focused = document.activeElement?.id;
      this.drawTools();
      if (focused) document.getElementById(focused)?.focus();
    }
    if (this.signature() === this.asked) return;
    Object.assign(this, { asked: this.signature(), limit: LIMIT });
    this.later();
  }

  refresh() {
    this.files.renew();
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
    const wasEmpty = !this.lines.childNodes.length;
    const which = wanted ? `lines with “${view.get("q")}”` : "lines";
    const searched = isAll ? "" : " (the search was ended for time; newest first)";
    this.note.textContent = lines.length
      ? `The last ${number(lines.length)} of ${number(total)} ${which}${searched}`
      : this.emptyText(which, searched);
    const older = lines.length < total && this.limit < MOST &&
      h("button", { class: "link", on: { click: () => {
        this.limit = Math.min(MOST, 4 * this.limit);
        this.loaded.refresh();
      } } }, "Show older lines");
    show(this.lines, older, h("ol", {}, lines.map((line) =>
      h("li", { class: levelOf(line.text) },
        h("span", { class: "number" }, line.number),
        h("span", { class: "line" }, visible(plainText(line.text)).flatMap((node) =>
          typeof node === "string" ? highlighted(node, wanted) : [node]))))));
    this.lines.classList.toggle("wrap", isWrapped());
    if (atEnd || wasEmpty) this.lines.scrollTop = this.lines.scrollHeight;
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
