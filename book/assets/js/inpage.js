// The model in the page: the form around inpage-model.js (the weights) and inpage-engine.js (llama.cpp). Nothing of either is
// fetched before the reader asks. What is drawn here is drawn by kvlab/show/inpage.py for the recorded answers; a test keeps both alike.
(() => {
  "use strict";
  const HERE = document.currentScript.src;
  const FROM_DISK = "The model cannot start in a page opened from the disk. In the site’s folder run “python -m http.server” and open http://localhost:8000/book/inpage.html. The recorded answers stay below.";
  const AGAIN = "Press the button again to go on from there.";
  const WORDS = 16, SHORT = 12, PLACES = 2, RIVALS = 5; // tokens of an answer, of a short one; places and rivals shown
  const parts = (root) => (name) => root.querySelector(`[data-part="${name}"]`);
  const own = (name) => import(new URL(name, HERE).href);
  const megabytes = (bytes) => `${Math.round(bytes / 1e6)} MB`;
  let engine, busy = false;

  // ---- as kvlab/show/inpage.py draws it ----------------------------------------------------------------------------------
  const escaped = (text) => text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;" })[c]);
  const shown = (piece) => escaped(piece.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
  const share = (logarithm) => { const p = 100 * Math.exp(logarithm); return `${p.toFixed(p >= 9.95 ? 0 : 1)}%`; };
  const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;

  function told(text, a) {
    const words = a.split(/\s+/).filter((word) => /[0-9]/.test(word)).map((word) => word.replace(/^[.,;:!?"'()]+|[.,;:!?"'()]+$/g, ""));
    const pattern = words.filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
    const pieces = pattern ? text.split(new RegExp(`(${pattern})`)) : [text];
    return pieces.map((piece, i) => (i % 2 ? `<mark>${escaped(piece)}</mark>` : escaped(piece))).join("");
  }
  function sideHTML(side, a) {
    const count = (owner) => side.held.filter(([, who]) => who === owner).length;
    const held = count("A") ? `${tokens(count("A"))} of A, then ${tokens(count("B"))} of B` : `${tokens(count("B"))} of B`;
    const strip = side.held.map(([piece, owner]) => `<span data-own="${owner.toLowerCase()}">${shown(piece)}</span>`).join("");
    const bar = ([token, p]) => `<li><code>${shown(token)}</code><span class="kvi-bar" style="--p:${share(p)}" aria-hidden="true"></span><span>${share(p)}</span></li>`;
    const lists = side.candidates.map((rivals, place) => `<p class="kvi-rank">${place ? "Second" : "First"} token, the likeliest</p><ol class="kvi-likely">${rivals.map(bar).join("")}</ol>`);
    const whose = side.cached ? "They are A’s." : "There was nothing in it.";
    return `<div class="kvi-strip" role="img" aria-label="The cache at B’s first token: ${held}.">${strip}</div>`
      + `<p class="kvi-facts">Computed for B: <b>${tokens(side.computed)}</b>, all B’s own. Read from the cache: <b>${tokens(side.cached)}</b>. ${whose}</p>${lists.join("")}`
      + `<p class="kvi-told"><b>B is told</b> ${told(side.text, a)}${side.ended ? "" : "…"}</p>`;
  }
  function rowHTML(row) {
    const part = `${(100 * row.cached / row.tokens).toFixed(0)}%`;
    const ratio = (row.ratio ?? 1).toFixed(2);
    return `<tr><th scope="row">${escaped(row.name)}<span class="kvi-answer">${escaped(row.text)}${row.ended ? "" : "…"}</span></th>`
      + `<td>${row.tokens}</td><td><span class="kvi-bar" style="--p:${part}" aria-hidden="true"></span>${row.cached}</td>`
      + `<td>${row.computed}</td><td>${row.ms === undefined ? ratio : `${ratio} (${(row.ms / 1000).toFixed(2)} s)`}</td></tr>`;
  }

  // ---- loading -----------------------------------------------------------------------------------------------------------
  function begin(root) {
    const part = parts(root), says = part("says"), bar = part("bar"), load = part("load"), stop = part("stop"), drop = part("remove");
    const pick = part("pick"), file = root.querySelector("input[type=file]"), { name, sha256 } = root.dataset;
    const model = { name, sha256, bytes: Number(root.dataset.bytes) }, size = megabytes(model.bytes);
    const carried = root.dataset.carried === "yes";
    let library, whole = null, halt;

    const say = (text, state) => { says.textContent = text; if (state) root.dataset.state = state; };
    // what this browser keeps, and what can be done now
    async function settle(text, state = "asleep") {
      const kept = await library.look(model);
      whole = kept.whole;
      load.textContent = whole ? `Start the model (${size}, kept in this browser)` : kept.bytes ? `Load the rest of the model (${size}, ${megabytes(kept.bytes)} are here)` : `Load the model (${size})`;
      load.hidden = Boolean(engine) || !(whole || carried);
      pick.hidden = Boolean(engine) || Boolean(whole) || carried;
      drop.hidden = !kept.bytes;
      stop.hidden = bar.hidden = true;
      const where = library.secure() ? "" : " This page is not on https or localhost: the browser will keep nothing, and the file’s size alone is checked.";
      say(text ?? (whole ? `This browser keeps the model: ${size}. Starting it asks the network for no weights.`
        : carried ? `Nothing is loaded. The model has ${size} and comes from this site alone; the engine has 10 MB more.${where}`
        : `This site was built without the weights (“MODEL_IN_SITE=1 make site” builds it with them). Choose the file yourself.${where}`), state);
    }
    async function bring(get) {
      if (busy || engine) return;
      busy = true;
      root.setAttribute("aria-busy", "true");
      halt = new AbortController();
      load.hidden = pick.hidden = drop.hidden = true;
      stop.hidden = bar.hidden = false;
      stop.focus();
      let what, kept = false;
      try {
        say("Loading …", "loading");
        ({ blob: whole, kept } = await get());
        bar.removeAttribute("value");
        say("Starting the engine …");
        stop.hidden = true;
        engine = await (await own("inpage-engine.js")).start(whole);
        what = `The model runs in this page, on ${engine.threads} thread${engine.threads > 1 ? "s" : ""}. ${kept ? `This browser keeps its ${size}.` : "It is in memory only: the browser keeps nothing."}`;
        kvInpage.engine = engine;
        document.querySelectorAll(".kvi fieldset").forEach((controls) => (controls.disabled = false));
      } catch (error) {
        const stopped = error.name === "AbortError";
        what = stopped ? `Stopped. What came before is kept. ${AGAIN}`
          : error.damaged ? `${error.message} It is not kept. Build the site again with “MODEL_IN_SITE=1 make site”, then press the button again.`
          : whole ? `The engine did not start: ${error.message}. It needs a recent Chrome, Edge or Firefox. The recorded answers stay below.`
          : get === picked ? `${error.message} Choose ${model.name}; “kvlab model show” tells where it lies.`
          : `${error.message} It is not kept; what came before is. ${AGAIN}`;
      }
      busy = false;
      root.removeAttribute("aria-busy");
      bar.value = 0;
      await settle(what, engine ? "ready" : what.startsWith("Stopped") ? "asleep" : "failed");
      if (engine || load.hidden) says.focus();
      else load.focus();
    }
    const fetched = async () => whole ? { blob: whole, kept: true } : library.load(model, {
      signal: halt.signal,
      onPart: (i, of) => say(`Loading part ${i + 1} of ${of} …`),
      onBytes: (bytes) => (bar.value = bytes / model.bytes),
    });
    const picked = async () => {
      bar.removeAttribute("value");
      say(`Checking ${file.files[0].name} …`);
      return library.take(model, file.files[0]);
    };
    load.addEventListener("click", () => bring(fetched));
    stop.addEventListener("click", () => halt.abort());
    file.addEventListener("change", () => file.files.length && bring(picked).then(() => (file.value = "")));
    drop.addEventListener("click", async () => {
      await library.remove();
      await settle(engine ? "Removed from this browser. The running model stays in this page’s memory until you leave it." : "Removed from this browser.", engine ? "ready" : "asleep");
      (load.hidden ? says : load).focus();
    });

    if (location.protocol === "file:") say(FROM_DISK, "disk");
    else {
      say("");
      own("inpage-model.js").then((found) => { library = found; return settle(); }).catch((error) => say(`The page is not whole: ${error.message}. Build the site again.`, "failed"));
    }
  }

  // One thing at a time: the engine has one cache. Stop ends it between two tokens, or two groups of 32 while it reads.
  async function alone(root, work) {
    if (busy) return;
    busy = true;
    const part = parts(root), says = part("says"), stop = part("stop"), bar = part("bar"), halt = new AbortController();
    const before = document.activeElement, buttons = [...document.querySelectorAll(".kvi fieldset button")].filter((each) => each !== stop);
    const end = () => halt.abort();
    root.setAttribute("aria-busy", "true");
    buttons.forEach((each) => each.setAttribute("aria-disabled", "true"));
    stop.hidden = false;
    stop.addEventListener("click", end);
    try {
      says.textContent = await work(halt.signal, (text) => (says.textContent = text), bar);
    } catch (error) {
      says.textContent = error.name === "AbortError" ? "Stopped."
        : /exceeds the available context/.test(error.message) ? `Too long: the cache of this page has room for ${engine.context.toLocaleString("en")} tokens. Shorten the text.`
        : `The engine failed: ${error.message}. Load the page again.`;
    }
    if (document.activeElement === stop) before.focus();
    stop.removeEventListener("click", end);
    stop.hidden = true;
    if (bar) bar.hidden = true;
    buttons.forEach((each) => each.removeAttribute("aria-disabled"));
    root.removeAttribute("aria-busy");
    busy = false;
  }

  // ---- the password ------------------------------------------------------------------------------------------------------
  function password(root) {
    const part = parts(root), field = (name) => root.querySelector(`#kvi-${name}`);
    part("serve").addEventListener("click", () => alone(root, async (signal, say) => {
      const a = field("a").value.trim(), b = ` ${field("b").value.trim()}`, name = field("fault").checked ? "kept" : "emptied";
      if (!a || b === " ") return "Write something for A and for B.";
      const side = root.querySelector(`[data-side="${name}"]`), { source, drawn } = { source: parts(side)("source"), drawn: parts(side)("drawn") };
      say("The server reads A’s message …");
      await engine.ask({ prompt: a, words: 1, fresh: true, signal });
      say("B asks …");
      // A cache that nobody empties holds A's tokens; B's are computed behind them. The engine has no call for that but this:
      // it is handed what the cache holds and B's text, and computes B's alone.
      const request = name === "kept" ? { prompt: a + b } : { prompt: b, fresh: true };
      const first = await engine.ask({ ...request, words: PLACES, candidates: RIVALS, signal });
      const cut = [...(name === "kept" ? engine.tokens(a).map((piece) => [piece, "A"]) : []), ...engine.tokens(b).map((piece) => [piece, "B"])];
      const held = cut.length === first.cached + first.computed ? cut : [...(name === "kept" ? [[a, "A"]] : []), [b, "B"]];
      const found = { held, cached: first.cached, computed: first.computed, candidates: first.half ? [] : first.candidates, text: first.text, ended: false };
      const draw = () => (drawn.innerHTML = sideHTML(found, a));
      source.textContent = "measured in this page";
      draw();
      side.dataset.source = "live";
      // the same request again, now for the words: of its prompt the last token alone is computed a second time
      const rest = await engine.ask({ prompt: request.prompt, words: WORDS, signal, onText: (text) => { found.text = text; draw(); } });
      Object.assign(found, { text: rest.text, ended: rest.ended });
      draw();
      kvInpage.password[name] = found;
      const leaked = drawn.querySelector("mark");
      return (first.half ? "The candidates cannot be shown: one of them is half a character. " : "")
        + (leaked ? "B is told what A said." : name === "kept" ? "B’s words are not A’s this time. Compare the candidates." : "B is told nothing of A’s.");
    }));
  }

  // ---- the same beginning --------------------------------------------------------------------------------------------------
  function prefix(root) {
    const part = parts(root), field = (name) => root.querySelector(`#kvi-${name}`), system = field("system"), original = system.value;
    const turn = (who, text) => `<|im_start|>${who}\n${text}<|im_end|>\n`;
    let rows = [], before = null;
    const ask = (name) => alone(root, async (signal, say, bar) => {
      const fresh = name === "first", beginning = system.value, question = field(name).value.trim();
      if (!question) return "Write a question.";
      const changed = !fresh && before !== null && beginning !== before;
      bar.hidden = false;
      bar.removeAttribute("value");
      const found = await engine.ask({
        prompt: `${turn("system", beginning)}${turn("user", question)}<|im_start|>assistant\n`, words: SHORT, fresh, signal,
        onRead: (read, of) => { bar.value = read / of; say(`${read} of ${tokens(of)} are in the cache …`); },
        onText: (text) => say(text),
      });
      if (fresh) rows = [];
      const count = found.cached + found.computed, measure = rows[0]?.ms;
      rows.push({
        name: fresh ? "Question 1, the cache emptied" : `Question 2${changed ? ", the beginning changed" : ""}`, text: found.text, ended: found.ended,
        tokens: count, cached: found.cached, computed: found.computed, ms: found.firstMs, ratio: measure ? found.firstMs / measure : null,
      });
      before = beginning;
      part("rows").innerHTML = rows.map(rowHTML).join("");
      part("source").textContent = "measured in this page";
      kvInpage.prefix = rows;
      return `Of ${tokens(count)}, ${found.cached} came from the cache; ${found.computed} were computed.`;
    });
    part("first").addEventListener("click", () => ask("first"));
    part("second").addEventListener("click", () => ask("second"));
    part("change").addEventListener("click", () => {
      const at = system.value.search(/\s\p{L}/u) + 1, letter = system.value[at] ?? "";
      system.value = system.value.slice(0, at) + (letter === letter.toUpperCase() ? letter.toLowerCase() : letter.toUpperCase()) + system.value.slice(at + 1);
      part("says").textContent = `The system prompt begins: ${system.value.slice(0, 30)}…`;
    });
    part("restore").addEventListener("click", () => { system.value = original; part("says").textContent = "As it was."; });
  }

  window.kvInpage = { password: {}, prefix: [], sideHTML, rowHTML };
  document.addEventListener("DOMContentLoaded", () => {
    for (const [id, make] of Object.entries({ model: begin, password, prefix })) {
      const root = document.getElementById(`kvi-${id}`);
      root.addEventListener("submit", (event) => event.preventDefault());
      make(root);
    }
  });
})();
