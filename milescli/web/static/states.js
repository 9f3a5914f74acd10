// What stands in place of content: nothing yet, being loaded, could not be loaded.

import { h, show } from "./dom.js";

/** What will be here and when. */
export function empty(title, text) {
  return h("div", { class: "card empty" }, h("h2", {}, title), h("p", {}, text));
}

/** What went wrong, why, what to do, and a button to try again. */
export function problem(error, retry) {
  const known = error.what !== undefined;
  const what = known ? error.what : "The page could not show this";
  return h(
    "div",
    { class: "card problem", role: "alert" },
    h("h2", {}, what),
    h(
      "dl",
      {},
      h("dt", {}, "why"),
      h("dd", {}, known ? error.why : String(error.message ?? error)),
      h("dt", {}, "fix"),
      h("dd", {}, known ? error.fix : "Reload the page; if it stays so, it is a fault of miles."),
    ),
    retry && h("p", {}, h("button", { on: { click: retry } }, "Try again")),
  );
}

/** Fill `root` with what `load` gives; what it raises is shown with a button that tries again. Of
 * several calls at once only the last one counts. `draw(answer, root)` changes the root. */
export class Loaded {
  constructor(root, { load, draw }) {
    Object.assign(this, { root, load, draw, ending: null, isDrawn: false });
  }

  async refresh() {
    this.ending?.abort();
    const ending = (this.ending = new AbortController());
    this.root.classList.add("busy");
    this.root.setAttribute("aria-busy", "true");
    try {
      const answer = await this.load(ending.signal);
      if (ending.signal.aborted) return;
      this.draw(answer, this.root);
      this.isDrawn = true;
    } catch (error) {
      if (ending.signal.aborted) return;
      if (error.what === undefined) console.error(error);
      // what is shown already stays while the connection is lost: the banner tells of that
      if (!this.isDrawn || error.status) {
        show(this.root, problem(error, () => this.refresh()));
        this.isDrawn = false;
      }
    } finally {
      if (this.ending === ending) {
        this.root.classList.remove("busy");
        this.root.removeAttribute("aria-busy");
      }
    }
  }

  close() {
    this.ending?.abort();
  }
}
