// The line above the pages: which run, its state, how far it is, when it will be done.

import { agoElement } from "./ago.js";
import { runButtons } from "./control.js";
import { h, show } from "./dom.js";
import { number, seconds } from "./format.js";

const SILENT_S = 180;
const SILENT_STEPS = 5;

/** Draw it. `menu`: what shows the list of runs on a narrow screen; `isOpen`: whether it is
 * shown; `canControl`: whether the page may stop and resume it. */
export function drawHead(head, { id, run, summary, menu, isOpen, canControl }) {
  const state = summary?.state ?? run?.state ?? "";
  const name = summary?.name || run?.name || id;
  const button = h(
    "button",
    { id: "menu", "aria-expanded": String(isOpen), "aria-controls": "side", on: { click: menu } },
    "Runs",
  );
  show(
    head,
    button,
    h("h1", {}, name),
    state && h("span", { class: `pill ${state}` }, state),
    summary?.state === "running" && summary.phase && !summary.step &&
      h("span", { class: "muted" }, phaseText(summary)),
    h("span", { class: "spring" }),
    h("span", { class: "muted" }, progress(summary)),
    canControl && run && runButtons({ ...run, state }),
  );
}

/** train: steps 1 to 40. */
export function phaseText(summary) {
  return summary.phase_detail ? `${summary.phase}: ${summary.phase_detail}` : summary.phase;
}

/** step 12 of 40 · 3 min to 4 min left. */
function progress(summary) {
  if (!summary) return null;
  const parts = [];
  if (summary.num_steps) parts.push(`step ${number(summary.step)} of ${number(summary.num_steps)}`);
  else if (summary.step) parts.push(`step ${number(summary.step)}`);
  if (summary.state === "running" && summary.left) parts.push(`${leftText(summary.left)} left`);
  else if (Number.isFinite(summary.last_s)) parts.push(["last wrote ", agoElement(summary.last_s)]);
  return parts.map((part, at) => [at ? " · " : "", part]);
}

/** about 4 min (3 min to 6 min). */
export function leftText(left) {
  const [low, mean, high] = [left.low_s, left.mean_s, left.high_s].map(seconds);
  return low === high || !Number.isFinite(left.low_s) ? mean : `${mean} (${low} to ${high})`;
}

/** What is to be said of the connection, "" when all is well. */
export function liveText({ isConnected, refusal, summary }) {
  if (refusal) {
    return `The server shows this page nothing any more: ${refusal.what}; ${refusal.why}. `
      + `What helps: ${refusal.fix}.`;
  }
  if (!isConnected) {
    return "The connection to miles ui is lost: what you see is what it told last. Trying again…";
  }
  if (summary?.state !== "running" || !Number.isFinite(summary.last_s)) return "";
  const silence = Date.now() / 1000 - summary.last_s;
  const step = (summary.phases ?? []).reduce((sum, one) => sum + one.seconds, 0);
  if (silence < Math.max(SILENT_S, SILENT_STEPS * step)) return "";
  const minutes = 60 * Math.floor(silence / 60); // else it is read aloud each second
  return `The run has written nothing for ${seconds(minutes)}. miles status tells who is silent.`;
}
