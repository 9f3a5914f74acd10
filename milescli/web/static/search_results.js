// What a search among the samples of all steps came to.

import { h, show } from "./dom.js";
import { counted, number } from "./format.js";
import { Loaded } from "./states.js";
import { highlighted } from "./token_view.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const MOST = 50;

/** The results of the newest search; nothing while there is none. */
export class SearchResults {
  constructor(context) {
    this.box = h("div", {});
    this.wanted = "";
    this.loaded = new Loaded(this.box, {
      load: (signal) => context.ask("find-samples", { q: this.wanted, limit: MOST }, { signal }),
      draw: (answer) => this.draw(answer),
    });
  }

  search(wanted) {
    this.hide();
    this.wanted = wanted;
    if (!wanted) return;
    show(this.box, h("p", { class: "muted" }, "Searching…"));
    this.loaded.refresh();
  }

  /** Show none; a search that is under way ends. */
  hide() {
    this.loaded.stop();
    show(this.box);
  }

  draw({ found: list, searched_steps: steps, is_all: isAll }) {
    const { wanted } = this;
    const extent = isAll ? "" : `; searched the newest ${counted(steps, "step")}`;
    const count = list.length === MOST ? `The first ${MOST}` : counted(list.length, "place");
    show(
      this.box,
      h(
        "section",
        { class: "card found", "aria-label": "Found samples" },
        h(
          "div",
          { class: "row between" },
          h("h2", { role: "status" }, `${count} with “${wanted}”${extent}`),
          h("button", { class: "plain", on: { click: () => this.hide() } }, "Close"),
        ),
        h("ul", {}, list.map((one) => place(one, wanted))),
      ),
    );
  }

  close() {
    this.loaded.close();
  }
}

function place(one, wanted) {
  return h("li", {},
    h("a", { href: view.href({ step: one.step, group: one.prompt_index, q: wanted, only: null }) },
      `step ${one.step}, prompt ${one.prompt_index}${which(one)}`),
    " ",
    visible(one.excerpt).flatMap((node) =>
      typeof node === "string" ? highlighted(node, wanted.toLowerCase()) : [node]));
}

/** , sample 3, reward 1; of a prompt all of its samples are meant. */
function which({ where, sample, reward }) {
  if (where === "prompt") return "";
  const gained = Number.isFinite(reward) ? `, reward ${number(reward, 3)}` : "";
  return `, sample ${sample + 1}${gained}`;
}
