// Figures over the latest runs with the page's backend, device and tier, from the history of runs.

const HISTORY_ROWS = 16; // rows of operations and recipes
const ULP_LEVELS = [0, 1, 10, 100, 1e6]; // a colour for each: more than so many ulp
const ULP_WORDS = ["1", "2 to 10", "11 to 100", "101 to 1e6", "more"];

/** Operations, recipes and dtypes of the filtered cases; of the whole history without a filter. */
function chosenPlaces() {
  const { places } = data.history;
  if (chosen.length === data.rows) return places;
  const key = (...names) => names.join("\t");
  const shown = new Set(chosen.map((row) => key(cell("operation", row), cell("recipe", row), cell("dtype", row))));
  return places.filter(({ operation, recipe, dtype }) => shown.has(key(operation, recipe, dtype)));
}

function runWords({ commit, dirty, time, seed }) {
  return `${commit || "no commit"}${dirty ? " with uncommitted changes" : ""}, ${time.slice(0, 16).replace("T", " ")} UTC, seed ${seed}`;
}

/** The scale of runs. Labels are commits, as many as have room. */
function runScale(shown, margin) {
  const room = Math.max(300, Math.min(document.getElementById("plots").clientWidth, 1100)) - margin - 16;
  const step = Math.ceil((15 * shown.length) / room);
  const label = (n) => `${(data.history.runs[n].commit || "none").slice(0, 7)}${data.history.runs[n].dirty ? "*" : ""}`;
  // The latest run always has its label.
  const ticks = shown.filter((_, n) => (shown.length - 1 - n) % step === 0);
  return { type: "point", domain: shown, ticks, tickFormat: label, tickRotate: -90, label: "commit of the run →", labelAnchor: "center", labelOffset: 84, padding: 0.5 };
}

function runPlot(shown, height, marginLeft, options) {
  return plotStyle({ marginLeft, marginBottom: 92, x: runScale(shown, marginLeft), ...options }, height + 120);
}

function failedByRun(runs, same) {
  const words = (r) => `${runWords(r)}\n${figure(r.failed)} of ${plural(r.cases, "case")} failed`;
  const svg = runPlot(runs.map(({ n }) => n), 110, 56, {
    y: { label: "↑ failed cases", grid: true, ticks: 4, tickFormat: "~s", domain: [0, Math.max(1, d3.max(runs, (r) => r.failed))] },
    marks: [
      Plot.ruleX(runs, { x: "n", y1: 0, y2: "failed", stroke: "var(--fail)", strokeWidth: 3, strokeOpacity: 0.6 }),
      Plot.ruleY([0], { stroke: "var(--soft)" }),
      Plot.dot(runs, { x: "n", y: "failed", r: 4, fill: (r) => (same(r) ? (r.failed ? "var(--fail)" : "var(--pass)") : "var(--page)"), stroke: (r) => (r.failed ? "var(--fail)" : "var(--pass)"), title: words, tip: true }),
    ],
  });
  const some = runs.some((r) => !same(r)) ? " Circle: a run with another number of cases than the latest." : "";
  return plotted("Failed cases by run", `Cases that did not pass and were neither unsupported nor known failures.${some}`, svg);
}

/** A square for each operation, recipe and run. */
function ulpByRun(places, runs) {
  const name = ({ operation, recipe }) => [operation, recipe].filter(Boolean).join(" ");
  const largest = new Map();
  for (const entry of places) {
    for (const { n } of runs) {
      if (entry.ulp[n] === null) continue;
      const key = JSON.stringify([name(entry), n]);
      largest.set(key, Math.max(largest.get(key) ?? 0, entry.ulp[n]));
    }
  }
  const all = [...largest].map(([key, ulp]) => ({ name: JSON.parse(key)[0], n: JSON.parse(key)[1], ulp }));
  const wrong = d3.rollup(all, (entries) => d3.max(entries, ({ ulp }) => ulp), (entry) => entry.name);
  const names = [...wrong].filter(([, ulp]) => ulp).sort(([a, x], [b, y]) => y - x || bySize(a, b)).map(([label]) => label);
  if (!names.length) return make("p", {}, "No run has a wrong element with a distance in ulp.");
  const kept = names.slice(0, HISTORY_ROWS).sort(bySize);
  const margin = labelMargin(kept);
  const squares = all.filter((entry) => kept.includes(entry.name));
  const level = (ulp) => ULP_LEVELS.findLastIndex((least) => ulp > least);
  const fill = ({ ulp }) => (ulp ? `var(--heat${level(ulp) + 1})` : "var(--pass-ground)");
  const words = (s) => `${s.name}: ${s.ulp ? `largest distance ${figure(s.ulp)} ulp` : "no wrong element"}\n${runWords(data.history.runs[s.n])}`;
  const svg = runPlot(runs.map(({ n }) => n), 20 * kept.length, margin, {
    x: { ...runScale(runs.map(({ n }) => n), margin), type: "band", padding: 0 },
    y: { domain: kept, label: null, tickFormat: shorten(margin) },
    marks: [Plot.cell(squares, { x: "n", y: "name", fill, inset: 0.5, title: words, tip: true })],
  });
  const swatch = (color) => shape("svg", { width: 12, height: 12, "aria-hidden": "true" }, shape("rect", { width: 12, height: 12, class: color }));
  const key = make("p", { className: "legend" }, make("span", {}, "ulp:"), make("span", {}, swatch("none"), " none wrong"),
    ...ULP_WORDS.map((range, n) => make("span", {}, swatch(`level${n + 1}`), ` ${range}`)));
  const left = names.length - kept.length;
  const note = `Steps (ulp) of the element's own format: the largest of the cases of an operation and recipe. Only rows with a wrong element in a run${left ? `; ${plural(left, "more row")} left out` : ""}. No square: the run has no such case.`;
  return plotted("Largest distance of a wrong element by run", note, key, svg);
}

/** A line for each GEMM operation: a change of a passing kernel shows here. */
function budgetByRun(places, runs) {
  const points = [...d3.group(places, ({ operation }) => operation)].flatMap(([operation, entries]) =>
    runs.map(({ n, ...run }) => ({ ...run, n, operation, budget: d3.max(entries, (entry) => entry.budget[n]) })).filter(({ budget }) => typeof budget === "number"));
  if (!points.length) return null;
  const scale = colorScale(points.map(({ operation }) => operation));
  const color = ({ operation }) => scale.range[scale.domain.indexOf(operation)];
  const over = points.some(({ budget }) => budget > 1);
  const y = ({ budget }) => Math.min(budget, OUTSIDE);
  const svg = runPlot(runs.map(({ n }) => n), 130, 56, {
    y: { label: "↑ error / proved bound", domain: [0, over ? OUTSIDE : 1.05], ticks: [0, 0.5, 1], grid: true },
    marks: [
      Plot.ruleY([1], { stroke: "var(--text)", strokeDasharray: "5 4" }),
      Plot.line(points, { x: "n", y, z: "operation", stroke: color, strokeWidth: 1.5 }),
      Plot.dot(points, { x: "n", y, r: 3.5, fill: color, title: (p) => `${p.operation}: ${figure(p.budget)} of the bound\n${runWords(p)}`, tip: true }),
    ],
  });
  return plotted("Largest error of GEMM outputs by run", `Share of the proved bound, the largest of all cases of an operation. Above 1 a kernel is wrong${over ? `; larger errors are drawn at ${OUTSIDE}` : ""}.`, legend(scale, "operation:"), svg);
}

function secondsByRun(runs, same) {
  const words = (r) => `${runWords(r)}\n${seconds(r.seconds)} for ${plural(r.all, "case")}`;
  const svg = runPlot(runs.map(({ n }) => n), 110, 56, {
    y: { label: "↑ seconds", grid: true, ticks: 4, zero: true },
    marks: [
      Plot.ruleY([0], { stroke: "var(--soft)" }),
      Plot.line(runs.filter(same), { x: "n", y: "seconds", stroke: "var(--c1)", strokeWidth: 1.5 }),
      Plot.dot(runs, { x: "n", y: "seconds", r: 3.5, stroke: "var(--c1)", fill: (r) => (same(r) ? "var(--c1)" : "var(--page)"), title: words, tip: true }),
    ],
  });
  return plotted("Time by run", "Wall-clock seconds of the whole run; the filter does not apply. Full dots and the line: runs with as many cases as the latest.", svg);
}

function drawHistory() {
  const box = document.getElementById("history-plots");
  if (!box) return;
  const places = chosenPlaces();
  const sum = (entries, name, n) => d3.sum(entries, (entry) => entry[name][n] ?? 0);
  const counted = data.history.runs.map((run, n) => ({ ...run, n, all: sum(data.history.places, "cases", n), cases: sum(places, "cases", n), failed: sum(places, "failed", n) }));
  const runs = counted.filter(({ cases }) => cases);
  if (!runs.length) {
    box.replaceChildren(make("p", {}, "No earlier run has such cases."));
    return;
  }
  const same = (name) => (run) => run[name] === runs[runs.length - 1][name];
  const parts = [failedByRun(runs, same("cases")), ulpByRun(places, runs), budgetByRun(places, runs), secondsByRun(runs, same("all"))];
  box.replaceChildren(...parts.filter(Boolean));
}
