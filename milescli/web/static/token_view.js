// Draws the tokens of one sample: coloured, long stretches that are not learned folded, the rest as
// it is scrolled to. Arrow keys and the pointer tell of single tokens.

import { h } from "./dom.js";
import { number, percent } from "./format.js";
import { classOf, differenceOf } from "./scales.js";
import { isSpecial, stretches, tokensOf } from "./trajectory.js";
import { visible, visibleText } from "./visible.js";

const CHUNK = 400;
const CHUNK_CHARACTERS = 4000;
const FOLDED_CHARACTERS = 200;
const FIRST_WORDS = 70;

/** The text of one trajectory. `tell(text, element)` is told of the token under pointer or
 * cursor. */
export class TokenView {
  constructor(line, { mode, wanted, label, tell }) {
    Object.assign(this, { line, mode, wanted, tell, spans: new Map(), cursor: null });
    this.tokens = tokensOf(line);
    this.pending = new Set();
    this.hits = this.tokens ? hitsOf(this.tokens, wanted.toLowerCase()) : [];
    this.box = h("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": label,
      on: {
        pointerover: (event) => this.point(event.target),
        pointerleave: (event) => event.pointerType !== "touch" && this.tell("", null),
        keydown: (event) => this.key(event),
      } });
    if (this.tokens) this.drawStretches();
    else this.fill(this.box, textParts(line.text), (part) => this.marked(visible(part), part));
  }

  drawStretches() {
    for (const { start, end, isLearned } of stretches(this.tokens)) {
      const list = this.tokens.slice(start, end);
      const text = list.map((token) => token.text).join("");
      const draw = (root) => this.fill(root, this.parts(start, end), (part) => this.some(part));
      if (isLearned || text.length <= FOLDED_CHARACTERS || this.holds(text)) draw(this.box);
      else this.box.append(this.fold(text, end - start, draw));
    }
  }

  holds(text) {
    return this.wanted !== "" && text.toLowerCase().includes(this.wanted.toLowerCase());
  }

  fold(text, count, draw) {
    const words = text.replace(/<\|[^|]*\|>/gu, " ").trim().replace(/\s+/gu, " ");
    const first = Array.from(words).slice(0, FIRST_WORDS).join("");
    const inside = h("div", { class: "unlearned" });
    const fold = h(
      "details",
      { class: "fold", on: { toggle: () => {
        if (fold.open && !inside.childNodes.length) draw(inside);
      } } },
      h("summary", {}, h("span", { class: "muted" }, `${number(count)} tokens not in the loss: `),
        visible(first), first.length < words.length ? "…" : ""),
      inside,
    );
    return fold;
  }

  parts(start, end) {
    const list = [];
    for (let at = start; at < end; at += CHUNK) list.push([at, Math.min(end, at + CHUNK)]);
    return list;
  }

  /** Draw the first part now, and each other when its place comes near to be seen. */
  fill(root, parts, draw) {
    let next = 0;
    const more = h("span", { class: "more" });
    const step = () => {
      more.before(...[draw(parts[next])].flat());
      next += 1;
      if (next < parts.length) return;
      this.pending.delete(step);
      observer?.disconnect();
      more.remove();
    };
    root.append(more);
    const observer = parts.length < 2 ? null : new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        step();
        if (next < parts.length) {
          // asked again, for it may be near still
          observer.unobserve(more);
          observer.observe(more);
        }
      }
    }, { rootMargin: "600px" });
    this.pending.add(step);
    if (parts.length) step();
    else more.remove();
    observer?.observe(more);
  }

  some([start, end]) {
    const nodes = [];
    for (let index = start; index < end; index += 1) {
      const token = this.tokens[index];
      const special = isSpecial(token.text) ? " special" : "";
      const unlearned = token.isLearned ? "" : " unlearned";
      const span = h("span", { class: `token ${classOf(token, this.mode)}${special}${unlearned}`,
        data: { index } }, this.ofToken(index));
      this.spans.set(index, span);
      nodes.push(span);
    }
    return nodes;
  }

  /** The text of a token, with what is searched for marked: that may go over several tokens. */
  ofToken(index) {
    const { text } = this.tokens[index];
    const nodes = [];
    let at = 0;
    for (const [start, end] of this.hits[index] ?? []) {
      nodes.push(visible(text.slice(at, start)), h("mark", {}, visible(text.slice(start, end))));
      at = end;
    }
    return [...nodes, visible(text.slice(at))].flat();
  }

  /** Go to a token and tell of it. */
  mark(index) {
    while (!this.spans.has(index) && this.pending.size) [...this.pending][0]();
    if (this.spans.has(index)) this.moveTo(index);
  }

  /** The learned token that the engine was least sure of; null where none is known. */
  leastSure() {
    let least = null;
    (this.tokens ?? []).forEach((token, index) => {
      if (!token.isLearned || token.logprob === null) return;
      if (least === null || token.logprob < this.tokens[least].logprob) least = index;
    });
    return least;
  }

  /** Nodes with what is searched for marked, where it lies within them. */
  marked(nodes, text) {
    if (!this.holds(text)) return nodes;
    const wanted = this.wanted.toLowerCase();
    return nodes.flatMap((node) => (typeof node === "string" ? highlighted(node, wanted) : [node]));
  }

  point(target) {
    const span = target.closest?.(".token");
    if (!span || !this.tokens) return;
    this.tell(this.inWords(Number(span.dataset.index)), span);
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !this.tokens || event.target !== this.box) return;
    event.preventDefault();
    let next = this.cursor === null ? (by > 0 ? 0 : this.tokens.length - 1) : this.cursor + by;
    while (this.tokens[next] && !this.spans.has(next)) next += by; // folded, or not drawn yet
    if (this.tokens[next]) this.moveTo(next);
  }

  moveTo(next) {
    this.spans.get(this.cursor)?.classList.remove("cursor");
    this.cursor = next;
    const span = this.spans.get(next);
    span.classList.add("cursor");
    span.scrollIntoView({ block: "nearest" });
    this.tell(this.inWords(next), span);
  }

  inWords(index) {
    const token = this.tokens[index];
    const parts = [`token ${index}: ${JSON.stringify(visibleText(token.text))}`];
    if (token.logprob !== null) {
      parts.push(`log-prob ${number(token.logprob)} (${percent(Math.exp(token.logprob), 1)})`);
    }
    if (token.trainer !== null) parts.push(`trainer ${number(token.trainer)}`);
    const between = differenceOf(token);
    if (between !== null) parts.push(`difference ${number(between)}`);
    if (token.version !== null) parts.push(`version ${token.version}`);
    parts.push(token.isLearned ? "in the loss" : "not in the loss");
    return parts.join(" · ");
  }
}

/** A text in parts of bounded length, parted between characters. */
function textParts(text) {
  const parts = [];
  for (let at = 0; at < text.length; ) {
    let end = Math.min(text.length, at + CHUNK_CHARACTERS);
    if (end < text.length && /[\ud800-\udbff]/.test(text[end - 1])) end -= 1;
    parts.push(text.slice(at, end));
    at = end;
  }
  return parts;
}

/** index of a token -> [[start, end]] within its text that belong to a hit. */
function hitsOf(tokens, wanted) {
  const hits = [];
  const text = tokens.map((token) => token.text).join("");
  const small = text.toLowerCase();
  if (!wanted || small.length !== text.length) return hits;
  let index = 0;
  let begin = 0; // of the token, in the text
  for (let at = small.indexOf(wanted); at >= 0; at = small.indexOf(wanted, at + wanted.length)) {
    const end = at + wanted.length;
    while (index < tokens.length && begin < end) {
      const { length } = tokens[index].text;
      const part = [Math.max(0, at - begin), Math.min(length, end - begin)];
      if (part[0] < part[1]) (hits[index] ??= []).push(part);
      if (begin + length > end) break; // the next hit may lie in it, too
      begin += length;
      index += 1;
    }
  }
  return hits;
}

/** A text as nodes in which each `wanted` (in small letters) is marked. */
export function highlighted(text, wanted) {
  if (!wanted) return [text];
  const nodes = [];
  const small = text.toLowerCase();
  // a letter may change its length when it is made small: then places do not fit
  if (small.length !== text.length) return [text];
  let at = 0;
  for (let found = small.indexOf(wanted); found >= 0; found = small.indexOf(wanted, at)) {
    if (found > at) nodes.push(text.slice(at, found));
    nodes.push(h("mark", {}, text.slice(found, found + wanted.length)));
    at = found + wanted.length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}
