// A click on a table's header sorts its rows by that column; a second click reverses the order.
// Cells that begin with a number are compared by it; other cells come last, as text.
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
  const rows = [...body.rows].map((row) => [key(row), row]);
  rows.sort((a, b) => (down ? -1 : 1) * compare(a[0], b[0]));
  for (const [, row] of rows) body.append(row);
});
