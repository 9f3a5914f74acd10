// How answers of evaluations are sampled, in words, from the keys of a recipe.

import { counted } from "./format.js";

/** greedy, 1 sample a prompt. `keys`: [{key, value}] of the recipe; "" where they do not say. */
export function samplingWords(keys) {
  const of = (name) => keys.find((one) => one.key === `eval.${name}`)?.value;
  const [temperature, topP, count] = ["temperature", "top_p", "samples_per_prompt"].map((name) =>
    (of(name) === undefined || of(name) === null ? NaN : Number(of(name))));
  if (!Number.isFinite(temperature)) return "";
  const cut = topP < 1 ? `, top_p ${topP}` : "";
  const how = temperature === 0 ? "greedy (temperature 0)"
    : `sampled at temperature ${temperature}${cut}`;
  return Number.isFinite(count) ? `${how}, ${counted(count, "sample")} a prompt` : how;
}
