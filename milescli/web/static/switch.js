// The switch between light and dark; at first what the system says. Kept in this browser.

import { h } from "./dom.js";

function theme() {
  return document.documentElement.dataset.theme ?? "";
}

function isSystemDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Is the page dark now? */
export function isDark() {
  return theme() ? theme() === "dark" : isSystemDark();
}

/** From light to dark or back. What the system says as well is not kept: it may change its mind. */
export function nextTheme() {
  const next = isDark() ? "light" : "dark";
  const kept = (next === "dark") === isSystemDark() ? "" : next;
  if (kept) document.documentElement.dataset.theme = kept;
  else delete document.documentElement.dataset.theme;
  try {
    if (kept) localStorage.setItem("miles.theme", kept);
    else localStorage.removeItem("miles.theme");
  } catch {
    // storage is forbidden: it lasts until the page is left
  }
  dispatchEvent(new Event("theme"));
}

/** The button in the side. */
export function themeButton() {
  return h(
    "button",
    { class: "plain", id: "theme-button", on: { click: nextTheme } },
    isDark() ? "Light " : "Dark ",
    h("kbd", {}, "t"),
  );
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!theme()) dispatchEvent(new Event("theme"));
});

/** The value of a colour of the style sheet, for canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
