// What is told of one token, beside it. Follows it when the page is scrolled.

import { h } from "./dom.js";

const GAP = 6;

export class Readout {
  constructor() {
    this.box = h("output", { class: "readout", "aria-live": "off" });
    this.target = null;
    this.onScroll = () => this.place();
    addEventListener("scroll", this.onScroll, { capture: true, passive: true });
    addEventListener("resize", this.onScroll);
  }

  /** Of an element; "" hides it. */
  tell(text, target) {
    this.box.textContent = text;
    this.target = text ? target : null;
    this.place();
  }

  hide() {
    this.tell("", null);
  }

  /** Below the token, above it where there is no room; nowhere while it is scrolled away. */
  place() {
    if (!this.target) return;
    const at = this.target.getClientRects()[0];
    if (!at) {
      this.hide();
      return;
    }
    this.box.hidden = at.bottom < 0 || at.top > innerHeight;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const isBelow = at.bottom + GAP + height <= innerHeight;
    this.box.style.top = `${isBelow ? at.bottom + GAP : at.top - GAP - height}px`;
    this.box.style.left = `${Math.max(GAP, Math.min(at.left, innerWidth - width - GAP))}px`;
  }

  close() {
    removeEventListener("scroll", this.onScroll, { capture: true });
    removeEventListener("resize", this.onScroll);
  }
}
