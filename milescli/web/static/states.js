// What stands in place of content: nothing yet, being loaded, could not be loaded.

import { h, keepingFocus, show, withCode } from "./dom.js";
import { counted } from "./format.js";

/** What will be here and when. */
export function empty(title, text) {
  return h("div", { class: "card empty" }, h("h2", {}, title), h("p", {}, withCode(text)));
}

/** Where the figures of a run of several adapters are. `href(id)`: the way to one. */
export function adaptersCard(ids, href) {
  return h("section", { class: "card", "aria-label": "Adapters" },
    h("h2", {}, counted(ids.length, "adapter")),
    h("p", {}, "They are trained beside each other. Rewards, curves, samples and evaluations are "
      + "those of one of them: ",
    ids.map((id, at) => [at ? ", " : "", h("a", { href: href(id) }, adapterName(id))])));
}

/** many-1:left -> left. */
export function adapterName(id) {
  return id.slice(id.lastIndexOf(":") + 1);
}

/** What went wrong, why, what to do, and a button to try again. */
export function problem(error, retry) {
  const known = error.what !== undefined;
  const what = known ? error.what : "The page could not show this";
  return h(
    "div",
    { class: "card problem", role: "alert" },
    h("h2", {}, withCode(what)),
    h(
      "dl",
      {},
      h("dt", {}, "why"),
      h("dd", {}, withCode(known ? error.why : String(error.message ?? error))),
      h("dt", {}, "fix"),
      h("dd", {}, known ? withCode(error.fix)
        : "Reload the page; if it stays so, it is a fault of miles."),
    ),
    retry && h("p", {}, h("button", { on: { click: retry } }, "Try again")),
  );
}

/** Fill `root` with what `load` gives; what it raises is shown with a button that tries again.
 * `draw(answer, root)` changes the root: all of it where `isDrawn` is false. */
export class Loaded {
  constructor(root, { load, draw }) {
    Object.assign(this, { root, load, draw, isDrawn: false, isClosed: false });
    this.ending = null; // of what is under way
    this.hasNews = false;
    this.problem = ""; // what went wrong and is shown
  }

  /** Ask another question: what is under way is ended. */
  refresh() {
    return this.ask("other");
  }

  /** Ask the same question, since there is news. What is under way goes on: else news that come
   * faster than answers would end them all. */
  renew() {
    if (this.ending) this.hasNews = true;
    else this.ask("same");
  }

  async ask(question) {
    if (this.isClosed) return;
    this.stop();
    const ending = (this.ending = new AbortController());
    this.root.classList.add("busy");
    this.root.setAttribute("aria-busy", "true");
    try {
      const answer = await this.load(ending.signal);
      if (ending.signal.aborted) return;
      keepingFocus(this.root, () => this.draw(answer, this.root));
      Object.assign(this, { isDrawn: true, problem: "" });
    } catch (error) {
      if (!ending.signal.aborted) this.fail(error, question);
    } finally {
      if (this.ending === ending) {
        const { hasNews } = this;
        this.stop();
        if (hasNews) this.renew();
      }
    }
  }

  fail(error, question) {
    if (error.what === undefined) console.error(error);
    // the banner tells of a lost connection: what the same question was answered stays
    if (question === "same" && this.isDrawn && !error.status) return;
    const text = [error.what, error.why, error.message].join();
    if (text !== this.problem) show(this.root, problem(error, () => this.refresh()));
    Object.assign(this, { isDrawn: false, problem: text });
  }

  /** End what is under way. */
  stop() {
    this.ending?.abort();
    Object.assign(this, { ending: null, hasNews: false });
    this.root.classList.remove("busy");
    this.root.removeAttribute("aria-busy");
  }

  /** For good. */
  close() {
    this.stop();
    this.isClosed = true;
  }
}
