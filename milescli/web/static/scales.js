// How tokens are coloured: classes of the style sheet, and the legend that says what they mean.
// Lightness carries the order, so that it is read without telling colours apart.

import { h } from "./dom.js";

/** -log-prob in nats: from sure to surprised. */
const SURPRISE = [0.05, 0.2, 0.5, 1, 2, 3.5, 5, 8];
/** |engine - trainer| in nats. */
const DIFFERENCE = [1e-4, 1e-3, 5e-3, 0.02, 0.05, 0.1, 0.3, 1];
const NUM_VERSIONS = 6;

export const MODES = [
  ["logprob", "Log-prob"],
  ["mask", "Loss mask"],
  ["version", "Weight version"],
  ["difference", "|engine − trainer|"],
];

/** The class of a token, "" for none. */
export function classOf(token, mode) {
  if (mode === "mask") return token.isLearned ? "learned" : "";
  if (!token.isLearned && mode !== "version") return "";
  if (mode === "logprob") return token.logprob === null ? ""
    : `heat${level(-token.logprob, SURPRISE)}`;
  if (mode === "difference") {
    const between = differenceOf(token);
    return between === null ? "" : `cold${level(between, DIFFERENCE)}`;
  }
  return token.version === null ? "" : `version${token.version % NUM_VERSIONS}`;
}

/** |engine - trainer| of a token; null where one of them is not known. */
export function differenceOf(token) {
  if (token.logprob === null || token.trainer === null) return null;
  return Math.abs(token.logprob - token.trainer);
}

function level(value, bounds) {
  const at = bounds.findIndex((bound) => value < bound);
  return at < 0 ? bounds.length : at;
}

/** What the colours of a mode mean. `versions`: those that are on the page, ascending. */
export function legend(mode, versions) {
  if (mode === "mask") return key("Learned tokens",
    [["learned", "in the loss"], ["", "not in the loss"]]);
  if (mode === "version") {
    return key("Weight version", versions.map((one) =>
      [`version${one % NUM_VERSIONS}`, String(one)]));
  }
  if (mode === "difference") return key("|engine − trainer|, nats", steps("cold", DIFFERENCE));
  return key("Log-prob (nats)", steps("heat", SURPRISE, "−"));
}

function steps(name, bounds, sign = "") {
  const last = bounds.at(-1);
  const inside = bounds.map((bound, at) => [
    `${name}${at}`,
    sign ? `> ${sign}${bound}` : `< ${bound}`,
  ]);
  return [...inside, [`${name}${bounds.length}`, sign ? `≤ ${sign}${last}` : `≥ ${last}`]];
}

function key(title, entries) {
  return h(
    "div",
    { class: "scale" },
    h("span", { class: "muted" }, title),
    h("ul", { class: "keys" }, entries.map(([name, text]) => h("li", { class: name }, text))),
  );
}
