// A click on the heading of a table's column sorts the rows by it, a second one the other way round.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = Number(text);
    return text === "" || text === "-" ? null : Number.isNaN(number) ? text.toLowerCase() : number;
  };
  const compare = (a, b) => typeof a === typeof b ? (a < b ? -1 : Number(a > b)) : typeof a === "number" ? -1 : 1;
  headings.forEach((heading, column) => {
    const sort = () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) => a === null || b === null ? Number(a === null) - Number(b === null)
        : (down ? -1 : 1) * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    };
    heading.tabIndex = 0;
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
