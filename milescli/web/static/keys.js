// Keys that work everywhere, and the window that lists them.

import { h } from "./dom.js";
import { PAGES, view } from "./view.js";

/** Of the pages, in their order. */
export const KEYS = "1234567890-";
const LIST = [
  ["1 – 9  0  -", "go to a page, in the order of the tabs"],
  ["j  k", "next step, step before (Samples; Curves: the marked step)"],
  ["n  p", "next group, group before (Samples)"],
  ["[  ]", "run before, next run"],
  ["/", "search on this page"],
  ["t", "light or dark"],
  ["m", "the list of runs (where it is folded)"],
  ["← →", "within a sample: token by token"],
  ["Esc", "close what is open; zoom out"],
  ["?", "this list"],
];

/** Listen. `acts`: {run(by), theme(), menu()}; a page gets its own by the event `page-key`. */
export function listen(acts) {
  const dialog = help();
  addEventListener("keys", () => open(dialog));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    const at = event.target;
    if (event.key === "Escape" && at.matches?.("input, select")) at.blur();
    if (at.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
    if (act(event.key, acts, dialog)) event.preventDefault();
  });
}

function act(key, acts, dialog) {
  const page = PAGES[KEYS.indexOf(key)];
  if (page && key.length === 1) view.set({ page: page[0] });
  else if (key === "?") open(dialog);
  else if (key === "[" || key === "]") acts.run(key === "]" ? 1 : -1);
  else if (key === "t") acts.theme();
  else if (key === "m") acts.menu();
  else if (key === "/") {
    const field = document.querySelector("#main input[type=search]");
    if (!field) return false;
    field.focus();
    field.select();
  } else {
    dispatchEvent(new CustomEvent("page-key", { detail: key }));
    return false;
  }
  return true;
}

function help() {
  const rows = LIST.map(([keys, text]) =>
    h(
      "tr",
      {},
      h("td", {}, keys.split("  ").map((key, at) => [at ? " " : "", h("kbd", {}, key)])),
      h("td", {}, text),
    ),
  );
  const dialog = h(
    "dialog",
    { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("table", {}, h("tbody", {}, rows)),
    h("form", { method: "dialog", class: "right" }, h("button", {}, "Close")),
  );
  document.body.append(dialog);
  return dialog;
}

function open(dialog) {
  if (!dialog.open) dialog.showModal();
}
