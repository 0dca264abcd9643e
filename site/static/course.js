// Search shows the text around what it found. Sphinx takes the whole of <main>, with the page's buttons and its table of
// contents; the article alone is what a reader looks for.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // only the search page has it
  const whole = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const article = new DOMParser().parseFromString(html, "text/html").querySelector("article.bd-article");
    return whole(article ? `<div role="main">${article.innerHTML}</div>` : html, anchor);
  };
});

// The page of claims: filters made of what its rows say, each value with its count.
document.addEventListener("DOMContentLoaded", () => {
  const rows = [...document.querySelectorAll("tr:has(.verdict)")];
  if (!rows.length) return;
  const kinds = { verdict: "Verdict", source: "Source", chapter: "Chapter", witness: "Witness" };
  const value = (node) => (node.classList.contains("verdict") ? node.closest("section").querySelector("h2").firstChild.textContent : node.textContent).trim();
  const has = (row, kind) => new Set([...row.querySelectorAll(`.${kind}`)].map(value));
  const form = document.createElement("form");
  form.className = "filters";
  for (const [kind, title] of Object.entries(kinds)) {
    const count = {};
    for (const row of rows) for (const name of has(row, kind)) count[name] = (count[name] ?? 0) + 1;
    const select = document.createElement("select");
    select.append(new Option("all", ""), ...Object.keys(count).sort().map((name) => new Option(`${name} (${count[name]})`, name)));
    select.name = kind;
    const label = document.createElement("label");
    label.append(title, select);
    form.append(label);
  }
  const said = document.createElement("output"), whole = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox";
  whole.append(box, " Show how each was found");
  form.append(whole, said);
  const fold = () => document.body.classList.toggle("no-details", !box.checked);
  box.addEventListener("change", fold);
  fold();
  const filter = () => {
    const wanted = [...new FormData(form)].filter(([, name]) => name);
    for (const row of rows) row.hidden = !wanted.every(([kind, name]) => has(row, kind).has(name));
    for (const section of document.querySelectorAll("section section:has(.verdict)")) {
      section.hidden = !section.querySelector("tr:has(.verdict):not([hidden])");
    }
    said.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
  };
  form.addEventListener("change", filter);
  rows[0].closest("section").before(form);
  filter();
});

// Long tables of evidence: a field that keeps the rows with its words.
document.addEventListener("DOMContentLoaded", () => {
  const LONG = 20;
  for (const table of document.querySelectorAll(".bd-article table")) {
    const rows = [...table.tBodies[0]?.rows ?? []];
    if (rows.length < LONG || table.querySelector(".verdict") || table.closest("#calculator, .cell_output")) continue;
    const form = document.createElement("form"), label = document.createElement("label");
    const field = document.createElement("input"), said = document.createElement("output");
    form.className = "filters";
    field.type = "search";
    field.placeholder = "llama lora";
    label.append("Rows with these words", field);
    form.append(label, said);
    const keep = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const kept = rows.filter((row) => {
        const text = row.textContent.toLowerCase();
        return !(row.hidden = !words.every((word) => text.includes(word)));
      });
      said.textContent = `${kept.length} of ${rows.length}`;
    };
    field.addEventListener("input", keep);
    form.addEventListener("submit", (event) => event.preventDefault());
    (table.closest(".pst-scrollable-table-container") ?? table).before(form);
    keep();
  }
});

// The first page's short form: a model, a way and a card, answered from what the build computed.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("quick");
  if (!place) return;
  const { cards, ways, needs, start } = JSON.parse(place.querySelector("script").textContent);
  const form = document.createElement("form");
  const choose = (title, names, first) => {
    const label = document.createElement("label"), select = document.createElement("select");
    select.append(...names.map((name) => new Option(name, name, name === first, name === first)));
    label.append(title, select);
    form.append(label);
    return select;
  };
  const model = choose("I train", Object.keys(needs), start[0]), way = choose("with", Object.keys(ways), start[1]), card = choose("on", Object.keys(cards), start[2]);
  const said = document.createElement("p"), bar = document.createElement("div"), note = document.createElement("p"), more = document.createElement("a");
  said.setAttribute("role", "status");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  note.className = "note";
  more.textContent = "Change anything";
  more.className = "more";
  const tell = () => {
    const [low, likely, high, tier, half] = needs[model.value][way.value][card.value], total = cards[card.value] / 2 ** 30;
    const scale = 100 / Math.max(total * 1.1, Math.min(high, total * 2));
    const kind = tier.split(" ")[0];  // "does" of "does not fit"
    said.className = `tier ${kind}`;
    said.innerHTML = `<strong>${tier}</strong>: ${likely.toFixed(1)} GiB (${low.toFixed(1)} to ${high.toFixed(1)}) of the card's ${total.toFixed(1)} GiB.`;
    const span = (look, from, to) => `<i class="${look}" style="left:${Math.min(from * scale, 100)}%;width:${Math.max(0, Math.min(to * scale, 100) - Math.min(from * scale, 100))}%"></i>`;
    bar.innerHTML = span(`need ${kind}`, 0, likely) + span("interval", low, high) + span("card", total, total);
    const state = new URLSearchParams({ model: model.value, gpu: card.value, ...ways[way.value], ...half });
    const trainer = half.trainer ? "The Trainer" : "TRL's SFTTrainer", format = half.precision ? "fp16 (the card has no bf16)" : "bf16";
    note.textContent = `${trainer}, batch 1 of 2,048 tokens, ${format}, AdamW, gradient checkpointing. The bar is what the process takes, the bracket its interval, the dashed line the card.`;
    more.href = `calculator.html#${state}`;
  };
  form.addEventListener("change", tell);
  form.addEventListener("submit", (event) => event.preventDefault());
  place.append(form, said, bar, note, more);
  tell();
});

// What scrolls by itself can be reached and scrolled by keyboard.
addEventListener("load", () => {
  const kinds = { ".pst-scrollable-table-container": "table", ".bd-article pre": "text", "div.formula": "formula" };
  const look = () => {
    const count = {};
    for (const [found, kind] of Object.entries(kinds)) {
      for (const box of document.querySelectorAll(found)) {
        const wide = box.scrollWidth > box.clientWidth + 1;
        box.classList.toggle("wide", wide);
        if (!wide || box.closest("#calculator")) continue;
        box.tabIndex = 0;
        if (kind === "text") continue;
        box.setAttribute("role", "region");
        const number = (count[kind] = (count[kind] ?? 0) + 1); // each region has a name of its own
        box.setAttribute("aria-label", `${kind} ${number}, scrolls sideways`);
      }
    }
  };
  look();
  let again;
  addEventListener("resize", () => (clearTimeout(again), (again = setTimeout(look, 150))));
});
