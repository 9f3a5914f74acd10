// The layout of a plan, drawn simply: a box for each device with what works on it.

import { h } from "./dom.js";
import { counted, number } from "./format.js";

const MOST = 64;
const AXES = ["tp", "pp", "cp", "ep", "dp"];

/** Devices by node, and what the layouts are in words. */
export function layout(plan) {
  const nodes = new Map();
  for (const slot of plan.slots.slice(0, MOST)) {
    const node = slot.node ?? 0;
    nodes.set(node, [...(nodes.get(node) ?? []), slot]);
  }
  return [
    h("ul", { class: "keys" },
      words(plan).map(([name, text, colour]) => h("li", {},
        colour && h("span", { class: "swatch", style: { background: `var(--${colour})` } }),
        h("span", { class: "muted" }, ` ${name} `), h("b", {}, text)))),
    [...nodes].map(([node, slots]) =>
      h("div", { class: "node" },
        nodes.size > 1 && h("h3", {}, `node ${node}`),
        h("ul", { class: "slots" },
          slots.map((slot) => slotBox(slot, plan.device_kind))))),
    plan.slots.length > MOST &&
      h("p", { class: "muted small" }, `and ${number(plan.slots.length - MOST)} more`),
  ];
}

function words(plan) {
  const { trainer = {}, engines = {}, batch = {} } = plan;
  const wide = AXES.filter((axis) => trainer[axis] > 1).map((axis) => `${axis} ${trainer[axis]}`);
  const narrow = AXES.filter((axis) => trainer[axis] === 1);
  const axes = [...wide, narrow.length > 0 && `${narrow.join(", ")} ${narrow.length > 1
    ? "all 1" : "1"}`].filter(Boolean);
  const isAlone = engines.num === 0; // rows of a file are learnt from: nothing is sampled
  const parts = [
    ["trainer", axes.join(" × "), "train"],
    engines.num && ["engines", `${engines.num} × tp ${engines.tp ?? 1}`, "rollout"],
    plan.device_kind && ["devices", `${plan.device_kind}, ${plan.precision ?? ""}`],
    plan.slots.length > 0 && ["placement", isAlone ? "trainer alone"
      : plan.colocated ? "colocated: they take turns" : "split"],
    !isAlone && Number.isFinite(plan.max_staleness) && ["staleness",
      `at most ${plan.max_staleness}`],
    batch.num_samples && ["batch", batch.of_rows ? counted(batch.prompts_per_step, "row")
      : counted(batch.num_samples, "sample")],
    plan.roles?.length > 0 && ["roles", plan.roles.map((role) =>
      `${role.name} (${role.place})`).join(", ")],
  ];
  return parts.filter((one) => one && one[1]);
}

function slotBox(slot, kind) {
  const has = (value) => value !== null && value !== undefined;
  const engineRank = slot.engine_rank ? `, rank ${slot.engine_rank}` : "";
  return h(
    "li",
    { class: "slot" },
    h("span", { class: "muted small" },
      kind === "cpu" ? `share ${slot.device} of the CPU` : `device ${slot.device}`),
    has(slot.trainer_rank) && h("span", { class: "of-trainer" },
      `trainer rank ${slot.trainer_rank}`),
    has(slot.engine) && h("span", { class: "of-engine" }, `engine ${slot.engine}${engineRank}`),
    has(slot.role) && h("span", {}, String(slot.role)),
  );
}
