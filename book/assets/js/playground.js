// The block manager's playground: every button is a call of kvlab/core/playground.py in the page's Python, which draws the board.
(() => {
  "use strict";
  // `game` is there for the page's live cells too
  const SET_UP = `
import json
from kvlab.core import playground
from kvlab.faults import ZOO, fault

game = playground.Game(switch=fault)

def _told(said=""):
    return json.dumps({"said": said, "board": playground.board(game), "told": game.told(), "moves": len(game.moves)})

def _turn(move):
    global game
    before = game.told()
    try:
        said = game.play(playground.Move(**json.loads(move)))
    except Exception as error:
        return _told(f"Refused, and nothing has changed. {error}" if not game.fault else f"{type(error).__name__}: {error}")
    if game.told() and not before:
        said += f" B reads A’s password, after {len(game.moves)} moves."
    return _told(said)

def _again(moves, fault_name, said):
    global game
    game = playground.replayed(moves, fault_name, fault)
    return _told(said)

def _every(length):
    count, told = playground.every_game(length, game.fault, fault)
    with_ = f"with {game.fault} on" if game.fault else "with no fault on"
    said = f"{count:,} games of {length} moves, {with_}: in {len(told) or 'none'} B reads A’s password."
    return _told(said + (f" One of them: {'; '.join(map(str, told[0]))}." if told else ""))
`;
  const FAULTS = `json.dumps([[f.name, f.symptom] for f in ZOO.values() if f.breaks.startswith("kvlab.core.blocks:BlockManager.")])`;
  const quoted = (text) => JSON.stringify(text); // a JSON string is a Python string, but for \\u escapes it shares

  function begin(root) {
    const part = (name) => root.querySelector(`[data-part="${name}"]`);
    const field = (name) => root.querySelector(`[name="${name}"]`);
    const says = part("says"), board = part("board"), start = part("start"), controls = part("controls"), stop = part("stop");
    const symptoms = {};
    let busy = false;

    async function ask(source, wait) {
      if (busy) return null;
      busy = true;
      root.setAttribute("aria-busy", "true");
      if (wait) says.textContent = wait;
      stop.hidden = false;
      try {
        const result = await kvKernel.run(source, { name: "<playground>", raw: true });
        if (result.stopped) { sleep("Stopped. Start again: the pool will be empty."); return null; }
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
      root.dataset.told = String(answer.told);
      root.dataset.moves = String(answer.moves);
    }
    function sleep(text) {
      controls.disabled = true;
      start.hidden = false;
      root.dataset.state = "asleep";
      says.textContent = text;
    }

    start.addEventListener("click", async () => {
      const faults = await ask(`${SET_UP}\n${FAULTS}`, "Starting Python, 13 MB the first time …");
      if (!faults) return;
      field("fault").replaceChildren(new Option("none", ""), ...faults.map(([name]) => new Option(name, name)));
      faults.forEach(([name, symptom]) => (symptoms[name] = symptom));
      controls.disabled = false;
      start.hidden = true;
      part("recorded").hidden = true;
      root.dataset.state = "live";
      show(await ask(`_told("The pool is empty. Your move.")`));
      field("seq").focus();
    });
    stop.addEventListener("click", () => kvKernel.stop());
    root.querySelectorAll("button[data-do]").forEach((button) => button.addEventListener("click", async () => {
      const kind = button.dataset.do;
      const move = { do: kind };
      if (kind !== "evict") move.seq = field("seq").value;
      if (kind === "allocate" || kind === "append") move.words = field("words").value;
      if (kind === "fork" || kind === "share_prefix") move.to = field("to").value;
      if (kind === "share_prefix") move.count = Number(field("count").value);
      show(await ask(`_turn(${quoted(JSON.stringify(move))})`));
    }));
    root.querySelectorAll("button[data-words]").forEach((button) => button.addEventListener("click", () => {
      field("words").value = button.dataset.words;
    }));
    field("fault").addEventListener("change", async () => {
      const name = field("fault").value;
      show(await ask(`game.fault = ${name ? quoted(name) : "None"}\n_told(${quoted(name
        ? `${name} is on from the next move. ${symptoms[name]}` : "No fault is on from the next move.")})`));
    });
    part("new").addEventListener("click", async () => show(await ask(`_again([], game.fault, "A new pool. Your move.")`)));
    part("undo").addEventListener("click", async () => show(await ask(`_again(game.moves[:-1], game.fault, "One move back.")`)));
    part("mend").addEventListener("click", async () => {
      field("fault").value = "";
      show(await ask(`_again(game.moves, None, "The same moves, no fault on.")`));
    });
    part("every").addEventListener("click", async () => show(await ask("_every(4)", "Playing every game of four moves; a few seconds …")));
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    start.disabled = false;
    root.dataset.state = "asleep";
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".kvb").forEach(begin));
})();
