// What is shown, held whole in the address behind #: page, run, columns, step. So it can be sent.

import { saved } from "./saved.js";

/** In the order of the keys 1 to 9, 0 and -. A saved page has no logs, no list of runs, no chat and no
 * rewards; that of two runs compares them, that of a sweep shows its trials. */
export const PAGES = [
  ["overview", "Overview"],
  ["curves", "Curves"],
  ["samples", "Samples"],
  ["time", "Time"],
  ["memory", "Memory"],
  ["evaluations", "Evaluations"],
  ["recipe", "Recipe & plan"],
  ...(saved ? [] : [["logs", "Logs"], ["runs", "All runs"],
    ["chat", "Chat"], ["rewards", "Rewards"]]),
  ...(saved?.comparison ? [["comparison", "Comparison"]] : []),
  ...(saved?.sweep ? [["sweep", "Sweep"]] : []),
];
/** The page itself: a bare # would be a skip link to tools that check for access. */
const HERE = location.pathname.split("/").at(-1) || "./";
const FIRST = saved?.comparison ? "comparison" : saved?.sweep ? "sweep" : "overview";
const ALWAYS = ["run", "page", "with", "base", "step"];
/** What one run alone has: another has other steps, files and groups. */
const OF_RUN = ["step", "first", "last", "marks", "group", "only", "path", "offset", "attempt",
  "file"];

class View {
  constructor() {
    this.listeners = new Set();
    this.values = new URLSearchParams(location.hash.slice(1));
    addEventListener("hashchange", () => {
      if (location.hash === "#main") return; // the skip link
      this.values = new URLSearchParams(location.hash.slice(1));
      this.tell();
    });
  }

  /** The value of a name; "" where there is none. */
  get(name) {
    return this.values.get(name) ?? "";
  }

  /** As a list: its parts between commas. */
  list(name) {
    return this.get(name).split(",").filter(Boolean).map((one) => one.replaceAll("%2C", ","));
  }

  /** As a number; `otherwise` where it is none. */
  number(name, otherwise = null) {
    const value = Number.parseFloat(this.get(name));
    return Number.isFinite(value) ? value : otherwise;
  }

  get page() {
    const page = this.get("page");
    return PAGES.some(([name]) => name === page) ? page : FIRST;
  }

  /** A link to this view with some values changed; null takes one away. On another page, or of
   * another run, what belonged to the one before is dropped. */
  href(changes) {
    return HERE + this.fragment(changes);
  }

  fragment(changes) {
    const isOtherPage = changes.page !== undefined && changes.page !== this.page;
    const run = this.get("run");
    const isOtherRun = run && (changes.run ?? run) !== run;
    const isOfRun = (name) => OF_RUN.includes(name)
      && !(name === "only" && this.page === "runs"); // there it chooses among runs
    const next = new URLSearchParams();
    for (const [name, value] of this.values) {
      if (isOtherPage && !ALWAYS.includes(name)) continue;
      if (!isOtherRun || !isOfRun(name)) next.set(name, value);
    }
    for (const [name, value] of Object.entries(changes)) {
      const text = Array.isArray(value)
        ? value.map((one) => one.replaceAll(",", "%2C")).join(",")
        : value;
      if (text === null || text === undefined || text === "") next.delete(name);
      else next.set(name, String(text));
    }
    // these two need no escape behind a #, and are easier to read without
    return `#${next.toString().replaceAll("%2F", "/").replaceAll("%2C", ",")}`;
  }

  /** Go there. `replace`: without a step back in the browser, for what changes often. */
  set(changes, { replace = false } = {}) {
    const fragment = this.fragment(changes);
    if (fragment === location.hash) return;
    history[replace ? "replaceState" : "pushState"](null, "", fragment);
    this.values = new URLSearchParams(fragment.slice(1));
    this.tell();
  }

  /** `f` is called at each change. */
  onChange(f) {
    this.listeners.add(f);
  }

  tell() {
    for (const f of this.listeners) f();
  }
}

export const view = new View();
