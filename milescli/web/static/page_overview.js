// Overview: the verdict first, then how far it is, what it gained, and where the time goes.

import { beginningCard } from "./beginning.js";
import { h, show } from "./dom.js";
import { endingCard } from "./ending.js";
import { bytes, counted, number, percent, seconds } from "./format.js";
import { leftText, phaseText } from "./head.js";
import { phaseBar, runBar } from "./phases.js";
import { samplingWords } from "./sampling.js";
import { numRecent } from "./series.js";
import { sparkline } from "./sparkline.js";
import { adaptersCard, Loaded } from "./states.js";
import { verdictCard } from "./verdict.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const POINTS = 160;
const REWARD = "rollout/reward_mean";
const MOST_DEVICES = 5;
const LOSS = "train/loss";

export function open(root, context) {
  const loaded = new Loaded(root, {
    load: async (signal) => {
      const summary = context.summary ?? await context.ask("summary", null, { signal });
      const isOver = !["running", "done", "not started"].includes(summary.state);
      const asked = ["evaluations", "names", "plan", "recipe"];
      const [ending, beginning, measured, names, plan, recipe] = await Promise.all([
        isOver && context.ask("why", null, { signal }),
        !summary.step && context.ask("beginning", null, { signal }),
        ...asked.map((name) => context.ask(name, null, { signal })),
      ]);
      const known = new Set(names.columns.map((column) => column.name));
      const name = [REWARD, LOSS].filter((one) => known.has(one));
      const columns = name.length
        ? await context.ask("columns", { name, points: POINTS }, { signal })
        : { steps: [], columns: {} };
      const abouts = new Map(names.columns.map((column) => [column.name, column.about]));
      const more = { takesTurns: plan.max_staleness === 0, sampling: samplingWords(recipe.keys),
        adapters: context.adapters,
        about: (name) => abouts.get(name) ?? "" };
      return { summary, ending, beginning, measured, columns, more };
    },
    draw: (answer) => draw(root, answer),
  });
  loaded.refresh();
  return { refresh: () => loaded.renew(), close: () => loaded.close() };
}

function draw(root, { summary, ending, beginning, measured, columns, more }) {
  // what a reader has unfolded stays so while the run goes on
  const unfolded = [...root.querySelectorAll("details[open]")].map((one) => one.dataset.name);
  show(
    root,
    endingCard(ending),
    summary.step > 0 || summary.state !== "running"
      ? verdictCard(summary.verdict, summary.learns_from_rows ? "loss" : "reward") : null,
    summary.step ? null : beginningCard(summary, beginning),
    summary.step || summary.phases?.length
      ? [gains(summary, measured, columns, more), flow(summary, more), meanings(more)] : null,
  );
  for (const one of root.querySelectorAll("details")) {
    one.open = unfolded.includes(one.dataset.name);
  }
}

// --- what it gained

function gains(summary, measured, columns, { sampling, adapters }) {
  if (adapters.length) {
    return h("div", { class: "grid gains" },
      adaptersCard(adapters, (id) => view.href({ run: id })), progress(summary));
  }
  const of = (name) => columns.steps.map((step, at) => [step, columns.columns[name]?.[at]]);
  const accuracies = measured.evaluations.map((one) => [one.step, one.accuracy]);
  const losses = measured.validations.map((one) => [one.step, one.loss]);
  return h(
    "div",
    { class: "grid gains" },
    summary.reward && figure("Reward", summary.reward, of(REWARD),
      "a point is the mean over the samples of one step"),
    summary.accuracy &&
      figure("Held-out accuracy", summary.accuracy, accuracies,
        [accuracyNote(summary), sampling].filter(Boolean).join("; "), percent1),
    summary.learns_from_rows &&
      summary.loss &&
      figure("Loss", summary.loss, of(LOSS), "of the rows of a step", number, "lowest"),
    losses.length > 0 && figure("Held-out loss", ends(losses), losses, "", number, "lowest"),
    progress(summary),
  );
}

const percent1 = (value) => percent(value, 1);

function accuracyNote(summary) {
  const at = summary.accuracy.last_step;
  return Number.isFinite(at) ? `measured after step ${number(at)}` : "";
}

function ends(points) {
  const values = points.map(([, value]) => value).filter(Number.isFinite);
  return { first: values[0], last: values.at(-1), best: Math.min(...values) };
}

function figure(title, value, points, note, say = number, best = "best") {
  const label = `${title}: from ${say(value.first)} to ${say(value.last)}`;
  return h(
    "section",
    { class: "card figure", "aria-label": title },
    h("h2", {}, title),
    h("p", { class: "big" }, say(value.last)),
    h("p", { class: "muted small" },
      `the last one · first ${say(value.first)} · ${best} ${say(value.best)}`),
    sparkline(points, label) ?? h("p", { class: "muted small spark-none" }, "a line from two on"),
    note && h("p", { class: "muted small" }, note),
  );
}

function progress(summary) {
  const share = summary.share_done;
  const rows = [
    ["state", summary.phase && summary.state === "running"
      ? `${summary.state}, in ${phaseText(summary)}`
      : summary.state],
    summary.forked_from && ["forked from", visible(summary.forked_from)],
    ["time", seconds(summary.elapsed_s)],
    summary.left && summary.state === "running" && ["left", leftText(summary.left)],
    ["checkpoint", summary.checkpoint_step ? `step ${number(summary.checkpoint_step)}`
      : "none yet"],
    summary.mirror && ["copied", summary.mirrored_step === null ? "none yet"
      : `step ${number(summary.mirrored_step)}`],
    ["restarts", number(summary.restarts) + (summary.lost_samples
      ? `, ${number(summary.lost_samples)} samples lost` : "")],
  ];
  return h(
    "section",
    { class: "card figure", "aria-label": "Progress" },
    h("h2", {}, "Progress"),
    h(
      "p",
      { class: "big" },
      number(summary.step),
      summary.num_steps && h("span", { class: "muted of" },
        ` of ${counted(summary.num_steps, "step")}`),
    ),
    Number.isFinite(share) &&
      h("progress", { max: 1, value: share, "aria-label": `${percent(share)} of the steps done` }),
    pairs(rows),
  );
}

function pairs(rows) {
  return h(
    "dl",
    { class: "pairs" },
    rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

// --- where the time goes

function flow(summary, more) {
  const window = summary.step > 0
    && h("span", { class: "muted small" }, ` ${windowWords(summary.verdict.num_steps)}`);
  return h(
    "div",
    { class: "grid flow" },
    h(
      "section",
      { class: "card wide", "aria-label": "Where the time of a step goes" },
      summary.run_phases?.length > 0 && h("div", { class: "whole-run" },
        h("h2", {}, "Where the time of the whole run went"),
        runBar(summary.run_phases)),
      h("h2", {}, "Where the time of a step goes", window),
      summary.phases?.length ? phaseBar(summary.phases)
        : h("p", { class: "muted" }, "Not known yet."),
      waits(summary.waits ?? [], more),
    ),
    h(
      "div",
      { class: "stack" },
      h(
        "section",
        { class: "card", "aria-label": "Speed" },
        h("h2", {}, "Speed", window && window.cloneNode(true)),
        pairs(speeds(summary)),
      ),
      memory(summary.memory ?? []),
    ),
  );
}

function speeds(summary) {
  const perSecond = (value) => `${number(value, 3)} tokens/s`;
  const has = Number.isFinite;
  return [
    has(summary.rollout_tokens_per_s) && ["rollout", perSecond(summary.rollout_tokens_per_s)],
    has(summary.train_tokens_per_s) && ["train", perSecond(summary.train_tokens_per_s)],
    has(summary.mfu) && ["MFU", percent(summary.mfu, 1)],
    has(summary.staleness_mean) && [
      "staleness",
      `${number(summary.staleness_mean, 2)} steps (up to ${number(summary.staleness_max)})`,
    ],
  ];
}

function waits(list, { takesTurns }) {
  if (!list.length) return null;
  return h(
    "ul",
    { class: "waits" },
    list.map((one) =>
      h(
        "li",
        {},
        h("b", {}, one.who),
        ` waits for ${one.for_whom}: ${seconds(one.seconds)} a step`,
        Number.isFinite(one.share) && h("span", { class: "muted" }, ` (${percent(one.share)})`),
      ),
    ),
    takesTurns && h("li", { class: "muted" }, "They take turns: with ",
      h("code", {}, "rollout.max_staleness=0"), " one works while the other waits."),
  );
}

/** mean of the last 6 steps. */
function windowWords(count) {
  return `mean of the last ${counted(numRecent(count), "step")}`;
}

// --- what the words mean

/** As the table of figures says it where it has a row, else in a line of our own. */
function meanings({ about }) {
  const terms = [
    ["rollout", about("time/rollout_s")],
    ["pack", about("time/pack_s")],
    ["train", about("time/train_s")],
    ["publish", about("time/publish_s")],
    ["save", about("time/save_s")],
    ["reward", about("rollout/reward_mean")],
    ["held-out accuracy", "mean reward over prompts that it does not learn from"],
    ["staleness", about("rollout/staleness_mean")],
    ["MFU", "FLOPs of the model in training, as a share of what the devices can do at most"],
    ["checkpoint", "the newest step from which the run can be resumed"],
    ["restarts", "how often a lost process was replaced"],
  ].filter(([, text]) => text);
  return h(
    "details",
    { class: "card", data: { name: "words" } },
    h("summary", {}, "What these words mean"),
    h("dl", { class: "pairs words" }, terms.map(([name, text]) =>
      [h("dt", {}, name), h("dd", {}, text)])),
  );
}

function memory(list) {
  if (!list.length) return null;
  const shown = [...list].sort((a, b) => (b.used_bytes ?? 0) - (a.used_bytes ?? 0)).slice(0,
    MOST_DEVICES);
  return h(
    "section",
    { class: "card", "aria-label": "Memory" },
    h("h2", {}, "Memory", h("span", { class: "muted small" }, " last seen")),
    h("ul", { class: "devices" }, shown.map(device)),
    list.length > shown.length &&
      h("p", { class: "small" }, h("a", { href: view.href({ page: "memory" }) },
        `and ${list.length - shown.length} more`)),
  );
}

/** A bar where it is known of how much. */
function device(one) {
  const whole = one.total_bytes ?? one.planned_bytes;
  const of = one.total_bytes ? ` of ${bytes(one.total_bytes)}` : "";
  const planned = one.planned_bytes ? `, planned ${bytes(one.planned_bytes)}` : "";
  return h(
    "li",
    {},
    h("span", {}, one.worker),
    h("span", {}, h("b", {}, bytes(one.used_bytes)), h("span", { class: "muted" }, of, planned)),
    whole && h("progress", { max: whole, value: one.used_bytes ?? 0,
      "aria-label": `${one.worker}: ${bytes(one.used_bytes)} of ${bytes(whole)}` }),
  );
}
