// What the calculator's other files draw with.
export const GiB = 2 ** 30;
export const place = document.getElementById("calculator");
export const part = (name) => place.querySelector(`[data-part=${name}]`);
export const gib = (bytes, digits = 2) => (bytes / GiB).toFixed(digits);
export const plain = (name) => name.replaceAll("_", " ");

const DRAWN = new Set(["svg", "g", "rect", "line", "circle", "text", "title"]);
export function element(tag, attributes = {}, ...children) {
  const made = DRAWN.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

// A table whose first column heads its rows; cells are text or elements.
export function table(caption, heads, rows) {
  const row = (cells, tag) =>
    element("tr", {}, ...cells.map((cell, i) => (i ? element(tag, {}, cell) : element("th", { scope: "row" }, cell))));
  const head = element("tr", {}, ...heads.map((cell) => element("th", { scope: "col" }, cell)));
  const body = element("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  return element("table", {}, element("caption", {}, caption), element("thead", {}, head), body);
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toPrecision(3)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 2 * 86400 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}
