// A run before its first step: which phases are done, and how far the warm-up is.

import { h } from "./dom.js";
import { counted, number, seconds } from "./format.js";
import { runPhase } from "./phases.js";
import { sparkline } from "./sparkline.js";
import { empty } from "./states.js";

/** Says of a running run what it does now; of one that ended, that it did no step. */
export function beginningCard(summary, { phases, warmup }) {
  if (summary.state === "not started") {
    return empty("No step is done yet", "Figures show up here with the first step.");
  }
  const isRunning = summary.state === "running";
  const title = isRunning ? "Before the first step" : "It ended before its first step";
  return h(
    "section",
    { class: "card figure beginning", "aria-label": title },
    h("h2", {}, title),
    h("ol", { class: "begun" },
      phases.map((one) => h("li", {}, h("span", { class: "done", "aria-hidden": "true" }, "✓"),
        runPhase(one.name), h("span", { class: "muted" }, seconds(one.seconds)))),
      isRunning && summary.phase && h("li", { "aria-current": "step" },
        h("span", { class: "now", "aria-hidden": "true" }, "…"),
        h("b", {}, runPhase(summary.phase)),
        h("span", { class: "muted" }, [summary.phase_detail, seconds(summary.phase_s)]
          .filter(Boolean).join(" · ")))),
    warmup && warm(warmup, isRunning && summary.phase === "warmup"),
    isRunning && h("p", { class: "muted small" }, "Figures show up here with the first step."),
  );
}

function warm({ step, num_steps: count, losses, first, last, left_s: left }, isGoingOn) {
  const time = isGoingOn && left > 0 ? ` · about ${seconds(left)} left` : "";
  return h("div", {},
    h("h3", {}, "Warm-up: it imitates demonstrations"),
    h("p", { class: "big" }, number(step), h("span", { class: "muted of" },
      ` of ${counted(count, "step")}${time}`)),
    h("progress", { max: count, value: step, "aria-label": `${step} of ${count} steps` }),
    h("p", {}, "Loss ", h("b", {}, number(last)),
      h("span", { class: "muted" }, ` · first ${number(first)}`)),
    sparkline(losses, `Loss of the warm-up: from ${number(first)} to ${number(last)}`));
}
