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

  function begin(root) {
    const symptoms = {};
    const { part, field, ask, show, quoted } = kvGame(root, {
      setUp: `${SET_UP}\n${FAULTS}`,
      woken(faults) {
        field("fault").replaceChildren(new Option("none", ""), ...faults.map(([name]) => new Option(name, name)));
        faults.forEach(([name, symptom]) => (symptoms[name] = symptom));
      },
      first: `_told("The pool is empty. Your move.")`,
      focus: "seq",
      lost: "Stopped. Start again: the pool will be empty.",
      shown(answer) {
        root.dataset.told = String(answer.told);
        root.dataset.moves = String(answer.moves);
      },
    });
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
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".kvb").forEach(begin));
})();
