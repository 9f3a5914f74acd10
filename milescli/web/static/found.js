// Where a text was found among the samples of all steps.

import { h, show } from "./dom.js";
import { counted, number } from "./format.js";
import { Loaded } from "./states.js";
import { highlighted } from "./token_view.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const MOST = 50;

/** Ask and draw; nothing is searched for: nothing is shown. */
export function found(root, context, wanted) {
  if (!wanted) {
    show(root);
    return;
  }
  show(root, h("p", { class: "muted" }, "Searching…"));
  new Loaded(root, {
    load: (signal) => context.ask("find-samples", { q: wanted, limit: MOST }, { signal }),
    draw: (answer) => draw(root, answer, wanted),
  }).refresh();
}

function draw(root, { found: list, searched_steps: steps, is_all: isAll }, wanted) {
  const extent = isAll ? "" : `; searched the newest ${counted(steps, "step")}`;
  const count = list.length === MOST ? `The first ${MOST}` : counted(list.length, "place");
  show(
    root,
    h(
      "section",
      { class: "card found", "aria-label": "Found samples" },
      h(
        "div",
        { class: "row between" },
        h("h2", { role: "status" },
          `${count} with “${wanted}”${extent}`),
        h("button", { class: "plain", on: { click: () => show(root) } }, "Close"),
      ),
      h("ul", {}, list.map((one) =>
        h("li", {},
          h("a", { href: view.href({ step: one.step, group: one.prompt_index, q: wanted,
            only: null }) }, `step ${one.step}, prompt ${one.prompt_index}${which(one)}`),
          " ",
          visible(one.excerpt).flatMap((node) =>
            typeof node === "string" ? highlighted(node, wanted.toLowerCase()) : [node])))),
    ),
  );
}

/** , sample 3, reward 1; of a prompt all of its samples are meant. */
function which({ where, sample, reward }) {
  if (where === "prompt") return "";
  const gained = Number.isFinite(reward) ? `, reward ${number(reward, 3)}` : "";
  return `, sample ${sample + 1}${gained}`;
}
