// Fetches the lines of charts: columns of steps, evaluations, of one run or several.

import { nearest } from "./series.js";

const POINTS = 2000;
const beginnings = new Map();

/** name -> lines for `Chart`; with the steps and times of the first run. Times are seconds since
 * the first step of each run. */
export async function fetchLines(context, names,
  { first, last, isTime, signal, points = POINTS }) {
  const ids = [context.run, ...context.compared];
  const ofSteps = names.filter((name) => !isSeldom(name));
  const answers = await Promise.all(
    ids.map(async (id) => {
      const query = { name: ofSteps, first, last, points };
      const seldom = names.length > ofSteps.length;
      const [columns, evaluations] = await Promise.all([
        context.askOf(id, "columns", query, { signal }),
        seldom ? context.askOf(id, "evaluations", null, { signal }) : null,
        isTime ? begin(context, id, signal) : null,
      ]);
      return { id, columns, evaluations, times: isTime ? elapsed(id, columns.times ?? []) : null };
    }),
  );
  const lines = new Map();
  for (const name of names) {
    lines.set(name, answers.map((answer, place) => line(answer, name, place, { context, ids, first,
      last })));
  }
  const [own] = answers;
  return { lines, steps: own.columns.steps, times: own.times ?? [] };
}

/** Is it measured only now and then, so that it is drawn as dots? */
function isSeldom(name) {
  return name.startsWith("eval/") || name.startsWith("validation/");
}

function line(answer, name, place, { context, ids, first, last }) {
  const { id, columns, evaluations, times } = answer;
  const line = { name: ids.length > 1 ? context.nameOf(id) : "", place };
  if (!isSeldom(name)) {
    const ys = columns.columns[name] ?? columns.steps.map(() => null);
    return { ...line, xs: times ?? columns.steps, ys };
  }
  const [section, figure] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
  const list = section === "eval" ? evaluations.evaluations : evaluations.validations;
  const shown = list.filter((one) => one.step >= (first ?? 0) && one.step <= (last ?? Infinity));
  return {
    ...line,
    dots: true,
    xs: shown.map((one) => (times ? times[nearest(columns.steps, one.step)] ?? 0 : one.step)),
    ys: shown.map((one) => one[figure] ?? one.figures?.[figure] ?? null),
  };
}

/** When the first step of a run was done. */
async function begin(context, id, signal) {
  if (beginnings.has(id)) return;
  const { times } = await context.askOf(id, "columns", { points: 2 }, { signal });
  const known = (times ?? []).find(Number.isFinite);
  if (known !== undefined) beginnings.set(id, known);
}

function elapsed(id, times) {
  let last = 0;
  return times.map((time) => {
    if (Number.isFinite(time)) last = time - (beginnings.get(id) ?? time);
    return last;
  });
}
