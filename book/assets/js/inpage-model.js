// The weights: fetched in parts from beside the site, or taken from a file; each part is checked and kept by the browser as it
// arrives, so a cut download goes on at the next part. Nobody else is asked.
//
//   look(model)                         →  {whole: Blob or null, bytes}    what this browser keeps
//   load(model, {signal, onPart, onBytes})  →  {blob, kept}                the same file, the missing parts fetched
//   take(model, file)                   →  {blob, kept}                    a file that the reader chose
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

async function kept(store, model, part, bytes) {
  const answer = await store?.match(key(model, part));
  const blob = await answer?.blob();
  return blob?.size === bytes ? blob : null;
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
  const store = await open(false);
  const list = await (await store?.match(key(model, "list")))?.json();
  if (!list) return { whole: null, bytes: 0 };
  const parts = await Promise.all(list.map((bytes, i) => kept(store, model, i, bytes)));
  const bytes = parts.reduce((sum, part) => sum + (part?.size ?? 0), 0);
  return { whole: parts.every(Boolean) && bytes === model.bytes ? new Blob(parts) : null, bytes };
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
    onPart(i, index.parts.length);
    let blob = await kept(store, model, i, entry.bytes);
    if (!blob) {
      const base = done;
      blob = await part(entry, signal, (size) => onBytes(base + size));
      if (!i) all = await keep(store, model, "list", JSON.stringify(index.parts.map((each) => each.bytes)));
      all = (await keep(store, model, i, blob)) && all;
    }
    parts.push(blob);
    done += blob.size;
    onBytes(done);
  }
  return { blob: new Blob(parts), kept: all };
}

export async function take(model, file) {
  if (file.size !== model.bytes)
    throw new Error(`${file.name} has ${file.size.toLocaleString("en")} bytes, the weights have ${model.bytes.toLocaleString("en")}.`);
  if (!(await same(await file.arrayBuffer(), model.sha256))) throw new Error(`${file.name} has the right size and another SHA-256: it is not these weights.`);
  const store = await open();
  const list = await keep(store, model, "list", JSON.stringify([file.size]));
  return { blob: file, kept: (await keep(store, model, 0, file)) && list };
}

export async function remove() {
  if (secure()) await caches.delete(BOX);
}
