// The model in the page: the form around inpage-model.js (the weights) and inpage-engine.js (llama.cpp). Nothing of either is
// fetched before the reader asks. What is drawn here is drawn by kvlab/show/inpage.py for the recorded answers; a test keeps both alike.
(() => {
  "use strict";
  const HERE = document.currentScript.src;
  const FROM_DISK = "The model cannot start in a page opened from the disk. In the site’s folder run “python -m http.server” and open http://localhost:8000/book/inpage.html. The recorded answers stay below.";
  const AGAIN = "Press the button again to go on from there.";
  const WORDS = 16, SHORT = 12, PLACES = 2, RIVALS = 5; // tokens of an answer, of a short one; places and rivals shown
  const LONG = 100; // tokens of a prompt that takes its time
  const parts = (root) => (name) => root.querySelector(`[data-part="${name}"]`);
  const own = (name) => import(new URL(name, HERE).href);
  const megabytes = (bytes) => `${Math.round(bytes / 1e6)} MB`;
  let engine, busy = false;

  // ---- as kvlab/show/inpage.py draws it ----------------------------------------------------------------------------------
  const escaped = (text) => text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;" })[c]);
  const shown = (piece) => escaped(piece.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
  const share = (logarithm) => { const p = 100 * Math.exp(logarithm); return `${p.toFixed(p >= 9.95 ? 0 : 1)}%`; };
  const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;

  // Where B's answer has words of A's that are neither B's own, nor told without A's as well, nor little ones
  const WORD = /[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])[\p{L}\p{N}])+/gu;
  const wordsOf = (text) => (text.match(WORD) ?? []).map((word) => word.toLowerCase());
  function leaks(text, a, b, without) {
    const others = new Set([...wordsOf(b), ...wordsOf(without), ...document.getElementById("kvi-password").dataset.little.split(" ")]);
    const own = new Set(wordsOf(a).filter((word) => !others.has(word))), found = [];
    for (const match of text.matchAll(WORD)) {
      if (!own.has(match[0].toLowerCase())) continue;
      const end = match.index + match[0].length, last = found.at(-1);
      if (last && a.toLowerCase().includes(text.slice(last[0], end).toLowerCase())) last[1] = end;
      else found.push([match.index, end]);
    }
    return found;
  }
  function told(text, marked) {
    let out = "", at = 0;
    for (const [begin, end] of marked) {
      out += `${escaped(text.slice(at, begin))}<mark>${escaped(text.slice(begin, end))}</mark>`;
      at = end;
    }
    return out + escaped(text.slice(at));
  }
  function sideHTML(side, a, b, without) {
    const count = (owner) => side.held.filter(([, who]) => who === owner).length;
    const held = count("A") ? `${tokens(count("A"))} of A, then ${tokens(count("B"))} of B` : `${tokens(count("B"))} of B`;
    const strip = side.held.map(([piece, owner]) => `<span data-own="${owner.toLowerCase()}">${shown(piece)}</span>`).join("");
    const bar = ([token, p]) => `<li><code>${shown(token)}</code><span class="kvi-bar" style="--p:${share(p)}" aria-hidden="true"></span><span>${share(p)}</span></li>`;
    const lists = side.candidates.map((rivals, place) => `<p class="kvi-rank">${place ? "Second" : "First"} token, the likeliest</p><ol class="kvi-likely">${rivals.map(bar).join("")}</ol>`);
    const whose = side.cached ? "They are A’s." : "There was nothing in it.";
    return `<div class="kvi-strip" role="img" aria-label="The cache at B’s first token: ${held}.">${strip}</div>`
      + `<p class="kvi-facts">Computed for B: <b>${tokens(side.computed)}</b>, all B’s own. Read from the cache: <b>${tokens(side.cached)}</b>. ${whose}</p>${lists.join("")}`
      + `<p class="kvi-told"><b>B is told</b> ${told(side.text, leaks(side.text, a, b, without))}${side.ended ? "" : "…"}</p>`;
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
        : carried ? `Nothing is loaded. The model has ${size} and comes from this site alone; the engine comes on top of it.${where}`
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
        what = stopped ? (get === picked ? "Stopped. Nothing of the file is kept." : `Stopped. What came before is kept. ${AGAIN}`)
          : error.damaged ? `${error.message} It is not kept. Build the site again with “MODEL_IN_SITE=1 make site”, then press the button again.`
          : whole ? `The engine did not start: ${error.message}. It needs a recent Chrome, Edge or Firefox. The recorded answers stay below.`
          : get === picked ? `${error.message} Choose ${model.name}; “kvlab model show” tells where it lies.`
          : `${error.message} It is not kept; what came before is. ${AGAIN}`;
      }
      busy = false;
      root.removeAttribute("aria-busy");
      bar.value = 0;
      await settle(what, engine ? "ready" : what.startsWith("Stopped") ? "asleep" : "failed");
      onward();
    }
    // The button that was pressed is gone: on to what can be done next, unless the reader is elsewhere by now
    function onward() {
      const at = document.activeElement;
      if (at && at !== document.body && !root.contains(at)) return;
      (engine ? document.querySelector('#kvi-password [data-part="serve"]') : !load.hidden ? load : !pick.hidden ? file : says).focus();
    }
    const fetched = async () => whole ? { blob: whole, kept: true } : library.load(model, {
      signal: halt.signal,
      onPart: (i, of) => say(`Loading part ${i + 1} of ${of} …`),
      onBytes: (bytes) => (bar.value = bytes / model.bytes),
    });
    const picked = async () => {
      bar.removeAttribute("value");
      say(`Checking ${file.files[0].name} …`);
      return library.take(model, file.files[0], { signal: halt.signal });
    };
    load.addEventListener("click", () => bring(fetched));
    stop.addEventListener("click", () => halt.abort());
    file.addEventListener("change", () => file.files.length && bring(picked).then(() => (file.value = "")));
    drop.addEventListener("click", async () => {
      await library.remove();
      await settle(engine ? "Removed from this browser. The running model stays in this page’s memory until you leave it." : "Removed from this browser.", engine ? "ready" : "asleep");
      onward();
    });

    if (location.protocol === "file:") say(FROM_DISK, "disk");
    else {
      say("");
      own("inpage-model.js").then((found) => { library = found; return settle(); }).catch((error) => say(`The page is not whole: ${error.message}. Build the site again.`, "failed"));
    }
  }

  // One thing at a time: the engine has one cache. Stop ends it between two tokens, or two groups of eight while it reads.
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
    const part = parts(root), field = (name) => root.querySelector(`#kvi-${name}`), sideOf = (name) => root.querySelector(`[data-side="${name}"]`);
    const now = (name) => field(name).value.trim();
    // what each panel was made from; as the page comes, the recorded texts
    const made = Object.fromEntries(["emptied", "kept"].map((name) => [name, {
      a: field("a").defaultValue.trim(), b: field("b").defaultValue.trim(), text: sideOf(name).dataset.answer, source: "recorded",
    }]));
    const alike = (one, other) => one.a === other.a && one.b === other.b;
    const stale = (name) => !alike(made[name], { a: now("a"), b: now("b") });
    function compare() {
      for (const name of Object.keys(made)) {
        sideOf(name).toggleAttribute("data-stale", stale(name));
        parts(sideOf(name))("source").textContent = made[name].source + (stale(name) ? ", with other words than those above" : "");
      }
    }
    const without = (side) => (alike(made.emptied, side) ? made.emptied.text : "");
    const draw = (name) => { const side = made[name]; parts(sideOf(name))("drawn").innerHTML = sideHTML(side, side.a, side.b, without(side)); };
    for (const name of ["a", "b"]) field(name).addEventListener("input", compare);
    compare();
    part("serve").addEventListener("click", () => alone(root, async (signal, say) => {
      const a = now("a"), b = ` ${now("b")}`, name = field("fault").checked ? "kept" : "emptied";
      if (!a || b === " ") return "Write something for A and for B.";
      say("The server reads A’s message …");
      await engine.ask({ prompt: a, words: 1, fresh: true, signal });
      say("B asks …");
      // A cache that nobody empties holds A's tokens; B's are computed behind them. The engine has no call for that but this:
      // it is handed what the cache holds and B's text, and computes B's alone.
      const request = name === "kept" ? { prompt: a + b } : { prompt: b, fresh: true };
      const first = await engine.ask({ ...request, words: PLACES, candidates: RIVALS, signal });
      const cut = [...(name === "kept" ? engine.tokens(a).map((piece) => [piece, "A"]) : []), ...engine.tokens(b).map((piece) => [piece, "B"])];
      const held = cut.length === first.cached + first.computed ? cut : [...(name === "kept" ? [[a, "A"]] : []), [b, "B"]];
      const found = made[name] = { a, b: b.trim(), source: "measured in this page", held, cached: first.cached, computed: first.computed, candidates: first.half ? [] : first.candidates, text: first.text, ended: false };
      compare();
      draw(name);
      // the same request again, now for the words: of its prompt the last token alone is computed a second time
      const rest = await engine.ask({ prompt: request.prompt, words: WORDS, signal, onText: (text) => { found.text = text; draw(name); } });
      Object.assign(found, { text: rest.text, ended: rest.ended });
      draw(name);
      if (name === "emptied" && made.kept.held && alike(made.kept, found)) draw("kept"); // words told here too are not A's there
      kvInpage.password[name] = found;
      const leaked = leaks(found.text, found.a, found.b, without(found)).map(([begin, end]) => `“${found.text.slice(begin, end)}”`);
      return (first.half ? "The candidates cannot be shown: one of them is half a character. " : "")
        + (leaked.length ? `B is told what A said: ${[...new Set(leaked)].join(", ")}.`
          : name === "kept" ? "No word of A’s is in B’s answer this time. Compare the candidates." : "B is told nothing of A’s: the cache held none of it.")
        + (alike(made.emptied, made.kept) ? "" : " The other panel was made with other words. Turn the switch and serve again to compare.");
    }));
  }

  // ---- the same beginning --------------------------------------------------------------------------------------------------
  function prefix(root) {
    const part = parts(root), field = (name) => root.querySelector(`#kvi-${name}`), system = field("system"), original = system.value;
    const turn = (who, text) => `<|im_start|>${who}\n${text}<|im_end|>\n`;
    let rows = [], opening = ""; // the system prompt of the first row
    // What sets a second question's prompt apart from the first row's, as it really is
    function differs(text) {
      const count = (part) => part.split(/\s+/).filter(Boolean).length;
      if (text === opening) return "";
      let same = 0;
      while (same < text.length && text[same] === opening[same]) same += 1;
      const inside = /\S$/.test(text.slice(0, same));
      return `, the system prompt changed from word ${count(text.slice(0, same)) + (inside ? 0 : 1)} of ${count(text)} on`;
    }
    const ask = (name) => alone(root, async (signal, say, bar) => {
      const fresh = name === "first", beginning = system.value, question = field(name).value.trim();
      if (!question) return "Write a question.";
      if (!fresh && !rows.length) return "Ask question 1 first: question 2 is measured against it.";
      const prompt = `${turn("system", beginning)}${turn("user", question)}<|im_start|>assistant\n`, length = engine.tokens(prompt).length;
      bar.hidden = false;
      bar.value = 0;
      say(`Reading ${tokens(length)} …${engine.threads === 1 && length > LONG ? " On one thread this takes a while." : ""}`);
      const found = await engine.ask({
        prompt, words: SHORT, fresh, signal,
        onRead: (read, of) => { bar.value = read / of; say(`${read} of ${tokens(of)} are in the cache …`); },
        onText: (text) => say(text),
      });
      if (fresh) [rows, opening] = [[], beginning];
      const count = found.cached + found.computed, measure = rows[0]?.ms;
      rows.push({
        name: fresh ? "Question 1, the cache emptied" : `Question 2${differs(beginning)}`, text: found.text, ended: found.ended,
        tokens: count, cached: found.cached, computed: found.computed, ms: found.firstMs, ratio: measure ? found.firstMs / measure : null,
      });
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
