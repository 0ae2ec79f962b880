// A lab's page: all answers at once; and a word where the browser's notebook cannot start.
document.addEventListener("DOMContentLoaded", () => {
  "use strict";
  const bar = document.querySelector(".kv-lab");
  const answers = [...document.querySelectorAll("details.kv-answer")], button = bar?.querySelector("[data-answers]");
  if (button && answers.length) {
    const say = () => {
      const open = answers.every((each) => each.open);
      button.textContent = open ? "Hide the answers" : "Show the answers";
      button.setAttribute("aria-pressed", String(open));
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      const open = !answers.every((each) => each.open);
      for (const each of answers) each.open = open;
    });
    for (const each of answers) each.addEventListener("toggle", say);
    // paper has no folds
    let before;
    addEventListener("beforeprint", () => { before = answers.map((each) => each.open); for (const each of answers) each.open = true; });
    addEventListener("afterprint", () => answers.forEach((each, i) => (each.open = before[i])));
  }
  const lite = bar?.querySelector("[data-lite]");
  if (lite && location.protocol === "file:") {
    lite.addEventListener("click", (event) => {
      event.preventDefault();
      bar.querySelector(".kv-lab-says").textContent =
        "Python cannot start in a page opened from the disk. In the site’s folder run “python -m http.server” and open http://localhost:8000/.";
    });
  }
});
