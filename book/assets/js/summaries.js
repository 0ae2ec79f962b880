// Under each page that the search found, the first place with one of the words (book/_ext/shared_state/search.py).
(() => {
  "use strict";
  const TEXT = new URL("../search-text.js", document.currentScript.src).href;
  const BEFORE = 90, AFTER = 190; // characters shown around the word

  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const query = (new URLSearchParams(location.search).get("q") ?? "").trim();
  const none = new Set(typeof stopwords === "undefined" ? [] : stopwords); // Sphinx's, which are not in its index
  const words = query.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word.length > 1 && !none.has(word));
  // the query as it was typed, else the first place where a word begins with one of its words
  const patterns = [query && escaped(query), words.map((word) => `(?<![\\p{L}\\p{N}])${escaped(word)}`).join("|")]
    .filter(Boolean).map((pattern) => new RegExp(pattern, "giu"));

  function summary(text) {
    const one = patterns.find((pattern) => text.search(pattern) >= 0);
    if (!one) return null;
    const at = text.search(one);
    const start = at <= BEFORE ? 0 : text.indexOf(" ", at - BEFORE) + 1;
    const cut = text.slice(start, at + AFTER);
    const stop = at + AFTER >= text.length ? cut.length : cut.lastIndexOf(" ");
    const p = document.createElement("p");
    p.className = "context";
    p.append(start ? "… " : "");
    let done = 0;
    for (const match of cut.slice(0, stop).matchAll(one)) {
      const mark = document.createElement("mark");
      mark.textContent = match[0];
      p.append(cut.slice(done, match.index), mark);
      done = match.index + match[0].length;
    }
    p.append(cut.slice(done, stop), stop < cut.length || at + AFTER < text.length ? " …" : "");
    return p;
  }

  function add(item) {
    const link = item.querySelector("a");
    if (!link || item.querySelector(".context")) return;
    const root = new URL(document.documentElement.dataset.content_root, document.baseURI).href;
    const name = link.href.split(/[?#]/)[0].slice(root.length).replace(/\.html$/, "");
    const found = summary(window.kvText[name] ?? "");
    if (found) item.append(found);
  }

  document.addEventListener("DOMContentLoaded", () => {
    const results = document.querySelector("#search-results");
    if (!results || !patterns.length) return;
    const script = document.createElement("script");
    script.src = TEXT;
    script.onload = () => {
      const all = () => results.querySelectorAll("ul.search li").forEach(add);
      new MutationObserver(all).observe(results, { childList: true, subtree: true });
      all();
    };
    document.head.append(script);
  });
})();
