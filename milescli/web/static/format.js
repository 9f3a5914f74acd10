// Figures and names as people read them. Pure.

const NONE = "–";

/** A figure in few digits: 0.7312, 12.4, 1.3e-5, 1,234. */
export function number(value, digits = 4) {
  if (!Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

/** The figures of an axis, with as many digits as it takes to tell them apart. */
export function ticks(values) {
  const known = values.filter((value) => value !== null);
  let said = [];
  for (let digits = 3; digits <= 9; digits += 1) {
    said = values.map((value) => (value === null ? "" : number(value, digits)));
    if (new Set(said.filter(Boolean)).size === new Set(known).size) break;
  }
  return said;
}

/** Of a share: 71 %. What is not all of it is never rounded up to 100 %. */
export function percent(share, digits = 0) {
  if (!Number.isFinite(share)) return NONE;
  const value = 100 * share;
  if (value > 0 && value < 1 && digits === 0) return "< 1 %";
  if (value < 100 && Number(value.toFixed(digits)) === 100) {
    return `> ${(100 - 10 ** -digits).toFixed(digits)} %`;
  }
  return `${value.toFixed(digits)} %`;
}

/** 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function seconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1) return `${Number((1000 * value).toPrecision(2))} ms`;
  if (value < 10) return `${Number(value.toPrecision(2))} s`;
  const s = Math.round(value);
  if (s < 60) return `${s} s`;
  if (s < 600) return `${Math.floor(s / 60)} min${s % 60 ? ` ${s % 60} s` : ""}`;
  if (s < 3600) return `${Math.round(s / 60)} min`;
  const minutes = Math.round(s / 60);
  const rest = minutes % 60 ? ` ${minutes % 60} min` : "";
  if (s < 86400) return `${Math.floor(minutes / 60)} h${rest}`;
  const hours = Math.round(s / 3600);
  return `${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
}

/** 1.5 GiB, 820 MiB: of 1024, as the plan tells sizes. */
export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let size = value;
  while (Math.abs(size) >= 1000 && at < names.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${size < 100 && at > 0 ? Number(size.toFixed(1)) : Math.round(size)} ${names[at]}`;
}

/** A moment as the clock shows it: 14:03:12; with the day where it was not today. */
export function moment(time_s, now = new Date()) {
  if (!Number.isFinite(time_s)) return NONE;
  const when = new Date(1000 * time_s);
  const clock = when.toLocaleTimeString("en-GB");
  if (when.toDateString() === now.toDateString()) return clock;
  return `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}`;
}

/** How long ago: just now, 5 min ago. */
export function ago(time_s, now_s = Date.now() / 1000) {
  if (!Number.isFinite(time_s)) return NONE;
  const s = now_s - time_s;
  return s < 5 ? "just now" : `${seconds(s)} ago`;
}

/** A value of a recipe or plan as YAML would show it, on one line. */
export function plain(value) {
  if (value === null || value === undefined) return NONE;
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** `count` things by their name: 1 step, 3 steps. */
export function counted(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** A name in parts, between which a narrow column may break it: after dots, _ and /. */
export function breakable(name) {
  return name.split(/(?<=[._/])/).flatMap((part, at) =>
    at ? [document.createElement("wbr"), part] : [part]);
}

/** `rollout/reward_mean` in words: reward mean. */
export function words(column) {
  return column.slice(column.indexOf("/") + 1).replaceAll("_", " ");
}
