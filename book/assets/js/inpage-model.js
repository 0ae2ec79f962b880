// The weights: fetched in parts from beside the site, or taken from a file; each part is checked and kept by the browser as it
// arrives, so a cut download goes on at the next part. What is kept is checked again whenever it is read: a disk may lose
// bytes, and the browser does not say so. Nobody else is asked.
//
//   look(model)                         →  {whole: Blob or null, bytes}    what this browser keeps
//   load(model, {signal, onPart, onBytes})  →  {blob, kept}                the same file, the missing parts fetched
//   take(model, file, {signal})         →  {blob, kept}                    a file that the reader chose
//   remove()                                                               forget all of it
//
// `model` is {name, bytes, sha256}. Where the page is not on https or localhost there is no Cache Storage and no hash: the
// file stays in memory, and its size alone is checked.
const BOX = "shared-state-model";
const FOLDER = new URL("../model/", import.meta.url);

export const secure = () => Boolean(globalThis.isSecureContext && globalThis.caches && globalThis.crypto?.subtle);

async function open(create = true) {
  try {
    return secure() && (create || (await caches.has(BOX))) ? await caches.open(BOX) : null;
  } catch { // a browser may refuse it, as in some private windows
    return null;
  }
}
// the name of a part in the box: an address that nobody is asked for
const key = (model, part) => new URL(`/${BOX}/${model.sha256}/${part}`, location.href).href;

// A part that is kept, or null; what cannot be read or is damaged is thrown away, so that it is fetched again
async function kept(store, model, part, sha256) {
  const answer = await store?.match(key(model, part));
  if (!answer) return null;
  try {
    const blob = await answer.blob();
    if (await same(await blob.arrayBuffer(), sha256)) return blob;
  } catch { /* as a damaged one */ }
  await store.delete(key(model, part));
  return null;
}
// what the parts should be: [{bytes, sha256}], or nothing
async function listed(store, model) {
  try {
    return (await (await store?.match(key(model, "list")))?.json()) ?? [];
  } catch {
    return [];
  }
}
async function keep(store, model, part, body) {
  try {
    await store?.put(key(model, part), new Response(body));
    return Boolean(store);
  } catch { // no room left: it stays in memory
    return false;
  }
}

async function same(bytes, sha256) {
  if (!globalThis.crypto?.subtle) return true;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("") === sha256;
}

export async function look(model) {
  const store = await open(false), parts = [];
  for (const [i, entry] of (await listed(store, model)).entries()) parts.push(await kept(store, model, i, entry.sha256));
  const bytes = parts.reduce((sum, part) => sum + (part?.size ?? 0), 0);
  return { whole: bytes === model.bytes ? new Blob(parts) : null, bytes };
}

async function get(name, signal) {
  let answer;
  try {
    // the box is the cache: a part that arrived broken must not come again from the browser's other one
    answer = await fetch(new URL(name, FOLDER), { signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`${name} did not arrive.`);
  }
  if (!answer.ok) throw new Error(`${name} did not arrive (${answer.status}).`);
  return answer;
}

async function part(entry, signal, onBytes) {
  const pieces = [];
  let size = 0;
  try {
    const reader = (await get(entry.name, signal)).body.getReader();
    for (let next; !(next = await reader.read()).done; ) {
      pieces.push(next.value);
      size += next.value.length;
      onBytes(size);
    }
  } catch (error) {
    if (error.name === "AbortError" || error.message.startsWith(entry.name)) throw error;
    throw new Error(`${entry.name} was cut off.`);
  }
  const blob = new Blob(pieces);
  if (size !== entry.bytes) throw new Error(`${entry.name} has ${size.toLocaleString("en")} bytes in place of ${entry.bytes.toLocaleString("en")}.`);
  if (!(await same(await blob.arrayBuffer(), entry.sha256))) throw Object.assign(new Error(`${entry.name} is damaged: its SHA-256 differs.`), { damaged: true });
  return blob;
}

export async function load(model, { signal, onPart = () => {}, onBytes = () => {} } = {}) {
  const index = await (await get("index.json", signal)).json();
  if (index.sha256 !== model.sha256 || index.bytes !== model.bytes)
    throw Object.assign(new Error("index.json is of another model than this page."), { damaged: true });
  const store = await open();
  const parts = [];
  let done = 0, all = true;
  for (const [i, entry] of index.parts.entries()) {
    signal?.throwIfAborted();
    onPart(i, index.parts.length);
    let blob = await kept(store, model, i, entry.sha256);
    if (!blob) {
      const base = done;
      blob = await part(entry, signal, (size) => onBytes(base + size));
      all = (await keep(store, model, i, blob)) && all;
    }
    if (!i) all = (await keep(store, model, "list", JSON.stringify(index.parts.map(({ bytes, sha256 }) => ({ bytes, sha256 }))))) && all;
    parts.push(blob);
    done += blob.size;
    onBytes(done);
  }
  return { blob: new Blob(parts), kept: all };
}

export async function take(model, file, { signal } = {}) {
  if (file.size !== model.bytes)
    throw new Error(`${file.name} has ${file.size.toLocaleString("en")} bytes, the weights have ${model.bytes.toLocaleString("en")}.`);
  // neither reading nor hashing can be halted, but nobody has to wait for their end
  const halted = new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));
  const right = file.arrayBuffer().then((bytes) => same(bytes, model.sha256));
  if (!(await Promise.race([halted, right]))) throw new Error(`${file.name} has the right size and another SHA-256: it is not these weights.`);
  const store = await open();
  signal?.throwIfAborted();
  const list = await keep(store, model, "list", JSON.stringify([{ bytes: file.size, sha256: model.sha256 }]));
  return { blob: file, kept: (await keep(store, model, 0, file)) && list };
}

export async function remove() {
  if (secure()) await caches.delete(BOX);
}
