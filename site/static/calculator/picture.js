// An answer drawn as a bar, and as a table.
import { GiB, element, gib, plain, table } from "./elements.js";

const STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
let top = 0; // the axis stays while the bar can still be read on it

function axis(size) {
  const need = size / GiB;
  let scale = 1;
  while (need > 256 * scale) scale *= 10;
  return (STEPS.find((step) => step * scale >= need) ?? 256) * scale * GiB;
}

const reach = ({ peak, process, card }) => Math.max(peak, Math.min(process[2], 2 * peak), card[1] * 1.02);

// `before` is the answer before, a ghost; `pinned` an answer that stays, a bar of its own.
export function bars(answer, before, pinned, look) {
  const wanted = axis(Math.max(reach(answer), pinned ? reach(pinned) : 0));
  if (wanted > top || wanted < top / 4) top = wanted;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => element("span", {}, `${+((top / GiB) * share).toFixed(2)}`));
  const all = element("div", { class: "bar" });
  if (pinned) all.append(element("p", { class: "name" }, "A, pinned"), bar(pinned, null, look));
  if (pinned) all.append(element("p", { class: "name" }, "B, now"));
  all.append(bar(answer, pinned ? null : before, look));
  all.append(element("div", { class: "ticks" }, ...ticks), key(answer, pinned, before, look));
  return all;
}

function bar(answer, before, look) {
  const [low, likely, high] = answer.process;
  const limit = answer.card[1];
  const x = (bytes) => Math.min((bytes / top) * 100, 100);
  const svg = element("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-hidden": "true" });
  if (before) svg.append(element("rect", { class: "ghost", x: 0, y: 1, width: x(before.peak), height: 3 }));
  let at = 0;
  for (const [name, size] of answer.parts) {
    const piece = element("rect", { x: x(at), y: 5, width: x(size), height: 14, fill: look[name] });
    piece.append(element("title", {}, `${plain(name)} ${gib(size, 3)} GiB`));
    svg.append(piece);
    at += size;
  }
  const line = (attributes) => svg.append(element("line", { "vector-effect": "non-scaling-stroke", ...attributes }));
  line({ class: "interval", x1: x(low), x2: x(high), y1: 23, y2: 23 });
  for (const bytes of [low, high]) line({ class: "interval", x1: x(bytes), x2: x(bytes), y1: 21.5, y2: 24.5 });
  line({ class: "likely", x1: x(likely), x2: x(likely), y1: 20.5, y2: 25.5 });
  line({ class: "card", x1: x(limit), x2: x(limit), y1: 0, y2: 28 });
  return svg;
}

function key(answer, pinned, before, look) {
  const [card, limit] = answer.card;
  const names = new Set([...answer.parts, ...(pinned?.parts ?? [])].map(([name]) => name));
  const said = (mark, text) => element("span", {}, element("i", mark), text);
  const all = element("p", { class: "key" });
  for (const name of names) all.append(said({ style: `background:${look[name]}` }, plain(name)));
  all.append(said({ class: "card" }, `${card}: ${gib(limit)} GiB`));
  all.append(said({ class: "interval" }, "whole process: at least, likely, at most"));
  if (before && !pinned) all.append(said({ class: "ghost" }, "the answer before"));
  return all;
}

export function peakTable(answer) {
  const share = (bytes) => `${((100 * bytes) / answer.peak).toFixed(1)} %`;
  const rows = answer.parts.map(([name, bytes]) => [plain(name), gib(bytes, 3), share(bytes)]);
  rows.push(["together", gib(answer.peak, 3), "100.0 %"]);
  return table("Allocated at the peak", ["part", "GiB", "share"], rows);
}
