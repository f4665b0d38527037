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

// On a phone, the help of an option stands below its name.
if (matchMedia("(max-width: 44em)").matches) {
  for (const code of document.querySelectorAll("pre > code")) {
    if (code.textContent.startsWith("Usage: ")) {
      code.textContent = code.textContent.replace(/\n {20,}(?=\S)/g, " ").replace(/^( {2}-.*?) {2,}(?=\S)/gm, "$1\n      ");
    }
  }
}
