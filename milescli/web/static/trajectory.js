// One line of tokens as it was kept -> tokens and stretches of one mask. Pure.

/** [{text, isLearned, logprob, trainer, version}] of a line with `lengths`; null of one that was
 * kept as text alone. Figures are null where there are none. */
export function tokensOf(line) {
  if (!line.lengths) return null;
  const characters = Array.from(line.text);
  const tokens = [];
  let at = 0;
  for (const length of line.lengths) {
    tokens.push({ text: characters.slice(at, at + length).join(""), isLearned: false, logprob: null,
      trainer: null, version: null });
    at += length;
  }
  learn(tokens, line);
  for (const [start, end, version] of line.versions ?? []) {
    for (let index = start; index < Math.min(end, tokens.length); index += 1) {
      tokens[index].version = version;
    }
  }
  return tokens;
}

function learn(tokens, line) {
  let index = 0;
  let learned = 0;
  (line.mask ?? []).forEach((length, run) => {
    const isLearned = run % 2 === 1;
    for (let left = length; left > 0 && index < tokens.length; left -= 1, index += 1) {
      const token = tokens[index];
      token.isLearned = isLearned;
      if (!isLearned) continue;
      token.logprob = line.logprobs?.[learned] ?? null;
      token.trainer = line.trainer_logprobs?.[learned] ?? null;
      learned += 1;
    }
  });
}

/** Stretches of tokens that are all learned or all not: [{start, end, isLearned}]. */
export function stretches(tokens) {
  const list = [];
  tokens.forEach((token, index) => {
    const last = list.at(-1);
    if (last && last.isLearned === token.isLearned) last.end = index + 1;
    else list.push({ start: index, end: index + 1, isLearned: token.isLearned });
  });
  return list;
}

/** Does it look like a token that steers, such as <|im_end|>, [INST] or </tool_call>? */
export function isSpecial(text) {
  return /^\s*(<\|[^|]*\|>|<\/?[a-z_][\w-]*>|<[|｜][^>]*>|\[\/?[A-Z_]+\])\s*$/u.test(text);
}
