// Evaluations: accuracy over steps and sets, with intervals where there are any, and their samples.

import { Chart } from "./chart.js";
import { h, show } from "./dom.js";
import { counted, number, percent, seconds, words } from "./format.js";
import { pictures } from "./pictures.js";
import { rewardPill } from "./sample_card.js";
import { samplingWords } from "./sampling.js";
import { empty, Loaded } from "./states.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const LIMIT = 20;
const ONLY = [["", "All"], ["right", "Only right"], ["wrong", "Only wrong"]];

export function open(root, context) {
  return new Evaluations(root, context);
}

class Evaluations {
  constructor(root, context) {
    Object.assign(this, { root, context, chart: null, path: "" });
    [this.plot, this.tables, this.samples] = [h("div", {}), h("div", { class: "stack" }),
      h("div", {})];
    show(root, this.plot, this.tables, this.samples);
    this.loaded = new Loaded(root, {
      load: (signal) => Promise.all(["evaluations", "recipe"].map((name) =>
        context.ask(name, null, { signal }))),
      draw: ([answer, recipe]) => {
        this.sampling = samplingWords(recipe.keys);
        this.draw(answer);
      },
    });
    this.rows = new Loaded(this.samples, {
      load: (signal) => context.ask("evaluation-samples", { path: this.path,
        only: this.only, offset: view.number("offset", 0), limit: LIMIT }, { signal }),
      draw: (answer) => this.drawSamples(answer),
    });
    this.loaded.refresh();
    this.changed();
  }

  refresh() {
    this.loaded.renew();
  }

  changed() {
    const [path, only, offset] = [view.get("path"), view.get("only"), view.number("offset", 0)];
    if (path === this.path && only === this.only && offset === this.offset) return;
    Object.assign(this, { path, only, offset });
    this.rows.stop();
    if (path) this.rows.refresh();
    else show(this.samples);
    if (this.answer) this.draw(this.answer);
  }

  draw(answer) {
    const { evaluations, validations, sets } = (this.answer = answer);
    if (!this.root.contains(this.tables)) show(this.root, this.plot, this.tables, this.samples);
    if (!evaluations.length && !validations.length && !sets.length) {
      show(this.tables, empty("Nothing was evaluated yet",
        "With data.eval in the recipe, held-out prompts are put to the model every eval.every "
        + "steps; "
        + "`miles eval` adds results of named sets."));
      return;
    }
    this.drawChart(evaluations, validations);
    show(
      this.tables,
      evaluations.length > 0 && this.table("During the run", evaluations, "accuracy",
        this.sampling),
      validations.length > 0 && this.table("Held-out rows", validations, "loss"),
      sets.length > 0 && this.sets(sets),
    );
  }

  drawChart(evaluations, validations) {
    const [list, name, title] = evaluations.length
      ? [evaluations, "accuracy", "Held-out accuracy"]
      : [validations, "loss", "Held-out loss"];
    if (list.length < 2) return;
    const lines = [{ name: "", place: 0, dots: true, xs: list.map((one) => one.step),
      ys: list.map((one) => one[name]) }];
    const about = name === "accuracy" ? this.sampling : "";
    const options = { title, about,
      say: name === "accuracy" ? (value) => percent(value, 1) : number,
      sayShort: name === "accuracy" ? percent : null };
    if (this.chart) this.chart.update(lines, options);
    else this.chart = new Chart(this.plot, lines, options);
  }

  table(title, list, main, note = "") {
    const figures = [...new Set(list.flatMap((one) => Object.keys(one.figures ?? {})))];
    const say = main === "accuracy" ? (value) => percent(value, 1) : number;
    const timed = list.some((one) => Number.isFinite(one.seconds));
    return table(
      title,
      ["Step", words(main), ...(main === "accuracy" ? ["prompts"] : []), ...figures.map(words),
        ...(timed ? ["took"] : []), ""],
      [...list].reverse().map((one) => [
        one.step,
        one.interval ? estimate(one.interval) : h("b", {}, say(one[main])),
        ...(main === "accuracy" ? [number(one.num_prompts)] : []),
        ...figures.map((name) => figureText(name, one.figures?.[name])),
        ...(timed ? [seconds(one.seconds)] : []),
        this.samplesLink(one.path, `Samples of step ${one.step}`),
      ]),
      note,
    );
  }

  sets(list) {
    const names = [...new Set(list.flatMap((one) => Object.keys(one.estimates ?? {})))];
    return table(
      "Named sets, by miles eval",
      ["Set", "Step", "accuracy", ...names, "prompts", ""],
      list.map((one) => [
        visible(String(one.set)),
        one.step,
        h("b", {}, percent(one.accuracy, 1)),
        ...names.map((name) => estimate(one.estimates?.[name])),
        number(one.num_prompts),
        this.samplesLink(one.path, `Samples of ${one.set}, step ${one.step}`),
      ]),
    );
  }

  samplesLink(path, label) {
    if (!path) return "";
    return h("a", { href: view.href({ path, offset: null }), "aria-label": label,
      "aria-current": path === this.path ? "true" : null }, "samples");
  }

  drawSamples({ total, samples, is_all: isAll = true }) {
    const offset = view.number("offset", 0);
    const go = (to) => view.set({ offset: to || null });
    show(
      this.samples,
      h(
        "section",
        { class: "card", "aria-label": "Samples of an evaluation" },
        h("div", { class: "row between" },
          h("h2", {}, `Samples of ${this.path}`),
          h("span", { class: "row" },
            h("span", { class: "several", role: "group", "aria-label": "Which samples" },
              ONLY.map(([value, text]) => h("button", {
                "aria-pressed": String(value === view.get("only")),
                on: { click: () => view.set({ only: value, offset: null }) } }, text))),
            h("button", { disabled: offset === 0,
              on: { click: () => go(Math.max(0, offset - LIMIT)) } },
              "Before"),
            h("span", { class: "muted small" },
              `${number(Math.min(offset + 1, total))} to ${number(offset + samples.length)} of `
              + counted(total, "sample") + (isAll ? "" : " so far; the rest was not read")),
            h("button", { disabled: offset + samples.length >= total,
              on: { click: () => go(offset + LIMIT) } }, "Next"),
            h("button", { class: "plain", on: { click: () =>
              view.set({ path: null, only: null, offset: null }) } },
              "Close"))),
        h("ul", { class: "evaluated" }, samples.map((one) => sampleRow(one, this.context.imageOf))),
      ),
    );
  }

  close() {
    this.loaded.close();
    this.rows.close();
    this.chart?.close();
  }
}

function sampleRow(sample, imageOf) {
  const isRight = sample.is_right ?? sample.reward > 0.5;
  const label = sample.label;
  return h(
    "li",
    {},
    h("div", { class: "row small" }, rewardPill(sample.reward, isRight),
      h("span", { class: "muted" }, `prompt ${sample.index}`),
      sample.stop_reason === "length" && h("span", { class: "pill warning" }, "cut off: length"),
      label !== null && label !== undefined && h("span", { class: "muted" }, "label ",
        visible(String(label)))),
    pictures(sample.images, imageOf),
    h("p", { class: "text muted" }, visible(String(sample.prompt ?? ""))),
    h("p", { class: "text mono" }, visible(String(sample.response ?? ""))),
  );
}

/** A card with a table: `rows` of cells, under `heads`; an empty head is that of links to samples. */
export function table(title, heads, rows, note = "") {
  return h(
    "section",
    { class: "card", "aria-label": title },
    h("h2", {}, title),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${title}` },
      h("table", {},
        h("thead", {}, h("tr", {}, heads.map((head) => head ? h("th", { scope: "col" }, head)
          : h("td", {}, h("span", { class: "unseen" }, "Samples"))))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))))),
    note && h("p", { class: "muted small" }, note),
  );
}

function figureText(name, value) {
  return name.endsWith("_fraction") ? percent(value, 1) : number(value);
}

/** 81.2 % (78.0 % to 84.1 %). */
function estimate(one) {
  if (!one) return "";
  if (!Number.isFinite(one.low)) return percent(one.value, 1);
  return [percent(one.value, 1),
    h("span", { class: "muted" }, ` (${percent(one.low, 1)} to ${percent(one.high, 1)})`)];
}
