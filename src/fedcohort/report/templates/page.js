// The behavior of all pages: sorts and searches tables, draws the figures of runs, switches their
// theme, and loads a live page again when its server has new rounds.
const root = document.documentElement;

function sort(header) {
  const table = header.closest("table");
  const column = [...header.parentElement.children].indexOf(header);
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const key = (row) => row.children[column].dataset.value || row.children[column].textContent.trim();
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    const [m, n] = [Number(x || NaN), Number(y || NaN)];
    if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) - Number.isNaN(n); // texts last
    const difference = Number.isNaN(m) ? x.localeCompare(y, "en", { numeric: true }) : m - n;
    return ascending ? difference : -difference;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(order));
}

function search(input) {
  const words = input.value.toLowerCase();
  const rows = [...input.parentElement.nextElementSibling.querySelector("tbody").rows];
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  const shown = rows.filter((row) => !row.hidden).length;
  input.parentElement.querySelector("[data-shown]").textContent = `${shown} of ${rows.length}`;
}

for (const button of document.querySelectorAll("thead button"))
  button.addEventListener("click", () => sort(button.closest("th")));
for (const input of document.querySelectorAll("[data-search]")) {
  input.addEventListener("input", () => search(input));
  search(input);
}

function drawRuns(page) {
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosenTheme = null; // what the reader picked; null follows the system
  let highlighted = [...page.highlighted];
  const views = {};
  const theme = () => chosenTheme ?? (prefersDark.matches ? "dark" : "light");
  const chosenRun = () => document.querySelector("[data-choose]")?.value ?? page.chosen;

  // Labels in order, inside the chart, a gap apart: `spread_labels` in figures.py.
  function spreadLabels(values, [low, high], height) {
    const gap = (page.label_gap / height) * (high - low);
    const names = Object.keys(values).sort((a, b) => values[a] - values[b] || (a < b ? -1 : 1));
    const pools = []; // of values less their gaps: a later pool is never lower
    names.forEach((name, i) => {
      let pool = { mean: values[name] - i * gap, count: 1 };
      while (pools.length && pools.at(-1).mean > pool.mean) {
        const last = pools.pop();
        const count = last.count + pool.count;
        pool = { mean: (last.mean * last.count + pool.mean * pool.count) / count, count };
      }
      pools.push(pool);
    });
    const top = Math.max(low, high - gap * (names.length - 1));
    const levels = pools.flatMap(({ mean, count }) => Array(count).fill(mean));
    const inside = levels.map((level) => Math.min(Math.max(level, low), top));
    return Object.fromEntries(names.map((name, i) => [name, inside[i] + i * gap]));
  }

  function show(figure) {
    const { view } = views[figure.name];
    if (figure.control === "chosen") return view.signal("chosen", chosenRun()).runAsync();
    const { ends, domain, height } = figure.labels;
    const shown = [...highlighted, ...page.baselines].filter((name) => name in ends);
    const values = Object.fromEntries(shown.map((name) => [name, ends[name].y]));
    const placed = spreadLabels(values, domain, height);
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
    views[figure.name] = await window.vegaEmbed(place, figure.spec, {
      ast: true, // no evaluation of strings: the page's policy forbids it
      renderer: "svg",
      config: page.config[theme()],
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: figure.name,
      tooltip: { theme: theme() === "dark" ? "dark" : undefined },
    });
    const svg = place.querySelector("svg");
    svg?.setAttribute("role", "img");
    svg?.setAttribute("aria-label", `${figure.title}. ${figure.caption}`);
    if (figure.control) await show(figure);
  }

  const update = (control) =>
    Promise.all(page.figures.filter((f) => f.control === control && views[f.name]).map(show));

  function colorLegend() {
    const colors = page.config[theme()].range.category;
    for (const button of document.querySelectorAll("[data-run]")) {
      button.setAttribute("aria-pressed", String(highlighted.includes(button.dataset.run)));
      const rank = page.ranked.indexOf(button.dataset.run);
      button.style.setProperty("--run", colors[rank % colors.length]);
    }
  }

  async function drawAll() {
    root.dataset.theme = theme();
    colorLegend();
    document.getElementById("theme").textContent =
      theme() === "dark" ? "Light theme" : "Dark theme";
    await Promise.all(page.figures.map(draw));
    root.dataset.ready = "true";
  }

  for (const button of document.querySelectorAll("[data-run]"))
    button.addEventListener("click", () => {
      const run = button.dataset.run;
      highlighted = highlighted.includes(run)
        ? highlighted.filter((name) => name !== run)
        : [...highlighted, run];
      colorLegend();
      update("highlighted");
    });
  document.querySelector("[data-choose]")?.addEventListener("change", () => update("chosen"));
  document.getElementById("theme").addEventListener("click", () => {
    chosenTheme = theme() === "dark" ? "light" : "dark";
    drawAll();
  });
  prefersDark.addEventListener("change", () => chosenTheme ?? drawAll());
  drawAll();
}

async function reloadWhenNew() {
  let current = null;
  for (;;) {
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      const version = answer.ok ? await answer.text() : current;
      if (current !== null && version !== current) location.reload();
      current = version;
    } catch {
      // The server has stopped: what is on the screen stays.
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

const data = document.getElementById("report-data");
if (data) drawRuns(JSON.parse(data.textContent));
if (root.dataset.live) reloadWhenNew();
