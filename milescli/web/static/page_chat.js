// Chat with a checkpoint of the run, and beside it with the model as it was before the first step.

import { get, post } from "./api.js";
import { h, show } from "./dom.js";
import { number } from "./format.js";
import { empty, problem } from "./states.js";
import { visible } from "./visible.js";

const LOOK_MS = 600;
const MOST_SURE = -0.1; // log-probs above it are plain
const LEAST_SURE = -3;
const SPEAKERS = { user: "You: ", model: "Model: ", miles: "No reply: " };

export function open(root, context) {
  if (!context.canControl) {
    show(root, empty("Chat needs permission to start an engine",
      `Start the page with \`miles ui --control\`, or chat in a terminal: \`miles chat ${
        context.run}\`, or \`miles chat ${context.run}@0\` with the model before its first step.`));
    return { close() {} };
  }
  return new ChatPage(root, context);
}

class ChatPage {
  constructor(root, context) {
    Object.assign(this, { root, context, sides: [], isClosed: false, isLooking: false });
    this.step = h("input", { type: "text", inputmode: "numeric", class: "number", id: "chat-step",
      placeholder: "newest", "aria-label": "Checkpoint of step" });
    this.isBeside = h("input", { type: "checkbox", id: "chat-beside", prop: { checked: true } });
    this.start = h("button", { class: "main-button", id: "chat-start",
      on: { click: () => this.begin() } }, "Start");
    this.note = h("p", { class: "muted small", role: "status" },
      "Each model gets its own engine, which uses memory until you leave this page.");
    this.columns = h("div", { class: "chats" });
    this.text = h("textarea", { id: "chat-text", rows: 3, placeholder: "Say something; Enter sends "
      + "it, Shift+Enter begins a new line", "aria-label": "Say something", disabled: true,
    on: { keydown: (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.say();
    } } });
    this.leave = () => this.end({ isLeaving: true });
    addEventListener("pagehide", this.leave);
    show(root, h("div", { class: "card stack" }, h("div", { class: "tools" },
      h("label", {}, "Step", this.step),
      h("label", {}, this.isBeside, "next to the model before the first step"),
      this.start), this.note), this.columns, this.text);
  }

  async begin() {
    this.start.disabled = true;
    await this.end();
    const steps = [this.step.value.trim(), ...(this.isBeside.checked ? ["0"] : [])];
    try {
      for (const step of new Set(steps)) {
        const path = `api/control/runs/${encodeURIComponent(this.context.run)}/chat`;
        this.sides.push({ chat: await post(path, { step }), box: h("section",
          { class: "card chat" }), drawn: "" });
        if (this.isClosed) { // the page was left while the engine started
          await this.end();
          return;
        }
      }
      show(this.columns, this.sides.map((side) => side.box));
      this.start.textContent = "Start anew";
      this.look();
    } catch (error) {
      show(this.columns, problem(error, () => this.begin()));
    }
    this.start.disabled = false;
  }

  async look() {
    if (this.isLooking) return;
    this.isLooking = true;
    while (!this.isClosed && this.sides.length) {
      for (const side of this.sides) {
        side.chat = await get(`api/control/chats/${side.chat.id}`).catch((error) =>
          ({ ...side.chat, is_over: true, error: side.chat.error
            ?? { error: error.what, why: error.why, fix: [error.fix] } }));
        this.draw(side);
      }
      const isReady = this.sides.some(({ chat }) => chat.is_ready && !chat.is_over);
      if (this.text.disabled === isReady) {
        this.text.disabled = !isReady;
        if (isReady) this.text.focus();
      }
      await new Promise((done) => { setTimeout(done, LOOK_MS); });
    }
    this.isLooking = false;
  }

  draw(side) {
    const { chat, box } = side;
    const now = JSON.stringify([chat.is_ready, chat.is_over, chat.status, chat.said.length,
      chat.error]);
    if (now === side.drawn) return;
    side.drawn = now;
    const isWaiting = chat.said.at(-1)?.who === "user" && !chat.is_over;
    box.setAttribute("aria-label", chat.subject);
    show(box, h("h2", {}, chat.subject),
      h("ol", { class: "said" }, chat.said.map((one) => h("li", { class: one.who },
        h("span", { class: one.who === "miles" ? "muted" : "unseen" }, SPEAKERS[one.who]),
        one.tokens.length ? tokens(one.tokens) : visible(one.text)))),
      h("p", { class: "muted small", role: "status" }, chat.is_over ? "This chat has ended."
        : !chat.is_ready ? `Starting: ${chat.status}` : isWaiting ? "It writes…" : ""),
      chat.error && problem({ what: chat.error.error, why: chat.error.why,
        fix: [chat.error.fix].flat().join(" or ") }));
    box.querySelector(".said").lastElementChild?.scrollIntoView({ block: "nearest" });
  }

  async say() {
    const text = this.text.value;
    const open = this.sides.filter(({ chat }) => chat.is_ready && !chat.is_over);
    if (!text.trim() || !open.length) return;
    this.text.value = "";
    for (const side of open) {
      try {
        side.chat = await post(`api/control/chats/${side.chat.id}/say`, { text });
      } catch (error) {
        side.chat = { ...side.chat, error: { error: error.what, why: error.why, fix: error.fix } };
      }
      this.draw(side);
    }
  }

  async end({ isLeaving = false } = {}) {
    const ended = this.sides.splice(0);
    this.text.disabled = true;
    await Promise.all(ended.map(({ chat }) =>
      post(`api/control/chats/${chat.id}/end`, {}, { isLeaving }).catch(() => null)));
  }

  close() {
    this.isClosed = true;
    removeEventListener("pagehide", this.leave);
    this.end();
  }
}

/** The reply, its tokens the more marked the less sure the model was of them. */
function tokens(list) {
  return list.map(({ token, logprob }) => {
    const doubt = Math.min(1, Math.max(0, (MOST_SURE - logprob) / (MOST_SURE - LEAST_SURE)));
    return h("span", { class: "chat-token", title: `log-prob ${number(logprob, 3)}`,
      style: { "--doubt": `${Math.round(60 * doubt)}%` } }, visible(token));
  });
}
