// The verdict of a run: one sentence, then what was found, with evidence, advice and source.

import { h, withCode } from "./dom.js";
import { counted } from "./format.js";
import { numEarly, numRecent } from "./series.js";
import { empty } from "./states.js";
import { view } from "./view.js";

const LEVELS = { bad: "Bad", warning: "Warning", hint: "Hint" };

/** The first card of the overview. `verdict` as the summary holds it; `word`: of which figure its
 * sentence tells. */
export function verdictCard(verdict, word) {
  if (!verdict) return empty("No verdict yet", "It comes with the first steps.");
  const worst = verdict.findings[0]?.level;
  const [tone, sign] = tones(verdict, worst);
  return h(
    "section",
    { class: `card verdict ${tone}`, "aria-label": "Verdict" },
    h(
      "div",
      { class: "headline" },
      h("span", { class: `sign ${tone}`, "aria-hidden": "true" }, sign),
      h(
        "div",
        {},
        h("p", { class: "sentence" }, verdict.headline),
        h(
          "p",
          { class: "muted small" },
          `After ${counted(verdict.step, "step")} · `,
          windowWords(verdict.num_steps, word),
          verdict.findings.length ? counted(verdict.findings.length, "finding") : "no findings",
        ),
      ),
    ),
    verdict.findings.length > 0 && h("ol", { class: "findings" }, verdict.findings.map(finding)),
    verdict.facts?.length > 0 &&
      h(
        "details",
        { data: { name: "facts" } },
        h("summary", {}, "What looks odd and is normal"),
        h("ul", {}, verdict.facts.map((fact) => h("li", {}, fact))),
      ),
  );
}

const TOO_EARLY = 10;

/** Which steps the figures on both sides of the arrow are of. */
function windowWords(count, word) {
  if (count < 2) return "";
  if (count < TOO_EARLY) return `${word}: first step → last step · `;
  return `${word}: mean of the first ${numEarly(count)} steps → mean of the last `
    + `${numRecent(count)} · `;
}

function tones(verdict, worst) {
  if (verdict.is_learning === null || verdict.is_learning === undefined) {
    return [worst === "bad" ? "bad" : "early", "…"];
  }
  if (verdict.is_learning) {
    if (worst === "bad") return ["bad", "!"];
    return [worst === "warning" ? "warning" : "good", worst === "warning" ? "!" : "✓"];
  }
  return ["bad", "!"];
}

function finding(one) {
  return h(
    "li",
    { class: `finding ${one.level}` },
    h(
      "div",
      { class: "row" },
      h("span", { class: `pill ${one.level}` }, LEVELS[one.level] ?? one.level),
      h("h3", {}, one.title),
    ),
    h("p", {}, withCode(one.evidence)),
    one.advice?.length > 0 && h("ul", { class: "advice" },
      one.advice.map((text) => h("li", {}, withCode(text)))),
    h(
      "div",
      { class: "row small" },
      one.columns?.length > 0 &&
        h(
          "a",
          {
            href: view.href({
              page: "curves",
              columns: one.columns,
              marks: one.steps ? one.steps.join("-") : null,
            }),
          },
          one.steps && one.steps[0] !== one.steps[1]
            ? `Show the curves, steps ${one.steps[0]} to ${one.steps[1]} marked`
            : "Show the curves",
        ),
      h(
        "details",
        { class: "source", data: { name: one.name } },
        h("summary", {}, "Where this rule comes from"),
        h("p", { class: "muted" }, one.source),
      ),
    ),
  );
}
