// Tables sort by a click or a key on a column's heading; a third one brings the first order back.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const next = now === "descending" ? "ascending" : now === "ascending" ? null : "descending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      if (next !== null) heading.setAttribute("aria-sort", next);
      body.append(...(next === null ? original : sorted(original, column, next)));
    });
  });
}

function sorted(rows, column, direction) {
  const sign = direction === "ascending" ? 1 : -1;
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].firstChild.textContent;
  const number = (text) => Number.parseFloat(text);
  return [...rows].sort((left, right) => {
    const [a, b] = [value(left), value(right)];
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return sign * (Number.isNaN(x) ? a.localeCompare(b) : x - y);
  });
}
