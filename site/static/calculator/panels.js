// What else is asked of a state: cards, cheaper settings, the largest that fits, time. Computed while a panel is open.
import { button, element, gib, part, plain, seconds, table } from "./elements.js";
import { ask } from "./python.js";

const TITLES = {
  cards: "Which cards fit?",
  changes: "What do I change?",
  largest: "How large can it get?",
  time: "How long does it take?",
};

// `take(change)` moves controls; `words(change)` says a change; `current()` gives the state as text and its answer.
export function panels(take, words, current) {
  const made = {};
  for (const [name, title] of Object.entries(TITLES)) {
    const place = element("div", { "data-part": name });
    made[name] = element("details", { "data-panel": name }, element("summary", {}, title), place);
    made[name].addEventListener("toggle", () => fill(name));
  }
  const fills = { cards: fillCards, changes: fillChanges, largest: fillLargest, time: fillTime };
  async function fill(name) {
    if (!made[name].open) return;
    const [wanted, answer] = current();
    if (!answer || answer.error) return part(name).replaceChildren("First an answer, then this.");
    const found = await fills[name](wanted, answer, take, words);
    if (wanted === current()[0]) part(name).replaceChildren(...found);
  }
  return { elements: Object.values(made), refresh: () => Promise.all(Object.keys(made).map(fill)) };
}

let samples = 10000; // of the reader's data

const speedOf = (speed) => (speed.error ? "unknown" : seconds(speed.seconds[1]));

async function fillCards(wanted, answer, take) {
  const rows = await ask("cards", wanted);
  if (rows.error) return [rows.error];
  const cells = rows.map((row) => {
    const name = button(row.card, () => take(row.change), { title: `Take the ${row.card}` });
    if (row.error) return [name, gib(row.memory, 1), "no", row.error, ""];
    const half = row.change.precision ? " (in fp16)" : "";
    const tier = element("span", { class: `word ${row.tier.split(" ")[0]}`, title: row.grade }, row.tier + half);
    return [name, gib(row.memory, 1), tier, `${gib(row.process[1], 1)} (${gib(row.process[0], 1)} to ${gib(row.process[2], 1)})`, speedOf(row.speed)];
  });
  return [table("The same training on each card", ["card", "GiB", "fits", "process, GiB", "a step"], cells)];
}

async function fillChanges(wanted, answer, take, words) {
  const rows = await ask("changes", wanted);
  if (rows.error) return [rows.error];
  if (!rows.length) return ["No single change takes a hundredth off this peak."];
  const cells = rows.map(({ change, saves, time, same }) => [
    button(words(change), () => take(change)),
    `−${gib(saves)}`,
    time === null ? "unknown" : `×${time.toFixed(2)}`,
    same ? "the same training" : "another training",
  ]);
  return [table("One change each: first those that make it fit", ["change", "GiB", "time of a step", "it is then"], cells)];
}

async function fillLargest(wanted, answer, take, words) {
  const found = await ask("largest", wanted);
  if (found.error) return [found.error];
  const choice = (name, value) => (value === null ? "none" : button(value.toLocaleString("en"), () => take({ [name]: value })));
  const cells = Object.entries(found).map(([name, { safe, likely, limit }]) => [
    words({ [name]: null }),
    choice(name, safe),
    choice(name, likely),
    limit ?? "the card's memory",
  ]);
  return [table(`On this card, the other settings as they are`, ["largest", "safe", "likely", "what ends it"], cells)];
}

async function fillTime(wanted, answer) {
  const { speed } = answer;
  if (speed.error) return [speed.error];
  const [least, likely, most] = speed.seconds;
  const rate = (time) => Math.round(speed.tokens / time).toLocaleString("en");
  const said = element("p", {}, `A step takes about ${seconds(likely)} (${seconds(least)} to ${seconds(most)}): ${rate(likely)} tokens/s (${rate(most)} to ${rate(least)}).`);
  const field = element("input", { type: "number", min: 1, step: 1, id: "calculator-samples", inputmode: "numeric" });
  field.value = samples;
  const epoch = element("output", { for: "calculator-samples" });
  const tell = () => {
    samples = Number(field.value);
    const steps = Math.ceil(samples / speed.samples);
    const times = [likely, least, most].map((time) => seconds(steps * time));
    epoch.textContent = steps > 0 ? `${steps.toLocaleString("en")} steps: ${times[0]} (${times[1]} to ${times[2]})` : "";
  };
  field.addEventListener("input", tell);
  tell();
  const label = element("label", { for: "calculator-samples" }, "An epoch of so many samples");
  return [said, element("p", { class: "epoch" }, label, " ", field, " ", epoch), element("p", { class: "note" }, `${plain(speed.basis)}.`)];
}
