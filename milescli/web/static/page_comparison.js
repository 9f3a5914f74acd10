// Comparison of two runs, on a saved page: who is better and how sure that is, and what differs.

import { h, show } from "./dom.js";
import { table } from "./page_evaluations.js";
import { saved } from "./saved.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

export function open(root) {
  const { comparison } = saved;
  const [a, b] = comparison.names;
  const kinds = [...new Set(comparison.differing.map((one) => one.what))];
  show(
    root,
    h("section", { class: `card verdict ${comparison.is_seen ? "good" : ""}`,
      "aria-label": "Which is better" },
    h("p", { class: "sentence" }, visible(comparison.headline)),
    comparison.sentences.map((text) => h("p", {}, visible(text))),
    h("p", { class: "muted small" }, visible(comparison.notes.join(" "))),
    h("p", {}, h("a", { href: view.href({ page: "curves" }) }, "Show the curves of both"))),
    table("Figures", ["Figure", a, b], comparison.figures),
    kinds.length
      ? kinds.map((what) => table(`What differs: ${what}`, ["Name", a, b],
        comparison.differing.filter((one) => one.what === what).map((one) =>
          [h("span", { class: "mono" }, visible(one.name)), visible(one.a), visible(one.b)])))
      : h("section", { class: "card", "aria-label": "What differs" }, h("h2", {}, "What differs"),
        h("p", {}, comparison.alike)),
    h("section", { class: "card", "aria-label": "Verdicts" }, h("h2", {}, "Verdicts"),
      comparison.verdicts.map((text, at) =>
        h("p", {}, h("b", {}, `${comparison.names[at]}: `), visible(text)))),
  );
  return { close() {} };
}
