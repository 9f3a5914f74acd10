// The list of figures to choose from, by section, with a search. Draws what it is told.

import { h, show } from "./dom.js";
import { words } from "./format.js";

/** `columns`: [{name, section, about, unit}]; `choose(names)` is told each change. */
export function chooser(root, columns, chosen, choose) {
  const search = root.querySelector("input[type=search]");
  const wanted = search?.value ?? "";
  const focused = document.activeElement;
  const focusedId = root.contains(focused) ? focused.id : null;
  const caret = focused === search ? search.selectionStart : null;
  const field = h("input", {
    type: "search",
    id: "column-search",
    placeholder: "Search figures",
    "aria-label": "Search figures",
    value: wanted,
    on: { input: () => filter(root, field.value) },
  });
  const folded = matchMedia("(max-width: 900px)").matches;
  const wasOpen = root.querySelector("details.all")?.open ?? !folded;
  show(
    root,
    h(
      "details",
      { class: "card all", open: wasOpen },
      h("summary", {}, h("b", {}, "Figures"),
        h("span", { class: "muted" }, ` ${chosen.length} shown`)),
      field,
      sections(columns).map(([name, list]) => section(name, list, chosen, choose)),
    ),
  );
  filter(root, wanted);
  if (focusedId) {
    const again = document.getElementById(focusedId);
    again?.focus();
    if (caret !== null) again.setSelectionRange(caret, caret);
  }
}

function sections(columns) {
  const bySection = new Map();
  for (const column of columns) {
    if (!bySection.has(column.section)) bySection.set(column.section, []);
    bySection.get(column.section).push(column);
  }
  return [...bySection];
}

function section(name, list, chosen, choose) {
  return h(
    "fieldset",
    {},
    h("legend", {}, name),
    list.map((column) =>
      h(
        "label",
        { class: "column", data: { name: column.name }, title: column.about || column.name },
        h("input", {
          type: "checkbox",
          id: `column-${column.name}`,
          title: column.about || null,
          prop: { checked: chosen.includes(column.name) },
          on: {
            change: (event) => {
              const rest = chosen.filter((one) => one !== column.name);
              choose(event.target.checked ? [...rest, column.name] : rest);
            },
          },
        }),
        words(column.name),
      ),
    ),
  );
}

function filter(root, text) {
  const parts = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const fieldset of root.querySelectorAll("fieldset")) {
    let any = false;
    for (const label of fieldset.querySelectorAll("label")) {
      const name = `${label.dataset.name} ${label.title} ${label.textContent}`.toLowerCase();
      label.hidden = !parts.every((part) => name.includes(part));
      any ||= !label.hidden;
    }
    fieldset.hidden = !any;
  }
}
