// The pictures that a prompt or a tool shows, each by its SHA-256. What is no picture shows its name alone.

import { h } from "./dom.js";

/** `images`: hashes; `imageOf`: hash -> address. Null where there are none. */
export function pictures(images, imageOf, whose = "of the prompt") {
  if (!images?.length) return null;
  return h("div", { class: "pictures" },
    images.map((sha256, at) => picture(sha256, `Image ${at + 1} ${whose}`, imageOf)));
}

function picture(sha256, name, imageOf) {
  const source = imageOf(sha256);
  if (!source) return h("span", { class: "muted small" }, `${name}: left out of this file`);
  return h("img", { src: source, alt: name, title: sha256, loading: "lazy", decoding: "async" });
}
