// The switch between light, dark and what the system says; kept in this browser.

import { h } from "./dom.js";

const ORDER = ["", "light", "dark"];
const NAMES = { "": "System", light: "Light", dark: "Dark" };

function theme() {
  return document.documentElement.dataset.theme ?? "";
}

/** Is the page dark now? */
export function isDark() {
  return theme() ? theme() === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Go to the next of system, light, dark. */
export function nextTheme() {
  const next = ORDER[(ORDER.indexOf(theme()) + 1) % ORDER.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  try {
    if (next) localStorage.setItem("miles.theme", next);
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
    { class: "plain", id: "theme-button", title: "Colours (t)", on: { click: nextTheme } },
    `Colours: ${NAMES[theme()]}`,
  );
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!theme()) dispatchEvent(new Event("theme"));
});

/** The value of a colour of the style sheet, for canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
