// Lanes of intervals over time, on a canvas: drag to move, buttons, keys or Ctrl with the wheel to
// zoom. What it shows is also told as a table by the page that holds it.

import { h, onWidth } from "./dom.js";
import { moment, seconds } from "./format.js";
import { phaseColour } from "./phases.js";
import { colour } from "./switch.js";

const LANE = 26;
const TOP = 22;
const PROFILES = 16; // room for their names, where there are any
const GAP = 6;
const ORDER = ["run", "rollout", "trainer", "weights", "driver", "evaluation", "checkpoint"];

export class Timeline {
  /** `answer`: {begin_s, end_s, intervals}. */
  constructor(parent, answer) {
    this.tip = h("p", { class: "muted small readout-line" }, "");
    this.canvas = h("canvas", { class: "lanes", tabindex: 0, role: "img", on: {
      pointerdown: (event) => this.down(event),
      pointermove: (event) => this.move(event),
      pointerup: () => (this.from = null),
      pointercancel: () => (this.from = null),
      pointerleave: () => this.hint(),
      wheel: (event) => this.wheel(event),
      keydown: (event) => this.key(event),
      dblclick: () => this.steps(),
    } });
    parent.append(this.canvas, this.tip);
    this.unwatch = onWidth(parent, () => this.draw());
    this.redraw = () => this.draw();
    addEventListener("theme", this.redraw);
    this.from = null;
    this.take(answer);
    this.steps();
    this.hint();
  }

  take(answer) {
    Object.assign(this, { begin: answer.begin_s, end: Math.max(answer.end_s, answer.begin_s + 1e-3),
      intervals: answer.intervals, profiles: answer.profiles ?? [] });
    this.top = TOP + (this.profiles.length ? PROFILES : 0);
    const actors = [...new Set(answer.intervals.map((one) => one.actor))];
    const place = (actor) => (ORDER.indexOf(actor) + 1 || ORDER.length + 1);
    this.actors = actors.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
    this.lane = new Map(this.actors.map((actor, at) => [actor, at]));
    this.canvas.setAttribute("aria-label", `Timeline of ${this.actors.join(", ")} from `
      + `${moment(this.begin)} to ${moment(this.end)}; the table below tells the same. `
      + "Arrow keys move, plus and minus zoom.");
  }

  /** What is new; the zoom stays, and follows the end where it showed it. */
  update(answer) {
    const followed = this.high >= this.end;
    const wide = this.high - this.low;
    this.take(answer);
    if (this.shows === "whole") this.whole();
    else if (this.shows === "steps") this.steps();
    else if (followed) this.window(this.end - wide, this.end);
    else this.draw();
  }

  /** All that there is. */
  whole() {
    this.window(this.begin, this.end);
    this.shows = "whole";
  }

  /** From the first step to the last one. */
  steps() {
    const ofSteps = this.intervals.filter((one) => one.step);
    if (!ofSteps.length) {
      this.whole();
      return;
    }
    this.window(Math.min(...ofSteps.map((one) => one.begin_s)),
      Math.max(...ofSteps.map((one) => one.end_s)));
    this.shows = "steps";
  }

  /** By a factor, about a moment or the middle. */
  zoom(by, about = (this.low + this.high) / 2) {
    this.window(about - (about - this.low) / by, about + (this.high - about) / by);
  }

  window(low, high) {
    this.shows = "";
    const whole = this.end - this.begin;
    const wide = Math.min(whole, Math.max(high - low, whole / 5000));
    this.low = Math.max(this.begin, Math.min(low, this.end - wide));
    this.high = this.low + wide;
    this.draw();
  }

  // --- drawing

  margin() {
    return this.canvas.clientWidth < 480 ? 78 : 104;
  }

  x(time) {
    const left = this.margin();
    return left + ((time - this.low) / (this.high - this.low)) * (this.width - left);
  }

  time(x) {
    const left = this.margin();
    return this.low + ((x - left) / (this.width - left)) * (this.high - this.low);
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.paint();
    });
  }

  paint() {
    const { canvas } = this;
    const height = this.top + this.actors.length * (LANE + GAP);
    canvas.style.height = `${height}px`;
    this.width = canvas.clientWidth;
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: this.width * scale, height: height * scale });
    const ctx = canvas.getContext("2d");
    ctx.scale(scale, scale);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.grid(ctx, height);
    const fills = new Map(this.intervals.map((one) => [one.what, ""]));
    for (const what of fills.keys()) fills.set(what, colour(phaseColour(what)));
    for (const one of this.intervals) this.interval(ctx, one, fills.get(one.what));
    ctx.fillStyle = colour("ink");
    ctx.strokeStyle = colour("ink");
    for (const one of this.profiles) this.profile(ctx, one, height);
    this.actors.forEach((actor, at) => {
      ctx.fillText(actor, 0, this.top + at * (LANE + GAP) + LANE / 2, this.margin() - 10);
    });
  }

  grid(ctx, height) {
    const step = pleasant((this.high - this.low) / Math.max(2, this.width / 130));
    ctx.strokeStyle = colour("line");
    ctx.fillStyle = colour("muted");
    for (let at = Math.ceil((this.low - this.begin) / step) * step; ; at += step) {
      const x = Math.round(this.x(this.begin + at)) + 0.5;
      if (x > this.width) break;
      ctx.beginPath();
      ctx.moveTo(x, this.top - 4);
      ctx.lineTo(x, height);
      ctx.stroke();
      const text = at === 0 ? "0" : `+${seconds(at)}`;
      if (x + ctx.measureText(text).width < this.width) ctx.fillText(text, x + 3, 8);
    }
  }

  interval(ctx, one, fill) {
    if (one.end_s < this.low || one.begin_s > this.high) return;
    const left = Math.max(this.margin(), this.x(one.begin_s));
    const right = Math.min(this.width, this.x(one.end_s));
    const top = this.top + this.lane.get(one.actor) * (LANE + GAP);
    ctx.fillStyle = fill;
    ctx.fillRect(left, top, Math.max(1, right - left - 0.5), LANE);
    const text = one.actor === "run" ? one.what : one.step !== null && `step ${one.step}`;
    if (right - left > 58 && text) {
      ctx.fillStyle = "#10141a";
      ctx.fillText(text, left + 5, top + LANE / 2 + 1, right - left - 8);
    }
  }

  /** A line where a profile was done. */
  profile(ctx, one, height) {
    const x = Math.round(this.x(one.time_s)) + 0.5;
    if (x < this.margin() || x > this.width) return;
    ctx.setLineDash([4, 3]);
    ctx.beginPath();
    ctx.moveTo(x, TOP - 6);
    ctx.lineTo(x, height);
    ctx.stroke();
    ctx.setLineDash([]);
    const text = `profile ${one.number}`;
    ctx.fillText(text, Math.min(x + 3, this.width - ctx.measureText(text).width), TOP + 2);
  }

  // --- pointer and keys

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const [x] = this.at(event);
    this.from = { x, low: this.low, high: this.high };
  }

  move(event) {
    const [x, y] = this.at(event);
    if (this.from) {
      const by = ((this.from.x - x) / (this.width - this.margin())) * (this.high - this.low);
      this.window(this.from.low + by, this.from.high + by);
      return;
    }
    const time = this.time(x);
    const actor = this.actors[Math.floor((y - this.top) / (LANE + GAP))];
    const one = this.intervals.find((each) => each.actor === actor && each.begin_s <= time
      && time <= each.end_s);
    if (!one) {
      this.hint();
      return;
    }
    const step = one.step === null ? "" : ` · step ${one.step}`;
    const took = seconds(one.end_s - one.begin_s);
    this.tip.textContent = `${one.actor}: ${one.what} · ${took}${step} · from `
      + moment(one.begin_s);
  }

  hint() {
    this.tip.textContent = "Point at a bar for what it is; drag to move, + and − to zoom.";
  }

  wheel(event) {
    if (!event.ctrlKey) return; // else it scrolls the page
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.time(this.at(event)[0]));
  }

  key(event) {
    const wide = this.high - this.low;
    const by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (by) this.window(this.low + by * wide, this.high + by * wide);
    else if (event.key === "+") this.zoom(1.6);
    else if (event.key === "-") this.zoom(1 / 1.6);
    else if (event.key === "0") this.steps();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  close() {
    cancelAnimationFrame(this.waiting);
    this.unwatch();
    removeEventListener("theme", this.redraw);
  }
}

/** A round number of seconds that is not below `least`. */
function pleasant(least) {
  for (const step of [0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
    7200,
    14400, 43200, 86400]) {
    if (step >= least) return step;
  }
  return 86400 * Math.ceil(least / 86400);
}
