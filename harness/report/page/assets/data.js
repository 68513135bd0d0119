// What the page shows, and what of it its address asks for. An error anywhere is written where a test can read it.

addEventListener("error", (event) => (document.documentElement.dataset.error = event.message));
addEventListener("unhandledrejection", (event) => (document.documentElement.dataset.error = String(event.reason)));
addEventListener("securitypolicyviolation", (event) => (document.documentElement.dataset.error = event.violatedDirective));

const data = JSON.parse(document.getElementById("records").textContent);
const columns = Object.fromEntries(data.columns.map((column) => [column.name, column]));

for (const column of data.columns) {
  if (column.digits) column.values = column.digits.match(/.{16}/g).map((digest) => (/[^0]/.test(digest) ? digest : ""));
  if (column.values.length === 1) column.at = new Uint8Array(data.rows);
  if (column.runs) column.at = column.runs.flatMap((place, n) => (n % 2 ? [] : Array(column.runs[n + 1]).fill(place)));
}
columns.case.values = Array.from({ length: data.rows }, (_, row) => cell("case", row).replace("\0", () => placeOf(row)));
delete columns.case.at;

/** Begin of a case id: ids are kept without the parts that have columns of their own. */
function placeOf(row) {
  return ["operation", "recipe", "shape", "dtype"].map((name) => cell(name, row)).filter(Boolean).join("/");
}

/** A value of a record; null where it was not measured. A column has all values, or places among different ones. */
function cell(name, row) {
  const { values, at } = columns[name];
  return values[at ? at[row] : row];
}

/** The line that runs a case again: lines are kept without the id, which most of them share. */
function reproduction(row) {
  return cell("line", row).replace("\0", () => cell("case", row));
}

const state = {};

function read() {
  const asked = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, {
    words: asked.get("words") ?? "",
    verdicts: asked.has("verdicts") ? asked.get("verdicts").split(",") : null,
    sort: asked.get("sort") ?? "",
    descending: asked.get("order") === "descending",
    group: asked.get("group") ?? "",
    case: asked.get("case") ?? "",
    backend: asked.get("backend") ?? "",
  });
}

/** Put the state into the address, so that it can be sent and comes back. */
function keep() {
  const asked = new URLSearchParams();
  const { verdicts, descending, ...plain } = state;
  for (const [name, value] of Object.entries(plain)) if (value) asked.set(name, value);
  if (verdicts) asked.set("verdicts", verdicts.join(","));
  if (descending) asked.set("order", "descending");
  const hash = asked.toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}
