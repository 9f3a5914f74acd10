// What ended a run that did not end well, and what to do next: the first card of its overview.

import { h, withCode } from "./dom.js";
import { saved } from "./saved.js";
import { view } from "./view.js";
import { visible } from "./visible.js";

/** The card of `why`; null while the run goes on and where it ended well. */
export function endingCard(why) {
  if (!why?.summary) return null;
  const isBad = why.cause !== null;
  return h(
    "section",
    { class: `card ending ${isBad ? "problem" : ""}`, role: isBad ? "alert" : null,
      "aria-label": isBad ? "What ended it" : "It was stopped" },
    h("h2", {}, visible(why.summary)),
    why.cause?.why && h("p", { class: "why" }, visible(why.cause.why)),
    why.next.length > 0 && h("div", {}, h("h3", {}, "What to do next"),
      h("ul", { class: "commands" }, why.next.map(command))),
    why.first && log(why),
    isBad && h("details", { data: { name: "end" } },
      h("summary", {}, "What happened before, memory and the kernel's log"),
      part(`Attempt ${why.attempt} (UTC)`, inUtc(why.timeline)
        .map(([time, text]) => `${time}  ${text}`)),
      part("Memory", memory(why.memory)),
      part("Kernel", why.kernel === null ? ["You may not read the kernel's log."]
        : why.kernel.length ? why.kernel
          : ["It reports nothing about memory or GPUs since the attempt began."])),
  );
}

/** A command with a button that copies it; an advice in words has none. */
function command(text) {
  const [line, comment = ""] = text.split("   # ");
  if (!/^(miles|make|export|pip|ls|chmod|df|rm|mv|ssh|kill|\w+=)\b/.test(line)) {
    return h("li", {}, withCode(text));
  }
  const copy = h("button", { class: "plain", "aria-label": `Copy ${line}`, on: { click: async () => {
    await navigator.clipboard?.writeText(line);
    copy.textContent = "Copied";
  } } }, "Copy");
  return h("li", {}, h("code", { class: "command" }, line), navigator.clipboard && copy,
    comment && h("span", { class: "muted small" }, comment));
}

function log({ first, log: file, last_lines: lines }) {
  return h("div", {},
    h("h3", {}, `The first process that died: ${first}`),
    lines && h("pre", { class: "raw", tabindex: 0, "aria-label": `Last lines of ${first}` },
      visible(lines)),
    file && !saved && h("p", { class: "small" },
      h("a", { href: view.href({ page: "logs", attempt: file.attempt, file: file.file }) },
        "Show its whole log")));
}

/** The same with the time of day in place of each time; with its date if they are of several days. */
function inUtc(moments) {
  const days = new Set(moments.map(([time]) => time.slice(0, 10)).filter(Boolean));
  const begin = days.size > 1 ? 0 : 11;
  return moments.map(([time, what]) =>
    [time.slice(begin, 19).replace("T", " ").padEnd(19 - begin), what]);
}

function memory(known) {
  if (!known?.curve.length) return [];
  const gib = (size) => `${(size / 2 ** 30).toFixed(2)} GiB`;
  return [
    `all processes: ${inUtc(known.curve).map(([time, size]) =>
      `${gib(size)} at ${time}`).join(", ")}`,
    `at most: ${Object.entries(known.peak).map(([name, size]) =>
      `${name} ${gib(size)}`).join(", ")}`,
    known.oom_kills === null ? "" : `killed by the kernel for lack of memory: ${known.oom_kills}`,
  ].filter(Boolean);
}

function part(title, lines) {
  return lines.length > 0 && [h("h3", {}, title),
    h("pre", { class: "raw", tabindex: 0, "aria-label": title }, visible(lines.join("\n")))];
}
