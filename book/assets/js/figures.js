// Draw the page's figures when the reader comes near them, in the colours of the page.
//
// Each figure is a box of the right height and its data as JSON, in the page or beside it (book/_ext/shared_state/figures.py).
// plotly.js is fetched once, for the first figure that nears the window: its bundle of plain charts, 1.5 MB, or all of it, 4.8 MB,
// for a figure that needs another kind of trace. Plotly's sliders and menus are mouse-only
// drawings, so they are taken out of the layout and become real inputs below the plot, which a keyboard and a screen reader can use.
(() => {
  "use strict";
  const VENDOR = new URL("../vendor/", document.currentScript.src).href;
  const PLAIN = new Set(["bar", "box", "contour", "heatmap", "histogram", "histogram2d", "histogram2dcontour", "image", "pie",
    "scatter", "scatterternary", "violin"]); // what plotly.js-cartesian draws
  const NARROW = 560; // CSS pixels of a figure under which the legend goes below the plot
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  const libraries = {};

  function load(address) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = address;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${address.split("/").at(-1)} did not load`));
      document.head.append(script);
    });
  }
  function loadPlotly({ data }) {
    const file = data.every((trace) => PLAIN.has(trace.type ?? "scatter")) ? "plotly-cartesian.min.js" : "plotly.min.js";
    return (libraries[file] ??= load(VENDOR + file).then(() => window.Plotly));
  }

  // A figure's data: in the page, or where the page says; a script's and not a file's, which a page on the disk could not fetch
  async function dataOf(figure) {
    const holder = figure.querySelector('script[type="application/json"]');
    if (!holder.dataset.src) return JSON.parse(holder.textContent);
    await load(holder.dataset.src);
    return window.kvFigures[holder.dataset.src.split("/").at(-1)];
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--kv-${name}`).trim();

  // The figure's own template (kvlab/show/theme.py) in the colours of the page's mode
  function recoloured(template) {
    const [ink, muted, grid, card] = ["ink", "muted", "grid", "card"].map(colour);
    const layout = template?.layout ?? {};
    const axis = (own) => ({
      ...own, gridcolor: grid, linecolor: muted, zerolinecolor: grid, tickcolor: muted,
      title: { ...own?.title, font: { ...own?.title?.font, color: ink } },
    });
    return {
      ...template,
      layout: {
        ...layout,
        font: { ...layout.font, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        xaxis: axis(layout.xaxis),
        yaxis: axis(layout.yaxis),
        hoverlabel: { ...layout.hoverlabel, bgcolor: card, bordercolor: muted, font: { color: ink } },
      },
    };
  }

  // What a narrow figure changes: smaller type, titles of several lines, and no drag, so that a finger scrolls the page
  function narrowed(layout) {
    const axes = Object.entries(layout).filter(([name, axis]) => /^xaxis\d*$/.test(name) && axis.title?.text);
    const titled = ([name, axis]) => [name, { ...axis, title: { ...axis.title, text: wrapped(axis.title.text, 18) } }];
    const title = typeof layout.title === "string" ? { text: layout.title } : layout.title;
    return {
      ...layout,
      ...Object.fromEntries(axes.map(titled)),
      dragmode: false,
      font: { ...layout.font, size: 12 },
      title: title && { ...title, text: wrapped(title.text ?? "", 44), font: { ...title.font, size: 14 } },
      margin: { ...layout.margin, l: 8, r: 8 },
    };
  }
  function wrapped(text, width) {
    const lines = [""];
    for (const word of text.split(" ")) {
      if ((lines.at(-1) + word).length > width) lines.push("");
      lines[lines.length - 1] += `${word} `;
    }
    return lines.map((line) => line.trim()).join("<br>");
  }
  const sideways = (trace) =>
    trace.showscale === false || !(trace.type === "heatmap" || trace.colorbar) ? trace : {
      ...trace,
      colorbar: { ...trace.colorbar, orientation: "h", x: 0.5, xanchor: "center", yref: "container", y: 0, yanchor: "bottom", thickness: 12 },
    };

  function element(tag, properties, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  // Build real inputs for the layout's sliders and menus; the layout loses them
  function controls(Plotly, plot, layout, number) {
    const call = (step) => {
      if (!step || step.method === "skip") return;
      const args = structuredClone(step.args ?? []);
      if (step.method === "animate" && reducedMotion.matches) {
        args[1] = { ...args[1], mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: true } };
      }
      Plotly[step.method](plot, ...args);
    };
    const visible = (item) => item.visible !== false;
    const built = [];
    (layout.sliders ?? []).filter(visible).forEach((slider, index) => {
      const steps = (slider.steps ?? []).filter(visible);
      const prefix = (slider.currentvalue?.prefix ?? "").trim();
      const name = slider.name ?? (prefix.replace(/[:=\s]+$/, "") || "Step");
      const id = `kv-slider-${number}-${index}`;
      const input = element("input", {
        type: "range", id, min: 0, max: Math.max(steps.length - 1, 0), step: 1, value: slider.active ?? 0,
      });
      const output = element("output", {});
      output.htmlFor = id;
      const show = () => {
        const label = steps[input.value]?.label ?? input.value;
        output.value = label;
        input.setAttribute("aria-valuetext", label);
      };
      input.addEventListener("input", () => { show(); call(steps[input.value]); });
      show();
      built.push(element("div", { className: "kv-control" },
        element("label", { htmlFor: id, textContent: name }), input, output));
      // an animation moves the slider along
      plot.on?.("plotly_animatingframe", (event) => {
        const at = steps.findIndex((step) => step.args?.[0]?.[0] === event.name);
        if (at >= 0) { input.value = at; show(); }
      });
    });
    (layout.updatemenus ?? []).filter(visible).forEach((menu, index) => {
      const buttons = (menu.buttons ?? []).filter(visible);
      const name = menu.name ?? "Show";
      if (menu.type === "buttons") {
        const row = element("div", { className: "kv-control kv-buttons", role: "group", ariaLabel: name });
        const toggles = menu.showactive !== false && buttons.length > 1;
        buttons.forEach((step, at) => {
          const button = element("button", { type: "button", textContent: step.label });
          if (toggles) button.setAttribute("aria-pressed", String(at === (menu.active ?? 0)));
          button.addEventListener("click", () => {
            call(step);
            if (toggles) row.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
          });
          row.append(button);
        });
        built.push(row);
      } else {
        const id = `kv-menu-${number}-${index}`;
        const select = element("select", { id }, ...buttons.map((step, at) => new Option(step.label, at)));
        select.value = menu.active ?? 0;
        select.addEventListener("change", () => call(buttons[select.value]));
        built.push(element("div", { className: "kv-control" },
          element("label", { htmlFor: id, textContent: name }), select));
      }
    });
    if (built.length) plot.after(element("div", { className: "kv-controls" }, ...built));
  }

  let count = 0;
  async function draw(figure) {
    if (figure.dataset.state) return;
    figure.dataset.state = "loading";
    const plot = figure.querySelector(".kv-plot");
    try {
      const source = await dataOf(figure);
      const Plotly = await loadPlotly(source);
      const { sliders, updatemenus, width, ...layout } = source.layout; // the page decides the width
      const narrow = () => figure.clientWidth < NARROW;
      const look = () => ({ ...(narrow() ? narrowed(layout) : layout), template: recoloured(layout.template) });
      await Plotly.newPlot(plot, {
        data: narrow() ? source.data.map(sideways) : source.data,
        layout: look(),
        frames: source.frames,
        // no bar of buttons: inside a picture (role img) nothing may take the focus
        config: { responsive: true, displayModeBar: false },
      });
      controls(Plotly, plot, { sliders, updatemenus }, count++);
      figure.addEventListener("kv-mode", () => Plotly.relayout(plot, { template: recoloured(layout.template) }));
      figure.dataset.state = "drawn";
    } catch (error) {
      figure.dataset.state = "failed";
      plot.textContent = `This figure could not be drawn (${error.message}). It shows: ${plot.getAttribute("aria-label")}`;
    }
  }

  window.kvDraw = draw; // for a figure that a live cell has made

  document.addEventListener("DOMContentLoaded", () => {
    const figures = document.querySelectorAll(".kv-figure");
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
      }
    }, { rootMargin: "600px 0px" });
    figures.forEach((figure) => near.observe(figure));
    // a tab or a folded box that opens needs no more: its figures come into view then
    addEventListener("beforeprint", () => figures.forEach(draw));
    const all = () => document.querySelectorAll(".kv-figure");
    new MutationObserver(() => all().forEach((figure) => figure.dispatchEvent(new Event("kv-mode"))))
      .observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  });
})();
