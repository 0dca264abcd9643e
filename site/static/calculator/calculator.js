// The calculator's page: controls made from what vramlab says of them, an answer drawn as a bar, the state in the
// address. The form and the answer to its beginning come with the page; Python, which answers all else, follows.
import { differing, pack, read, unpack, write } from "./address.js";
import { control } from "./controls.js";
import { button, element, gib, part, place, plain } from "./elements.js";
import { panels } from "./panels.js";
import { bars, peakTable } from "./picture.js";
import { ask, startPython } from "./python.js";

// What only `simulate` can answer stands further down the page, if it stands there: the address is the state's.
const STORED = { GRPO: "answers-of-grpo", Images: "answers-with-images" };

let page; // what vramlab says of its controls, and the answer to the beginning
let state;
let pinned = null; // a state to compare with, and its answer
let ownConfig = null; // {name, packed}: the configuration that the page was given
let ready = false;
let python; // resolves when Python can be asked
let moved = ""; // the control that was turned last
let good = null; // the last state that had an answer
let drawn = null; // the last answer
let before = null; // the one before it, to another question
let last; // the state that is asked about, as text
let asks; // the panels below
const inputs = {};

const named = (name) => page.controls.find((control) => control.name === name);
function word(name, value) {
  const { values, words } = named(name);
  const at = values.indexOf(value);
  return at < 0 ? String(value) || "default" : words[at];
}
const changeWords = (change) =>
  Object.entries(change)
    .map(([name, value]) => (value === null ? named(name).label : `${named(name).label}: ${word(name, value)}`))
    .join(", ");

// --- the state ------------------------------------------------------------------------------------------------------

function showAll() {
  for (const { show } of Object.values(inputs)) show();
}

function take(change) {
  Object.assign(state, change);
  showAll();
  update();
}

function turn(name, value) {
  moved = name;
  take({ [name]: value });
}

function toAddress() {
  const config = ownConfig?.name === state.model ? ownConfig.packed : null;
  write(state, pinned?.state, config, page);
}

async function fromAddress() {
  const said = read(location.hash, page);
  state = said.state;
  pinned = said.pinned && { state: said.pinned, answer: null };
  showAll();
  if (said.config && !named("model").values.includes(state.model)) {
    await python;
    try {
      await addConfig(ownName(), await unpack(said.config));
    } catch {
      part("config").textContent = "The config.json in the address cannot be read: a part of the link may be missing.";
    }
  }
  await update();
}

// --- the answer -------------------------------------------------------------------------------------------------------

function tell(answer) {
  const [low, likely, high] = answer.process;
  const [card, limit] = answer.card;
  const against = pinned?.answer && !pinned.answer.error ? pinned.answer : before;
  const change = against ? answer.peak - against.peak : 0;
  const more = change ? `, ${change > 0 ? "+" : "−"}${gib(Math.abs(change))} GiB${against === before ? "" : " against A"}` : "";
  const short = element("p", { class: `tier ${answer.tier.split(" ")[0]}` },
    element("strong", {}, `${card}: ${answer.grade}.`), ` ${gib(likely, 1)} of ${gib(limit, 1)} GiB${more}`);
  part("said").replaceChildren(short);
  const differences = pinned ? [...differing(state, { ...page, start: pinned.state }).keys()] : [];
  part("more").replaceChildren(
    element("p", {}, `Peak ${gib(answer.peak)} GiB, in phase ${plain(answer.phase)}. The whole process is likely to ` +
      `take ${gib(likely)} GiB (${gib(low)} to ${gib(high)}) of ${gib(limit)}.`),
    ...(answer.why ? [element("p", {}, `Why the peak is there: ${answer.why}.`)] : []),
    ...(pinned?.answer?.error ? [element("p", { class: "note" }, `A has no answer: ${pinned.answer.error}`)] : []),
    ...(differences.length
      ? [element("p", {}, `B differs from A: ${differences.map((name) =>
          `${named(name).label} ${word(name, pinned.state[name])} → ${word(name, state[name])}`).join(", ")}.`)]
      : []),
    ...answer.notes.map((note) => element("p", { class: "note" }, `Note: ${note}.`)));
}

function draw(answer) {
  place.dataset.state = JSON.stringify(state);
  const form = place.querySelector("form");
  const isWrong = Boolean(answer.error);
  part("picture").classList.toggle("old", isWrong);
  part("more").hidden = isWrong;
  form.classList.toggle("refused", isWrong);
  if (isWrong) {
    part("said").replaceChildren(element("p", { class: "wrong" }, answer.error));
  } else {
    if (drawn && drawn.recipe + drawn.card !== answer.recipe + answer.card) before = drawn;
    tell(answer);
    const against = pinned?.answer?.error ? null : pinned?.answer;
    part("picture").replaceChildren(bars(answer, before, against, page.look));
    part("table").replaceChildren(peakTable(answer));
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
  if (!ready) {
    const isStart = wanted === JSON.stringify(page.start);
    if (isStart && !pinned) draw(page.answer);
    else part("said").replaceChildren(element("p", {}, "The answer comes with Python."));
    await python;
    if (wanted !== last) return;
  }
  if (pinned && !pinned.answer) pinned.answer = await ask("answer", JSON.stringify(pinned.state));
  const answer = await ask("answer", wanted);
  if (wanted !== last) return; // a newer question is on its way
  draw(answer);
  if (!answer.error) good = JSON.parse(wanted);
  await (answer.error ? offer(wanted) : refusals(wanted));
  if (wanted !== last) return;
  await asks.refresh();
  if (wanted === last) place.dataset.settled = wanted;
}

// One click each: changes that make a refused state one that has an answer.
async function offer(wanted) {
  for (const { refuse } of Object.values(inputs)) refuse({});
  const changes = await ask("repairs", wanted, moved);
  if (wanted !== last || !Array.isArray(changes)) return;
  const buttons = changes.map((change) => button(changeWords(change), () => take(change)));
  if (good) buttons.push(button("Undo", () => take(good)));
  part("said").append(element("p", { class: "repairs" }, "Mend it: ", ...buttons));
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

// --- to compare, to share, to begin with ------------------------------------------------------------------------------

function shortcuts() {
  const apply = async (name) => {
    const wanted = JSON.stringify(state);
    await python;
    take(await ask("preset", wanted, name));
  };
  const ways = Object.keys(page.presets).map((name) => button(name, () => apply(name)));
  for (const [name, id] of Object.entries(STORED)) {
    const section = document.getElementById(id);
    if (section) ways.push(button(name, () => section.scrollIntoView()));
  }
  const pin = button("Pin as A", () => {
    pinned = pinned ? null : { state: { ...state }, answer: null };
    pin.textContent = pinned ? "Unpin A" : "Pin as A";
    update();
  });
  if (pinned) pin.textContent = "Unpin A";
  const copy = button("Copy link", async () => {
    await navigator.clipboard.writeText(location.href);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy link"), 1500);
  });
  return element("div", { class: "shortcuts", role: "group", "aria-label": "Ways to train, and this answer" }, ...ways, pin, copy);
}

// --- a model of one's own ---------------------------------------------------------------------------------------------

async function addConfig(name, text) {
  await python;
  const found = await ask("add_config", name, text);
  const model = named("model");
  part("config").textContent = found.error ?? `${found.model} is in use.`;
  if (found.error) return;
  if (!model.values.includes(found.model)) {
    model.values.push(found.model);
    model.words.push(`${found.model} (your config.json)`);
  }
  ownConfig = { name: found.model, packed: await pack(JSON.stringify(JSON.parse(text))) };
  turn("model", found.model);
}

// A name of the hub, as it stands there.
async function addNamed(name) {
  await python;
  const found = await ask("named", name);
  part("config").textContent = found.error ?? `${name} is built as ${found.model}.`;
  if (!found.error) turn("model", found.model);
}

// The name that the address asks for, when that is no model which the page has.
const ownName = () => (named("model").values.includes(state.model) ? "my-model" : state.model);

function own() {
  const area = element("textarea", { rows: 4, id: "calculator-config", spellcheck: "false" });
  const file = element("input", { type: "file", accept: ".json,application/json", "aria-label": "config.json as a file" });
  const use = button("Use it", () => addConfig(ownName(), area.value));
  file.addEventListener("change", async () => file.files[0] && addConfig(ownName(), await file.files[0].text()));
  const name = element("input", { type: "text", id: "calculator-named", placeholder: "Qwen/Qwen2.5-7B-Instruct", spellcheck: "false" });
  name.addEventListener("change", () => name.value.trim() && addNamed(name.value.trim()));
  return element("details", {}, element("summary", {}, "Another model: its name on the hub, or its config.json"),
    element("p", {}, element("label", { for: "calculator-named" }, "Name on the hub "), name),
    element("label", { for: "calculator-config" }, "Or paste the file that lies beside the weights. It stays on this page, and goes into the link that you copy."),
    area, element("p", {}, use, " or ", file), element("p", { "data-part": "config", role: "status" }));
}

function code(title, name) {
  const text = element("pre", { "data-code": name, tabindex: 0 });
  const copy = button("Copy", () => navigator.clipboard.writeText(text.textContent));
  return element("section", {}, element("h4", {}, title, " ", copy), text);
}

// --- start ------------------------------------------------------------------------------------------------------------

function lay() {
  for (const described of page.controls) inputs[described.name] = control(described, () => state, turn);
  const of = (more) => page.controls.filter((described) => described.more === more).map(({ name }) => inputs[name].whole);
  asks = panels(take, changeWords, () => [last, drawn && JSON.parse(place.dataset.answer)]);
  const answer = element("div", { class: "answer" },
    element("div", { "data-part": "said", role: "status", "aria-live": "polite" }), element("div", { "data-part": "loading" }));
  const form = element("form", {}, element("div", { class: "controls" }, ...of(false)),
    element("details", {}, element("summary", {}, "More options: attention, loop, weights' dtype, accumulation, packing, several GPUs"),
      element("div", { class: "controls" }, ...of(true))), own());
  form.addEventListener("submit", (event) => event.preventDefault());
  place.replaceChildren(answer, element("div", { "data-part": "picture" }), shortcuts(), form, element("div", { "data-part": "more" }),
    ...asks.elements,
    element("details", {}, element("summary", {}, "The peak in numbers"), element("div", { "data-part": "table" })),
    element("details", { class: "code" }, element("summary", {}, "As code"), code("Python", "code"), code("Command line", "command"), code("Trainer", "arguments")));
  // What a key reaches is scrolled to below the answer, which stays in sight.
  new ResizeObserver(() => {
    const { height } = answer.getBoundingClientRect();
    document.documentElement.style.scrollPaddingTop = `${Math.round(height + (parseFloat(getComputedStyle(answer).top) || 0) + 8)}px`;
  }).observe(answer);
}

function loading() {
  const bar = element("progress", { max: page.bytes, value: 0, "aria-label": "Loading Python" });
  const said = element("span", {}, `Loading Python (${Math.round(page.transfer / 1e6)} MB, once) `);
  part("loading").replaceChildren(element("p", {}, said, bar));
  python = startPython((loaded) => {
    bar.value = loaded;
    if (loaded >= page.bytes) {
      said.textContent = "Starting Python ";
      bar.removeAttribute("value");
    }
  }).then(
    () => {
      ready = true;
      part("loading").replaceChildren();
    },
    (error) => {
      part("loading").replaceChildren(element("p", {}, `${error.message}. The table below has usual answers.`));
      return new Promise(() => {}); // nothing more can be asked
    },
  );
}

async function start() {
  if (location.protocol === "file:") {
    place.style.minHeight = "0";
    place.append(element("p", {}, "Opened as a file, without a server, a page may not start Python. The table below has usual answers."));
    return;
  }
  page = await (await fetch(new URL("start.json", import.meta.url))).json();
  const said = read(location.hash, page);
  state = said.state;
  pinned = said.pinned && { state: said.pinned, answer: null };
  lay();
  loading();
  addEventListener("hashchange", fromAddress);
  await fromAddress();
}
start();
