// Heat map of verdicts: a row for each operation and recipe, a column for each dtype.

const FOLDED_FROM = 24; // more rows than this: recipes of a family are one row, which opens
const unfolded = new Set();
let cells = new Map();

function branch(map, key) {
  if (!map.has(key)) map.set(key, new Map());
  return map.get(key);
}

function bySize(a, b) {
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Records by operation, recipe and dtype. */
function byPlace() {
  const found = new Map();
  for (let row = 0; row < data.rows; row++) {
    const line = branch(branch(found, cell("operation", row)), cell("recipe", row));
    const dtype = cell("dtype", row);
    if (!line.has(dtype)) line.set(dtype, []);
    line.get(dtype).push(row);
  }
  return found;
}

function joined(lines) {
  const all = new Map();
  for (const line of lines) for (const [dtype, rows] of line) all.set(dtype, [...(all.get(dtype) ?? []), ...rows]);
  return all;
}

/** Rows of the heat map of one operation: `{label, prefix, line, recipes}`; `prefix` begins the case ids of the row. */
function mapRows(operation, recipes, fold) {
  const single = ([recipe, line]) => ({ label: recipe || "no recipe", prefix: [operation, recipe].filter(Boolean).join("/") + "/", line });
  const sorted = [...recipes].sort(([a], [b]) => bySize(a, b));
  if (!fold) return sorted.map(single);
  const families = new Map();
  for (const entry of sorted) branch(families, family(entry[0])).set(entry[0], entry[1]);
  return [...families].flatMap(([name, members]) => {
    if (members.size === 1) return [single([...members][0])];
    const key = `${operation}/${name}`;
    const whole = { label: `${name} (${members.size} recipes)`, prefix: key, line: joined(members.values()), key };
    return unfolded.has(key) ? [whole, ...[...members].map((entry) => ({ ...single(entry), member: true }))] : [whole];
  });
}

function family(recipe) {
  return recipe.match(/^(nvfp4|mxfp\d|fp8-[a-z]+|\w+Scaling\b)/)?.[0] ?? recipe;
}

function mapCell({ prefix, label }, operation, dtype, rows) {
  const counts = {};
  for (const row of rows) counts[cell("verdict", row)] = (counts[cell("verdict", row)] ?? 0) + 1;
  const verdict = data.severity.find((name) => counts[name]);
  const verdicts = data.severity.filter((name) => counts[name]).map((name) => `${figure(counts[name])} ${name}`).join(", ");
  const button = make("button", { type: "button", tabIndex: -1, className: `cell ${verdict}` });
  button.append(make("span", {}, verdict === "pass" ? data.glyphs.pass : `${data.glyphs[verdict]} ${figure(counts[verdict])}`));
  button.title = `${operation} ${label} ${dtype}: ${verdicts}`;
  button.ariaLabel = button.title;
  button.dataset.words = [prefix, dtype && `/${dtype}/`].filter(Boolean).join(" ");
  cells.set(button, rows);
  return make("td", {}, button);
}

function drawHeatMap() {
  const found = byPlace();
  const lines = [...found.values()].reduce((sum, recipes) => sum + recipes.size, 0);
  const dtypes = [...new Set(Array.from({ length: data.rows }, (_, row) => cell("dtype", row)))].sort((a, b) => a.length - b.length || bySize(a, b));
  cells = new Map();
  const head = dtypes.map((dtype) => make("th", { scope: "col" }, make("span", {}, dtype || "no dtype")));
  const bodies = [...found].sort(([a], [b]) => bySize(a, b)).map(([operation, recipes]) => {
    const title = make("tr", {}, make("th", { scope: "rowgroup", colSpan: dtypes.length + 1, className: "operation" }, operation));
    const rows = mapRows(operation, recipes, lines > FOLDED_FROM).map((line) => {
      const name = line.key
        ? make("button", { type: "button", className: "fold", ariaExpanded: String(unfolded.has(line.key)), "data-key": line.key }, line.label)
        : line.label;
      const place = (dtype) => (line.line.has(dtype) ? mapCell(line, operation, dtype, line.line.get(dtype)) : make("td"));
      return make("tr", {}, make("th", { scope: "row", className: line.member ? "member" : "", title: line.label }, name), ...dtypes.map(place));
    });
    return make("tbody", {}, title, ...rows);
  });
  const corner = make("td", { className: "corner" }, "operation, recipe \\ dtype");
  const table = make("table", { className: "verdicts" }, make("thead", {}, make("tr", {}, corner, ...head)), ...bodies);
  const first = table.querySelector("td button");
  if (first) first.tabIndex = 0;
  roving(table, "td button", mapStep);
  document.getElementById("heat-map").replaceChildren(table);
  markChosen();
}

/** The button that an arrow key reaches: to the right and left in reading order, up and down in the same column. */
function mapStep(key, at, items) {
  if (key === "ArrowRight") return at + 1;
  if (key === "ArrowLeft") return at - 1;
  if (key !== "ArrowDown" && key !== "ArrowUp") return -1;
  const { cellIndex } = items[at].parentElement;
  const column = items.filter((item) => item.parentElement.cellIndex === cellIndex);
  const next = column[column.indexOf(items[at]) + (key === "ArrowDown" ? 1 : -1)];
  return next ? items.indexOf(next) : -1;
}

/** Dim the cells without a case that the filter shows. */
function markChosen() {
  const shown = new Set(chosen);
  for (const [button, rows] of cells) button.classList.toggle("outside", !rows.some((row) => shown.has(row)));
}

document.getElementById("heat-map").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { key, words: asked } = button.dataset;
  if (key) {
    if (!unfolded.delete(key)) unfolded.add(key);
    drawHeatMap();
    document.querySelector(`.fold[data-key="${CSS.escape(key)}"]`)?.focus();
    return;
  }
  Object.assign(state, { words: state.words === asked ? "" : asked, verdicts: null, group: "", case: "", backend: "" });
  keep();
  show();
});
