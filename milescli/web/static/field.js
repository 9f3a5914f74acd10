// Fields whose value is kept in the address: what is typed goes there, and what an address says
// anew (a link, the way back, an address changed by hand) is put into the field.

import { settled } from "./dom.js";
import { view } from "./view.js";

/** {input, take, fill}: an input or select bound to the value `name` of the address. `take` takes
 * what is in it now, else that is done `wait_ms` after the last key; `fill` puts in what is new. */
export function field(name, input, { wait_ms = 0, replace = true } = {}) {
  let shown = null;
  const take = () => {
    if (!input.isConnected) return; // its page was left meanwhile
    shown = input.value;
    view.set({ [name]: shown }, { replace });
  };
  const fill = () => {
    if (view.get(name) === shown) return;
    shown = view.get(name);
    input.value = shown;
  };
  input.addEventListener("input", wait_ms ? settled(take, wait_ms) : take);
  input.addEventListener("change", take);
  fill();
  return { input, take, fill };
}
