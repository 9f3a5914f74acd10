// A page that `miles report` saved into one file: the answers stand in the file, and this module
// replies with them in place of a server. Filters as the server does. Knows nothing of the DOM's
// content but the element that holds the answers.

const holder = document.getElementById("saved");

/** {runs, answers: {run id: {path: answer}}, comparison, note}; null on a page with a server. */
export const saved = holder && JSON.parse(holder.textContent);

const NUM_STEPS = 50; // of a timeline that names none
const OF_STEPS = new Set(["rollout", "driver", "trainer", "weights"]);
const AROUND = 80;

/** The answer to `path` with `query`; undefined where the file does not hold it. */
export function savedAnswer(path, query) {
  if (path === "api/runs") return { runs: saved.runs };
  const [, , id, name] = path.split("/");
  const answers = saved.answers[decodeURIComponent(id)];
  const select = SELECTIONS[name];
  return select ? select(answers ?? {}, query ?? {}) : answers?.[name];
}

const SELECTIONS = {
  columns({ columns: all }, { name = [], first, last }) {
    const [low, high] = [first ?? -Infinity, last ?? Infinity];
    const places = [...all.steps.keys()].filter((at) =>
      low <= all.steps[at] && all.steps[at] <= high);
    const chosen = (values) => places.map((at) => values?.[at] ?? null);
    const steps = chosen(all.steps);
    return { first: steps[0] ?? null, last: steps.at(-1) ?? null, steps,
      num_steps: steps.length === all.steps.length ? all.num_steps : steps.length,
      times: chosen(all.times),
      columns: Object.fromEntries([name].flat().map((one) => [one, chosen(all.columns[one])])) };
  },

  notices({ notices: all }, { kind, level, q, offset = 0, limit = 200 }) {
    const wanted = (q ?? "").toLowerCase();
    const fitting = all.notices.filter((one) => (!kind || one.kind === kind)
      && (!level || one.level === level)
      && `${one.text}\n${one.kind}`.toLowerCase().includes(wanted));
    return { total: fitting.length, notices: fitting.slice(offset, offset + limit) };
  },

  /** With the first step comes what was before it, with the last one what came after. */
  timeline({ timeline: all }, query) {
    const steps = all.intervals.filter((one) => OF_STEPS.has(one.actor));
    const newest = Math.max(0, ...steps.map((one) => one.step));
    const last = Number.parseInt(query.last, 10) || newest;
    const asked = Number.parseInt(query.first, 10);
    const first = Number.isFinite(asked) ? asked : Math.max(1, last - NUM_STEPS + 1);
    const own = steps.filter((one) => first <= one.step && one.step <= last);
    const oldest = Math.min(...steps.map((one) => one.step));
    const begin = first <= oldest ? -Infinity : Math.min(...own.map((one) => one.begin_s));
    const end = last >= newest ? Infinity : Math.max(...own.map((one) => one.end_s));
    const beside = all.intervals.filter((one) => !OF_STEPS.has(one.actor)
      && one.end_s >= begin && one.begin_s <= end);
    const intervals = [...own, ...beside].sort((a, b) => a.begin_s - b.begin_s);
    const known = intervals.length > 0;
    return { intervals, profiles: all.profiles,
      begin_s: known ? intervals[0].begin_s : null,
      end_s: known ? Math.max(...intervals.map((one) => one.end_s)) : null };
  },

  samples: ({ samples }, { step }) => samples[step ?? Object.keys(samples).at(-1)],

  "find-samples"({ samples }, { q, limit }) {
    const wanted = q.toLowerCase();
    const found = Object.values(samples).reverse().flatMap(({ step, groups }) =>
      groups.flatMap((group) => group.samples.flatMap((one, sample) => [
        { text: one.response, where: "response" },
        ...(sample ? [] : [{ text: group.prompt, where: "prompt" }]),
      ].filter(({ text }) => text.toLowerCase().includes(wanted)).slice(0, 1).map(
        ({ text, where }) => ({ step, sample, where, reward: one.reward,
          prompt_index: group.prompt_index, excerpt: excerpt(text, wanted) })))));
    return { found: found.slice(0, limit), is_all: true };
  },
};

function excerpt(text, wanted) {
  const at = text.toLowerCase().indexOf(wanted);
  const [begin, end] = [Math.max(0, at - AROUND), at + wanted.length + AROUND];
  return (begin > 0 ? "…" : "") + text.slice(begin, end) + (end < text.length ? "…" : "");
}
