// The server's endpoints. Addresses are relative, so that the page works under any path of a proxy.

import { EventReader } from "./events.js";

const KEY = "imputer-key";

export class NeedsKey extends Error {}

// The server did not answer, or not to the end; the same request may succeed later.
export class Lost extends Error {}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

function refusal(status, text) {
  let message = `The server answered ${status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not an answer of ours: a proxy's, perhaps
  }
  if (status === 401) return new NeedsKey(message);
  return status === 429 || status >= 500 ? new Lost(message) : new Error(message);
}

async function get(address, signal) {
  let response;
  try {
    response = await fetch(address, { headers: headers(), signal });
  } catch (problem) {
    throw problem.name === "AbortError" ? problem : new Lost("The server cannot be reached.");
  }
  if (!response.ok) throw refusal(response.status, await response.text());
  return response;
}

export async function models() {
  return (await (await get("v1/models")).json()).data;
}

export async function sample(model, signal) {
  return (await get(`sample.wav?model=${encodeURIComponent(model)}`, signal)).blob();
}

// A live session: a WebSocket, which takes no headers, so the key is one of its protocols, as OpenAI's clients send it.
export function realtime() {
  const address = new URL("v1/realtime", location.href);
  address.protocol = address.protocol.replace("http", "ws");
  const key = sessionStorage.getItem(KEY);
  return new WebSocket(address, key ? ["realtime", `openai-insecure-api-key.${key}`] : ["realtime"]);
}

// Send a recording and pass on what the server says about it until it is done.
// XMLHttpRequest, since fetch does not report how much of an upload is sent.
export function impute(blob, name, options, { signal, onUpload, onEvent }) {
  const form = new FormData();
  form.append("file", blob, name);
  for (const [field, value] of Object.entries({ ...options, stream: true })) form.append(field, value);
  const request = new XMLHttpRequest();
  return new Promise((resolve, reject) => {
    let done = false;
    const reader = new EventReader((kind, told) => {
      if (kind === "error") reject(new Error(told.error.message));
      else onEvent(kind, told);
      done ||= kind === "imputation.done";
    });
    const read = () => request.status === 200 && reader.read(request.responseText);
    request.open("POST", "v1/imputations");
    for (const [field, value] of Object.entries(headers())) request.setRequestHeader(field, value);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onUpload(event.loaded / event.total));
    request.addEventListener("progress", read);
    request.addEventListener("load", () => {
      read();
      if (request.status !== 200) reject(refusal(request.status, request.responseText));
      else if (!done) reject(new Lost("The server stopped before the end."));
      resolve();
    });
    request.addEventListener("error", () => reject(new Lost(request.status ? "The server stopped before the end." : "The server cannot be reached.")));
    signal.addEventListener("abort", () => {
      request.abort();
      reject(new DOMException("cancelled", "AbortError"));
    });
    request.send(form);
  });
}
