// How long ago something was, kept true while the page is open: also where nothing new happens.

import { h } from "./dom.js";
import { ago } from "./format.js";

/** 5 min ago, of seconds since 1970. */
export function agoElement(time_s) {
  return h("span", { data: { ago: time_s } }, ago(time_s));
}

/** Say everywhere how long ago it is now. */
export function updateAgo() {
  for (const element of document.querySelectorAll("[data-ago]")) {
    const text = ago(Number(element.dataset.ago));
    if (element.textContent !== text) element.textContent = text;
  }
}
