// The frame around the pages: which run, which page, what is live. Calls pages, knows no figure.

import { updateAgo } from "./ago.js";
import { get, imageOf, ofRun } from "./api.js";
import { launchButton } from "./control.js";
import { h, keepingFocus, show, showOther, throttled } from "./dom.js";
import { drawHead, liveText } from "./head.js";
import * as keys from "./keys.js";
import { Live } from "./live.js";
import { saved } from "./saved.js";
import { drawSide } from "./side.js";
import { empty, problem } from "./states.js";
import { nextTheme, themeButton } from "./switch.js";
import { PAGES, view } from "./view.js";

const RUNS_EVERY_MS = 3000;
const REFRESH_EVERY_MS = 1500;
const FORBIDDEN = 403;
const NOT_FOUND = 404;
const at = (id) => document.getElementById(id);

const app = {
  runs: null, // not known yet
  run: null, // id
  summary: null,
  page: null, // what is open: {refresh, changed, close, poll: at files that grow between events}
  opened: "",
  tab: "", // the page whose tab was moved into view
  isConnected: true,
  refusal: null, // why the server shows nothing at all
  asking: null, // for the runs: the question under way
  canControl: false, // whether the page may start and stop runs
};

const live = saved ? { isOpen: true, follow() {} } : new Live({
  news: () => refresh(),
  opened: () => connected(true),
  // the server may be there and refuse this stream alone
  failed: () => loadRuns(),
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
  addEventListener("theme", changed);
  document.addEventListener("click", closeSide);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") setSide(false);
  });
  await loadRuns();
  if (!saved) setInterval(async () => {
    if (document.visibilityState !== "visible") return;
    await loadRuns();
    if (app.isConnected && !live.isOpen) refresh();
    else if (app.isConnected && app.summary?.state === "running") app.page?.poll?.();
    updateAgo();
    drawBanner();
  }, RUNS_EVERY_MS);
}

/** What the server says now, one question at a time. */
function loadRuns() {
  app.asking ??= askForRuns().finally(() => (app.asking = null));
  return app.asking;
}

/** What it says of a change that was just made: an answer under way may be older. */
async function reloadRuns() {
  await app.asking;
  await loadRuns();
}

async function askForRuns() {
  const answer = await get("api/runs").catch((error) => error);
  if (answer instanceof Error) {
    app.refusal = answer.status === FORBIDDEN ? answer : null;
    connected(answer.status > 0 && !app.refusal);
    if (app.run === null) show(at("main"), problem(answer, loadRuns));
    return;
  }
  app.refusal = null;
  app.canControl = Boolean(answer.can_control);
  connected(true);
  if (JSON.stringify(answer.runs) === JSON.stringify(app.runs)) return;
  app.runs = answer.runs;
  runsChanged();
}

/** At the foot of the list of runs. */
function sideButtons() {
  return [app.canControl && launchButton(), themeButton()];
}

function connected(isConnected) {
  const isBack = isConnected && !app.isConnected;
  app.isConnected = isConnected;
  drawBanner();
  if (isBack) refresh();
}

function runsChanged() {
  if (app.runs.length === 0) {
    app.page?.close?.();
    Object.assign(app, { run: null, summary: null, page: null, opened: "" });
    live.follow(null);
    show(
      at("main"),
      empty("No run yet", "A run appears here as soon as it starts in this folder."),
    );
    drawSide(at("side"), [], null, sideButtons());
    return;
  }
  changed();
}

/** The runs, of the one that is shown with the state that its summary tells: it is newer. */
function runsNow() {
  const state = app.summary?.state;
  return app.runs.map((run) => (state && run.id === app.run ? { ...run, state } : run));
}

/** The run of an address that names none: the one that runs, else the newest. */
function first() {
  if (saved) return app.runs[0].id;
  const newest = [...app.runs].sort((a, b) => (b.changed_s ?? 0) - (a.changed_s ?? 0));
  const running = newest.find((run) => run.state === "running");
  return (running ?? newest[0]).id;
}

async function changed() {
  if (!app.runs?.length) return;
  const run = view.get("run");
  if (!run) {
    // named from now on: a link leads to this run, and the page stays at it
    const other = saved?.comparison ? { with: app.runs[1].id } : {};
    view.set({ run: app.run ?? first(), ...other }, { replace: true });
    return;
  }
  drawSide(at("side"), runsNow(), run, sideButtons());
  drawTabs();
  if (run !== app.run) {
    Object.assign(app, { run, summary: null });
    live.follow(run);
    await loadSummary();
    if (run !== app.run) return;
  }
  const compared = view.page === "curves" ? comparedWith(run) : ""; // no other page draws them
  const opened = `${run} ${view.page} ${compared}`;
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

/** Ids of the runs that lie over a run in its curves: those that are ticked, and the baseline. */
function comparedWith(run) {
  const known = new Set(app.runs.flatMap((one) => [one.id, ...(one.adapters ?? [])]));
  const ids = new Set([...view.list("with"), view.get("base")]);
  return [...ids].filter((id) => id !== run && known.has(id));
}

/** What pages get. */
function context() {
  const run = app.run;
  return {
    run,
    /** As /api/runs lists them. */
    get runs() {
      return runsNow();
    },
    get canControl() {
      return app.canControl;
    },
    reloadRuns,
    /** Ids of the adapters that this run trains beside each other; of one of them, none. */
    get adapters() {
      return app.runs.find((one) => one.id === run)?.adapters ?? [];
    },
    compared: comparedWith(run),
    get summary() {
      return app.summary;
    },
    get isConnected() {
      return app.isConnected;
    },
    ask: (path, query, options) => get(ofRun(run, path), query, options),
    imageOf: (sha256) => imageOf(run, sha256),
    askOf: (id, path, query, options) => get(ofRun(id, path), query, options),
    nameOf: (id) => app.runs.find((one) => one.id === id)?.name ?? id,
  };
}

async function loadSummary() {
  const run = app.run;
  if (run === null) return;
  const answer = await get(ofRun(run, "summary")).catch((error) => error);
  if (run !== app.run) return;
  if (!(answer instanceof Error) || answer.status === NOT_FOUND) {
    const summary = answer instanceof Error ? null : answer;
    const isOther = summary?.state !== app.summary?.state;
    app.summary = summary;
    if (isOther) drawSide(at("side"), runsNow(), run, sideButtons());
  }
  keepingFocus(at("head"), () => drawHead(at("head"), { id: run,
    run: app.runs.find((one) => one.id === run), summary: app.summary, menu: toggleSide,
    isOpen: isSideOpen(), canControl: app.canControl }));
  drawBanner();
}

function drawTabs() {
  const list = PAGES.map(([name, title], index) =>
    h(
      "a",
      {
        href: view.href({ page: name }),
        "aria-current": name === view.page ? "page" : null,
        title: `${title} (${keys.KEYS[index]})`,
      },
      title,
    ),
  );
  const nav = at("pages");
  keepingFocus(nav, () => showOther(nav, list));
  const current = nav.querySelector("[aria-current]");
  if (app.tab === view.page) return; // a reader may have moved the tabs
  app.tab = view.page;
  if (current) nav.scrollLeft = current.offsetLeft - nav.clientWidth / 2 + current.clientWidth / 2;
}

function drawBanner() {
  const text = saved ? "" : liveText(app);
  const banner = at("banner");
  if (banner.textContent !== text) show(banner, text && h("div", { class: "note" }, text));
}

function otherRun(by) {
  if (!app.runs) return;
  const index = app.runs.findIndex((run) =>
    run.id === app.run || run.adapters?.includes(app.run));
  const other = app.runs[index + by];
  if (other) view.set({ run: other.id, with: null });
}

const isSideOpen = () => at("side").classList.contains("open");

function setSide(isOpen) {
  const hadFocus = at("side").contains(document.activeElement);
  const isClosed = isSideOpen() && !isOpen;
  at("side").classList.toggle("open", isOpen);
  const menu = at("menu");
  menu?.setAttribute("aria-expanded", String(isOpen));
  if (isClosed && hadFocus) menu?.focus();
}

function toggleSide() {
  const isOpen = !isSideOpen();
  setSide(isOpen);
  if (isOpen) at("side").querySelector("a")?.focus();
}

function closeSide(event) {
  const inside = event.target.closest?.("#side, #menu");
  if (!inside || event.target.closest?.("#side a")) setSide(false);
}

start();
