// Follows a run by server-sent events: tells when there is news of it (a step, what happened, its
// end), and of the stream. Lets go of the stream while nobody looks at the page.

import { ofRun } from "./api.js";

const AGAIN_MS = 3000;

export class Live {
  /** `acts`: {news(), opened(), failed()}. */
  constructor(acts) {
    this.acts = acts;
    this.id = null;
    this.source = null;
    this.again = null;
    document.addEventListener("visibilitychange", () => this.attach());
    addEventListener("pagehide", () => this.detach());
  }

  get isOpen() {
    return this.source?.readyState === EventSource.OPEN;
  }

  /** Follow this run, and no other. */
  follow(id) {
    if (id === this.id) return;
    this.id = id;
    this.attach();
  }

  attach() {
    this.detach();
    if (this.id === null || document.visibilityState === "hidden") return;
    const source = new EventSource(ofRun(this.id, "live"));
    this.source = source;
    source.addEventListener("news", () => this.acts.news());
    source.addEventListener("open", () => this.acts.opened());
    source.addEventListener("error", () => {
      this.acts.failed();
      // a refused stream is not tried again by the browser
      if (source.readyState === EventSource.CLOSED) {
        this.again = setTimeout(() => this.attach(), AGAIN_MS);
      }
    });
  }

  detach() {
    clearTimeout(this.again);
    this.source?.close();
    this.source = null;
  }
}
