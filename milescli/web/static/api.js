// Asks the server, or a saved page the answers in it, and says in three parts what went wrong.
// Caches nothing: the server does.

import { saved, savedAnswer } from "./saved.js";

/** What went wrong: `what`, `why`, `fix`. */
export class ApiError extends Error {
  constructor({ what, why, fix, status = 0 }) {
    super(what);
    Object.assign(this, { what, why, fix, status });
  }
}

const LIMIT_MS = 60_000;

/** The path of a run's answers. */
export function ofRun(id, path) {
  return `api/runs/${encodeURIComponent(id)}/${path}`;
}

/** Where a picture of a run is, by its SHA-256; "" where a saved page left it out. */
export function imageOf(id, sha256) {
  return saved ? saved.images[sha256] ?? "" : ofRun(id, `images/${encodeURIComponent(sha256)}`);
}

/** `path` with a query: lists are given as several values, null is left out. */
export function withQuery(path, query) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") search.append(name, one);
    }
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

/** GET of JSON. Raises ApiError; AbortError where `signal` ended it. */
export async function get(path, query, { signal } = {}) {
  if (saved) return fromFile(path, query);
  const limit = AbortSignal.timeout(LIMIT_MS);
  const both = signal ? AbortSignal.any([signal, limit]) : limit;
  let answer;
  try {
    answer = await fetch(withQuery(path, query), { signal: both, credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (limit.aborted) {
      throw new ApiError({
        what: "The server did not reply in time",
        why: `No answer to ${path} after ${LIMIT_MS / 1000} s.`,
        fix: "Try again; if it stays so, stop `miles ui` with Ctrl-C and start it again.",
      });
    }
    throw new ApiError({
      what: "The server does not answer",
      why: "`miles ui` was stopped, or the connection to its machine is gone.",
      fix: "Start `miles ui` again and open the address that it prints.",
    });
  }
  return answered(answer, path);
}

/** POST of JSON, of a server with `--control`. `isLeaving`: it is sent although the page is left.
 * Raises ApiError. */
export async function post(path, body, { isLeaving = false } = {}) {
  let answer;
  try {
    answer = await fetch(path, { method: "POST", credentials: "same-origin",
      headers: { "content-type": "application/json" }, body: JSON.stringify(body ?? {}),
      keepalive: isLeaving, signal: AbortSignal.timeout(LIMIT_MS) });
  } catch {
    throw new ApiError({
      what: "The server does not answer",
      why: "`miles ui` was stopped, or the connection to its machine is gone.",
      fix: "Start `miles ui --control` again and open the address that it prints.",
    });
  }
  return answered(answer, path);
}

function fromFile(path, query) {
  const answer = savedAnswer(path, query);
  if (answer !== undefined) return answer;
  throw new ApiError({
    what: "This file does not hold that",
    why: `The report was saved without ${path}.`,
    fix: "Open the run with `miles ui`, which shows everything.",
  });
}

async function answered(answer, path) {
  let body = null;
  try {
    body = await answer.json();
  } catch {
    // body stays null: an answer that is no JSON
  }
  if (answer.ok && body !== null) return body;
  throw new ApiError({
    what: body?.what ?? `The server could not answer (${answer.status})`,
    why: body?.why ?? `It was asked for ${path}.`,
    fix: body?.fix ?? "Try again; the terminal where `miles ui` runs may say more.",
    status: answer.status,
  });
}
