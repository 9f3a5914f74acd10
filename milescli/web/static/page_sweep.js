// A sweep, on a saved page: which trial is best and how sure that is, which settings matter, where in
// the space of settings the good trials lie, and how each trial came there.

import { Chart } from "./chart.js";
import { h, put, show, withCode } from "./dom.js";
import { number, percent } from "./format.js";
import { table } from "./page_evaluations.js";
import { saved } from "./saved.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const NUM_BANDS = 4;
const FEWEST_SPLITS = 3; // of an axis: with less, it is divided evenly
const share = (value) => percent(value, 1);

export function open(root) {
  const { sweep } = saved;
  const charts = [];
  const draw = (parent, lines, options) => charts.push(new Chart(parent, lines, options));
  const compared = sweep.trials.filter((one) => one.is_comparable);
  const plots = h("div", { class: "stack" });
  show(root, verdict(sweep), plots, importance(sweep), trials(sweep));
  curves(plots, sweep.trials, draw);
  const axes = ordered(sweep).map((one) => axis(one, compared));
  if (axes.length > 1 && compared.length > 2) surface(plots, compared, axes, draw);
  for (const one of axes) if (compared.length > 1) ofSetting(plots, compared, one, draw);
  return { close: () => charts.forEach((one) => one.close()) };
}

function verdict(sweep) {
  return h("section", { class: `card verdict ${sweep.winner ? "good" : ""}`,
    "aria-label": "Which trial is best" },
  h("p", { class: "sentence" }, visible(sweep.headline)),
  sweep.notes.map((text) => h("p", { class: "muted small" }, withCode(text))),
  sweep.winner && h("p", {}, "Train with its settings: ", h("code", {}, visible(sweep.command))));
}

/** Accuracy and reward of each trial over its steps. */
function curves(parent, all, draw) {
  for (const [name, title, say, dots] of [["evaluations", "Held-out accuracy", share, true],
    ["curve", "Reward or loss of the steps", number, false]]) {
    const lines = all.map((one, place) => ({
      name: one.run, place, dots, xs: one[name].map(([step]) => step),
      ys: one[name].map(([, value]) => value) })).filter(({ xs }) => xs.length > 1);
    if (lines.length) draw(parent, lines, { title, say, smooth: dots ? 0 : 0.6 });
  }
}

/** The searched settings, the most important first. */
function ordered({ dimensions, importance: found }) {
  const weight = ({ key }) => found?.by_key[key] ?? 0;
  return [...dimensions].sort((a, b) => weight(b) - weight(a));
}

/** Where a setting's values lie on an axis: `place(trial)`, `say(x)`, and `splits`, the places of
 * labels, where they are not even; `isNames`: it is a list of values. */
function axis(dimension, compared) {
  const { key, kind } = dimension;
  const text = (trial) => trial.settings[key];
  if (["choice", "grid"].includes(kind)) {
    const names = [...new Set([...dimension.values, ...compared.map(text)])];
    return { key, isNames: true, place: (trial) => names.indexOf(text(trial)),
      say: (x) => (Number.isInteger(x) ? names[x] ?? "" : ""), splits: [...names.keys()] };
  }
  if (kind === "loguniform") {
    return { key, place: (trial) => Math.log10(text(trial)), say: (x) => number(10 ** x, 3),
      splits: decades(Math.log10(dimension.low), Math.log10(dimension.high)) };
  }
  return { key, place: (trial) => Number(text(trial)), say: (x) => number(x, 3), splits: null };
}

/** Logarithms of 1, 2 and 5 times powers of ten in a range; of a wide one of the powers alone. */
function decades(low, high) {
  const steps = high - low > 3 ? [1] : [1, 2, 5];
  const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 },
    (_, at) => Math.floor(low) + at);
  return powers.flatMap((power) => steps.map((step) => power + Math.log10(step)))
    .filter((x) => low <= x && x <= high);
}

/** [x, y, trial] with x ascending, none twice: equal ones lie side by side. */
function points(compared, x, y) {
  const found = compared.map((one) => [x.place(one), y(one), one]).sort((a, b) => a[0] - b[0]);
  const width = (found.at(-1)[0] - found[0][0]) || 1;
  const room = (x.isNames ? 0.3 : 1e-6 * width) / found.length;
  const counts = new Map();
  for (const [at] of found) counts.set(at, (counts.get(at) ?? 0) + 1);
  let last = -Infinity;
  return found.map(([at, value, trial]) => {
    last = Math.max(at - (room * (counts.get(at) - 1)) / 2, last + room);
    return [last, value, trial];
  });
}

const pick = (found) => (x) => {
  const hit = found.find(([at]) => at === x)?.[2];
  if (saved.answers[hit?.run]) view.set({ run: hit.run, page: "overview" });
};

function across(x, found) {
  const room = x.isNames ? 0.5 : 0.05 * ((found.at(-1)[0] - found[0][0]) || 1);
  const [low, high] = [found[0][0] - room, found.at(-1)[0] + room];
  const inside = x.splits?.filter((at) => low <= at && at <= high) ?? [];
  const splitsX = x.isNames || inside.length >= FEWEST_SPLITS ? inside : null;
  return { sayX: x.say, splitsX, range: [low, high] };
}

function ofSetting(parent, compared, x, draw) {
  const found = points(compared, x, (one) => one.accuracy);
  draw(parent, [{ name: "", place: 0, dots: true, isLoose: true, xs: found.map(([at]) => at),
    ys: found.map(([, value]) => value) }], { title: `Accuracy by ${x.key}`, say: share,
    ...across(x, found), onPick: pick(found) });
}

/** The two settings that matter most against each other; a line of dots for each band of accuracy. */
function surface(parent, compared, [x, y], draw) {
  const found = points(compared, x, y.place);
  const sorted = compared.map((one) => one.accuracy).sort((a, b) => a - b);
  const bounds = Array.from({ length: NUM_BANDS + 1 }, (_, at) =>
    sorted[Math.round((at * (sorted.length - 1)) / NUM_BANDS)]);
  const bandOf = (trial) => Math.min(NUM_BANDS - 1,
    bounds.slice(1).findIndex((bound) => trial.accuracy <= bound));
  const lines = Array.from({ length: NUM_BANDS }, (_, at) => NUM_BANDS - 1 - at).map((band, place) => {
    const own = found.filter(([, , trial]) => bandOf(trial) === band);
    const ends = own.map(([, , trial]) => trial.accuracy);
    return { name: `${share(Math.min(...ends))} to ${share(Math.max(...ends))}:`, place, dots: true,
      isLoose: true, xs: own.map(([at]) => at), ys: own.map(([, value]) => value) };
  }).filter((line) => line.xs.length);
  draw(parent, lines, { title: `${y.key} against ${x.key}`,
    about: "Each dot is a trial; its colour is its held-out accuracy.", say: y.say,
    ...across(x, found), onPick: pick(found) });
}

function importance({ importance: found }) {
  if (!found) return null;
  return table("Importance of settings", ["Setting", "Importance", "of 1"],
    Object.entries(found.by_key).map(([key, value]) => [h("span", { class: "mono" }, visible(key)),
      value.toFixed(2), h("progress", { value, max: 1, "aria-label": `Importance of ${key}` })]),
    `${found.method}, ${found.num_trials} trials`);
}

function trials({ trials: all, dimensions, winner }) {
  const searched = dimensions.map(({ key }) => key);
  return table("Trials", ["Trial", ...searched, "accuracy", "at step", "state"], all.map((one) => [
    saved.answers[one.run]
      ? h("a", { href: view.href({ run: one.run, page: "overview" }) }, visible(one.run))
      : visible(one.run),
    ...searched.map((key) => h("span", { class: "mono" }, visible(one.settings[key] ?? ""))),
    accuracy(one, winner), one.step ?? "–", state(one)]),
  "Trials with a link have their whole runs in this file. Tick runs to compare them in the curves.");
}

function accuracy({ run, accuracy: value, interval }, winner) {
  if (value === null) return "–";
  const said = h(run === winner ? "b" : "span", {}, share(value));
  return interval ? put(said, [h("span", { class: "muted" },
    ` (${share(interval.low)} to ${share(interval.high)})`)]) : said;
}

function state({ state: name, error }) {
  return error?.error ? [h("span", { class: "pill failed" }, name), " ",
    visible(`${error.error}: ${error.why ?? ""}`)] : name;
}
