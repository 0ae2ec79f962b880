// ipywidgets draw a slider's handle without a name; give it the text of the label beside it.
(() => {
  "use strict";
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
