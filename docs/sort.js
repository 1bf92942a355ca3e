// A click on a table's header sorts its rows by that column; a second click reverses the order.
// Cells that begin with a number are compared by it; other cells come last, as text. Rows with text in the
// first cell only are the heads of groups: they stay where they are, and each group is sorted by itself.
document.addEventListener("click", (event) => {
  const header = event.target.closest("article table th");
  if (!header) return;
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const down = header.dataset.order === "up";
  for (const other of header.parentElement.children) delete other.dataset.order;
  header.dataset.order = down ? "down" : "up";
  const key = (row) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/^[≥\s]+/, "").replace(/,/g, ""));
    return { text, number };
  };
  const compare = (a, b) => {
    if (!isNaN(a.number) && !isNaN(b.number)) return a.number - b.number;
    if (isNaN(a.number) !== isNaN(b.number)) return isNaN(a.number) ? 1 : -1;
    return a.text.localeCompare(b.text);
  };
  const head = (row) => [...row.cells].every((cell, i) => (i === 0) === (cell.textContent.trim() !== ""));
  const groups = [[null, []]];
  for (const row of body.rows) {
    if (head(row)) groups.push([row, []]);
    else groups.at(-1)[1].push([key(row), row]);
  }
  for (const [first, rows] of groups) {
    rows.sort((a, b) => (down ? -1 : 1) * compare(a[0], b[0]));
    body.append(...(first ? [first] : []), ...rows.map(([, row]) => row));
  }
});
