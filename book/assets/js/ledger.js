// The KV memory ledger, live in the page: the arithmetic of kvlab/core/ledger.py, and the form that asks for it.
//
// No kernel and no library. Models, cards and formats come as JSON with the form, which kvlab/show/ledger.py writes; a test runs
// this file in Node over hundreds of settings and finds Python's numbers, to the byte. All quantities are whole and below 2^53.
(() => {
  "use strict";

  // ---- arithmetic: function by function as in kvlab/core/ledger.py ---------------------------------------------------------
  const up = (a, b) => Math.ceil(a / b);
  const stored = (numbers, form) =>
    up(numbers * form.bits, 8) + (form.group ? Math.floor((up(numbers, form.group) * form.scale_bits) / 8) : 0);
  // a shape's `caches` are its layers by kind; what keeps no tokens has no heads, and `state` is bytes
  const keepsTokens = (cache) => cache.kind === "full" || cache.kind === "window";
  const kvHeads = (spec, cache, broken) => (broken ? spec.heads : cache.heads);
  const sum = (caches, size) => caches.reduce((total, cache) => total + cache.count * size(cache), 0);
  const layerToken = (spec, cache, form, broken) =>
    keepsTokens(cache)
      ? kvHeads(spec, cache, broken) * (stored(cache.key_dim, form) + stored(cache.value_dim, form)) + stored(cache.shared, form)
      : 0;
  const tokenBytes = (spec, form, broken) => sum(spec.caches, (cache) => layerToken(spec, cache, form, broken));
  const growthBytes = (spec, form, broken) =>
    sum(spec.caches, (cache) => (cache.kind === "full" ? layerToken(spec, cache, form, broken) : 0));
  const stateBytes = (spec) => sum(spec.caches, (cache) => cache.state);
  const blocks = (tokens, block, window) => {
    const whole = up(tokens, block);
    return window === null ? whole : Math.min(whole, up(window - 1, block) + 1);
  };

  function requestBytes(spec, tokens, { form, beams, block, broken }) {
    const kept = (cache) => layerToken(spec, cache, form, broken) * blocks(tokens, block, cache.window) * block;
    return beams * (sum(spec.caches, kept) + stateBytes(spec));
  }

  function longest(room, request, most) {
    let low = 0, high = most;
    while (low < high) {
      const middle = Math.floor((low + high + 1) / 2);
      if (request(middle) <= room) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function ledger(s) {
    const request = (tokens) => requestBytes(s.spec, tokens, s);
    const weights = stored(s.parameters, s.weight_form);
    const limit = Math.trunc(s.memory * s.watermark);
    const room = limit - weights - s.activations;
    const one = request(s.context);
    return {
      token: tokenBytes(s.spec, s.form, s.broken),
      grows: growthBytes(s.spec, s.form, s.broken),
      state: s.beams * stateBytes(s.spec),
      request: one,
      kv: s.batch * one,
      weights,
      limit,
      room,
      requests: Math.max(0, Math.floor(room / one)),
      longest: longest(Math.floor(room / s.batch), request, s.spec.max_context),
      longest_alone: longest(room, request, s.spec.max_context),
    };
  }

  const count = (n) => n.toLocaleString("en-US");

  function sentence(s, found) {
    const said = `${s.spec.name} supports ${count(s.spec.max_context)} tokens; `;
    if (found.room < 0) return said + "on this card its weights alone do not fit.";
    if (found.longest_alone === 0) return said + "on this card its weights fit, and no request beside them.";
    const many = found.requests === 1 ? "request fits" : "requests fit";
    const beyond = s.context > s.spec.max_context ? " (more than it supports)" : "";
    return (
      said + `on this card ${count(found.longest_alone)} fit, for one request. ` +
      `Of ${count(s.context)} tokens each${beyond}, ${count(found.requests)} ${many} at once.`
    );
  }

  function human(size) {
    const sign = size < 0 ? "−" : "";
    const whole = Math.abs(size);
    for (const [name, unit] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (whole >= unit) {
        const hundredths = Math.trunc((whole / unit) * 100 + 0.5);
        return `${sign}${Math.trunc(hundredths / 100)}.${String(hundredths % 100).padStart(2, "0")} ${name}`;
      }
    }
    return `${sign}${whole} B`;
  }

  function layerLines(spec, form, broken) {
    return spec.caches.map((cache) => {
      const many = `${cache.count} layer${cache.count === 1 ? "" : "s"}`;
      if (cache.kind === "none") {
        return `${many} keep${cache.count === 1 ? "s" : ""} nothing of the text` + (cache.why ? ` (${cache.why})` : "");
      }
      if (cache.kind === "state") return `${many} with a state: ${human(cache.state)} each, whatever the length`;
      const more = cache.shared ? ` and an index key of ${cache.shared}` : "";
      const dim = cache.key_dim === cache.value_dim ? `${cache.key_dim}` : `${cache.key_dim} (K) and ${cache.value_dim} (V)`;
      const widths =
        cache.why === "kv_lora_rank"
          ? `a latent of ${cache.key_dim} + ${cache.value_dim} numbers${more}`
          : `${cache.heads} K/V head${cache.heads === 1 ? "" : "s"} of ${dim}${more}`;
      const cap = cache.kind === "window" ? `, of the last ${count(cache.window)} tokens` : "";
      return `${many} with ${widths}: ${count(layerToken(spec, cache, form, broken))} bytes a token each${cap}`;
    });
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { ledger, sentence, human, stored, blocks, layerLines };
    return;
  }

  // ---- the form ------------------------------------------------------------------------------------------------------------
  const GIB = 2 ** 30;
  const SHAPE = ["layers", "heads", "kv_heads", "head_dim", "max_context"];

  function start(root) {
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const field = (name) => root.querySelector(`[name="${name}"]`);
    const out = (name) => root.querySelector(`[data-out="${name}"]`);
    const model = () => data.models[field("model").value];

    // a number field's value, or an error that names the field
    function read(name, { whole = true, least = 1, most = Infinity } = {}) {
      const input = field(name);
      const value = input.value.trim() === "" ? NaN : Number(input.value);
      const right = Number.isFinite(value) && (!whole || Number.isInteger(value)) && value >= least && value <= most;
      input.setAttribute("aria-invalid", String(!right));
      if (!right) {
        const label = root.querySelector(`label[for="${input.id}"]`).textContent.trim();
        const range = most === Infinity ? `of at least ${least}` : `from ${least} to ${most}`;
        throw new Error(`${label}: give a ${whole ? "whole number" : "number"} ${range}.`);
      }
      return value;
    }

    // a chosen model fills in the shape; an edited shape is nobody's model
    function fillShape() {
      for (const name of SHAPE) field(name).value = model()[name];
      field("parameters").value = String(model().parameters / 1e9);
    }
    function fillMemory() {
      field("memory").value = String(Math.round((data.cards[field("card").value].memory / GIB) * 1000) / 1000);
    }

    // every layer keeps keys and values of one shape
    const uniform = (shape) => ({
      kind: "full", count: shape.layers, heads: shape.kv_heads, key_dim: shape.head_dim, value_dim: shape.head_dim,
      shared: 0, window: null, why: "", state: 0,
    });

    function setting() {
      const shape = Object.fromEntries(SHAPE.map((name) => [name, read(name, { most: 1e7 })]));
      const billions = read("parameters", { whole: false, least: 0, most: 1e5 });
      if (shape.heads % shape.kv_heads) {
        field("kv_heads").setAttribute("aria-invalid", "true");
        throw new Error("K/V heads: the number of query heads must be a multiple of it.");
      }
      const known = SHAPE.every((name) => shape[name] === model()[name]) && billions === model().parameters / 1e9;
      const card = data.cards[field("card").value];
      const gib = read("memory", { whole: false, least: 0.1, most: 1e5 });
      const same = gib === Math.round((card.memory / GIB) * 1000) / 1000;
      return {
        spec: known ? model() : { ...shape, name: "This shape", caches: [uniform(shape)] },
        parameters: known ? model().parameters : Math.round(billions * 1e9),
        memory: same ? card.memory : Math.round(gib * GIB),
        context: read("context", { most: 1e8 }),
        batch: read("batch", { most: 1e5 }),
        form: data.formats[field("form").value],
        weight_form: data.formats[field("weight_form").value],
        beams: read("beams", { most: 1000 }),
        block: read("block", { most: 1e5 }),
        activations: Math.round(read("activations", { whole: false, least: 0, most: 1e5 }) * GIB),
        watermark: read("watermark", { whole: false, least: 1, most: 100 }) / 100,
        broken: field("broken").checked,
      };
    }

    function draw(s, found) {
      const need = found.weights + s.activations + found.kv;
      const scale = Math.max(s.memory, need);
      const width = (size) => `${(100 * Math.max(0, size)) / scale}%`;
      const inside = Math.max(0, Math.min(found.kv, found.room));
      const parts = {
        weights: Math.min(found.weights, scale),
        activations: s.activations,
        kv: inside,
        over: found.kv - inside,
        free: Math.max(0, found.limit - need),
        headroom: Math.max(0, s.memory - Math.max(found.limit, need)),
      };
      for (const [name, size] of Object.entries(parts)) root.querySelector(`.kvl-bar [data-part="${name}"]`).style.flexBasis = width(size);
      const kv = root.querySelector(`.kvl-bar [data-part="kv"]`);
      kv.style.setProperty("--kvl-cells", s.batch <= 48 && found.kv > 0 ? String(s.batch * (inside / found.kv)) : "1");
      root.querySelector(".kvl-edge").style.left = width(found.limit);
      root.querySelector(".kvl-bar").setAttribute(
        "aria-label",
        `Of ${human(s.memory)}: weights ${human(found.weights)}, activations ${human(s.activations)}, keys and values ` +
          `${human(found.kv)}; ${human(found.limit)} may be used; ` +
          (found.kv <= found.room ? "it fits." : `it is ${human(found.kv - found.room)} too much.`),
      );
    }

    function update() {
      const says = root.querySelector(".kvl-says");
      try {
        const s = setting();
        const found = ledger(s);
        says.textContent = sentence(s, found);
        root.dataset.fits = String(found.kv <= found.room);
        root.dataset.broken = String(s.broken);
        const words = {
          layers: layerLines(s.spec, s.form, s.broken).join("; "),
          token: `${count(found.token)} bytes`,
          grows: `${count(found.grows)} bytes`,
          state: human(found.state),
          request: `${human(found.request)} (${count(found.request)} bytes)`,
          kv: human(found.kv),
          weights: human(found.weights),
          activations: human(s.activations),
          limit: human(found.limit),
          left: human(found.room - found.kv),
        };
        for (const [name, text] of Object.entries(words)) out(name).textContent = text;
        draw(s, found);
      } catch (error) {
        says.textContent = error.message;
        root.dataset.fits = "unknown";
      }
    }

    // the sliders beside context and batch move in steps of a quarter of an octave
    for (const slider of root.querySelectorAll("input[type=range][data-for]")) {
      const number = field(slider.dataset.for);
      const follow = () => {
        slider.value = String(Math.round(4 * Math.log2(Math.max(1, Number(number.value) || 1))));
        slider.setAttribute("aria-valuetext", number.value);
      };
      slider.addEventListener("input", () => {
        number.value = String(Math.round(2 ** (slider.value / 4)));
        slider.setAttribute("aria-valuetext", number.value);
      });
      number.addEventListener("input", follow);
      follow();
    }
    field("model").addEventListener("change", fillShape);
    field("card").addEventListener("change", fillMemory);
    root.addEventListener("input", update);
    root.addEventListener("change", update);
    root.addEventListener("submit", (event) => event.preventDefault());
    root.querySelector("fieldset").disabled = false;
    fillShape();
    fillMemory();
    update();
    root.dataset.state = "live";
  }

  const begin = () => document.querySelectorAll(".kvl").forEach((root) => root.dataset.state || start(root));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
