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
  const said = document.createElement("output");
  form.append(said);
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
