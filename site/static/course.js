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
