// Run, edit and reset the page's live cells: code cells with the tag `live`. They share one memory, as in a notebook.
(() => {
  "use strict";
  const FIGURES = new URL("figures.js", document.currentScript.src).href;

  function element(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  function figure(source) {
    const alt = source.layout?.meta?.alt || source.layout?.title?.text || source.layout?.title || "A figure made by this cell";
    const plot = element("div", { className: "kv-plot", role: "img", ariaLabel: alt });
    plot.style.minHeight = `${source.layout?.height ?? 450}px`;
    const data = element("script", { type: "application/json", textContent: JSON.stringify(source) });
    return element("figure", { className: "kv-figure" }, plot, data);
  }
  let drawing;
  function draw(node) {
    drawing ??= window.kvDraw ? Promise.resolve() : new Promise((resolve) => {
      document.head.append(element("script", { src: FIGURES, onload: resolve }));
    });
    drawing.then(() => window.kvDraw(node));
  }

  function enliven(cell, number) {
    const shown = cell.querySelector(".cell_input pre"), recorded = cell.querySelector(".cell_output");
    const original = shown.textContent.replace(/\n+$/, "");
    const what = `cell ${number}`;
    const button = (text, label) => element("button", { type: "button", textContent: text, ariaLabel: `${label} ${what}` });
    const run = button("Run", "Run"), edit = button("Edit", "Edit"), reset = button("Reset", "Reset"), stop = button("Stop", "Stop");
    const says = element("span", { className: "kv-live-says", role: "status" });
    const out = element("div", { className: "kv-live-out", ariaLive: "polite", hidden: true });
    const code = element("textarea", {
      className: "kv-live-code", value: original, hidden: true, spellcheck: false, autocapitalize: "off", ariaLabel: `Code of ${what}`,
    });
    code.setAttribute("autocomplete", "off");
    edit.setAttribute("aria-pressed", "false");
    stop.hidden = true;
    const bar = element("div", { className: "kv-live-bar", role: "group", ariaLabel: `Live ${what}` }, run, edit, reset, stop, says);
    cell.querySelector(".cell_input").append(code, bar);
    (recorded ?? cell.querySelector(".cell_input")).after(out);

    const fit = () => (code.rows = code.value.split("\n").length + 1);
    function editing(on) {
      edit.setAttribute("aria-pressed", String(on));
      code.hidden = !on;
      shown.closest("[class*=highlight-]").hidden = on;
      fit();
      if (on) code.focus();
    }
    let running = false;
    async function go() {
      if (running) return;
      running = true;
      run.setAttribute("aria-disabled", "true");
      stop.hidden = false;
      cell.dataset.live = "running";
      says.textContent = kvKernel.started ? "Running …" : "Starting Python, 13 MB the first time …";
      const pre = element("pre", { className: "kv-live-text" });
      out.replaceChildren(pre);
      out.hidden = false;
      if (recorded) recorded.hidden = true;
      try {
        const result = await kvKernel.run(code.value, {
          name: `<${what}>`,
          onText: (text) => { says.textContent = "Running …"; pre.append(text); },
        });
        if (result.value) out.append(element("pre", { className: "kv-live-value", textContent: result.value }));
        if (result.error) out.append(element("pre", { className: "kv-live-error", textContent: result.error }));
        if (result.figure) { const node = figure(result.figure); out.append(node); draw(node); }
        if (!pre.textContent) pre.remove();
        says.textContent = result.stopped ? "Stopped. The next run starts Python anew, with nothing in memory."
          : result.error ? "Ended with an error." : `Done in ${Math.max(1, Math.round(result.ms))} ms.`;
        cell.dataset.live = result.stopped ? "stopped" : result.error ? "failed" : "done";
      } catch (error) {
        says.textContent = error.message;
        out.hidden = true;
        if (recorded) recorded.hidden = false;
        cell.dataset.live = "refused";
      }
      running = false;
      run.removeAttribute("aria-disabled");
      if (document.activeElement === stop) run.focus();
      stop.hidden = true;
    }

    run.addEventListener("click", go);
    stop.addEventListener("click", () => kvKernel.stop());
    edit.addEventListener("click", () => editing(code.hidden));
    reset.addEventListener("click", () => {
      if (running) kvKernel.stop();
      code.value = original;
      editing(false);
      out.replaceChildren();
      out.hidden = true;
      if (recorded) recorded.hidden = false;
      says.textContent = "As it was.";
      delete cell.dataset.live;
    });
    code.addEventListener("input", fit);
    code.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.shiftKey || event.metaKey)) {
        event.preventDefault();
        go();
      } else if (event.key === "Enter" && !event.isComposing) { // keep the indentation; Tab stays the way out
        const line = code.value.slice(0, code.selectionStart).split("\n").at(-1);
        const indent = line.match(/^ */)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
        if (indent) {
          event.preventDefault();
          code.setRangeText(`\n${indent}`, code.selectionStart, code.selectionEnd, "end");
          fit();
        }
      } else if (event.key === "Escape") {
        editing(false);
        edit.focus();
      }
    });
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".cell.tag_live").forEach((cell, i) => enliven(cell, i + 1)));
})();
