// The page's Python: one kernel, started by the first thing that needs it. Nothing is fetched before.
//
//   kvKernel.run(source, {name, raw, onText})  →  {value, figure, error, ms, stopped}
//   kvKernel.stop()                            ends the thread; the next run starts anew, with nothing in memory
//   kvKernel.starts                            how often it was started
(() => {
  "use strict";
  const WORKER = new URL("kernel-worker.mjs", document.currentScript.src).href;
  const FROM_DISK = "Python cannot start in a page opened from the disk. In the site’s folder run “python -m http.server” and open http://localhost:8000/.";
  let worker, ready, count = 0;
  const waiting = new Map();

  function start() {
    ready ??= new Promise((resolve, reject) => {
      if (location.protocol === "file:") throw new Error(FROM_DISK);
      kvKernel.starts += 1;
      worker = new Worker(WORKER, { type: "module" });
      const fail = (text) => { end(); reject(new Error(`Python did not start: ${text}`)); };
      worker.onerror = (event) => fail(event.message || "its files did not load");
      worker.onmessage = ({ data }) => {
        if (data.kind === "ready") resolve();
        else if (data.kind === "failed") fail(data.error);
        else if (data.kind === "out") waiting.get(data.id)?.onText?.(data.text);
        else { waiting.get(data.id)?.resolve(data); waiting.delete(data.id); }
      };
      kvKernel.abort = () => reject(new Error("Stopped before Python had started."));
    });
    ready.catch(() => (ready = undefined)); // the next run tries again
    return ready;
  }

  function end() {
    worker?.terminate();
    worker = ready = undefined;
    for (const { resolve } of waiting.values()) resolve({ stopped: true });
    waiting.clear();
  }

  async function run(source, { name = "<cell>", raw = false, onText } = {}) {
    await start();
    const id = ++count;
    return new Promise((resolve) => {
      waiting.set(id, { resolve, onText });
      worker.postMessage({ id, source, name, raw });
    });
  }

  window.kvKernel = { run, starts: 0, abort() {}, stop() { kvKernel.abort(); end(); }, get started() { return Boolean(ready); } };
})();
