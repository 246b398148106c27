// The server's endpoints. Addresses are relative, so that the page works under any path of a proxy.

const KEY = "imputer-key";

export class NeedsKey extends Error {}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not an answer of ours: a proxy's, perhaps
  }
  if (response.status === 401) throw new NeedsKey(message);
  throw new Error(message);
}

export async function models() {
  const response = await checked(await fetch("v1/models", { headers: headers() }));
  return (await response.json()).data;
}

export async function sample(model) {
  const response = await checked(await fetch(`sample.wav?model=${encodeURIComponent(model)}`));
  return response.blob();
}

export async function impute(blob, name, options, signal) {
  const form = new FormData();
  form.append("file", blob, name);
  for (const [field, value] of Object.entries(options)) form.append(field, value);
  const request = { method: "POST", body: form, headers: headers(), signal };
  return (await checked(await fetch("v1/imputations", request))).json();
}
