// Plots of error and tolerance of the filtered cases, by Observable Plot.

const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const OUTSIDE = 1.25; // share of the proved bound at which larger errors are drawn
const MOST_LABELS = 40; // rows of a dot plot
const theory = (mantissa) => -10 * Math.log10(2 * 0.18 * 4 ** -(mantissa + 1));

/** dtype of the results: of `bf16xbf16-fp32` the part after the hyphen. */
function outDtype(row) {
  return cell("dtype", row).split("-").pop() || "no dtype";
}

/** K of a GEMM's shape MxKxN, else null. */
function depth(row) {
  const sizes = cell("shape", row).split("x").map(Number);
  return cell("operation", row).startsWith("gemm") && sizes.length === 3 && sizes[1] > 0 ? sizes[1] : null;
}

function place(row) {
  return [cell("operation", row), cell("recipe", row)].filter(Boolean).join(" ");
}

/** Place by recipe; by family of recipes if the rows are too many. */
function placesOf(rows) {
  const fold = new Set(rows.map(place)).size > MOST_LABELS;
  return (row) => (fold ? `${cell("operation", row)} ${family(cell("recipe", row))}` : place(row));
}

/** Least, median and largest of `value` in groups of rows with equal keys; rows without a value are left out. */
function ranges(rows, keys, value) {
  const groups = d3.groups(rows.filter((row) => typeof value(row) === "number"), (row) => JSON.stringify(keys(row)));
  return groups.map(([key, members]) => {
    const values = members.map(value);
    return { ...JSON.parse(key), low: d3.min(values), middle: d3.median(values), high: d3.max(values), cases: members.length };
  });
}

function plotStyle(options, height) {
  const width = Math.max(300, Math.min(document.getElementById("plots").clientWidth, 1100));
  return Plot.plot({
    width, height, className: "plot", marginTop: 28, marginBottom: 42, marginRight: 16,
    style: { background: "transparent", color: "var(--text)", fontSize: "12px" }, ...options,
  });
}

const ink = document.createElement("canvas").getContext("2d");

/** Pixels of a label in the font of the plots. */
function labelWidth(label) {
  ink.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return ink.measureText(label).width;
}

/** Margin for the longest label, at most 46 % of the width; longer labels end in an ellipsis. */
function labelMargin(labels) {
  const width = document.getElementById("plots").clientWidth;
  return Math.ceil(Math.min(0.46 * width, 14 + (d3.max(labels, labelWidth) ?? 0)));
}

function shorten(margin) {
  return (label) => {
    if (labelWidth(label) <= margin - 14) return label;
    let most = label.length - 1;
    while (most > 1 && labelWidth(`${label.slice(0, most)}…`) > margin - 14) most--;
    return `${label.slice(0, most)}…`;
  };
}

function colorScale(names) {
  const domain = [...new Set(names)].sort(bySize);
  return { domain, range: domain.map((_, n) => COLORS[n % COLORS.length]) };
}

function legend(scale, words) {
  const items = scale.domain.map((name, n) => {
    const swatch = shape("svg", { width: 12, height: 12, "aria-hidden": "true" });
    swatch.append(shape("circle", { cx: 6, cy: 6, r: 5, class: `c${(n % COLORS.length) + 1}` }));
    return make("span", {}, swatch, ` ${name}`);
  });
  return make("p", { className: "legend" }, make("span", {}, words), ...items);
}

function plotted(title, note, ...children) {
  for (const child of children) if (child instanceof SVGElement) child.setAttribute("aria-label", `${title}. ${note}`);
  for (const svg of children.filter((child) => child instanceof SVGElement)) {
    svg.setAttribute("role", "img");
    // An image has one name: Plot also names its marks and axes.
    for (const part of svg.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  }
  return make("figure", { className: "plotted" }, make("h3", {}, title), make("figcaption", {}, note), ...children);
}

const cases = (entry) => plural(entry.cases, "case");

/** Radius of a dot: smaller on a narrow page, so that neighbours do not hide one another. */
function dotRadius() {
  return document.getElementById("plots").clientWidth < 600 ? 2.25 : 3.5;
}

/** The axis of K. Labels: the lengths of the points, from the largest down, as far apart as a label is wide. */
function depthScale(points) {
  const lengths = [...new Set(points.map(({ k }) => k))].sort((a, b) => b - a);
  const labels = document.getElementById("plots").clientWidth < 600 ? 5 : 12;
  const apart = Math.log2(lengths[0] / lengths.at(-1)) / labels;
  const ticks = [];
  for (const k of lengths) if (!ticks.length || Math.log2(ticks.at(-1) / k) >= apart) ticks.push(k);
  return { type: "log", base: 2, inset: 8, label: "K, length of the sum →", ticks, tickFormat: String };
}

/** Largest error of a GEMM against K, as a share of the proved bound. */
function errorByDepth(rows) {
  const points = ranges(rows.filter(depth), (row) => ({ k: depth(row), dtype: outDtype(row) }), (row) => cell("budget_max", row));
  if (!points.length) return null;
  const dtypes = [...new Set(points.map(({ dtype }) => dtype))];
  const clip = (value) => Math.min(value, OUTSIDE);
  const words = (p) => `K = ${p.k}, output ${p.dtype}\n${cases(p)}\nlargest error: ${figure(p.low)} to ${figure(p.high)} of the bound`;
  const over = points.filter(({ high }) => high > 1);
  const svg = plotStyle({
    marginLeft: 48, marginRight: 68, fy: { label: "output", padding: 0.15, domain: dtypes.sort(bySize) }, x: depthScale(points),
    y: { label: "↑ error / proved bound", domain: [0, over.length ? OUTSIDE : 1.05], ticks: [0, 0.5, 1], grid: true },
    marks: [
      Plot.rect([0], { y1: 0, y2: 1, fill: "var(--c1)", fillOpacity: 0.1 }),
      Plot.ruleY([1], { stroke: "var(--text)", strokeDasharray: "5 4" }),
      Plot.ruleX(points, { x: "k", y1: (p) => clip(p.low), y2: (p) => clip(p.high), fy: "dtype", stroke: "var(--c1)", strokeOpacity: 0.6 }),
      Plot.dot(points, { x: "k", y: (p) => clip(p.high), fy: "dtype", r: dotRadius(), fill: (p) => (p.high > 1 ? "var(--fail)" : "var(--c1)"), symbol: (p) => (p.high > 1 ? "triangle" : "circle"), title: words, tip: true }),
    ],
    symbol: { type: "identity" },
  }, 40 + 130 * dtypes.length);
  const note = "Error of a case: its largest |output − centre of the interval| over the proved half width. Dot: the largest error of all cases; line: from the smallest to the largest. "
    + `Shaded: errors that the proof allows${over.length ? `; a triangle is outside, drawn at ${OUTSIDE} at most` : ""}.`;
  return plotted("Error of GEMM outputs against K", note, svg);
}

/** Width of the accepted interval against K. */
function toleranceByDepth(rows) {
  const keys = (row) => ({ k: depth(row), dtype: outDtype(row) });
  const largest = ranges(rows.filter(depth), keys, (row) => cell("interval_ulps_max", row));
  if (!largest.length) return null;
  const means = new Map(ranges(rows.filter(depth), keys, (row) => cell("interval_ulps_mean", row)).map((p) => [`${p.k} ${p.dtype}`, p]));
  const points = largest.map((p) => ({ ...p, mean: means.get(`${p.k} ${p.dtype}`)?.middle ?? 0 }));
  const dtypes = [...new Set(points.map(({ dtype }) => dtype))].sort(bySize);
  const words = (p) => `K = ${p.k}, output ${p.dtype}\n${cases(p)}\nwidth: mean ${figure(p.mean)} ulp, widest ${figure(p.high)} ulp`;
  const svg = plotStyle({
    marginLeft: 62, marginRight: 68, fy: { label: "output", padding: 0.15, domain: dtypes }, x: depthScale(points),
    y: { type: "symlog", label: "↑ width, ulp of the output", grid: true, ticks: ulpTicks(d3.max(points, (p) => p.high)), tickFormat: short },
    marks: [
      Plot.ruleX(points, { x: "k", y1: "mean", y2: "high", fy: "dtype", stroke: "var(--c2)", strokeOpacity: 0.6 }),
      Plot.dot(points, { x: "k", y: "mean", fy: "dtype", r: dotRadius() - 0.5, stroke: "var(--c2)", fill: "var(--page)" }),
      Plot.dot(points, { x: "k", y: "high", fy: "dtype", r: dotRadius(), fill: "var(--c2)", title: words, tip: true }),
    ],
  }, 40 + 130 * dtypes.length);
  return plotted("Tolerance of GEMM outputs against K", "Width of the proved interval that any correct kernel meets, in ulp of the output dtype. Full dot: widest interval of all cases; circle: median of the cases' mean widths. A wide interval is a weak test.", svg);
}

/** Ticks of a symmetric logarithm scale with room for their labels. */
function ulpTicks(largest) {
  return largest > 1000 ? [0, 100, 1e4, 1e6, 1e8].filter((tick) => tick <= 2 * largest) : [0, 1, 10, 100, 1000].filter((tick) => tick <= 2 * Math.max(1, largest));
}

function short(value) {
  return Math.abs(value) >= 1e4 ? `1e${Math.round(Math.log10(value))}` : String(value);
}

/** Row number of a row, or of an entry of a row. */
const rowOf = (entry) => entry.row ?? entry;

/** A dot plot: a row for each operation and recipe, dot and range for each dtype. */
function dotPlot(rows, value, { title, note, x, color, clip = (v) => v, extra = () => [], of = outDtype, unit, show = "high" }) {
  const name = placesOf(rows.filter((row) => typeof value(row) === "number").map(rowOf));
  const points = ranges(rows, (entry) => ({ name: name(rowOf(entry)), series: of(entry) }), value);
  if (!points.length) return null;
  const names = [...new Set(points.map((p) => p.name))].sort(bySize);
  const margin = labelMargin(names);
  const scale = color ?? colorScale(points.map((p) => p.series));
  const series = d3.group(points, (p) => p.name);
  // The dots of a row lie around its label, in the order of the legend.
  const dodge = (p) => {
    const order = series.get(p.name).map((other) => scale.domain.indexOf(other.series)).sort(d3.ascending);
    return 5 * (order.indexOf(scale.domain.indexOf(p.series)) - (order.length - 1) / 2);
  };
  const words = (p) => `${p.name}, ${p.series}\n${cases(p)}\nsmallest ${figure(p.low)}, median ${figure(p.middle)}, largest ${figure(p.high)} ${unit}`;
  // A mark has one offset for all its dots: a mark for each offset.
  const fill = (p) => scale.range[scale.domain.indexOf(p.series)];
  const marks = [...d3.group(points, dodge)].flatMap(([dy, some]) => [
    Plot.ruleY(some, { y: "name", x1: (p) => clip(p.low), x2: (p) => clip(p.high), stroke: fill, strokeWidth: 1.5, strokeOpacity: 0.7, dy }),
    Plot.dot(some, { y: "name", x: (p) => clip(p[show]), r: dotRadius(), fill, dy }),
  ]);
  const svg = plotStyle({
    marginLeft: margin, x: { grid: true, labelAnchor: "center", labelOffset: 36, ...x }, y: { domain: names, label: null, tickFormat: shorten(margin) },
    marks: [...extra(names), ...marks, Plot.tip(points, Plot.pointerY({ y: "name", x: (p) => clip(p[show]), title: words }))],
  }, 80 + names.length * Math.max(20, 6 * scale.domain.length));
  return plotted(title, note, legend(scale, color ? "tensor:" : "dtype of the result:"), svg);
}

function errorByRecipe(rows) {
  const over = rows.some((row) => cell("budget_max", row) > 1);
  return dotPlot(rows, (row) => cell("budget_max", row), {
    title: "Error by recipe and dtype, as a share of the proved bound", unit: "of the bound",
    note: `Dot: largest error of all cases; line: from the smallest to the largest. Above 1 a kernel is wrong${over ? `; larger errors are drawn at ${OUTSIDE}` : ""}.`,
    x: { domain: [0, over ? OUTSIDE : 1.05], label: "largest error / proved bound →", ticks: [0, 0.25, 0.5, 0.75, 1], tickFormat: String },
    clip: (value) => Math.min(value, OUTSIDE),
    extra: () => [Plot.ruleX([1], { stroke: "var(--text)", strokeDasharray: "5 4" })],
  });
}

function wrongByRecipe(rows) {
  const wrong = rows.filter((row) => cell("mismatches", row));
  const largest = d3.max(wrong, (row) => cell("max_ulp", row));
  return dotPlot(wrong, (row) => cell("max_ulp", row), {
    title: "Largest distance of a wrong element, by recipe and dtype", unit: "ulp",
    note: "Steps (ulp) of the element's own format, cases with wrong elements. Dot: the largest of all cases; line: from the smallest to the largest.",
    x: { type: "symlog", domain: [0, Math.max(10, largest)], label: "distance, ulp →", ticks: ulpTicks(largest), tickFormat: short },
  });
}

/** Counts in equal bins of several rows, added. */
function added(lists) {
  return lists.reduce((sum, list) => list.map((count, n) => count + (sum[n] ?? 0)), []);
}

/** Outputs of GEMMs by the share of the bound that they use. */
function budgetHistogram(rows) {
  const groups = d3.groups(rows.filter((row) => cell("budget_histogram", row)), outDtype).sort(([a], [b]) => bySize(a, b));
  if (!groups.length) return null;
  const bins = groups.flatMap(([dtype, members]) => {
    const counts = added(members.map((row) => cell("budget_histogram", row).split(" ").map(Number)));
    const total = Math.max(1, d3.sum(counts));
    return counts.map((count, n) => ({ dtype, low: n / 10, high: (n + 1) / 10, count, share: (100 * count) / total, over: n === counts.length - 1 }));
  });
  const words = (b) => `${b.dtype}: ${b.over ? "above the bound" : `${b.low} to ${b.high} of the bound`}\n${figure(b.count)} outputs, ${figure(b.share)} %`;
  const shown = bins.filter((b) => !b.over || b.count);
  const svg = plotStyle({
    marginLeft: 48, marginRight: 68, fy: { label: "output", padding: 0.15, domain: groups.map(([dtype]) => dtype) },
    x: { label: "|output − centre| / proved bound →", ticks: [0, 0.25, 0.5, 0.75, 1], tickFormat: String }, y: { label: "↑ outputs, %", grid: true, ticks: 4 },
    marks: [
      Plot.rect(shown, { x1: "low", x2: "high", y1: 0, y2: "share", fy: "dtype", inset: 0.5, fill: (b) => (b.over ? "var(--fail)" : "var(--c1)"), title: words, tip: true }),
      Plot.ruleY([0], { stroke: "var(--soft)" }),
    ],
  }, 40 + 110 * groups.length);
  return plotted("Histogram of outputs by used share of the bound", "All compared outputs that have a bound, by dtype of the output. The last bin holds every output above the bound: a wrong output.", svg);
}

/** Elements of failing stages by signed steps from the expected value. */
function stepHistogram(rows) {
  const bins = new Map();
  let failures = 0;
  for (const row of rows) {
    const findings = data.failures[row]?.findings ?? [];
    failures += findings.some(({ steps }) => steps.length);
    for (const [order, label, count] of findings.flatMap((found) => found.steps)) {
      if (order === 0) continue;
      const bin = bins.get(order) ?? { order, label, count: 0 };
      bins.set(order, { ...bin, count: bin.count + count });
    }
  }
  if (!bins.size) return null;
  const label = (bin) => bin.label.replaceAll("-", "−");
  const sorted = [...bins.values()].sort((a, b) => a.order - b.order);
  const names = sorted.map(label);
  const svg = plotStyle({
    marginLeft: labelMargin(names), y: { domain: names, label: null },
    x: { label: "wrong elements →", labelAnchor: "center", labelOffset: 36, grid: true, ticks: 4, tickFormat: (count) => (count ? d3.format("~s")(count) : "0") },
    marks: [Plot.barX(sorted, { y: label, x: "count", fill: "var(--c2)", title: (b) => `${label(b)} steps: ${figure(b.count)} elements`, tip: true }), Plot.ruleX([0], { stroke: "var(--soft)" })],
  }, 80 + 18 * names.length);
  return plotted("Wrong elements by actual minus expected", `Bars: signed distance from the expected value in steps (ulp) of the element's format, all wrong stages of ${plural(failures, "failure")}. Elements without a difference are left out.`, svg);
}

/** SQNR of modules under a training recipe, with the theory for outputs of FP8 products. */
function sqnrByRecipe(rows) {
  const tensors = ["y", "dx", "dw"];
  const entries = rows.flatMap((row) => (cell("accuracy", row) ?? "").split(" ").map((value, n) => ({ row, tensor: tensors[n], value: Number(value || NaN) })))
    .filter(({ value }) => Number.isFinite(value));
  if (!entries.length) return null;
  // Modules with two products, a norm or an attention have no such formula, and NVFP4 rounds too coarsely for the model.
  const e4m3 = (name) => /^linear (MXFP8|Float8|Delayed)/.test(name) && !/e5m2/i.test(name);
  return dotPlot(entries, ({ value }) => value, {
    title: "SQNR by training recipe", unit: "dB", of: ({ tensor }) => tensor, show: "middle",
    color: { domain: tensors, range: COLORS.slice(0, 3) }, x: { label: "SQNR, dB →" },
    note: "Modules under the recipe against float64 of inputs that are not quantized; in no verdict. Dot: median of the cases; line: from the smallest to the largest. "
      + `Vertical mark, ${figure(theory(3))} dB: theory for y of a linear module with both operands in E4M3, −10·log₁₀(2 · 0.180 · 2^(−2p)) with p = 4 significant bits `
      + "(Widrow and Kollár, Quantization Noise, 2008, floating-point quantization; the errors of both operands are independent and add). It holds for zero-mean values far from the smallest and largest code, "
      + "so families of inputs with zeros, outliers or few values differ. No formula is drawn for NVFP4, gradients and other modules.",
    extra: (names) => [Plot.tickX(names.filter(e4m3), { x: () => theory(3), y: (name) => name, stroke: "var(--text)", strokeWidth: 2 })],
  });
}

/** Sentence on exact stages: a plot of zeros says no more. */
function exactCases(rows) {
  const exact = rows.filter((row) => cell("verdict", row) === "pass" && typeof cell("budget_max", row) !== "number");
  if (!exact.length) return null;
  return make("p", {}, `${plural(exact.length, "passing case")} without a GEMM bound: error 0 ulp, except where the rule of a stage accepts more (`, make("code", {}, "stages"), " of the case).");
}

function drawPlots() {
  const rows = chosen;
  const figures = [exactCases, errorByDepth, toleranceByDepth, errorByRecipe, wrongByRecipe, budgetHistogram, stepHistogram, sqnrByRecipe];
  const parts = figures.map((draw) => draw(rows)).filter(Boolean);
  document.getElementById("plots").replaceChildren(...(parts.length ? parts : [make("p", {}, "The selected cases have no error to plot.")]));
  drawHistory();
  reachScrollers();
}

let waiting = 0;
/** Draw what follows the filter again, once typing pauses. */
function redraw() {
  markChosen();
  clearTimeout(waiting);
  waiting = setTimeout(drawPlots, 150);
}

let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (drawnWidth === innerWidth) return;
  drawnWidth = innerWidth;
  redraw();
});
