// Two things that ipywidgets lack in a static page.
(() => {
  "use strict";
  // They typeset labels through MathJax 2's queue; the page has MathJax 3. Its script has run by now, theirs has not begun.
  document.addEventListener("DOMContentLoaded", () => {
    if (window.MathJax && !MathJax.Hub) {
      MathJax.Hub = { Queue: ([, , element]) => MathJax.startup.promise.then(() => MathJax.typesetPromise([element])) };
    }
  });

  // A slider's handle has no name; give it the text of the label beside it.
  const name = () => {
    for (const handle of document.querySelectorAll('.jupyter-widgets [role="slider"]:not([aria-label])')) {
      const label = handle.closest(".jupyter-widgets")?.querySelector(".widget-label");
      if (label?.textContent.trim()) handle.setAttribute("aria-label", label.textContent.trim());
    }
  };
  document.addEventListener("DOMContentLoaded", () => {
    name();
    new MutationObserver(name).observe(document.querySelector("article"), { childList: true, subtree: true });
  });
})();
