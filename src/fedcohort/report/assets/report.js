// The report's behavior: draws the figures, highlights runs, sorts the table, switches the theme.
const page = JSON.parse(document.getElementById("report-data").textContent);
const root = document.documentElement;
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null; // what the reader picked; null follows the system
let highlighted = [...page.highlighted];
let views = {};

function theme() {
  return chosenTheme ?? (prefersDark.matches ? "dark" : "light");
}

// The same rule as `separated` in figures.py: labels in order, inside the chart, a gap apart.
function separated(values, domain, height) {
  const gap = (page.label_gap / height) * (domain[1] - domain[0]);
  const names = Object.keys(values).sort((a, b) => values[a] - values[b] || (a < b ? -1 : 1));
  const inside = (center, members) => {
    const room = (gap * (members.length - 1)) / 2;
    return Math.max(Math.min(center, domain[1] - room), domain[0] + room);
  };
  const groups = [];
  for (const name of names) {
    let members = [name];
    let center = inside(values[name], members);
    for (;;) {
      const last = groups.at(-1);
      if (!last) break;
      const top = last.center + (gap * last.members.length) / 2;
      if (center - (gap * members.length) / 2 >= top) break;
      groups.pop();
      const total = members.length + last.members.length;
      center = (center * members.length + last.center * last.members.length) / total;
      members = [...last.members, ...members];
      center = inside(center, members);
    }
    groups.push({ center, members });
  }
  const placed = {};
  for (const { center, members } of groups)
    members.forEach((name, i) => (placed[name] = center + gap * (i - (members.length - 1) / 2)));
  return placed;
}

function showHighlighted(figure, view) {
  const { ends, domain, height } = figure.labels;
  const shown = [...highlighted, ...page.baselines].filter((name) => name in ends);
  const values = Object.fromEntries(shown.map((name) => [name, ends[name].y]));
  const placed = separated(values, domain, height);
  const rows = (names) =>
    names.filter((name) => name in ends).map((run) => ({ run, x: ends[run].x, y: placed[run] }));
  view.signal("highlighted", highlighted);
  view.data("labels", rows(highlighted));
  view.data("baseline-labels", rows(page.baselines));
  return view.runAsync();
}

async function draw(figure) {
  const place = document.getElementById(`chart-${figure.name}`);
  views[figure.name]?.finalize();
  const result = await window.vegaEmbed(place, figure.spec, {
    ast: true, // no evaluation of strings: the page's policy forbids it
    renderer: "svg",
    config: page.config[theme()],
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: figure.name,
    tooltip: { theme: theme() === "dark" ? "dark" : undefined },
  });
  views[figure.name] = result;
  const svg = place.querySelector("svg");
  svg?.setAttribute("role", "img");
  svg?.setAttribute("aria-label", `${figure.title}. ${figure.caption}`);
  if (figure.control === "highlighted") await showHighlighted(figure, result.view);
  if (figure.control === "chosen") await result.view.signal("chosen", chosenRun()).runAsync();
}

function chosenRun() {
  return document.querySelector("[data-choose]")?.value ?? page.chosen;
}

function update(control) {
  const drawn = page.figures.filter((f) => f.control === control && views[f.name]);
  return Promise.all(
    drawn.map((f) => {
      const { view } = views[f.name];
      if (control === "highlighted") return showHighlighted(f, view);
      return view.signal("chosen", chosenRun()).runAsync();
    }),
  );
}

function colorLegend() {
  const colors = page.config[theme()].range.category;
  for (const button of document.querySelectorAll("[data-run]")) {
    button.setAttribute("aria-pressed", String(highlighted.includes(button.dataset.run)));
    const rank = page.ranked.indexOf(button.dataset.run);
    button.style.setProperty("--run", colors[rank % colors.length]);
  }
}

async function toggle(run) {
  highlighted = highlighted.includes(run)
    ? highlighted.filter((name) => name !== run)
    : [...highlighted, run];
  colorLegend();
  await update("highlighted");
}

function sort(header) {
  const table = header.closest("table");
  const column = [...header.parentElement.children].indexOf(header);
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const key = (row) => row.children[column].dataset.value;
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // unknown values stay last
    const [m, n] = [Number(x), Number(y)];
    const difference = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
    return ascending ? difference : -difference;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(order));
}

async function drawAll() {
  root.dataset.theme = theme();
  colorLegend();
  const button = document.getElementById("theme");
  button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
  await Promise.all(page.figures.map(draw));
  root.dataset.ready = "true";
}

for (const button of document.querySelectorAll("[data-run]"))
  button.addEventListener("click", () => toggle(button.dataset.run));
for (const button of document.querySelectorAll("thead button"))
  button.addEventListener("click", () => sort(button.closest("th")));
for (const select of document.querySelectorAll("[data-choose]"))
  select.addEventListener("change", () => {
    for (const other of document.querySelectorAll("[data-choose]")) other.value = select.value;
    update("chosen");
  });
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = theme() === "dark" ? "light" : "dark";
  drawAll();
});
prefersDark.addEventListener("change", () => chosenTheme ?? drawAll());
drawAll();
