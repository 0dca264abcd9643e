// Controls, made from what vramlab says of its options.
import { button, element } from "./elements.js";

const FEW = 30; // values of a list that needs no search

// A control's element, and how to move it: `show` its value, `disable` it, `refuse` values with their reasons.
// `state` is read; `set(name, value)` is called when the reader turns it.
export function control(described, state, set) {
  const { name, label, help, kind, needs } = described;
  const id = `calculator-${name}`;
  const waits = element("small", { hidden: "" }, ` (${needs})`);
  const made = { select, number, text }[kind](described, id, state, (value) => set(name, value));
  const around = made.around ?? made.input;
  const disable = (is) => {
    made.input.disabled = is;
    for (const other of made.around?.querySelectorAll("button, input") ?? []) other.disabled = is;
    waits.hidden = !is;
  };
  const title = element("label", { for: id }, label, waits);
  const whole = element("div", { class: "control", title: help }, title, around);
  return { refuse: () => {}, ...made, kind, disable, whole };
}

function select({ name, label, values, words }, id, state, set) {
  const input = element("select", { id });
  const options = [];
  const add = () => {
    while (options.length < values.length) {
      const at = options.length;
      options.push(element("option", { value: at }, words[at]));
      input.append(options[at]);
    }
  };
  add();
  input.addEventListener("input", () => set(values[Number(input.value)]));
  const chosen = () => values.indexOf(state()[name]);
  const show = () => {
    add();
    if (chosen() >= 0 && !options[chosen()].isConnected) input.append(options[chosen()]);
    input.value = chosen();
  };
  const refuse = (reasons) => {
    for (const [i, option] of options.entries()) {
      option.disabled = i in reasons;
      option.textContent = words[i] + (i in reasons ? ` (no: ${reasons[i]})` : "");
    }
  };
  if (values.length < FEW) return { input, show, refuse };
  const search = searching(label, options, input, chosen);
  return { input, show, refuse, search, around: element("span", { class: "searched" }, search, input) };
}

// A field that keeps those options of a long list that have its words.
function searching(label, options, input, chosen) {
  const search = element("input", { type: "search", placeholder: "Find", "aria-label": `${label}: find` });
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase().split(/[\s/]+/).filter(Boolean);
    const has = (option) => wanted.every((word) => option.textContent.toLowerCase().includes(word));
    const kept = options.filter((option, i) => i === chosen() || has(option));
    input.replaceChildren(...kept);
    input.value = chosen();
  });
  return search;
}

function number({ name, label, values, words }, id, state, set) {
  const numbers = values.filter((value) => typeof value === "number");
  const unset = values.find((value) => typeof value !== "number"); // what an empty field means
  const whole = name !== "free_memory";
  const input = element("input", {
    id,
    type: "number",
    min: whole ? 1 : 0,
    step: whole ? 1 : "any",
    inputmode: whole ? "numeric" : "decimal",
  });
  if (unset !== undefined) input.placeholder = words[values.indexOf(unset)];
  input.addEventListener("input", () => set(input.value === "" ? (unset ?? "") : Number(input.value)));
  const next = (sign) => {
    const now = typeof state()[name] === "number" ? state()[name] : 0;
    const others = numbers.filter((value) => sign * (value - now) > 0);
    return sign > 0 ? (others[0] ?? now) : (others.at(-1) ?? unset ?? now);
  };
  const step = (sign, text, said) => button(text, () => set(next(sign)), { "aria-label": `${label}: ${said}` });
  const around = element("span", { class: "number" }, step(-1, "−", "less"), input, step(1, "+", "more"));
  const show = () => {
    const text = state()[name] === unset ? "" : String(state()[name]);
    if (text === "" || Number(input.value) !== state()[name]) input.value = text;
  };
  return { input, show, around };
}

function text({ name, values }, id, state, set) {
  const unset = values.find((value) => typeof value !== "number");
  const input = element("input", { id, type: "text" });
  input.addEventListener("change", () => set(input.value));
  const show = () => {
    input.value = state()[name] === unset ? "" : String(state()[name]);
  };
  return { input, show };
}
