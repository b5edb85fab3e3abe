// Requests to the server, and what goes wrong with them.
const KEPT = "bertsmith-key";  // of this tab only
const KINDS = {400: "input", 401: "key", 404: "missing", 408: "slow", 413: "long", 422: "input", 429: "busy",
  503: "closing"};
let key = read();

function read() {
  try { return sessionStorage.getItem(KEPT) || ""; } catch { return ""; }  // a browser may forbid storage
}

export const hasKey = () => key !== "";

export function keep(given) {
  key = given;
  try { given ? sessionStorage.setItem(KEPT, given) : sessionStorage.removeItem(KEPT); } catch { /* kept in memory */ }
}

// `kind` names the sentence that a person reads, `detail` is the server's own line.
export class Problem extends Error {
  constructor(kind, detail = "", seconds = 1) {
    super(kind);
    this.kind = kind; this.detail = detail; this.seconds = seconds;
  }
}

export async function ask(path, body, signal) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) {
    if (!/^[\x21-\x7e]+$/.test(key)) throw new Problem("key");  // a header cannot carry it
    headers.Authorization = "Bearer " + key;
  }
  const options = {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
    credentials: "omit", cache: "no-store"};
  let response;
  try {
    response = await fetch(path, options);
    if (response.ok) return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem("stopped");
  }
  const found = await response.json().catch(() => ({}));
  const detail = typeof found.error === "string" ? found.error : "";
  const retry = parseInt(response.headers.get("Retry-After"), 10) || 1;
  throw new Problem(KINDS[response.status] || "failed", detail, retry);
}
