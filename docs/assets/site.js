// Tables with text have no room on a phone: site.css shows each row as a list of cells with their headings.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const headings = [...table.querySelectorAll("th")].map((cell) => cell.textContent);
  const cells = [...table.querySelectorAll("td")];
  if (headings.length > 2 && cells.some((cell) => cell.cellIndex && cell.textContent.length > 20)) {
    table.dataset.rows = "";
    for (const cell of cells) cell.dataset.heading = headings[cell.cellIndex];
  }
}

// Browsers let no page that is a file read the index of the search.
if (location.protocol === "file:") {
  document.querySelector(".md-search__input").placeholder = "Needs make serve";
}
