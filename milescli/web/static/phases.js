// Phases of a step and of a whole run: their colours and words, the same on all pages.

import { h } from "./dom.js";
import { percent, seconds } from "./format.js";

/** Each has a colour of its own in the style sheet, for they stand in one legend. */
const KNOWN = new Set(["rollout", "pack", "train", "publish", "save", "eval", "lost", "start",
  "warm-up", "check", "steps", "reference", "teacher", "stop"]);

/** What a run calls its own phases, in words that no phase of a step has. */
export function runPhase(name) {
  return { train: "steps", warmup: "warm-up" }[name] ?? name;
}

/** The name of the CSS variable of a phase's colour. */
export function phaseColour(name) {
  return KNOWN.has(name) ? name : "other";
}

export function swatch(name) {
  return h("span", { class: "swatch", style: { background: `var(--${phaseColour(name)})` } });
}

const LEAST_S = 1e-3;

/** One bar of shares and the same in words, the largest first. `phases`: [{name, share, seconds}].
 * What took less than a millisecond is left out. */
export function phaseBar(phases) {
  const shown = phases.filter((one) => one.share > 0 && !(one.seconds < LEAST_S))
    .sort((a, b) => b.share - a.share);
  return [
    h(
      "div",
      { class: "bar", "aria-hidden": "true" },
      shown.map((one) =>
        h("span", {
          style: { "flex-grow": one.share, background: `var(--${phaseColour(one.name)})` },
          title: `${one.name} ${percent(one.share)}`,
        }),
      ),
    ),
    h(
      "ul",
      { class: "keys" },
      shown.map((one) =>
        h(
          "li",
          {},
          swatch(one.name),
          ` ${one.name} `,
          h("b", {}, percent(one.share)),
          Number.isFinite(one.seconds) &&
            h("span", { class: "muted" }, ` ${seconds(one.seconds)}`),
        ),
      ),
    ),
  ];
}

/** The same of the phases of a whole run. */
export function runBar(phases) {
  return phaseBar(phases.map((one) => ({ ...one, name: runPhase(one.name) })));
}
