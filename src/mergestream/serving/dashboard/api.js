// Requests to the service with the token; its problems (problem+json) become errors.

const KEY = "mergestream-token";
const PATIENCE = 10_000; // milliseconds
const SLOW = 120_000; // for actions of administrators: a pool may take long to load

// Without storage the token is kept while the page is open.
let token = "";
try {
  token = sessionStorage.getItem(KEY) ?? "";
} catch { /* in memory only */ }

export const hasToken = () => token !== "";
export const setToken = (value) => {
  token = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch { /* in memory only */ }
};

// A problem document of the service.
export class Problem extends Error {
  constructor(status, { title, detail, code } = {}, retryAfter = null) {
    super([title, detail].filter((text) => typeof text === "string" && text).join(": ") || `Status ${status}`);
    Object.assign(this, { status, title, detail, code, retryAfter });
  }
}

// No answer at all.
export class Lost extends Error {}

const send = async (method, path, body, patience) => {
  const headers = { Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method, headers, cache: "no-store", signal: AbortSignal.timeout(patience) };
  try {
    return await fetch(path, body === undefined ? options : { ...options, body: JSON.stringify(body) });
  } catch (error) {
    throw new Lost(
      error.name === "TimeoutError" ? `no answer within ${patience / 1000} s` : "the service cannot be reached",
    );
  }
};

const request = async (method, path, body, patience = PATIENCE) => {
  const answer = await send(method, path, body, patience);
  const content = await answer.json().catch(() => null);
  if (answer.ok) return content;
  const wait = Number(answer.headers.get("Retry-After"));
  throw new Problem(answer.status, content ?? {}, Number.isFinite(wait) && wait > 0 ? wait : null);
};

const name = encodeURIComponent;
export const overview = () => request("GET", "v1/overview");
export const recent = (stream, after) =>
  request("GET", `v1/streams/${name(stream)}/recent${after === null ? "" : `?after=${after}`}`);
export const acknowledge = (stream, person) =>
  request("POST", `v1/streams/${name(stream)}/acknowledge`, person, SLOW);
export const resetStream = (stream) => request("POST", `v1/streams/${name(stream)}/reset`, undefined, SLOW);
export const deleteStream = (stream) => request("DELETE", `v1/streams/${name(stream)}`, undefined, SLOW);
export const switchExpert = (expert, on) => request("PUT", `v1/pool/experts/${name(expert)}`, { on }, SLOW);
export const reloadPool = () => request("POST", "v1/pool/reload", undefined, SLOW);
