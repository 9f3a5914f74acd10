// The groups of a step, to choose one: prompt, mean reward, and how its samples did.

import { h, show } from "./dom.js";
import { counted, number } from "./format.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const EXCERPT = 90;

/** Between the lowest and the highest reward of a step; above it a sample counts as right. */
export function midpoint(groups) {
  const rewards = groups.flatMap((group) => group.samples.map((one) =>
    one.reward)).filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  return (low + high) / 2;
}

export function isRight(sample, middle) {
  return Number.isFinite(sample.reward) && sample.reward > middle;
}

/** The first group that has both right and wrong samples: it has something to compare. */
export function mixed(groups, middle) {
  return groups.find((group) => {
    const num = group.samples.filter((sample) => isRight(sample, middle)).length;
    return num > 0 && num < group.samples.length;
  });
}

/** 4 of 32 groups were kept. */
function keptWords(count, numKept, numGroups) {
  const kept = numGroups > numKept
    ? `${number(numKept)} of ${counted(numGroups, "group")} ${numKept === 1 ? "was" : "were"} kept`
    : counted(numKept, "group");
  return count < numKept ? `${kept}, ${number(count)} shown` : kept;
}

/** Draw the list; each entry is a link to its group. */
export function groupList(root, groups, { current, middle, numGroups, numKept }) {
  const hadFocus = root.contains(document.activeElement);
  const scroll = root.scrollTop;
  show(
    root,
    h("h2", { class: "small muted" }, keptWords(groups.length, numKept, numGroups)),
    h(
      "ul",
      {},
      groups.map((group) =>
        h(
          "li",
          {},
          h(
            "a",
            { href: view.href({ group: group.prompt_index }),
              "aria-current": group === current ? "true" : null },
            h("span", { class: "excerpt" }, visible(excerpt(String(group.prompt)))),
            h("span", { class: "row small muted" }, dots(group, middle),
              `mean ${number(mean(group), 3)}`),
          ),
        ),
      ),
    ),
  );
  root.scrollTop = scroll;
  if (hadFocus) root.querySelector("[aria-current]")?.focus();
}

function dots(group, middle) {
  const num = group.samples.filter((sample) => isRight(sample, middle)).length;
  return h(
    "span",
    { class: "dots", role: "img", "aria-label": `${num} of ${group.samples.length} right` },
    group.samples.slice(0, 16).map((sample) =>
      h("span", { class: isRight(sample, middle) ? "right-sample" : "wrong-sample" })),
  );
}

function mean(group) {
  const known = group.samples.map((sample) => sample.reward).filter(Number.isFinite);
  return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : NaN;
}

function excerpt(text) {
  const letters = Array.from(text.trim().replace(/\s+/gu, " "));
  return letters.length > EXCERPT ? `${letters.slice(0, EXCERPT).join("")}…` : letters.join("");
}
