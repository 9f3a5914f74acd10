// The row above the samples: step, which samples, colour, search. Made once and then filled, so
// that a slider that is drawn and a text that is typed stay, whatever is drawn anew.

import { h, settled, show } from "./dom.js";
import { field } from "./field.js";
import { MODES } from "./scales.js";
import { nearest } from "./series.js";
import { view } from "./view.js";

const ONLY = [["", "All"], ["right", "Only right"], ["wrong", "Only wrong"]];
const TYPED_MS = 700;
const SEARCHED_MS = 200;

export class SampleTools {
  /** `acts`: {go(place), step(number), searchAll(text), closeResults()}. */
  constructor(acts) {
    Object.assign(this, { acts, place: 0 });
    this.pressed = [];
    this.makePicker();
    this.makeSearch();
    this.box = h("div", { class: "tools card" });
    show(this.box, this.picker, this.several("Which samples", "only", ONLY),
      this.several("Colour of tokens", "colour", MODES), this.form);
  }

  makePicker() {
    const button = (id, text, label, act) => h("button", { id, "aria-label": label,
      on: { click: act } }, text);
    this.before = button("step-before", "‹", "Step before", () => this.acts.go(this.place - 1));
    this.after = button("step-after", "›", "Next step", () => this.acts.go(this.place + 1));
    this.newest = h("button", { id: "step-last", title: "Follow the run: always the newest step",
      on: { click: () => view.set({ step: null }) } }, "Newest");
    const take = () => {
      if (!this.box.isConnected) return; // its page was left meanwhile
      const step = Number.parseInt(this.number.value, 10);
      if (Number.isFinite(step)) this.acts.step(step);
    };
    this.number = h("input", { id: "step-number", type: "number", class: "number", min: 0,
      on: { input: settled(take, TYPED_MS), change: take, blur: () => this.fillStep() } });
    this.slider = h("input", { id: "step-slider", type: "range", min: 0,
      "aria-label": "Step, by slider",
      on: { input: (event) => this.acts.go(Number(event.target.value)) } });
    this.picker = h("div", { class: "row step-picker" }, this.before,
      h("label", {}, "Step", this.number), this.slider, this.after, this.newest);
  }

  several(label, name, list) {
    return h("span", { class: "several", role: "group", "aria-label": label },
      list.map(([value, text]) => {
        const button = h("button", { id: `${name}-${value}`,
          on: { click: () => view.set({ [name]: value }, { replace: true }) } }, text);
        this.pressed.push({ name, value, button });
        return button;
      }));
  }

  makeSearch() {
    const input = h("input", { id: "sample-search", type: "search", class: "grow",
      placeholder: "Search this step", "aria-label": "Search samples",
      on: { keydown: (event) => {
        if (event.key === "Escape") this.acts.closeResults();
      } } });
    this.search = field("q", input, { wait_ms: SEARCHED_MS });
    const all = h("button", { type: "button", title: "Search the samples of all steps",
      on: { click: () => {
        this.search.take();
        this.acts.searchAll(input.value);
      } } }, "All steps");
    this.form = h("form", { class: "row grow", role: "search", on: { submit: (event) => {
      event.preventDefault();
      this.search.take();
    } } }, input, all);
  }

  /** What is shown now: the step among `steps`, the mode of colours. */
  fill({ step, steps, mode }) {
    const place = nearest(steps, step);
    Object.assign(this, { place, step });
    this.fillStep();
    Object.assign(this.number, { min: steps[0], max: steps.at(-1) });
    this.slider.max = steps.length - 1;
    if (Number(this.slider.value) !== place) this.slider.value = place;
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.before.disabled = place <= 0;
    this.after.disabled = place >= steps.length - 1;
    this.newest.disabled = view.number("step") === null;
    for (const { name, value, button } of this.pressed) {
      const current = name === "colour" ? mode : view.get(name);
      button.setAttribute("aria-pressed", String(value === current));
    }
    this.search.fill();
  }

  fillStep() {
    if (document.activeElement !== this.number) this.number.value = this.step ?? "";
    else if (this.step !== this.shown) this.number.value = this.step;
    this.shown = this.step;
  }
}
