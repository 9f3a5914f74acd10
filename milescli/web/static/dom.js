// Builds elements. Text goes in as text, never as markup: what a model wrote stays harmless.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes: `on: {event: f}`, `style: {name: value}`, `data: {name: value}`,
 * `prop: {name: value}`; null and false are left out. Children: nodes, texts, lists of them. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function svg(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, f] of Object.entries(value)) element.addEventListener(event, f);
    } else if (name === "style") {
      for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    } else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "prop") Object.assign(element, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, children);
  return element;
}

/** Add children to an element. */
export function put(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Put these in place of what was there. */
export function show(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

/** A function that runs at most once in `wait_ms`: at once, and once more at the end if it was
 * called in between. */
export function throttled(f, wait_ms) {
  let timer = null;
  let again = false;
  const run = () => {
    timer = setTimeout(() => {
      timer = null;
      if (again) {
        again = false;
        run();
      }
    }, wait_ms);
    f();
  };
  return () => {
    if (timer === null) run();
    else again = true;
  };
}

/** A function that runs when it was not called for `wait_ms`. */
export function settled(f, wait_ms) {
  let timer = null;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...values), wait_ms);
  };
}

/** Run `f` when `element` changes its width; returns what ends it. */
export function onWidth(element, f) {
  let width = element.clientWidth;
  const observer = new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - width) < 2) return;
    width = element.clientWidth;
    f(width);
  });
  observer.observe(element);
  return () => observer.disconnect();
}

/** Move the focus among `elements` by arrow keys: only one of them is in the order of Tab. */
export function roving(list, { selector, vertical = false }) {
  const next = vertical ? "ArrowDown" : "ArrowRight";
  const previous = vertical ? "ArrowUp" : "ArrowLeft";
  list.addEventListener("keydown", (event) => {
    const all = [...list.querySelectorAll(selector)];
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    const to = { [next]: at + 1, [previous]: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  });
}
