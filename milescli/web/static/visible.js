// Makes characters visible that change how a text is read without being seen: directions, widths of
// zero, controls. For everything that a model wrote. Pure.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4" +
    "\\u17b5\\u180b-\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0d" +
    "\\ufeff\\uffa0\\ufff9-\\ufffb\\ud800-\\udfff\\u{e0000}-\\u{e0fff}]",
  "gu",
);

/** The name of a hidden character: U+202E. */
export function nameOf(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The text as nodes to append: hidden characters as marked names, the rest as plain text. */
export function visible(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const mark = document.createElement("span");
    mark.className = "hidden-character";
    mark.textContent = nameOf(match[0]);
    nodes.push(mark);
    at = match.index + match[0].length;
  }
  if (at === 0) return [text];
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

/** The same as one text, for titles and the like. */
export function visibleText(text) {
  return text.replace(HIDDEN, (character) => `⟨${nameOf(character)}⟩`);
}
