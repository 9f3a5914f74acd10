// Recipe & plan: what was asked for with the origin of each key, what was decided and why, the
// layout, and what the run was made with.

import { h, show, showOther, withCode } from "./dom.js";
import { field } from "./field.js";
import { breakable, bytes, plain } from "./format.js";
import { layout } from "./layout.js";
import { Loaded, empty } from "./states.js";
import { view } from "./view.js";
import { visible } from "./visible.js";
import { highlighted } from "./token_view.js";

export function open(root, context) {
  const tools = makeTools();
  const keys = h("div", {});
  let known = [];
  let drawn = "";
  const drawAll = ([recipe, plan, manifest]) => {
    const text = JSON.stringify([recipe, plan, manifest]);
    if (loaded.isDrawn && text === drawn) return;
    [known, drawn] = [recipe.keys, text];
    drawKeys(keys, known);
    show(root, planCard(plan), decisions(plan), recipeCard(tools.box, known.length && keys),
      alternatives(plan), manifestCard(manifest));
  };
  const loaded = new Loaded(root, {
    load: (signal) => Promise.all(["recipe", "plan", "manifest"].map((name) =>
      context.ask(name, null, { signal }))),
    draw: drawAll,
  });
  loaded.refresh();
  return {
    refresh: () => loaded.renew(),
    changed: () => {
      tools.fill();
      drawKeys(keys, known);
    },
    close: () => loaded.close(),
  };
}

/** Which keys are shown, and the search among them. */
function makeTools() {
  const all = h("input", { type: "checkbox", on: { change: () =>
    view.set({ keys: all.checked ? null : "all" }, { replace: true }) } });
  const search = field("key", h("input", { type: "search", placeholder: "Search keys",
    "aria-label": "Search keys" }));
  const fill = () => {
    all.checked = view.get("keys") !== "all";
    search.fill();
  };
  fill();
  return { fill, box: h("div", { class: "tools" },
    h("label", {}, all, "Only what was set"), search.input) };
}

function planCard(plan) {
  if (!plan.slots.length && !plan.decisions.length) {
    return empty("No plan yet", "It is written when the run has looked at the machine.");
  }
  return h("section", { class: "card", "aria-label": "Layout" }, h("h2", {}, "Layout"),
    layout(plan));
}

function decisions(plan) {
  if (!plan.decisions.length) return null;
  return h(
    "section",
    { class: "card", "aria-label": "Decisions" },
    h("h2", {}, "What the plan decided, and why"),
    h("dl", { class: "decisions" }, gathered(plan.decisions).map((one) =>
      h("div", {},
        h("dt", {}, h("code", {}, breakable(one.key))),
        h("dd", {}, h("b", {}, plain(one.value)), h("p", { class: "muted small" },
          withCode(String(one.reason ?? ""))))))),
  );
}

/** Axes of the trainer that are 1, as one decision. */
function gathered(list) {
  const narrow = list.filter(isNarrow);
  if (narrow.length < 2) return list;
  const key = `trainer.${narrow.map((one) => one.key.split(".")[1]).join(", ")}`;
  const reason = [...new Set(narrow.map((one) => one.reason))].join("; ");
  return list.filter((one) => one === narrow[0] || !narrow.includes(one)).map((one) =>
    (one === narrow[0] ? { ...one, key, reason } : one));
}

function isNarrow(one) {
  return /^trainer\.(tp|pp|cp|ep|dp)$/.test(one.key) && String(one.value) === "1";
}

function recipeCard(tools, keys) {
  return h(
    "section",
    { class: "card", "aria-label": "Recipe" },
    h("div", { class: "row between" }, h("h2", {}, "Recipe"), tools),
    keys || h("p", { class: "muted" }, "The recipe of this run cannot be read."),
  );
}

/** Sizes also as people read them. */
function valueText(name, value) {
  return name.endsWith("_bytes") && value >= 1024 ? `${value} (${bytes(Number(value))})` : plain(value);
}

/** Was it left as it is by default? */
const isDefault = (one) => one.origin === "default";

function drawKeys(root, known) {
  const wanted = view.get("key").toLowerCase();
  const shown = known.filter((one) => {
    if (view.get("keys") !== "all" && !wanted && isDefault(one)) return false;
    return `${one.key} ${plain(one.value)} ${one.origin}`.toLowerCase().includes(wanted);
  });
  if (!shown.length) {
    show(root, h("p", { class: "muted" }, "No key fits."));
    return;
  }
  const mark = (text) => visible(text).flatMap((node) =>
    typeof node === "string" ? highlighted(node, wanted) : [node]);
  const inParts = (nodes) => nodes.flatMap((node) =>
    typeof node === "string" ? breakable(node) : [node]);
  showOther(
    root,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Keys of the recipe" },
      h("table", { class: "recipe" },
        h("thead", {}, h("tr", {}, ["Key", "Value", "Origin"].map((one) =>
          h("th", { scope: "col" }, one)))),
        h("tbody", {}, shown.map((one) =>
          h("tr", { class: isDefault(one) ? "" : "was-set" },
            h("td", { class: "mono" }, inParts(mark(one.key))),
            h("td", { class: "mono value" }, mark(valueText(one.key, one.value))),
            h("td", { class: "muted small" }, mark(one.origin ?? ""))))))),
  );
}

function alternatives(plan) {
  if (!plan.alternatives?.length) return null;
  const names = Object.keys(plan.alternatives[0]);
  return h(
    "section",
    { class: "card", "aria-label": "Other layouts" },
    h("h2", {}, "Layouts that were not chosen"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Other layouts, table" },
      h("table", {},
        h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, plan.alternatives.map((one) =>
          h("tr", {}, names.map((name) => h("td", {}, plain(one[name])))))))),
  );
}

function manifestCard(manifest) {
  const entries = Object.entries(manifest);
  if (!entries.length) return null;
  const { packages, ...rest } = manifest;
  return h(
    "section",
    { class: "card", "aria-label": "Manifest" },
    h("h2", {}, "Made with"),
    h("dl", { class: "pairs" }, Object.entries(rest).filter(([name]) => name !== "data").map(
      ([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", { class: "mono" },
        visible(valueText(name, value)))])),
    packages && h("details", {}, h("summary", {}, "Packages"), h("dl", { class: "pairs" },
      Object.entries(packages).map(([name, value]) => [h("dt", {}, name),
        h("dd", { class: "mono" }, plain(value))]))),
    manifest.data && h("details", {}, h("summary", {}, "Data"),
      h("pre", { class: "raw", tabindex: 0 },
        visible(JSON.stringify(manifest.data, null, 2)).flat())),
  );
}
