// Lines of figures before they are drawn: smoothing, joining runs, positions. Pure.

/** Exponential smoothing, without the pull of the beginning towards zero. Gaps stay gaps.
 * `weight` of what was before: 0 changes nothing. */
export function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** How many of `count` steps the mean of the newest ones is over: a fifth, 5 to 50. */
export function numRecent(count) {
  return Math.min(count, Math.max(5, Math.min(50, Math.round(count / 5))));
}

/** How many the mean of the first ones is over: a tenth, 5 to 50. */
export function numEarly(count) {
  return Math.min(count, Math.max(5, Math.min(50, Math.round(count / 10))));
}

/** What a logarithm can show: only what is above zero. */
export function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}

/** The place of the value in `sorted` that is nearest to `wanted`; -1 of nothing. */
export function nearest(sorted, wanted) {
  if (sorted.length === 0) return -1;
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] <= sorted[low] - wanted ? low - 1 : low;
}

/** First, last, lowest and highest of the known values; null where there are none. */
export function extent(values) {
  let known = null;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    known ??= { first: value, last: value, low: value, high: value };
    known.last = value;
    if (value < known.low) known.low = value;
    if (value > known.high) known.high = value;
  }
  return known;
}
