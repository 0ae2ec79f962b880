// Draw the page's ipywidgets when the reader comes near them, and name their sliders.
//
// html-manager is 3.6 MB and needs require.js before it; both are fetched once, for the first widget that nears the window. It
// then draws all widgets of the page.
(() => {
  "use strict";
  const VENDOR = new URL("../vendor/", document.currentScript.src).href;
  const WIDGETS = 'script[type="application/vnd.jupyter.widget-view+json"]';

  function load(path, attributes = {}) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.entries(attributes).forEach(([name, value]) => script.setAttribute(name, value));
      script.src = VENDOR + path;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${path} did not load`));
      document.head.append(script);
    });
  }

  async function draw() {
    window.require = { baseUrl: VENDOR }; // require.js reads its configuration from a global that exists before it loads
    await load("require.js");
    await load("@jupyter-widgets/html-manager/dist/embed-amd.js", { "data-jupyter-widgets-cdn": VENDOR });
  }

  // A slider's handle has no name; give it the text of the label beside it.
  const name = () => {
    for (const handle of document.querySelectorAll('.jupyter-widgets [role="slider"]:not([aria-label])')) {
      const label = handle.closest(".jupyter-widgets")?.querySelector(".widget-label");
      if (label?.textContent.trim()) handle.setAttribute("aria-label", label.textContent.trim());
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    new MutationObserver(name).observe(document.querySelector("article"), { childList: true, subtree: true });
    const near = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        near.disconnect();
        draw();
      }
    }, { rootMargin: "600px 0px" });
    // the script element itself has no place in the window; its cell has
    document.querySelectorAll(WIDGETS).forEach((script) => near.observe(script.parentElement));
  });
})();
