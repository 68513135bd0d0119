// Error by shape, dtype and recipe: a small table for each recipe, all on one scale.

const METRICS = {
  wrong: { words: "share of wrong elements", limits: [0, 1e-5, 1e-4, 1e-3, 1e-2] },
  ulp: { words: "largest distance in steps", limits: [0, 1, 4, 16, 256] },
  budget: { words: "largest share of the proved budget", limits: [0, 0.25, 0.5, 0.75, 1] },
  noise: { words: "difference over signal in dB (−SQNR)", limits: [-Infinity, -60, -40, -20, -10] },
};
const metric = document.getElementById("metric");

/** Cells of every small table: by operation, by recipe and backend, by shape, by dtype the rows that are in it. */
function multiples() {
  const found = new Map();
  const several = ["backend", "device"].filter((name) => new Set(columns[name].values).size > 1);
  for (let row = 0; row < data.rows; row++) {
    const place = [cell("recipe", row), ...several.map((name) => cell(name, row))].filter(Boolean).join(", ");
    const table = branch(branch(found, cell("operation", row)), place);
    const line = branch(table, cell("shape", row));
    const dtype = cell("dtype", row);
    if (!line.has(dtype)) line.set(dtype, []);
    line.get(dtype).push(row);
  }
  return found;
}

function branch(map, key) {
  if (!map.has(key)) map.set(key, new Map());
  return map.get(key);
}

function bySize(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}

/** The worst of a metric in some rows, null where none was measured. */
function worst(rows, name) {
  let most = null;
  for (const row of rows) {
    let value = null;
    if (name === "wrong") value = cell("compared", row) ? cell("mismatches", row) / cell("compared", row) : null;
    else if (name === "ulp") value = cell("max_ulp", row) ?? (cell("verdict", row) === "pass" ? 0 : null);
    else if (name === "budget") value = cell("budget_max", row);
    else if (cell("sqnr_db", row) !== null) value = -Number(cell("sqnr_db", row));
    if (value !== null && !(value <= most && most !== null)) most = value;
  }
  return most;
}

function short(value) {
  if (value === null) return "";
  if (value === -Infinity) return "=";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toExponential(0).replace("e+", "e");
  return size < 0.1 ? value.toExponential(0) : String(Number(value.toPrecision(2)));
}

function square(rows, place, name) {
  const counts = {};
  for (const row of rows) counts[cell("verdict", row)] = (counts[cell("verdict", row)] ?? 0) + 1;
  const verdict = data.severity.find((one) => counts[one]);
  const value = worst(rows, name);
  const { words: what, limits } = METRICS[name];
  const level = value === null ? 0 : limits.filter((limit) => value > limit).length;
  const verdicts = data.severity.filter((one) => counts[one]).map((one) => `${figure(counts[one])} ${one}`).join(", ");
  const text = verdict === "pass" ? short(value) || data.glyphs.pass : `${data.glyphs[verdict]} ${short(value)}`;
  const button = make("button", { type: "button", tabIndex: -1, className: `level${level} ${verdict === "pass" ? "right" : "wrong"}` }, text.trim());
  button.title = `${place.filter(Boolean).join(" ")}: ${verdicts}${value === null ? "" : `; ${what} ${figure(value)}`}`;
  button.ariaLabel = button.title;
  button.dataset.words = `${place.filter(Boolean).join("/")}/`;
  return make("td", {}, button);
}

function multiple(operation, name, lines) {
  const dtypes = [...new Set([...lines.values()].flatMap((line) => [...line.keys()]))].sort(bySize);
  const shapes = [...lines.keys()].sort(bySize);
  const rows = shapes.map((size) =>
    make("tr", {}, make("th", { scope: "row" }, size), ...dtypes.map((dtype) => {
      const here = lines.get(size).get(dtype);
      if (!here) return make("td");
      return square(here, [operation, cell("recipe", here[0]), size, dtype], metric.value);
    })),
  );
  // The names of dtypes stand upright above their columns; that of a single one needs no column to point at.
  const single = dtypes.length === 1;
  const head = single ? [] : [make("td"), ...dtypes.map((dtype) => make("th", { scope: "col" }, make("span", {}, dtype)))];
  const caption = make("caption", {}, name || operation, single ? make("small", {}, dtypes[0]) : null);
  const table = make("table", { className: "multiple" }, caption, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  const first = table.querySelector("button");
  if (first) first.tabIndex = 0;
  roving(table, "button", (key, at, items) => {
    if (key === "ArrowRight") return at + 1;
    if (key === "ArrowLeft") return at - 1;
    if (key !== "ArrowDown" && key !== "ArrowUp") return -1;
    const { cellIndex, parentElement } = items[at].parentElement;
    let tr = parentElement;
    do tr = key === "ArrowDown" ? tr.nextElementSibling : tr.previousElementSibling;
    while (tr && !tr.cells[cellIndex].firstChild);
    return tr ? items.indexOf(tr.cells[cellIndex].firstChild) : -1;
  });
  return table;
}

function drawMatrix() {
  const parts = [];
  for (const [operation, recipes] of [...multiples()].sort(([a], [b]) => bySize(a, b))) {
    const failing = (lines) => [...lines.values()].some((line) => [...line.values()].flat().some((row) => cell("verdict", row) !== "pass"));
    const tables = [...recipes].sort(([a, x], [b, y]) => failing(y) - failing(x) || bySize(a, b));
    parts.push(make("h3", {}, operation), make("div", { className: "multiples" }, ...tables.map(([name, lines]) => multiple(operation, name, lines))));
  }
  document.getElementById("multiples").replaceChildren(...parts);
}

document.getElementById("multiples").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  Object.assign(state, { words: button.dataset.words, verdicts: null, group: "", case: "", backend: "" });
  keep();
  show();
  document.getElementById("cases").scrollIntoView();
  body.querySelector(".case button")?.focus({ preventScroll: true });
});
metric.addEventListener("change", () => {
  state.metric = metric.value;
  keep();
  drawMatrix();
});
