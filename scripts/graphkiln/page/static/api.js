// What the page asks its own server.

const KEY_HEADER = "x-graphkiln-admin-key";
const TIMEOUT_MS = 120_000;
let mostBytes = Infinity;

/** A request that failed: `message` says what happened, `hint` what to do. */
export class Failure extends Error {
  constructor(message, hint = "") {
    super(message);
    this.hint = hint;
  }
}

async function ask(path, options = {}) {
  const bytes = options.body?.size ?? options.body?.length ?? 0;
  if (bytes > mostBytes) throw new Failure(`this is larger than ${Math.round(mostBytes / (1 << 20))} MiB`, "send less");
  let response;
  try {
    response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    if (error.name === "TimeoutError") throw new Failure(`there was no answer within ${TIMEOUT_MS / 1000} s`, "try again");
    throw new Failure("the page's server does not answer", "is graphkiln serve still running?");
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const told = body && body.error;
  throw told ? new Failure(told.message, told.hint) : new Failure(`the page's server answered ${response.status}`);
}

const key = (adminKey) => (adminKey ? { headers: { [KEY_HEADER]: adminKey } } : {});
const of = (model) => `api/models/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;

/** The versions; what is larger than the server takes is refused from then on before it is sent: browsers tell of a connection that ended. */
export async function listModels(adminKey) {
  const found = await ask("api/models", key(adminKey));
  mostBytes = found.most_bytes;
  return found;
}
export const describe = (model) => ask(of(model));
export const traffic = () => ask("api/metrics");
export const control = (name, verb, adminKey) =>
  ask(`api/models/${encodeURIComponent(name)}/${verb}`, { method: "POST", ...key(adminKey) });
export const askImage = (model, file, top) =>
  ask(`${of(model)}/image?top_k=${top}`, { method: "POST", body: file });
export const askTensors = (model, body) => ask(`${of(model)}/tensors`, { method: "POST", body });
export const golden = (model) => ask(`${of(model)}/golden`);
export const snippets = (model) => ask(`${of(model)}/snippets`);
