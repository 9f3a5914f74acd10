// Tries another reward on the samples that the run kept: what changes, how far both agree, what the
// other pays for, and the texts that it judges otherwise.

import { get, post } from "./api.js";
import { h, show } from "./dom.js";
import { counted, number, percent } from "./format.js";
import { table } from "./page_evaluations.js";
import { empty, problem } from "./states.js";
import { visible } from "./visible.js";

const LOOK_MS = 700;
const MOST_CHARACTERS = 1500;

export function open(root, context) {
  if (!context.canControl) {
    show(root, empty("Trying a reward runs its code, which needs permission",
      `Start the page with \`miles ui --control\`, or try it in a terminal: \`miles rewards try ${
        context.run} --reward math\`.`));
    return { close() {} };
  }
  return new Rewards(root, context);
}

class Rewards {
  constructor(root, context) {
    Object.assign(this, { context, isClosed: false });
    this.reward = h("input", { type: "text", id: "reward-name", spellcheck: "false",
      placeholder: "math or mypkg.rewards:strict", required: true, "aria-label": "Reward" });
    this.last = h("input", { type: "text", inputmode: "numeric", class: "number", id: "reward-last",
      placeholder: "all", pattern: "[0-9]*", "aria-label": "Newest steps" });
    this.go = h("button", { class: "main-button", id: "reward-try" }, "Try");
    this.note = h("p", { class: "muted small", role: "status" },
      "It scores the texts that the run kept; no engine is started and the run is not changed.");
    const form = h("form", { class: "tools", on: { submit: (event) => {
      event.preventDefault();
      this.try();
    } } }, h("label", {}, "Reward", this.reward), h("label", {}, "Newest steps", this.last), this.go);
    this.found = h("div", { class: "stack" });
    show(root, h("div", { class: "card stack" }, form, this.note), this.found);
  }

  async try() {
    this.go.disabled = true;
    show(this.found);
    try {
      const path = `api/control/runs/${encodeURIComponent(this.context.run)}/rewards`;
      let job = await post(path, { reward: this.reward.value, last: this.last.value });
      this.note.textContent = "It scores the samples…";
      while (!this.isClosed && job.exit_code === null) {
        await new Promise((done) => { setTimeout(done, LOOK_MS); });
        job = await get(`api/control/jobs/${job.id}`);
      }
      if (!this.isClosed) this.draw(job);
    } catch (error) {
      show(this.found, problem(error, () => this.try()));
    }
    this.go.disabled = false;
  }

  draw({ result, command, output }) {
    this.note.textContent = `Done: ${command.replace(" --json", "")}`;
    if (result?.kind !== "rewards") {
      show(this.found, problem({ what: result?.error ?? "The reward could not be tried",
        why: result?.why ?? output, fix: [result?.fix ?? command].flat().join(" or ") }));
      return;
    }
    const { flips, num_flips: count, no_advantages: noAdvantages, without_label: label } = result;
    show(this.found, figures(result), agreement(result), warnings(result, label),
      noAdvantages && h("p", { class: "muted small" }, `No advantages: ${noAdvantages}.`),
      h("section", { class: "card", "aria-label": "Samples whose reward changes" },
        h("h2", {}, `${counted(count, "sample")} with another reward`),
        flips.length < count && h("p", { class: "muted small" },
          `The ${flips.length} that change most; \`miles rewards try --json\` has all.`),
        h("ul", { class: "evaluated" }, flips.map((one) => flip(one, result.names)))));
  }

  close() {
    this.isClosed = true;
  }
}

function figures({ names, means, agreement: told, silent_groups: silent }) {
  const { num_samples: all, num_groups: groups, both_right: both } = told;
  const right = [told.only_a, told.only_b].map((one) => percent((both + one) / all, 1));
  return table(`${counted(all, "sample")} of ${counted(groups, "group")}`,
    ["Figure", ...names.map((name) => visible(name))],
    [["mean reward", ...means.map((mean) => number(mean, 3))], ["right", ...right],
      ["groups without a difference", ...silent]]);
}

function agreement({ names: [a, b], agreement: told }) {
  const kappa = told.kappa === null ? "none" : number(told.kappa, 2);
  return table("Agreement", ["Measure", "Value", "Detail"], [
    ["same verdict", percent(told.share, 1), `kappa ${kappa}`],
    ["right by one alone", visible(`${a}: ${told.only_a}`), visible(`${b}: ${told.only_b}`)],
    ...(told.pairs_agree === null ? [] : [["same order", percent(told.pairs_agree, 1),
      `of ${counted(told.num_pairs, "pair")} of one prompt`]]),
  ]);
}

/** What the other reward may pay for besides the answer. */
function warnings({ names, suspicions }, [missing, labelled]) {
  const found = suspicions.map((one) => `${names[1]} pays for ${one.says}, more than ${names[0]}: `
    + `correlation with the gain ${number(one.correlation, 2)} within prompts, `
    + `p = ${number(one.p_value, 1)}.`);
  if (labelled && 2 * missing > labelled) {
    found.push(`Of ${labelled} samples that only ${names[1]} calls right, ${missing} do not contain `
      + "the label.");
  }
  return found.length > 0 && h("section", { class: "card", "aria-label": "Suspicions" },
    h("h2", {}, "Suspicions"), h("ul", {}, found.map((text) => h("li", {}, visible(text)))));
}

function flip({ step, prompt_index: index, rewards, advantages, label, prompt, response }, names) {
  const isUp = rewards[1] > rewards[0];
  const [before, after] = advantages;
  return h("li", {},
    h("div", { class: "row small" },
      h("span", { class: `pill ${isUp ? "good" : "bad"}` },
        `${isUp ? "▲" : "▼"} ${number(rewards[0], 3)} → ${number(rewards[1], 3)}`),
      h("span", { class: "muted" }, visible(`${names[0]} → ${names[1]}`)),
      before !== null && after !== null && h("span", { class: "muted" },
        `advantage ${number(before, 3)} → ${number(after, 3)}`),
      h("span", { class: "muted" }, `step ${step}, prompt ${index}`),
      label !== null && h("span", { class: "muted" }, "label ", visible(String(label)))),
    h("p", { class: "text muted" }, visible(prompt.slice(0, MOST_CHARACTERS))),
    h("p", { class: "text mono" }, visible(response.slice(-MOST_CHARACTERS))));
}
