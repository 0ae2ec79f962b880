// Python in a thread of its own, so that the page stays alive and a cell that never ends can be stopped by ending the thread.
import { loadPyodide } from "../vendor/pyodide/pyodide.mjs";

const here = (path) => new URL(path, import.meta.url).href;
const EVERY = 60; // milliseconds between two pieces of a running cell's output
const MOST = 200_000; // characters of one cell's output; the page would choke on more

let current, pending = "", sent = 0, last = 0;
function flush() {
  if (pending) postMessage({ id: current, kind: "out", text: pending });
  pending = "";
  last = performance.now();
}
const decoder = new TextDecoder();
function write(bytes) {
  if (sent < MOST) {
    pending += decoder.decode(bytes, { stream: true });
    sent += bytes.length;
    if (sent >= MOST) pending += "\n… and more, which is not shown.\n";
  }
  if (performance.now() - last > EVERY) flush();
  return bytes.length;
}

async function get(path) {
  const answer = await fetch(here(path));
  if (!answer.ok) throw new Error(`${path} did not load (${answer.status})`);
  return answer;
}

async function boot() {
  const [python, files, cell] = await Promise.all([
    loadPyodide({ indexURL: here("../vendor/pyodide/") }),
    get("../live/kvlab.json").then((answer) => answer.json()),
    get("../py/cell.py").then((answer) => answer.text()),
  ]);
  python.setStdout({ write });
  python.setStderr({ write });
  for (const [path, text] of Object.entries({ ...files, "live_cell.py": cell })) {
    const full = `/home/pyodide/${path}`;
    python.FS.mkdirTree(full.slice(0, full.lastIndexOf("/")));
    python.FS.writeFile(full, text);
  }
  return { run: python.pyimport("live_cell").run, names: python.toPy({ __name__: "__main__" }), version: python.version };
}

const booted = boot();
booted.then(({ version }) => postMessage({ kind: "ready", version }), (error) => postMessage({ kind: "failed", error: error.message }));

onmessage = async ({ data: { id, source, name, raw } }) => {
  const { run, names } = await booted;
  [current, pending, sent] = [id, "", 0];
  const start = performance.now();
  const result = JSON.parse(run(source, names, name, raw));
  flush();
  postMessage({ id, kind: "done", ms: performance.now() - start, ...result });
};
