// A small line without axes, in SVG; what it shows is told in words beside it.

import { svg } from "./dom.js";

/** Of [[x, y], ...]; null where there are fewer than two. `label`: for those who do not see it. */
export function sparkline(points, label) {
  const known = points.filter(([, y]) => Number.isFinite(y));
  if (known.length < 2) return null;
  const xs = known.map(([x]) => x);
  const ys = known.map(([, y]) => y);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const across = (x) => (100 * (x - left)) / (right - left || 1);
  const up = (y) => (high === low ? 20 : 37 - (34 * (y - low)) / (high - low));
  const line = known.map(([x, y]) => `${across(x).toFixed(2)},${up(y).toFixed(2)}`).join("L");
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
      "aria-label": label },
    svg("path", { class: "under", d: `M${across(xs[0])},40L${line}L${across(xs.at(-1))},40Z` }),
    svg("path", { d: `M${line}` }),
  );
}
