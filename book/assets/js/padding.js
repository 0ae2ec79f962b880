// A padded batch to edit, live in the page: what each row attends to, and whether it is as if it stood alone.
//
// No kernel and no library. The arithmetic is that of kvlab/core/padding.py, function by function; a test runs this file in Node
// over random rows and finds Python's answers. The form and the ways to fill it come from kvlab/show/padding.py.
(() => {
  "use strict";

  // ---- arithmetic: a row is { tokens, mask, positions, read } ----------------------------------------------------------------
  function seen(row, query) {
    const columns = [];
    for (let column = 0; column <= query; column++) if (row.mask[column]) columns.push(column);
    return columns.length ? columns : [query];
  }

  function look(row) {
    const own = row.tokens.flatMap((here, column) => (here ? [column] : []));
    const pads = new Set(), unseen = new Set();
    for (const query of own) {
      const visible = new Set(seen(row, query));
      for (const column of visible) if (!row.tokens[column]) pads.add(column);
      for (const column of own) if (column <= query && !visible.has(column)) unseen.add(column);
    }
    const offsets = new Set(own.map((column, number) => row.positions[column] - number));
    const shift = offsets.size === 1 ? [...offsets][0] : null;
    const readsPad = !row.tokens[row.read];
    const readsEarly = !readsPad && row.read !== own.at(-1);
    const masked = own.length > 0 && !pads.size && !unseen.size && !readsPad && !readsEarly;
    return {
      pads_seen: pads.size, unseen: unseen.size, shift, reads_pad: readsPad, reads_early: readsEarly,
      rope: masked && shift !== null, learned: masked && shift === 0,
    };
  }

  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

  function sentence(row) {
    const found = look(row);
    if (!row.tokens.some(Boolean)) return "It has no token.";
    const wrong = [];
    if (found.reads_pad) wrong.push("the next token is read at a pad");
    if (found.reads_early) wrong.push("the next token is read before the row's end");
    if (found.pads_seen) wrong.push(`${count(found.pads_seen, "pad")} can be seen`);
    if (found.unseen) wrong.push(`${count(found.unseen, "token")} cannot be seen`);
    if (found.shift === null) wrong.push("distances between its tokens are wrong");
    if (wrong.length) return `Wrong in both kinds of model: ${wrong.join("; ")}.`;
    if (found.shift) return `All positions are off by ${found.shift}: with RoPE as if alone, with learned positions wrong.`;
    return "As if alone, in both kinds of model.";
  }

  function attends(row, names) {
    const columns = seen(row, row.read);
    const listed = columns.map((column) => (row.tokens[column] ? names[column] : "pad")).join(", ");
    const distances = columns.map((column) => row.positions[row.read] - row.positions[column]).join(", ");
    return `Column ${row.read} attends to ${listed}; distances ${distances}.`.replaceAll("-", "−");
  }

  // what a query has at a column, and between tokens that see each other the distance
  function see(row, query, column) {
    if (column > query) return ["later", null];
    if (!seen(row, query).includes(column)) return [row.tokens[column] && row.tokens[query] ? "lost" : "hidden", null];
    if (!row.tokens[column]) return ["pad", null];
    return ["own", row.tokens[query] ? row.positions[query] - row.positions[column] : null];
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { seen, look, sentence, attends, see };
    return;
  }

  // ---- the form ------------------------------------------------------------------------------------------------------------
  function start(root) {
    const known = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const preset = root.querySelector('[name="preset"]');
    const boxes = (field, kind) => [...field.querySelectorAll(`[data-${kind}]`)];

    // a whole number of a field, or null and a mark on the field
    function whole(input, most) {
      const value = input.value.trim() === "" ? NaN : Number(input.value);
      const right = Number.isInteger(value) && value >= 0 && value <= most;
      input.setAttribute("aria-invalid", String(!right));
      return right ? value : null;
    }

    function update(field) {
      const texts = boxes(field, "text"), last = texts.length - 1;
      const positions = boxes(field, "at").map((input) => whole(input, 99));
      const readBox = field.querySelector('input[type="number"][data-read]');
      const read = whole(readBox, last);
      const says = field.querySelector(".kvp-says"), told = field.querySelector(".kvp-attends");
      if (read === null || positions.includes(null)) {
        says.textContent =
          read === null ? `Read at column: give a whole number from 0 to ${last}.` : "Position: give a whole number from 0 to 99.";
        field.dataset.state = "unknown";
        return;
      }
      const names = texts.map((input) => input.value.trim());
      const row = { tokens: names.map(Boolean), mask: boxes(field, "mask").map((input) => input.checked), positions, read };
      const found = look(row);
      says.textContent = sentence(row);
      told.textContent = attends(row, names);
      field.querySelector(".kvp-see").setAttribute("aria-label", told.textContent);
      field.dataset.state = "known";
      for (const kind of ["rope", "learned"]) field.querySelector(`[data-kind="${kind}"]`).dataset.ok = String(found[kind]);
      const cells = field.querySelectorAll(".kvp-see .kvp-cell");
      texts.forEach((_, query) =>
        texts.forEach((_, column) => {
          const cell = cells[query * texts.length + column];
          const [kind, distance] = see(row, query, column);
          const apart = row.tokens.slice(column + 1, query + 1).filter(Boolean).length;
          cell.dataset.k = kind;
          cell.dataset.off = String(distance !== null && distance !== apart);
          cell.dataset.idle = String(!row.tokens[query]);
          cell.dataset.read = String(query === row.read);
          cell.textContent = distance === null ? "" : String(distance).replace("-", "−");
        }),
      );
    }

    const fields = [...root.querySelectorAll("[data-row]")];
    function fill() {
      for (const field of fields) {
        const filled = known[preset.value][field.dataset.row];
        boxes(field, "text").forEach((input, c) => (input.value = filled.text[c].trim()));
        boxes(field, "mask").forEach((input, c) => (input.checked = filled.mask[c]));
        boxes(field, "at").forEach((input, c) => (input.value = String(filled.positions[c])));
        field.querySelector('input[type="number"][data-read]').value = String(filled.read);
        update(field);
      }
    }
    for (const field of fields) for (const kind of ["input", "change"]) field.addEventListener(kind, () => update(field));
    preset.addEventListener("change", fill);
    root.addEventListener("submit", (event) => event.preventDefault());
    root.querySelector("fieldset").disabled = false;
    fill();
    root.dataset.state = "live";
  }

  const begin = () => document.querySelectorAll(".kvp").forEach((root) => root.dataset.state || start(root));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
