// Follows a run by server-sent events: tells of new steps, of what happens, of its end, and of the
// connection. Lets go of the connection while nobody looks at the page.

import { ofRun } from "./api.js";

const AGAIN_MS = 3000;

export class Live {
  /** `tell(kind, data)`: kind is step, told, end, reset; or `connection`, with data true or
   * false. */
  constructor(tell) {
    this.tell = tell;
    this.id = null;
    this.source = null;
    this.again = null;
    document.addEventListener("visibilitychange", () => this.attach());
    addEventListener("pagehide", () => this.detach());
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
    for (const kind of ["step", "told", "end", "reset"]) {
      source.addEventListener(kind, (event) => this.tell(kind, parsed(event.data)));
    }
    source.addEventListener("open", () => this.tell("connection", true));
    source.addEventListener("error", () => {
      this.tell("connection", false);
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

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
