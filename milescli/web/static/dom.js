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

/** Text in which `...` is code, as children. */
export function withCode(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

/** Put these in place of what was there. */
export function show(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

/** The same where they look different; else what a reader has selected or opened in it stays. For
 * nodes whose listeners would do the same. */
export function showOther(element, ...children) {
  const next = put(element.cloneNode(false), children);
  if (!next.isEqualNode(element)) element.replaceChildren(...next.childNodes);
}

/** Draw anew what is in `root`. The focus stays at the element with the same id, else at the one of
 * the same kind and name. */
export function keepingFocus(root, draw) {
  const focused = document.activeElement;
  const isInside = focused !== root && root.contains(focused);
  draw();
  if (!isInside || document.activeElement === focused) return;
  const again = focused.id ? document.getElementById(focused.id)
    : [...root.querySelectorAll(focused.localName)].find((one) => nameOf(one) === nameOf(focused));
  again?.focus({ preventScroll: true });
}

function nameOf(element) {
  return element.getAttribute("aria-label") ?? element.textContent;
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
