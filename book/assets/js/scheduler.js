// Drive the scheduler: every button is a call of kvlab/core/station.py in the page's Python, which draws the board.
(() => {
  "use strict";
  // `station` is there for the page's live cells too
  const SET_UP = `
import json
from dataclasses import asdict
from kvlab.core.station import PRESETS, Station, remedy_of, started
from kvlab.core.station_board import board

station = Station()

def _told(said=""):
    return json.dumps({"said": said, "board": board(station), "steps": station.steps, "over": station.over, "wrong": None,
                       "settings": asdict(station.settings), "remedy": remedy_of(station.preset)})

def _try(move, wrong=None):
    global station
    try:
        said = move()
    except ValueError as error:
        return json.dumps({**json.loads(_told(f"{str(error)[:1].upper()}{str(error)[1:]}. Nothing has changed.")), "wrong": wrong})
    if isinstance(said, tuple):
        station, said = said
    return _told(said)

def _preset(number):
    new = started(number)
    return new, f"{new.preset.name.capitalize()}: {len(new.asked)} requests will come. {new.preset.ask}"

def _set(name, text):
    new = station.changed(station.settings.typed(**{name: text}))
    same = "The same" if new.asked == station.asked else "Other"
    return new, f"{same} {len(new.asked)} requests, from the start."

def _remedy():
    new = station.remedied()
    return new, f"With the remedy, {remedy_of(new.preset)}: the same {len(new.asked)} requests, served to the end. The table compares."

def _reset():
    return station.changed(station.settings), "From the start: the same requests, the same settings."
json.dumps("ready")
`;
  const FRAME = matchMedia("(prefers-reduced-motion: reduce)").matches ? { steps: 20, pause: 1000 } : { steps: 4, pause: 120 };
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

  function begin(root) {
    let playing = false, played = Promise.resolve();
    const game = kvGame(root, {
      setUp: SET_UP,
      woken() {},
      first: `_told("24 requests will come. Take a step, or choose one of the three collapses.")`,
      focus: "workload",
      lost: "Stopped. Start again: the settings will be the first ones.",
      shown({ steps, over, settings, remedy, wrong }) {
        root.dataset.steps = String(steps);
        root.dataset.over = String(over);
        for (const [name, value] of Object.entries(settings)) {
          const field = game.field(name);
          if (name === wrong) field.setAttribute("aria-invalid", "true"); // what was typed stays, to be mended
          else { field.removeAttribute("aria-invalid"); field.value = String(value); }
        }
        part("remedy").disabled = !remedy;
        part("remedy").textContent = remedy ? `Remedy: ${remedy}` : "Remedy";
      },
    });
    const { part, field, ask, show, quoted } = game;
    const says = part("says"), play = part("play");

    // a move that comes while another one is computed waits for it; playing ends
    async function turn(move, wrong) {
      playing = false;
      await played;
      while (root.hasAttribute("aria-busy")) await sleep(20);
      show(await ask(`_try(lambda: ${move}, ${wrong ? quoted(wrong) : "None"})`));
    }
    async function film() {
      playing = true;
      play.textContent = "Pause";
      says.setAttribute("aria-live", "off"); // a screen reader is told the last sentence only
      let answer;
      while (playing && (answer = await ask(`_try(lambda: station.run(${FRAME.steps}))`))) {
        show(answer);
        if (answer.over) break;
        await sleep(FRAME.pause);
      }
      playing = false;
      play.textContent = "Play";
      says.removeAttribute("aria-live");
      if (answer) says.textContent = answer.over ? answer.said : `Paused after ${answer.steps} steps.`;
    }
    play.addEventListener("click", () => {
      if (playing) playing = false;
      else played = film();
    });
    root.querySelectorAll("button[data-steps]").forEach((button) => button.addEventListener("click", () => turn(`station.run(${button.dataset.steps})`)));
    root.querySelectorAll("button[data-send]").forEach((button) => button.addEventListener("click", () => turn(`station.send(${quoted(button.dataset.send)})`)));
    root.querySelectorAll("button[data-preset]").forEach((button) => button.addEventListener("click", () => turn(`_preset(${button.dataset.preset})`)));
    part("remedy").addEventListener("click", () => turn("_remedy()"));
    part("reset").addEventListener("click", () => turn("_reset()"));
    root.querySelectorAll("[data-part=settings] [name]").forEach((one) => one.addEventListener("change", () => {
      turn(`_set(${quoted(one.name)}, ${quoted(one.value)})`, one.name);
    }));
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".kvs[data-state]").forEach(begin));
})();
