// The live state diagram in the page. It draws what Python says and tells Python what was chosen:
// which moves there are, what they need and what the kernel answered is decided over there.
//
// Keys: Tab goes from part to part, arrows choose a move, Enter makes it.

const PATIENCE_MS = 700; // then the reader is told that the notebook is at work
const LOST_MS = 30000;

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// A list of moves: one stop for Tab, arrows inside (the radio group of the ARIA practices guide).
function moveList(title, moves, chosen, first, tell) {
  if (!moves.length) return null;
  const choose = (at) => tell({ do: "choose", to: moves[at].to });
  const items = moves.map((move, at) =>
    node(
      "button",
      {
        type: "button",
        role: "radio",
        "aria-checked": String(move.to === chosen),
        tabindex: move.to === first ? "0" : "-1",
        "data-key": `move-${move.to}`,
        class: "rdmalab-move",
        title: move.note,
        onclick: () => choose(at),
        onkeydown: (event) => {
          const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
          if (step) {
            event.preventDefault();
            const next = (at + step + moves.length) % moves.length;
            items[next].focus();
            choose(next);
          } else if (event.key === "Enter") {
            event.preventDefault();
            tell({ do: "run", to: move.to });
          }
        },
      },
      move.label,
    ),
  );
  return node(
    "div",
    { class: "rdmalab-moves" },
    node("div", { class: "rdmalab-head" }, title),
    node("div", { role: "radiogroup", "aria-label": title }, ...items),
  );
}

// One attribute: whether it is given, and what stands in it.
function fieldRow(field, tell) {
  const tick = node("input", {
    type: "checkbox",
    checked: field.given,
    "data-key": `give-${field.attribute}`,
    "aria-label": `give ${field.attribute}`,
    onchange: (event) =>
      tell({ do: "give", attribute: field.attribute, given: event.target.checked }),
  });
  const inputs = field.inputs.map((input) => {
    const box = node("input", {
      type: "text",
      size: Math.max(6, Math.min(28, String(input.value).length)),
      "data-key": `set-${input.key}`,
      "aria-label": `${input.key}: ${input.words}`,
      title: input.words,
      spellcheck: "false",
      disabled: !field.given,
      onchange: (event) => {
        box.dataset.was = event.target.value;
        tell({ do: "set", key: input.key, value: event.target.value });
      },
    });
    box.value = box.dataset.was = input.value;
    return node("label", { class: "rdmalab-input" }, node("code", {}, input.key), box);
  });
  const name = node("code", { class: "rdmalab-attribute", title: field.words }, field.attribute);
  const boxes = node("div", {}, ...inputs);
  return node("div", { class: "rdmalab-field" }, node("label", {}, tick, name), boxes);
}

function attributes(scene, tell) {
  if (!scene.chosen) return null;
  const required = scene.fields.filter((field) => field.required);
  const optional = scene.fields.filter((field) => !field.required);
  const rows = (fields) => fields.map((field) => fieldRow(field, tell));
  const more = optional.length
    ? node(
        "details",
        { "data-key": "more", open: optional.some((field) => field.given) },
        node("summary", { "data-key": "more-summary" }, "attributes that it may take"),
        ...rows(optional),
      )
    : null;
  const head = required.length ? "attributes that the move requires" : "the move requires none";
  return node("div", {}, node("div", { class: "rdmalab-head" }, head), ...rows(required), more);
}

function panel(scene, tell) {
  const legal = scene.moves.filter((move) => move.legal);
  const others = scene.moves.filter((move) => !move.legal);
  const stop = (moves) =>
    (moves.find((move) => move.to === scene.chosen) || moves[0] || {}).to;
  const run = () => tell({ do: "run", to: scene.chosen });
  const look = node(
    "button",
    { type: "button", "data-key": "look", class: "rdmalab-look", onclick: () => tell({ do: "look" }) },
    "Look again",
  );
  const make = scene.chosen
    ? node(
        "button",
        { type: "button", "data-key": "run", class: "rdmalab-run", onclick: run },
        `Run it on ${scene.host}`,
      )
    : null;
  return node(
    "div",
    { class: "rdmalab-panel" },
    moveList(`moves from ${scene.state}`, legal, scene.chosen, stop(legal), tell),
    moveList("not in the table: try one", others, scene.chosen, stop(others), tell),
    attributes(scene, tell),
    node("div", { class: "rdmalab-buttons" }, ...[make, look].filter(Boolean)),
  );
}

function history(scene) {
  if (!scene.log.length) return null;
  const lines = scene.log.map((line) => node("li", {}, line));
  return node(
    "details",
    { "data-key": "log", class: "rdmalab-log" },
    node("summary", { "data-key": "log-summary" }, `what happened so far (${scene.log.length})`),
    node("ol", {}, ...lines),
  );
}

function render({ model, el }) {
  let waiting = null;
  let lost = null;
  let ahead = 0; // messages that are not answered yet
  let turn = model.get("scene").turn;
  const open = {};
  // What stays from drawing to drawing; a live region that is made anew is not read out.
  const title = node("div", { class: "rdmalab-title" });
  const picture = node("div", { class: "rdmalab-drawing" });
  const status = node("p", {});
  const answer = node("div", { class: "rdmalab-answer", role: "status", "aria-live": "polite" });
  const wait = node("div", { class: "rdmalab-wait", role: "status", "aria-live": "polite" });
  const call = node("pre", { class: "rdmalab-call", "aria-label": "the call" });
  const side = node("div", { class: "rdmalab-side" });
  const past = node("div", {});
  const left = node("div", { class: "rdmalab-left" }, picture, status, answer, wait, call);
  const columns = node("div", { class: "rdmalab-columns" }, left, side);
  // The page must not take our keys for its own shortcuts.
  const suppress = { "data-lm-suppress-shortcuts": "true", role: "group", tabindex: "-1" };
  const looks = { class: "rdmalab-view rdmalab-qp rdmalab-live" };
  const root = node("div", { ...looks, ...suppress }, title, columns, past);

  const quiet = () => {
    clearTimeout(waiting);
    clearTimeout(lost);
    root.removeAttribute("aria-busy");
    wait.textContent = "";
  };
  const tell = (words) => {
    quiet();
    ahead += 1;
    root.setAttribute("aria-busy", "true");
    waiting = setTimeout(() => {
      wait.textContent = "Waiting for the notebook: it is running a cell, or is busy.";
    }, PATIENCE_MS);
    lost = setTimeout(() => {
      wait.textContent =
        "No answer from the notebook's kernel. If it was restarted, run this cell again.";
    }, LOST_MS);
    model.send(words);
  };

  const draw = () => {
    const scene = model.get("scene");
    const active = root.contains(document.activeElement) ? document.activeElement : null;
    const held = active && active.dataset.key;
    for (const part of root.querySelectorAll("details")) open[part.dataset.key] = part.open;
    ahead = Math.max(0, ahead - (scene.turn - turn));
    turn = scene.turn;
    if (!ahead) quiet();
    root.setAttribute("aria-label", scene.title);
    title.textContent = scene.title;
    picture.innerHTML = scene.svg;
    for (const part of picture.querySelectorAll("[data-to]"))
      part.addEventListener("click", () => tell({ do: "choose", to: part.dataset.to }));
    status.textContent = scene.status;
    call.textContent = scene.call;
    answer.dataset.kind = scene.kind;
    if (answer.textContent !== scene.answer) answer.textContent = scene.answer;
    // Who is typing is not interrupted: that part waits for the scene after the last key.
    const typing = active && active.dataset.was !== undefined && active.dataset.was !== active.value;
    const caret = active && active.dataset.was !== undefined && [active.selectionStart, active.selectionEnd];
    if (!typing) side.replaceChildren(panel(scene, tell));
    past.replaceChildren(...[history(scene)].filter(Boolean));
    for (const part of root.querySelectorAll("details"))
      if (open[part.dataset.key]) part.open = true;
    if (!held || typing) return;
    // In the lists the focus goes with the choice: after a move it is on the next one. A reader
    // who is quicker than the answers stays where the last key has led.
    const chosen = root.querySelector('[role="radio"][aria-checked="true"]');
    const stay = ahead || !held.startsWith("move-");
    const same = stay ? root.querySelector(`[data-key="${held}"]`) : null;
    (same || chosen || root).focus({ preventScroll: true });
    if (same && caret) same.setSelectionRange(...caret);
  };

  // With Ctrl or Cmd a key is the page's all the same: a reader may save from in here.
  const keys = (event) => {
    if (root.contains(event.target))
      root.toggleAttribute("data-lm-suppress-shortcuts", !(event.ctrlKey || event.metaKey));
  };
  window.addEventListener("keydown", keys, true);

  el.append(root);
  draw();
  model.on("change:scene", draw);
  // A host that is at work is looked at again until it has time.
  const again = setInterval(() => {
    if (model.get("scene").busy && !root.hasAttribute("aria-busy")) tell({ do: "look" });
  }, 2000);
  return () => {
    clearInterval(again);
    window.removeEventListener("keydown", keys, true);
    quiet();
    model.off("change:scene", draw);
  };
}

export default { render };
