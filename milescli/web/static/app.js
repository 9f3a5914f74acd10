// The frame around the pages: which run, which page, what is live. Calls pages, knows no figure.

import { get, ofRun } from "./api.js";
import { h, show, throttled } from "./dom.js";
import { drawHead, liveText } from "./head.js";
import * as keys from "./keys.js";
import { Live } from "./live.js";
import { drawSide } from "./side.js";
import { empty, problem } from "./states.js";
import { nextTheme, themeButton } from "./switch.js";
import { PAGES, view } from "./view.js";

const RUNS_EVERY_MS = 3000;
const REFRESH_EVERY_MS = 1500;
const at = (id) => document.getElementById(id);

const app = {
  runs: [],
  run: null, // id
  summary: null,
  page: null, // what is open: {refresh, changed, close}
  opened: "",
  isConnected: true,
};

const live = new Live((kind, data) => {
  if (kind === "connection") {
    const was = app.isConnected;
    app.isConnected = data;
    drawBanner();
    if (data && !was) refresh();
  } else refresh();
});

const refresh = throttled(async () => {
  await loadSummary();
  app.page?.refresh?.();
}, REFRESH_EVERY_MS);

async function start() {
  const key = new URLSearchParams(location.search);
  if (key.has("key")) {
    key.delete("key");
    const rest = key.toString();
    history.replaceState(null, "", location.pathname + (rest ? `?${rest}` : "") + location.hash);
  }
  at("skip").addEventListener("click", (event) => {
    event.preventDefault();
    at("main").focus();
  });
  keys.listen({ run: otherRun, theme: () => nextTheme(), menu: toggleSide });
  view.onChange(changed);
  addEventListener("theme", () => {
    app.opened = "";
    changed();
  });
  document.addEventListener("click", closeSide);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") setSide(false);
  });
  await loadRuns();
  setInterval(() => {
    if (document.visibilityState === "visible") loadRuns();
    drawBanner();
  }, RUNS_EVERY_MS);
}

async function loadRuns() {
  try {
    app.runs = (await get("api/runs")).runs;
  } catch (error) {
    app.isConnected = error.status !== 0;
    if (app.run === null) show(at("main"), problem(error, loadRuns));
    else drawBanner();
    return;
  }
  if (!app.isConnected && app.run === null) app.isConnected = true;
  if (app.runs.length === 0) {
    show(
      at("main"),
      empty("No run yet", "As soon as a run begins in this folder, it shows up here by itself."),
    );
    drawSide(at("side"), [], null, themeButton());
    return;
  }
  await changed();
}

/** The runs, of the one that is shown with the state that its summary tells: it is newer. */
function runsNow() {
  const state = app.summary?.state;
  return app.runs.map((run) => (state && run.id === app.run ? { ...run, state } : run));
}

/** The run of the address; else the one that runs, else the newest. */
function chosen() {
  const wanted = view.get("run");
  const newest = [...app.runs].sort((a, b) => (b.changed_s ?? 0) - (a.changed_s ?? 0));
  const running = newest.find((run) => run.state === "running");
  return wanted || (running ?? newest[0]).id;
}

async function changed() {
  if (app.runs.length === 0) return;
  const run = chosen();
  drawSide(at("side"), runsNow(), run, themeButton());
  drawTabs();
  if (run !== app.run) {
    Object.assign(app, { run, summary: null });
    live.follow(run);
    await loadSummary();
    if (run !== app.run) return;
  }
  const opened = `${run} ${view.page} ${view.list("with")}`;
  if (opened !== app.opened) await openPage(opened);
  else app.page?.changed?.();
}

async function openPage(opened) {
  const isFirst = app.opened === "";
  app.opened = opened;
  app.page?.close?.();
  app.page = null;
  const main = at("main");
  const name = view.page;
  const title = PAGES.find(([one]) => one === name)[1];
  document.title = `${title} · ${app.run} · miles`;
  main.dataset.page = name;
  show(main, h("p", { class: "muted", role: "status" }, "Loading…"));
  try {
    const module = await import(`./page_${name}.js`);
    if (app.opened !== opened) return;
    const root = h("section", { class: "stack", "aria-label": title });
    show(main, root);
    app.page = module.open(root, context());
    if (isFirst) prepare();
    else scrollTo(0, 0);
  } catch (error) {
    console.error(error);
    show(main, problem(error, () => openPage(opened)));
  }
}

/** Fetch the other pages beforehand, so that they open at once. */
function prepare() {
  for (const [name] of PAGES) import(`./page_${name}.js`).catch(() => {}); // openPage tells
}

/** What pages get. */
function context() {
  const run = app.run;
  return {
    run,
    runs: app.runs,
    compared: view.list("with").filter((id) => id !== run),
    get summary() {
      return app.summary;
    },
    get isConnected() {
      return app.isConnected;
    },
    ask: (path, query, options) => get(ofRun(run, path), query, options),
    askOf: (id, path, query, options) => get(ofRun(id, path), query, options),
    nameOf: (id) => app.runs.find((one) => one.id === id)?.name ?? id,
  };
}

async function loadSummary() {
  const run = app.run;
  if (run === null) return;
  try {
    const summary = await get(ofRun(run, "summary"));
    if (run !== app.run) return;
    const isOther = summary.state !== app.summary?.state;
    app.summary = summary;
    if (isOther) drawSide(at("side"), runsNow(), run, themeButton());
  } catch (error) {
    if (error.status === 404) app.summary = null;
  }
  drawHead(at("head"), { id: run, run: app.runs.find((one) => one.id === run), summary: app.summary,
    menu: toggleSide });
  drawBanner();
}

function drawTabs() {
  const list = PAGES.map(([name, title], index) =>
    h(
      "a",
      {
        href: view.href({ page: name }),
        "aria-current": name === view.page ? "page" : null,
        title: `${title} (${index + 1})`,
      },
      title,
    ),
  );
  const nav = at("pages");
  const focused = [...nav.children].indexOf(document.activeElement);
  show(nav, list);
  if (focused >= 0) nav.children[focused].focus();
  const current = nav.querySelector("[aria-current]");
  if (current) nav.scrollLeft = current.offsetLeft - nav.clientWidth / 2 + current.clientWidth / 2;
}

function drawBanner() {
  const text = liveText(app);
  const banner = at("banner");
  if (banner.textContent !== text) show(banner, text && h("div", { class: "note" }, text));
}

function otherRun(by) {
  const index = app.runs.findIndex((run) => run.id === app.run);
  const other = app.runs[index + by];
  if (other) view.set({ run: other.id, with: null, step: null });
}

function setSide(isOpen) {
  at("side").classList.toggle("open", isOpen);
  document.querySelector("#menu")?.setAttribute("aria-expanded", String(isOpen));
}

function toggleSide() {
  const isOpen = !at("side").classList.contains("open");
  setSide(isOpen);
  if (isOpen) at("side").querySelector("a")?.focus();
}

function closeSide(event) {
  const inside = event.target.closest?.("#side, #menu");
  if (!inside || event.target.closest?.("#side a")) setSide(false);
}

start();
