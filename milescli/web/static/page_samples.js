// Samples: what the model said at a step, the samples of a group side by side. One step is held.

import { h, settled, show } from "./dom.js";
import { counted, number } from "./format.js";
import { groupList, isRight, midpoint, mixed } from "./groups.js";
import { pictures } from "./pictures.js";
import { Readout } from "./readout.js";
import { sampleCard } from "./sample_card.js";
import { SampleTools } from "./sample_tools.js";
import { legend, MODES } from "./scales.js";
import { SearchResults } from "./search_results.js";
import { nearest } from "./series.js";
import { empty, Loaded, problem } from "./states.js";
import { highlighted } from "./token_view.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

const NUM_GROUPS = "rollout/num_groups";

export function open(root, context) {
  return new Samples(root, context);
}

class Samples {
  constructor(root, context) {
    Object.assign(this, { root, context, steps: [], asked: null, step: null, groups: [],
      views: [] });
    this.results = new SearchResults(context);
    this.tools = new SampleTools({
      go: (place) => this.go(place),
      step: (step) => this.go(nearest(this.steps, step)),
      searchAll: (text) => this.results.search(text),
      closeResults: () => this.results.hide(),
    });
    this.list = h("div", { class: "groups" });
    this.main = h("div", { class: "stack group" });
    this.readout = new Readout();
    this.content = h("div", { class: "samples" }, this.list, this.main);
    show(root, this.tools.box, this.results.box, this.content, this.readout.box);
    this.loaded = new Loaded(this.content, {
      load: (signal) => this.load(signal),
      draw: (answer) => this.take(answer),
    });
    this.later = settled(() => this.loaded.refresh(), 80);
    this.onKey = (event) => this.key(event.detail);
    addEventListener("page-key", this.onKey);
    this.content.setAttribute("aria-busy", "true");
    this.start();
  }

  async start() {
    try {
      await this.loadSteps();
    } catch (error) {
      this.content.removeAttribute("aria-busy");
      show(this.content, problem(error, () => this.start()));
      return;
    }
    if (this.loaded.isClosed) return;
    if (!this.steps.length) {
      const rows = this.context.summary?.learns_from_rows;
      this.tools.box.hidden = true;
      this.content.removeAttribute("aria-busy");
      show(this.content, rows
        ? empty("No samples", "This run learns from rows of a file: the model says nothing in it.")
        : empty("No samples yet", "With the first step that is done, what the model said shows up "
          + "here. The key logging.samples_per_step of the recipe says how many groups are kept."));
      return;
    }
    this.tools.box.hidden = false;
    this.drawTools();
    this.loaded.refresh();
  }

  async loadSteps() {
    this.steps = (await this.context.ask("sample-steps")).steps;
  }

  wantedStep() {
    const wanted = view.number("step");
    if (!this.steps.length) return wanted;
    return wanted === null ? this.steps.at(-1) : this.steps[nearest(this.steps, wanted)];
  }

  /** The samples of a step, and how many groups it had. */
  async load(signal) {
    const step = (this.asked = this.wantedStep());
    const [answer, columns] = await Promise.all([
      this.context.ask("samples", { step }, { signal }),
      this.context.ask("columns", { name: NUM_GROUPS, first: step, last: step }, { signal }),
    ]);
    return { ...answer, numGroups: columns.columns[NUM_GROUPS]?.[0] };
  }

  async refresh() {
    const was = this.steps.length;
    try {
      await this.loadSteps();
    } catch {
      return; // the banner tells of a lost connection
    }
    if (was === 0) {
      this.start();
      return;
    }
    if (this.steps.length !== was) this.drawTools();
    if (this.wantedStep() === this.asked && !this.loaded.problem) return;
    this.asked = this.wantedStep(); // news, not another question: see `changed`
    this.loaded.renew();
  }

  changed() {
    if (!this.steps.length) return;
    this.drawTools();
    const wanted = this.wantedStep();
    if (wanted !== this.asked) {
      this.content.setAttribute("aria-busy", "true");
      this.later();
    } else if (wanted === this.step && this.signature() !== this.drawn) this.draw();
  }

  signature() {
    return ["group", "only", "q"].map((name) => view.get(name)).join("|") + this.mode();
  }

  mode() {
    const mode = view.get("colour");
    return MODES.some(([name]) => name === mode) ? mode : "logprob";
  }

  take({ step, groups, numGroups }) {
    Object.assign(this, { step, groups, numGroups });
    this.middle = midpoint(groups);
    if (!this.content.contains(this.list)) show(this.content, this.list, this.main);
    this.draw();
  }

  /** Groups with at least one sample that the filter and the search let through. */
  shownGroups() {
    const [only, wanted] = [view.get("only"), view.get("q").toLowerCase()];
    const passes = (sample, group) => {
      if (only && isRight(sample, this.middle) !== (only === "right")) return false;
      if (!wanted) return true;
      const texts = [sample.response, group.prompt,
        ...(sample.lines ?? []).map((line) => line.text)];
      return texts.some((text) => String(text ?? "").toLowerCase().includes(wanted));
    };
    return this.groups
      .map((group) => ({ ...group, shown: group.samples.map((sample, at) =>
        ({ sample, place: at + 1 }))
        .filter(({ sample }) => passes(sample, group)) }))
      .filter((group) => group.shown.length > 0);
  }

  draw() {
    this.drawn = this.signature();
    const groups = this.shownGroups();
    const wanted = view.get("group");
    const current = groups.find((group) => String(group.prompt_index) === wanted)
      ?? mixed(groups, this.middle) ?? groups[0];
    this.current = current;
    this.inOrder = groups;
    const { middle, numGroups } = this;
    groupList(this.list, groups, { current, middle, numGroups, numKept: this.groups.length });
    this.views = [];
    this.readout.hide();
    if (!current) {
      show(this.main, empty("No sample fits", this.groups.length
        ? "No sample of this step passes the filter and the search."
        : `Nothing was kept of step ${number(this.step)}.`));
      return;
    }
    const cards = current.shown.map(({ sample, place }) => {
      const card = sampleCard(sample, { place, mode: this.mode(), wanted: view.get("q"),
        isRight: isRight(sample, this.middle), imageOf: this.context.imageOf,
        tell: (text, token) => this.readout.tell(text, token) });
      this.views.push(...card.views);
      return card.element;
    });
    show(this.main, this.prompt(current), this.scale(), h("div", { class: "side-by-side" }, cards));
  }

  prompt(group) {
    const label = group.label;
    return h(
      "section",
      { class: "card prompt", "aria-label": "Prompt" },
      h("div", { class: "row" }, h("h2", {}, `Prompt ${group.prompt_index}`),
        h("span", { class: "muted small" }, countWords(group))),
      pictures(group.images, this.context.imageOf),
      h("div", { class: "text", tabindex: 0, role: "region", "aria-label": "Text of the prompt" },
        marked(String(group.prompt), view.get("q").toLowerCase())),
      label !== null && label !== undefined && label !== "" &&
        h("p", { class: "small" }, h("span", { class: "muted" }, "label "), visible(String(label))),
    );
  }

  scale() {
    const tokens = this.views.flatMap((one) => one.tokens ?? []);
    if (!tokens.length) {
      return h("p", { class: "muted small" },
        "These samples were kept as text alone, without figures of their tokens.");
    }
    const mode = this.mode();
    if (mode === "difference" && !tokens.some((token) => token.trainer !== null)) {
      return h("p", { class: "muted small" },
        "The trainer's log-probs were not kept with this step.");
    }
    const versions = new Set(tokens.map((token) => token.version).filter((one) => one !== null));
    return legend(mode, [...versions].sort((a, b) => a - b));
  }

  drawTools() {
    this.tools.fill({ step: this.wantedStep(), steps: this.steps, mode: this.mode() });
  }

  go(place) {
    const step = this.steps[Math.max(0, Math.min(this.steps.length - 1, place))];
    view.set({ step }, { replace: true });
  }

  key(key) {
    if (key === "Escape") {
      this.results.hide();
      this.readout.hide();
    }
    const step = { j: 1, k: -1 }[key];
    if (step && this.steps.length) this.go(nearest(this.steps, this.wantedStep()) + step);
    const by = { n: 1, p: -1 }[key];
    if (by && this.current && this.wantedStep() === this.step) {
      const at = this.inOrder.indexOf(this.current) + by;
      if (this.inOrder[at]) view.set({ group: this.inOrder[at].prompt_index }, { replace: true });
    }
  }

  close() {
    removeEventListener("page-key", this.onKey);
    this.readout.close();
    this.loaded.close();
    this.results.close();
  }
}

/** 8 samples, 3 shown. A saved page holds the best and the worst, and the rewards of all. */
function countWords({ samples, shown, rewards }) {
  const part = shown.length < samples.length ? `, ${shown.length} shown` : "";
  const all = rewards?.length
    ? ` of ${number(rewards.length)}; rewards of all: ${rewards.map((one) => number(one, 3)).join(", ")}`
    : "";
  return `${counted(samples.length, "sample")}${all}${part}`;
}

/** A text with what is searched for marked. */
function marked(text, wanted) {
  return visible(text).flatMap((node) =>
    typeof node === "string" ? highlighted(node, wanted) : [node]);
}
