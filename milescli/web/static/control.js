// Starts, resumes and stops runs, where the server was started with `--control`: shows the command
// first, then what it says.

import { get, post } from "./api.js";
import { h, put, show } from "./dom.js";
import { problem } from "./states.js";
import { visible } from "./visible.js";

const LOOK_MS = 1000;
const NEAR_END_PX = 40;
const NOT_FOUND = 404;
const GOES_ON = ["stopped", "failed", "killed"];

/** The buttons of one run: those that its state allows. */
export function runButtons(run) {
  const path = `api/control/runs/${encodeURIComponent(run.id)}`;
  const shown = /^[\w./-]+$/.test(run.id) ? run.id : `'${run.id}'`;
  const button = (text, open) => h("button", { id: `control-${text.toLowerCase()}`,
    on: { click: open } }, text);
  if (run.state === "running") {
    return [button("Stop", () => ask({
      title: `Stop ${run.name}?`,
      about: "The run saves a checkpoint and stops. You can resume it later.",
      command: `miles stop ${shown}`,
      act: "Stop the run",
      start: () => post(`${path}/stop`),
    }))];
  }
  if (!GOES_ON.includes(run.state) && run.state !== "done") return [];
  return [button("Resume", () => ask({
    title: `Resume ${run.name}?`,
    about: run.state === "done" ? "The run is done. To continue it, give it more steps."
      : "The run continues from its newest checkpoint.",
    command: `miles resume ${shown}`,
    more: run.state === "done" ? `--steps ${2 * (run.num_steps ?? 10)}` : "",
    act: "Resume the run",
    start: (more) => post(`${path}/resume`, { arguments: more }),
  }))];
}

/** The button that launches another run. */
export function launchButton() {
  return h("button", { class: "plain", id: "launch-button", on: { click: () => ask({
    title: "Launch a run",
    about: "Name a recipe and settings. The command miles recipes lists recipes.",
    command: "miles launch",
    more: "quickstart",
    act: "Launch",
    start: (more) => post("api/control/launch", { arguments: more }),
  }) } }, "Launch…");
}

/** A dialog with the command, which is started by its button; then it shows what the command says
 * until it has ended. `more`: the rest of the command, which can be changed. */
function ask({ title, about, command, more, act, start }) {
  const rest = more === undefined ? null : h("input", { type: "text", value: more,
    class: "command-rest", "aria-label": "The rest of the command", spellcheck: "false" });
  const body = h("div", { class: "stack" }, h("p", {}, about),
    h("p", { class: "command-line" }, h("code", {}, command), rest));
  const close = h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel");
  const go = h("button", { class: "main-button" }, act);
  const form = h("form", { method: "dialog" }, h("h2", { id: "control-title" }, title), body,
    h("div", { class: "row right-buttons" }, close, go));
  const dialog = h("dialog", { class: "control", "aria-labelledby": "control-title" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const job = await start(rest?.value);
      go.remove();
      close.textContent = "Close";
      follow(job.id, body, dialog);
    } catch (error) {
      go.disabled = false;
      show(body, problem(error));
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

async function follow(id, body, dialog) {
  let draw = null;
  while (dialog.isConnected) {
    const job = await get(`api/control/jobs/${id}`).catch((error) => error);
    if (job.status === NOT_FOUND) {
      show(body, problem(job));
      return;
    }
    if (!(job instanceof Error)) { // else it is asked again: the connection may come back
      draw ??= drawJob(body, job.command);
      draw(job);
      if (job.exit_code !== null) return;
    }
    await new Promise((done) => { setTimeout(done, LOOK_MS); });
  }
}

/** Put the command into `body`; returns what shows how far it is. What it says is added to, so that
 * the focus and what is selected stay, and the end is followed where it was seen. */
function drawJob(body, command) {
  const state = h("p", { role: "status" });
  const output = h("pre", { class: "raw", tabindex: 0, hidden: true,
    "aria-label": "What it says" });
  show(body, h("p", { class: "command-line" }, h("code", {}, command)), state, output);
  let said = "";
  return (job) => {
    const text = stateText(job.exit_code);
    if (state.textContent !== text) state.textContent = text;
    if (job.output === said) return;
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < NEAR_END_PX;
    if (job.output.startsWith(said)) put(output, visible(job.output.slice(said.length)));
    else show(output, visible(job.output));
    said = job.output;
    output.hidden = false;
    if (atEnd) output.scrollTop = output.scrollHeight;
  };
}

function stateText(exitCode) {
  if (exitCode === null) return "The command is running. You can close this window; it continues.";
  return exitCode === 0 ? "The command has finished."
    : `The command failed with exit code ${exitCode}.`;
}
