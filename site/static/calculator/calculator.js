// The calculator's page: controls made from what vramlab says of them, an answer drawn as a bar, the state in the address.
const GiB = 2 ** 30;
const place = document.getElementById("calculator");
const gib = (bytes, digits = 2) => (bytes / GiB).toFixed(digits);
const element = (tag, attributes = {}, ...children) => {
  const svg = ["svg", "g", "rect", "line", "circle", "text", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

// --- vramlab, in a worker -----------------------------------------------------------------------------------------

let worker, calls = 0;
const waiting = new Map();
function ask(call, ...args) {
  return new Promise((resolve) => {
    waiting.set(++calls, resolve);
    worker.postMessage({ id: calls, call, args });
  });
}

// --- the state: what differs from the start stands in the address -------------------------------------------------

let page, state;
function fromAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  state = { ...page.start };
  for (const { name, kind, values } of page.controls) {
    if (!said.has(name)) continue;
    const raw = said.get(name), found = values.find((value) => String(value) === raw);
    // What is not offered is asked too, and refused with its reason: another answer would be to another question.
    state[name] = found ?? (kind === "number" && /^\d+$/.test(raw) ? Number(raw) : raw);
  }
}
function toAddress() {
  const said = new URLSearchParams();
  for (const { name } of page.controls) if (state[name] !== page.start[name]) said.set(name, state[name]);
  history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search);
}

// --- controls -----------------------------------------------------------------------------------------------------

const inputs = {};
let moved = "", good = null; // the control that was turned last, the last state that had an answer
function control({ name, label, help, kind, values, words, needs }) {
  const id = `calculator-${name}`;
  const waits = element("small", { hidden: "" }, ` (${needs})`);
  let input, around;
  const numbers = values.filter((value) => typeof value === "number");
  const unset = values.find((value) => typeof value !== "number"); // what an empty field of a number means
  const set = (value) => {
    state[name] = value;
    moved = name;
    show();
    update();
  };
  if (kind === "select") {
    input = element("select", { id }, ...words.map((word, i) => element("option", { value: i }, word)));
    input.addEventListener("input", () => set(values[Number(input.value)]));
  } else if (kind === "number") {
    input = element("input", { id, type: "number", min: 1, step: 1, inputmode: "numeric" });
    if (unset !== undefined) input.placeholder = words[values.indexOf(unset)];
    input.addEventListener("input", () => set(input.value === "" ? unset ?? "" : Number(input.value)));
    const next = (sign) => {
      const now = typeof state[name] === "number" ? state[name] : 0;
      const others = numbers.filter((value) => sign * (value - now) > 0);
      return sign > 0 ? others[0] ?? now : others.at(-1) ?? unset ?? now;
    };
    const button = (sign, text, said) => {
      const made = element("button", { type: "button", "aria-label": `${label}: ${said}` }, text);
      made.addEventListener("click", () => set(next(sign)));
      return made;
    };
    around = element("span", { class: "number" }, button(-1, "−", "less"), input, button(1, "+", "more"));
  } else {
    input = element("input", { id, type: "text" });
    input.addEventListener("change", () => set(input.value));
  }
  const show = () => {
    if (kind === "select") {
      input.value = values.indexOf(state[name]);
    } else {
      const text = state[name] === unset ? "" : String(state[name]);
      if (kind === "text" || text === "" || Number(input.value) !== state[name]) input.value = text;
    }
  };
  const disable = (is) => {
    for (const part of [input, ...(around ? around.querySelectorAll("button") : [])]) part.disabled = is;
    waits.hidden = !is;
  };
  // Which values cannot be chosen now, and why: {index: reason}.
  const refuse = (reasons) => {
    for (const [i, option] of [...input.options].entries()) {
      option.disabled = i in reasons;
      option.textContent = words[i] + (i in reasons ? ` (no: ${reasons[i]})` : "");
    }
  };
  inputs[name] = { input, show, disable, refuse, kind };
  return element("div", { class: "control", title: help }, element("label", { for: id }, label, waits), around ?? input);
}

const named = (name) => page.controls.find((control) => control.name === name);
function word(name, value) {
  const { values, words } = named(name), at = values.indexOf(value);
  return at < 0 ? String(value) || "default" : words[at];
}

// --- the answer ---------------------------------------------------------------------------------------------------

let last, drawn, top = 0;
const steps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
function axis(size) {
  const need = size / GiB;
  let scale = 1;
  while (need > 256 * scale) scale *= 10;
  return (steps.find((step) => step * scale >= need) ?? 256) * scale * GiB;
}

function bar(answer, before) {
  const [low, likely, high] = answer.process, [card, limit] = answer.card;
  const wanted = axis(Math.max(answer.peak, Math.min(high, 2 * answer.peak), limit * 1.02));
  if (wanted > top || wanted < top / 4) top = wanted; // the axis stays while the bar can still be read on it
  const x = (bytes) => Math.min((bytes / top) * 100, 100);
  const svg = element("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-hidden": "true" });
  let at = 0;
  if (before) svg.append(element("rect", { class: "ghost", x: 0, y: 1, width: x(before.peak), height: 3 }));
  for (const [name, size] of answer.parts) {
    const part = element("rect", { x: x(at), y: 5, width: x(size), height: 14, fill: page.look[name] });
    part.append(element("title", {}, `${name.replace("_", " ")} ${gib(size, 3)} GiB`));
    svg.append(part);
    at += size;
  }
  const line = (attributes) => svg.append(element("line", { "vector-effect": "non-scaling-stroke", ...attributes }));
  line({ class: "interval", x1: x(low), x2: x(high), y1: 23, y2: 23 });
  for (const bytes of [low, high]) line({ class: "interval", x1: x(bytes), x2: x(bytes), y1: 21.5, y2: 24.5 });
  line({ class: "likely", x1: x(likely), x2: x(likely), y1: 20.5, y2: 25.5 });
  line({ class: "card", x1: x(limit), x2: x(limit), y1: 0, y2: 28 });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => element("span", {}, `${+((top / GiB) * part).toFixed(2)}`));
  const key = element("p", { class: "key" });
  for (const [name] of answer.parts) {
    key.append(element("span", {}, element("i", { style: `background:${page.look[name]}` }), name.replace("_", " ")));
  }
  key.append(element("span", {}, element("i", { class: "card" }), `${card}: ${gib(limit)} GiB`));
  key.append(element("span", {}, element("i", { class: "interval" }), "whole process: at least, likely, at most"));
  if (before) key.append(element("span", {}, element("i", { class: "ghost" }), "the answer before"));
  return element("div", { class: "bar" }, svg, element("div", { class: "ticks" }, ...ticks), key);
}

function table(answer) {
  const row = (tag, ...cells) => element("tr", {}, ...cells.map((cell, i) => element(i ? tag : "th", i ? {} : { scope: "row" }, cell)));
  const size = answer.parts.map(([name, bytes]) =>
    row("td", name.replace("_", " "), gib(bytes, 3), `${((100 * bytes) / answer.peak).toFixed(1)} %`));
  return element("table", {}, element("caption", {}, "Allocated at the peak"),
    element("thead", {}, row("th", "part", "GiB", "share")),
    element("tbody", {}, ...size, row("td", "together", gib(answer.peak, 3), "100.0 %")));
}

function draw(answer) {
  const said = place.querySelector("[data-part=said]"), picture = place.querySelector("[data-part=picture]");
  place.dataset.state = JSON.stringify(state);
  if (answer.error) {
    said.replaceChildren(element("p", { class: "wrong" }, answer.error));
    picture.classList.add("old");
    place.querySelector("form").classList.add("refused");
  } else {
    picture.classList.remove("old");
    place.querySelector("form").classList.remove("refused");
    const [low, likely, high] = answer.process, [card, limit] = answer.card;
    const change = drawn ? answer.peak - drawn.peak : 0;
    const moved = change ? `, ${change > 0 ? "+" : "−"}${gib(Math.abs(change))} GiB` : "";
    said.replaceChildren(
      element("p", { class: `tier ${answer.tier.split(" ")[0]}` }, element("strong", {}, `${card}: ${answer.tier}.`)),
      element("p", {}, `Peak ${gib(answer.peak)} GiB${moved}, in phase ${answer.phase.replace("_", " ")}. The whole process is likely to ` +
        `take ${gib(likely)} GiB (${gib(low)} to ${gib(high)}) of ${gib(limit)}.`),
      ...(answer.why ? [element("p", {}, `Why the peak is there: ${answer.why}.`)] : []),
      ...answer.notes.map((note) => element("p", { class: "note" }, `Note: ${note}.`)));
    picture.replaceChildren(bar(answer, drawn));
    place.querySelector("[data-part=table]").replaceChildren(table(answer));
    for (const name of ["code", "command", "arguments"]) place.querySelector(`[data-code=${name}]`).textContent = answer[name];
    drawn = answer;
  }
  for (const [name, { input, disable }] of Object.entries(inputs)) {
    if (answer.idle) disable(answer.idle.includes(name));
    input.setAttribute("aria-invalid", answer.control === name);
  }
  place.dataset.answer = JSON.stringify(answer);
}

async function update() {
  toAddress();
  const wanted = (last = JSON.stringify(state));
  const answer = await ask("answer", wanted);
  if (wanted !== last) return; // a newer question is on its way
  draw(answer);
  if (!answer.error) good = JSON.parse(wanted);
  await (answer.error ? offer(wanted) : refusals(wanted));
  if (wanted === last) place.dataset.settled = wanted;
}

// One click each: changes that make a refused state one that has an answer.
async function offer(wanted) {
  for (const { kind, refuse } of Object.values(inputs)) if (kind === "select") refuse({});
  const changes = await ask("repairs", wanted, moved);
  if (wanted !== last || !Array.isArray(changes)) return;
  const button = (text, change) => {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", () => {
      Object.assign(state, change);
      Object.values(inputs).forEach(({ show }) => show());
      update();
    });
    return made;
  };
  const buttons = changes.map((change) =>
    button(Object.entries(change).map(([name, value]) => `${named(name).label}: ${word(name, value)}`).join(", "), change));
  if (good) buttons.push(button("Undo", good));
  place.querySelector("[data-part=said]").append(element("p", { class: "repairs" }, "Mend it: ", ...buttons));
}

// Values that cannot be chosen, control by control, while nobody asks anything else; the many models last.
async function refusals(wanted) {
  const selects = page.controls.filter(({ kind }) => kind === "select").sort((a, b) => a.values.length - b.values.length);
  for (const { name } of selects) {
    const reasons = await ask("refused", wanted, name);
    if (wanted !== last) return;
    if (!reasons.error) inputs[name].refuse(reasons);
  }
}

// --- a model of one's own -----------------------------------------------------------------------------------------

async function addConfig(name, text) {
  const found = await ask("add_config", name, text), model = page.controls.find(({ name }) => name === "model");
  place.querySelector("[data-part=config]").textContent = found.error ?? `${found.model} is in use.`;
  if (found.error) return;
  if (!model.values.includes(found.model)) {
    model.values.push(found.model);
    model.words.push(`${found.model} (your config.json)`);
    inputs.model.input.append(element("option", { value: model.values.length - 1 }, model.words.at(-1)));
  }
  state.model = found.model;
  moved = "model";
  inputs.model.show();
  update();
}
// The name that the address asks for, when that is no model which the page has.
const ownName = () => (named("model").values.includes(state.model) ? "my-model" : state.model);
function own() {
  const area = element("textarea", { rows: 4, id: "calculator-config", spellcheck: "false" });
  const file = element("input", { type: "file", accept: ".json,application/json", "aria-label": "config.json as a file" });
  const button = element("button", { type: "button" }, "Use it");
  button.addEventListener("click", () => addConfig(ownName(), area.value));
  file.addEventListener("change", async () => file.files[0] && addConfig(ownName(), await file.files[0].text()));
  return element("details", {}, element("summary", {}, "Another model: its config.json"),
    element("label", { for: "calculator-config" }, "Paste the file that lies beside the weights on the hub. It stays on this page."),
    area, element("p", {}, button, " or ", file), element("p", { "data-part": "config", role: "status" }));
}

function code(title, name) {
  const text = element("pre", { "data-code": name, tabindex: 0 }), copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", () => navigator.clipboard.writeText(text.textContent));
  return element("section", {}, element("h4", {}, title, " ", copy), text);
}

// --- start --------------------------------------------------------------------------------------------------------

async function start() {
  if (location.protocol === "file:") {
    place.style.minHeight = "0";
    place.append(element("p", {}, "Opened as a file, without a server, a page may not start Python. The table below has usual answers."));
    return;
  }
  const wait = element("p", { role: "status" }, "Loading Python (5 MB, once) …");
  place.append(wait);
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data: { id, result } }) => (waiting.get(id)(result), waiting.delete(id));
  worker.onerror = () => (wait.textContent = "Python did not start here. The table below has usual answers.");
  page = await ask("page");
  if (page.error) return void (wait.textContent = `${page.error} The table below has usual answers.`);
  fromAddress();
  const main = page.controls.filter(({ more }) => !more).map(control), more = page.controls.filter(({ more }) => more).map(control);
  wait.replaceWith(
    element("div", { class: "answer" }, element("div", { "data-part": "said", role: "status", "aria-live": "polite" }), element("div", { "data-part": "picture" })),
    element("form", {}, element("div", { class: "controls" }, ...main),
      element("details", {}, element("summary", {}, "More options: attention, loop, weights' dtype, accumulation, packing, several GPUs"), element("div", { class: "controls" }, ...more)), own()),
    element("details", {}, element("summary", {}, "The peak in numbers"), element("div", { "data-part": "table" })),
    element("details", { class: "code" }, element("summary", {}, "As code"), code("Python", "code"), code("Command line", "command"), code("Trainer", "arguments")));
  place.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  const showAll = () => Object.values(inputs).forEach(({ show }) => show());
  showAll();
  addEventListener("hashchange", () => (fromAddress(), showAll(), update()));
  await update();
}
start();
