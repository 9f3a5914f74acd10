// One chart of lines over steps or time, on uPlot. Its legend tells the values at the cursor. It can
// be enlarged, given a range of y, and saved as a picture or a table.

import { saveTable, savePicture } from "./chart_files.js";
import { h, show } from "./dom.js";
import { number, seconds, ticks } from "./format.js";
import { extent, nearest, positive, smoothed } from "./series.js";
import { colour, isDark } from "./switch.js";

const LIGHT = ["#2b62cf", "#c4620a", "#0b7f60", "#a83a80", "#6a52c4", "#5d6774", "#8a6d00",
  "#0f7c93", "#b3261e", "#4b7f16", "#7a4a2b", "#1f3a7a"];
const DARK = ["#7aa7ff", "#f0a04b", "#4fcfa6", "#e58cc0", "#b3a1ff", "#a3adba", "#d8bd4a",
  "#5cc7de", "#ff8f84", "#9ccc5a", "#cfa184", "#dfe6ff"];
/** Distances of the lines of a grid of time, in seconds. */
const TIMES = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400,
  172800, 604800];
/** Distances of the lines of a grid of bytes. */
const SIZES = Array.from({ length: 50 }, (_, power) => 2 ** power);
const DOUBLE_MS = 300;
const HEIGHT = 210;
const LARGE_HEIGHT = 460;
const DASHES = [[], [9, 4], [2, 3], [10, 3, 2, 3], [5, 5], [14, 4], [1, 4], [6, 2]];

/** The colour and the dash of the run at this place of those that are compared. */
export function lineStyle(place) {
  const colours = isDark() ? DARK : LIGHT;
  return { stroke: colours[place % colours.length], dash: DASHES[place % DASHES.length] };
}

/** `lines`: [{name, place, xs, ys, dots, isLoose: dots without a line}], xs ascending. `options`:
 * {title, unit, about, smooth, isLog, isTime, sayX(x), splitsX: places of its labels, range: [low,
 * high] of x or null, marks, at: x of the marked step, sync, onZoom(low, high), onReset(),
 * onPick(x), remove(), fetchAll()} */
export class Chart {
  constructor(parent, lines, options) {
    Object.assign(this, { lines, options, plot: null, say: options.say ?? number,
      sayShort: options.sayShort ?? options.say ?? null, isLarge: false, yRange: [null, null] });
    this.legend = h("ul", { class: "legend" });
    this.note = h("p", { class: "about muted small" });
    this.yBox = h("div", { class: "row small y-range", hidden: true });
    this.place = h("div", { class: "plot", role: "img" });
    this.box = h(
      "section",
      { class: "card chart", "aria-label": options.title },
      h(
        "div",
        { class: "row between" },
        h("h2", {}, options.title,
          options.unit && h("span", { class: "muted small" }, ` ${options.unit}`)),
        this.buttons(),
      ),
      options.about && h("p", { class: "about muted small" }, options.about),
      this.note,
      this.legend,
      this.yBox,
      this.place,
    );
    parent.append(this.box);
    this.draw();
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.place);
    this.redraw = () => this.draw();
    addEventListener("theme", this.redraw);
  }

  buttons() {
    const { title, remove } = this.options;
    const button = (text, label, click) =>
      h("button", { class: "plain", "aria-label": `${label} ${title}`, title: label,
        on: { click } }, text);
    this.enlarge = button("⤢", "Enlarge", () => this.setLarge(!this.isLarge));
    return h("span", { class: "chart-buttons" },
      button("PNG", "Save as a picture:", () => savePicture(this)),
      button("CSV", "Save as a table:", () => saveTable(this)),
      this.enlarge,
      remove && button("×", "Take away", remove));
  }

  /** As wide as the page and higher, with a range of y to be set; or as before. */
  setLarge(isLarge) {
    this.isLarge = isLarge;
    this.box.classList.toggle("large", isLarge);
    this.enlarge.setAttribute("aria-pressed", String(isLarge));
    this.yBox.hidden = !isLarge || this.options.isLog;
    if (isLarge) this.drawRange();
    else this.yRange = [null, null];
    this.plot.setSize({ width: this.place.clientWidth, height: this.height });
    this.plot.setData(this.plot.data);
    if (isLarge) this.box.scrollIntoView({ block: "nearest" });
  }

  get height() {
    return this.isLarge ? LARGE_HEIGHT : HEIGHT;
  }

  drawRange() {
    const bound = (place, label) => h("label", {}, label, h("input", {
      type: "text", inputmode: "decimal", class: "number", placeholder: "auto",
      "aria-label": `${this.options.title}: y ${label}`,
      on: { change: (event) => {
        const value = event.target.value.trim() === "" ? Number.NaN : Number(event.target.value);
        this.yRange[place] = Number.isFinite(value) ? value : null;
        if (!Number.isFinite(value)) event.target.value = "";
        this.plot.setData(this.plot.data);
      } },
    }));
    show(this.yBox, h("span", { class: "muted" }, "y"), bound(0, "from"), bound(1, "to"));
  }

  /** The range of y: what was set, else what the lines need. */
  yScale(low, high) {
    const [least, most] = padded(low, high);
    const [from, to] = [this.yRange[0] ?? least, this.yRange[1] ?? most];
    return from < to ? [from, to] : [least, most];
  }

  draw() {
    this.yBox.hidden = !this.isLarge || this.options.isLog; // a range is one of a linear axis
    const data = this.data();
    this.values = [];
    this.legend.replaceChildren(
      ...this.lines.map((line) => {
        const style = lineStyle(line.place);
        const value = h("b", {}, "");
        this.values.push(value);
        return h(
          "li",
          {},
          h("span", { class: "line-sign", style: { "border-color": style.stroke,
            "border-top-style": style.dash.length ? "dashed" : "solid" } }),
          line.name && h("span", { class: "muted" }, `${line.name} `),
          value,
        );
      }),
    );
    this.place.setAttribute("aria-label", this.inWords());
    this.plot?.destroy();
    this.plot = new uPlot(this.settings(), data, this.place);
    this.tell(null);
  }

  /** Other lines in the same chart. */
  update(lines, options) {
    const nameOf = (line) => `${line.place} ${line.name}`;
    const same = lines.map(nameOf).join() === this.lines.map(nameOf).join();
    const old = this.options;
    Object.assign(this, { lines, options: { ...old, ...options } });
    const alike = ["isLog", "isTime", "smooth"].every((name) => old[name] === this.options[name]);
    if (!same || !alike) {
      this.draw();
      return;
    }
    this.place.setAttribute("aria-label", this.inWords());
    this.plot.setData(this.data());
    this.tell(this.plot.cursor.idx);
  }

  /** Mark a step; null none. */
  mark(x) {
    this.options.at = x;
    this.plot.redraw(false);
    this.tell(this.plot.cursor.idx);
  }

  styleOf(line) {
    return lineStyle(line.place);
  }

  close() {
    removeEventListener("theme", this.redraw);
    this.observer.disconnect();
    this.plot?.destroy();
    this.box.remove();
  }

  fit() {
    const width = this.place.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  /** Aligned for uPlot: raw and smoothed of each line. */
  data() {
    const { smooth, isLog } = this.options;
    this.note.hidden = !isLog || this.lines.every((line) => line.ys.every((y) => !(y <= 0)
      || y === null));
    this.note.textContent = "Values that are not above 0 are not shown.";
    const tables = this.lines.map((line) => {
      const raw = isLog ? positive(line.ys) : line.ys;
      return line.dots ? [line.xs, raw, raw] : [line.xs, raw, smoothed(raw, smooth)];
    });
    if (tables.length === 1) return tables[0];
    return uPlot.join(tables);
  }

  settings() {
    const { options } = this;
    const ink = colour("muted");
    const grid = { stroke: colour("line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 },
      font: "12px system-ui, sans-serif" };
    const across = options.sayX
      ? { values: (_, splits) => splits.map(options.sayX), space: 70,
          ...(options.splitsX ? { splits: () => options.splitsX } : {}) }
      : options.isTime
      ? { values: (_, splits) => splits.map((value) => seconds(value)), incrs: TIMES,
          space: 90 }
      : { values: (_, splits) => splits.map((value) =>
        (Number.isInteger(value) ? number(value) : "")) };
    return {
      width: this.place.clientWidth || 400,
      height: this.height,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => this.options.range
          ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: options.isLog ? { distr: 3 } : { range: (_, low, high) => this.yScale(low, high) },
      },
      axes: [{ ...axis, ...across, size: 28 },
        { ...axis, size: 58, ...(options.isBytes ? { incrs: SIZES } : {}), values: (_, splits) =>
          (this.sayShort ? splits.map((v) => (v === null ? "" : this.sayShort(v)))
            : ticks(splits)) }],
      series: [{}, ...this.lines.flatMap((line) => this.series(line))],
      cursor: {
        sync: { key: options.sync ?? null },
        drag: { setScale: false, x: true, y: false },
        points: { size: 6 },
        bind: { dblclick: () => () => options.onReset?.() },
      },
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => this.zoom(plot)],
        drawClear: [(plot) => this.under(plot)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  series(line) {
    const style = lineStyle(line.place);
    if (line.dots) {
      const points = { show: true, size: 7, fill: style.stroke, stroke: style.stroke };
      return [{ show: false }, { ...style, width: 1.25, points, spanGaps: true,
        ...(line.isLoose ? { paths: () => null } : {}) }];
    }
    const pale = this.options.smooth > 0;
    const few = line.xs.length <= 40;
    return [
      { show: pale, stroke: style.stroke, alpha: 0.3, width: 1, points: { show: false } },
      { ...style, width: 1.75, points: { show: few, size: 4, fill: style.stroke } },
    ];
  }

  /** Steps that a finding is about, and the marked step, below the lines. */
  under(plot) {
    const { marks, at } = this.options;
    const { ctx, bbox } = plot;
    ctx.save();
    if (marks) {
      const [left, right] = marks.map((x) => plot.valToPos(x, "x", true));
      ctx.fillStyle = colour("mark");
      ctx.globalAlpha = 0.45;
      ctx.fillRect(left - 2, bbox.top, Math.max(4, right - left + 4), bbox.height);
      ctx.globalAlpha = 1;
    }
    if (Number.isFinite(at)) {
      const x = plot.valToPos(at, "x", true);
      ctx.strokeStyle = colour("accent");
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.stroke();
    }
    ctx.restore();
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const [low, high] = [left, left + width].map((x) => plot.posToVal(x, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.options.onZoom?.(low, high);
  }

  listen(plot) {
    let down = 0;
    let picking = null;
    plot.over.addEventListener("mousedown", (event) => (down = event.clientX));
    plot.over.addEventListener("click", (event) => {
      clearTimeout(picking);
      const isSingle = event.detail < 2 && Math.abs(event.clientX - down) <= 4;
      if (!isSingle || plot.cursor.idx === null) return;
      const x = plot.data[0][plot.cursor.idx];
      // a second click would make it a double click, which marks nothing
      picking = setTimeout(() => this.options.onPick?.(x), DOUBLE_MS);
    });
  }

  /** The values at a place of the cursor; without one at the marked step, else the last ones. */
  tell(index) {
    if (!this.plot && index === null && !this.values) return;
    const x = index === null || index === undefined ? this.options.at : this.plot?.data[0][index];
    this.options.onCursor?.(index === null || index === undefined ? null : x);
    this.lines.forEach((line, place) => {
      const at = Number.isFinite(x) ? nearest(line.xs, x) : line.ys.findLastIndex(Number.isFinite);
      const value = line.ys[at];
      const smooth = this.options.smooth > 0 && !line.dots && Number.isFinite(value)
        ? ` (smooth ${number(this.smoothAt(place, at))})` : "";
      const isResting = line.isLoose && !Number.isFinite(x); // its last dot is no latest value
      this.values[place].textContent = isResting ? "" : `${this.say(value)}${smooth}`;
    });
  }

  smoothAt(place, at) {
    const line = this.lines[place];
    if (line.kept !== this.options.smooth) {
      line.kept = this.options.smooth;
      line.smoothed = smoothed(line.ys, line.kept);
    }
    return line.smoothed[at];
  }

  inWords() {
    const words = this.lines.map((line) => {
      const known = extent(line.ys);
      if (!known) return `${line.name}: no values`;
      const { first, last, low, high } = known;
      const name = line.name ? `${line.name}: ` : "";
      const [from, to, least, most] = [first, last, low, high].map((value) => this.say(value));
      return `${name}from ${from} to ${to}, between ${least} and ${most}`;
    });
    return `${this.options.title}. ${words.join("; ")}`;
  }
}

/** With some room; around a line that is flat as well. */
function padded(low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const room = Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}
