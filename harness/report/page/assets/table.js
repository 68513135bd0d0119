// The table of all cases: rows are made as one scrolls, so that 20 000 cases open at once.

const CHUNK = 100;
const FIGURES = { seconds, max_ulp: ulps, budget_max: compact };
const words = document.getElementById("words");
const boxes = [...document.querySelectorAll("input[name=verdict]")];
const frame = document.getElementById("frame");
const body = frame.querySelector("tbody");
const more = document.getElementById("more");
const shownColumns = data.columns.filter((column) => column.label);
const haystack = Array.from({ length: data.rows }, () => "");
for (const column of shownColumns.filter(({ numeric }) => !numeric)) {
  const lower = column.values.map((value) => value.toLowerCase());
  for (let row = 0; row < data.rows; row++) haystack[row] += `${lower[column.at ? column.at[row] : row]} `;
}
let chosen = [];
let rendered = 0;

// What was not measured sorts last, whichever the direction.
function ordered(name, descending) {
  const rank = Object.fromEntries(data.severity.map((verdict, place) => [verdict, place]));
  const { numeric } = columns[name];
  const key = (row) => {
    const value = cell(name, row);
    if (value === null || value === "NaN") return null;
    return name === "verdict" ? rank[value] : numeric ? Number(value) : value;
  };
  const keys = new Map(chosen.map((row) => [row, key(row)]));
  chosen.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    const order = x < y ? -1 : x > y ? 1 : 0;
    return (descending ? -order : order) || a - b;
  });
}

function select() {
  const wanted = state.words.toLowerCase().split(/\s+/).filter(Boolean);
  const group = state.group === "" ? null : Number(state.group);
  chosen = [];
  for (let row = 0; row < data.rows; row++) {
    if (state.verdicts && !state.verdicts.includes(cell("verdict", row))) continue;
    if (group !== null && cell("group", row) !== group) continue;
    if (wanted.every((word) => haystack[row].includes(word))) chosen.push(row);
  }
  if (state.sort in columns) ordered(state.sort, state.descending);
  body.replaceChildren();
  rendered = 0;
  extend();
  redraw();
  document.getElementById("shown").textContent = `${figure(chosen.length)} of ${plural(data.rows, "case")}`;
}

function extend() {
  const lines = chosen.slice(rendered, rendered + CHUNK).map(line);
  if (!rendered && lines.length) opener(lines[0]).tabIndex = 0;
  body.append(...lines);
  rendered = Math.min(rendered + CHUNK, chosen.length);
  more.hidden = rendered === chosen.length;
}

function line(row) {
  const cells = shownColumns.map(({ name, numeric }) => {
    const value = cell(name, row);
    if (name === "verdict") return make("td", {}, make("span", { className: `badge ${value}` }, `${data.glyphs[value]} ${value}`));
    if (name === "case") return make("td", { className: "case" }, make("button", { type: "button", tabIndex: -1, ariaExpanded: "false" }, ...breakable(value)));
    if (numeric) return make("td", { className: "number" }, (FIGURES[name] ?? figure)(value));
    // The whole message is shown where the case is opened.
    return make("td", { className: name }, make("div", { className: "clamp" }, value));
  });
  return make("tr", { "data-row": row }, ...cells);
}

function opener(tr) {
  return tr.querySelector(".case button");
}

/** Show what is known of a case below its row, or hide it. */
function toggle(tr, open = opener(tr).ariaExpanded === "false") {
  opener(tr).ariaExpanded = String(open);
  if (tr.nextSibling?.className === "opened") tr.nextSibling.remove();
  if (open) {
    const row = Number(tr.dataset.row);
    const inside = make("td", { colSpan: shownColumns.length }, make("div", { className: "inside" }, failure(row), sameWay(row)));
    tr.after(make("tr", { className: "opened" }, inside));
    reachScrollers();
  }
  state.case = open ? cell("case", Number(tr.dataset.row)) : "";
  state.backend = open && columns.backend.values.length > 1 ? cell("backend", Number(tr.dataset.row)) : "";
  keep();
}

/** Open the case that the address names, wherever in the table it is. */
function openNamed() {
  const named = (row) => cell("case", row) === state.case && (!state.backend || cell("backend", row) === state.backend);
  const place = chosen.findIndex(named);
  document.documentElement.dataset.case = place < 0 ? "missing" : "open";
  if (place < 0) return;
  while (rendered <= place) extend();
  const tr = body.querySelector(`tr[data-row="${chosen[place]}"]`);
  toggle(tr, true);
  opener(tr).focus({ preventScroll: true });
  frame.scrollIntoView({ block: "start" });
  frame.scrollTop = tr.offsetTop - frame.querySelector("thead").offsetHeight;
}

function sameWay(row) {
  const group = cell("group", row);
  const size = group === null ? 0 : data.groups[group];
  if (size < 2) return null;
  return make("p", {}, make("a", { href: `#group=${group}` }, `${plural(size, "case")} fail in this way`));
}

const heads = shownColumns.map(({ name, label, numeric }) => {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", () => {
    // Figures are looked at from the largest down.
    state.descending = state.sort === name ? !state.descending : Boolean(numeric);
    state.sort = name;
    keep();
    show();
  });
  return make("th", { scope: "col", className: numeric ? "number" : "", "data-name": name }, button);
});
frame.querySelector("thead tr").append(...heads);

body.addEventListener("click", (event) => {
  const button = event.target.closest(".case button");
  if (button) toggle(button.closest("tr"));
});
body.addEventListener("focusin", (event) => {
  if (!event.target.matches(".case button")) return;
  body.querySelectorAll('.case button[tabindex="0"]').forEach((button) => (button.tabIndex = -1));
  event.target.tabIndex = 0;
});
roving(body, ".case button", (key, at, items) => {
  if (at === items.length - 1 && key === "ArrowDown") extend();
  return key === "ArrowDown" ? at + 1 : key === "ArrowUp" ? at - 1 : -1;
});
words.form.addEventListener("submit", (event) => event.preventDefault());
words.form.addEventListener("input", () => {
  state.words = words.value;
  const verdicts = boxes.filter((box) => box.checked).map((box) => box.value);
  state.verdicts = verdicts.length === boxes.length ? null : verdicts;
  keep();
  select();
});
document.getElementById("ungroup").addEventListener("click", () => {
  state.group = "";
  keep();
  show();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input[type=search]");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    words.focus();
    words.select();
  } else if (event.key === "ArrowDown" && typing) {
    event.preventDefault();
    body.querySelector(".case button")?.focus();
  }
});
more.addEventListener("click", extend);
new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && extend(), { root: frame, rootMargin: "400px" }).observe(more);

/** The whole table as the state wants it. */
function show() {
  words.value = state.words;
  boxes.forEach((box) => (box.checked = !state.verdicts || state.verdicts.includes(box.value)));
  document.getElementById("grouped").hidden = state.group === "";
  document.getElementById("group-number").textContent = state.group === "" ? "" : `failing group ${Number(state.group) + 1} only`;
  for (const head of heads) {
    if (head.dataset.name === state.sort) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  select();
  if (state.case) openNamed();
}
