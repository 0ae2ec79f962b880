// A game on a page: the page's Python plays and draws the board, the buttons ask. The playground and the scheduler share this.
//
//   const game = kvGame(root, {setUp, woken, first, focus, lost, shown})
//     setUp   Python that is run once; `woken` is given what it ends in, as parsed JSON
//     first   Python for the first board; `focus`: the field that gets the focus then; `lost`: said when the thread was stopped
//     shown   is given each answer after it was drawn: {said, board, …}
//   game.ask(source, wait)   the answer as parsed JSON; null while another one is awaited, or when there is none
//   game.show(answer)        draws it
(() => {
  "use strict";
  window.kvGame = (root, { setUp, woken, first, focus, lost, shown }) => {
    const part = (name) => root.querySelector(`[data-part="${name}"]`);
    const field = (name) => root.querySelector(`[name="${name}"]`);
    const says = part("says"), board = part("board"), start = part("start"), controls = part("controls"), stop = part("stop");
    let busy = false;

    async function ask(source, wait) {
      if (busy) return null;
      busy = true;
      root.setAttribute("aria-busy", "true");
      if (wait) says.textContent = wait;
      stop.hidden = false;
      try {
        const result = await kvKernel.run(source, { name: "<game>", raw: true });
        if (result.stopped) { sleep(lost); return null; }
        if (result.error) throw new Error(result.error.trim().split("\n").at(-1));
        return result.value && JSON.parse(result.value);
      } catch (error) {
        says.textContent = error.message;
        return null;
      } finally {
        busy = false;
        root.removeAttribute("aria-busy");
        if (document.activeElement === stop) start.focus();
        stop.hidden = true;
      }
    }
    function show(answer) {
      if (!answer) return;
      board.innerHTML = answer.board;
      says.textContent = answer.said;
      shown(answer);
    }
    function sleep(text) {
      controls.disabled = true;
      start.hidden = false;
      root.dataset.state = "asleep";
      says.textContent = text;
    }

    start.addEventListener("click", async () => {
      const found = await ask(setUp, "Starting Python, 13 MB the first time …");
      if (!found) return;
      woken(found);
      controls.disabled = false;
      start.hidden = true;
      part("recorded").hidden = true;
      root.dataset.state = "live";
      show(await ask(first));
      field(focus).focus();
    });
    stop.addEventListener("click", () => kvKernel.stop());
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    start.disabled = false;
    root.dataset.state = "asleep";
    // a JSON string is a Python string, but for \\u escapes it shares
    return { part, field, ask, show, quoted: (text) => JSON.stringify(text) };
  };
})();
