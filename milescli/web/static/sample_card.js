// One sample: reward, its parts, how it ended, and its text.

import { h } from "./dom.js";
import { counted, number, percent, plain } from "./format.js";
import { pictures } from "./pictures.js";
import { TokenView } from "./token_view.js";
import { visible } from "./visible.js";

const ENDS = { stop: "", length: "warning", null: "", undefined: "" };

/** {element, views}: the card and the views of its trajectories. `place`: from 1 in its group. */
export function sampleCard(sample, { place, mode, wanted, isRight, tell, imageOf }) {
  const lines = linesOf(sample);
  const views = lines.map(
    (line, at) =>
      new TokenView(line, {
        mode,
        wanted,
        tell,
        label: `Text of sample ${place}${lines.length > 1 ? `, trajectory ${at + 1}` : ""}`,
      }),
  );
  const element = h(
    "article",
    { class: "card sample", "aria-label": `Sample ${place}` },
    h(
      "div",
      { class: "sample-head" },
      h(
        "div",
        { class: "row" },
        h("h3", {}, `Sample ${place}`),
        rewardPill(sample.reward, isRight),
        h("span", { class: `pill ${ENDS[sample.stop_reason] ?? "bad"}` },
          endWords(sample.stop_reason)),
        h("span", { class: "muted small" }, lengthWords(sample, lines)),
      ),
      copyButton(lines, place),
    ),
    rewardParts(sample),
    pictures(sample.returned_images, imageOf, "that tools returned"),
    leastSure(views),
    views.map((view, at) => [
      lines.length > 1 &&
        h("p", { class: "muted small" },
          `Trajectory ${at + 1} of ${lines.length}${lines[at].role ? `: ${lines[at].role}` : ""}`),
      view.box,
    ]),
  );
  return { element, views };
}

/** What was kept of it; of a run of an older miles the response alone. */
function linesOf(sample) {
  if (sample.lines?.length) return sample.lines;
  const trajectories = sample.episode?.trajectories;
  if (trajectories?.length) return trajectories.map((text) => ({ text: String(text) }));
  return [{ text: sample.response ?? "" }];
}

/** The reward: a sign beside the colour, for those who do not tell colours apart. */
export function rewardPill(reward, isRight) {
  if (!Number.isFinite(reward)) return h("span", { class: "pill" }, "no reward");
  const [tone, sign] = isRight ? ["good", "✓"] : ["bad", "✗"];
  return h("span", { class: `pill ${tone}` }, `${sign} reward ${number(reward, 3)}`);
}

function endWords(reason) {
  if (!reason) return "end not known";
  return reason === "length" ? "cut off: length" : `ended: ${reason}`;
}

function lengthWords(sample, lines) {
  const learned = lines.flatMap((line) => line.logprobs ?? []).length;
  const tokens = sample.response_ids?.length || learned;
  if (tokens) return counted(tokens, "token");
  return counted((sample.response ?? "").length, "character");
}

function rewardParts(sample) {
  const parts = Object.entries(sample.reward_parts ?? {});
  const figures = Object.entries(sample.episode ?? {}).filter(([name]) => name !== "trajectories");
  if (!parts.length && !figures.length) return null;
  return h(
    "ul",
    { class: "keys small" },
    [...parts, ...figures].map(([name, value]) =>
      h("li", {}, h("span", { class: "muted" }, visible(`${name} `)),
        typeof value === "number" ? number(value) : visible(plain(value)))),
  );
}

/** Where the model was least sure of what it said; a click goes there. */
function leastSure(views) {
  let least = null;
  for (const view of views) {
    const index = view.leastSure();
    if (index === null) continue;
    const { logprob, text } = view.tokens[index];
    if (least === null || logprob < least.logprob) least = { view, index, logprob, text };
  }
  if (least === null) return null;
  return h("p", { class: "small" }, h("span", { class: "muted" }, "least sure: "),
    h("button", { class: "link", on: { click: () => least.view.mark(least.index) } },
      h("code", {}, visible(least.text.replaceAll("\n", "⏎"))),
      ` ${percent(Math.exp(least.logprob), 1)}`));
}

function copyButton(lines, place) {
  const button = h("button", { class: "plain small",
    "aria-label": `Copy the text of sample ${place}`,
    on: { click: async () => {
      const text = lines.map((line) => line.text).join("\n\n");
      button.textContent = (await copied(text)) ? "Copied" : "Not copied: the browser forbids it";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    } } }, "Copy");
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "unseen", prop: { value: text } });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
