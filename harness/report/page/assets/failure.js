// The first-failure view: what a kernel engineer wants to see of a case, in that order.

const SPECIAL = {
  nan: "NaN", inf: "Inf", negative_zero: "−0", saturated: "saturated", subnormal: "subnormal", no_code: "no code",
};

/** Everything known of a case: for a failure the cause, then the pattern if there is one, then the rest. */
function failure(row) {
  const found = data.failures[row];
  const parts = [make("p", { className: "sentence" }, found?.sentence ?? cell("message", row) ?? "")];
  if (found) {
    const patterns = found.patterns.map((line) => make("p", { className: "explanation pattern" }, line));
    parts.unshift(...found.causes.map((line) => make("p", { className: "explanation" }, line)), ...patterns);
  }
  parts.push(command(reproduction(row)));
  if (found) {
    if (found.known) parts.push(make("p", {}, `known: ${found.known}`));
    if (found.baseline) parts.push(make("p", {}, `baseline: ${found.baseline}`));
    parts.push(...found.findings.map((one, place) => findingView(one, place === 0, found.patterns.length > 0)));
    parts.push(...found.saved.map(labelled));
  } else if (cell("verdict", row) !== "pass") {
    parts.push(make("p", { className: "hint" }, "Its figures are left out, to keep this page small: the command above shows them."));
  }
  parts.push(...(data.notes[row] ?? []).map((line) => make("p", { className: "note" }, line)));
  parts.push(stagesView(row));
  const budget = found?.budget ?? cell("budget_histogram", row)?.split(" ").filter(Boolean).map(Number) ?? [];
  parts.push(make("div", { className: "finding" }, budgets(budget), found && sweep(found.sweep)));
  parts.push(definitions("figures", found?.figures ?? passFigures(row)), definitions("figures", caseTimes(row)));
  return make("div", { className: "failure" }, ...parts.filter(Boolean));
}

function definitions(className, entries) {
  const items = entries.filter(([, value]) => value).map(([label, value]) => make("div", {}, make("dt", {}, label), make("dd", {}, value)));
  return items.length ? make("dl", { className }, ...items) : null;
}

/** The judged stages: what was compared, by which rule, and the result. */
function stagesView(row) {
  const counted = (cell("counts", row) ?? "").split(" ").map((counts) => Object.assign(Array(5).fill("0"), counts.split(",").map((count) => count || "0")));
  const lines = (cell("stages", row) ?? "").split("\n").filter(Boolean).map((line, n) => [...line.split("\t"), ...counted[n]]);
  if (!lines.length) return null;
  const head = ["stage", "compared how", "compared", "wrong", "other roundings accepted", "largest distance, steps", "without a bound"];
  const body = lines.map(([stage, rule, ...counts]) =>
    make("tr", {}, make("th", { scope: "row" }, `${Number(counts[1]) ? data.glyphs.fail : data.glyphs.pass} ${stage}`),
      make("td", {}, rule), ...counts.map((count, n) => make("td", { className: "number" }, n === 3 ? ulps(Number(count)) : figure(Number(count))))),
  );
  const table = make("table", { className: "stages" },
    make("thead", {}, make("tr", {}, ...head.map((name, n) => make("th", { scope: "col", className: n > 1 ? "number" : "" }, name)))),
    make("tbody", {}, ...body));
  return make("div", { className: "scroll" }, table);
}

function passFigures(row) {
  const db = cell("sqnr_db", row);
  return [
    ["largest error / proved bound", compact(cell("budget_max", row))],
    ["accepted interval, widest", unit(cell("interval_ulps_max", row), "ulp")],
    ["accepted interval, mean", unit(cell("interval_ulps_mean", row), "ulp")],
    ["SQNR against the reference", unit(db, "dB")],
  ];
}

function unit(value, name) {
  return value === null ? "" : `${compact(value)} ${name}`;
}

function caseTimes(row) {
  const times = (cell("times", row) ?? "").split(" ");
  const labels = { total: "time of the case", core: "processor time" };
  return [
    ["first call of the kernel", seconds(cell("seconds", row))],
    ...data.times.map((part, n) => [labels[part] ?? `time of ${part}`, times[n] ? seconds(Number(times[n])) : ""]),
    ["digest of inputs", cell("input_digest", row)],
    ["digest of results", cell("output_digest", row)],
  ];
}

function findingView(found, first, pattern) {
  const head = found.stage + (found.rule ? ` (${found.rule})` : "");
  const heading = first ? [] : [make("h4", {}, head), make("p", {}, found.sentence)];
  // One wrong element has a place, and no pattern.
  const total = found.heat ? found.heat.counts.flat().reduce((sum, count) => sum + count, 0) : 0;
  const where = total > 1 ? [heatMap(found.heat, found.bands), ...(pattern ? Object.entries(found.modulo).map(([axis, by]) => axisView(axis, by)) : [])] : [];
  const figures = [
    found.elements.length ? elements(found) : null,
    where.length ? make("div", { className: "where" }, ...where) : null,
    found.table.rows ? elementTable(found.table) : null,
    found.steps.length ? make("div", {}, steps(found.steps), census(found.census)) : null,
  ];
  return make("section", {}, ...heading, make("div", { className: "finding" }, ...figures));
}

function elements({ keys, elements: shown, which }) {
  const head = make("tr", {}, make("th", { scope: "col" }, "element"), ...which.map((name) => make("th", { scope: "col" }, name)));
  const rows = keys.map((key, n) =>
    make("tr", {}, make("th", { scope: "row" }, key), ...shown.map((values) => make("td", {}, values[n]))),
  );
  return make("div", { className: "scroll" }, make("table", { className: "elements" }, make("thead", {}, head), make("tbody", {}, ...rows)));
}

/** The elements around the first wrong one, as `narrowgauge show` prints them. */
function elementTable({ title, rows: [headings, ...rows], different }) {
  const row = (tag, cells, properties) => make("tr", properties, ...cells.map((words) => make(tag, tag === "th" ? { scope: "col" } : {}, words)));
  const body = rows.map((cells, n) => row("td", cells, { className: different.includes(n + 1) ? "differs" : "" }));
  const table = make("table", { className: "elements around" }, make("thead", {}, row("th", headings, {})), make("tbody", {}, ...body));
  return captioned(`${title}\nbold: the numbers are different`, make("div", { className: "scroll" }, table));
}

function heatMap({ rows, columns, counts }, bands) {
  const down = counts.length;
  const across = Math.max(...counts.map((line) => line.length));
  const side = Math.max(6, Math.min(20, Math.floor(360 / Math.max(down, across))));
  const most = Math.max(...counts.flat());
  const span = (index, size) => (size === 1 ? `${index}` : `${index * size}–${(index + 1) * size - 1}`);
  // Bars before the first row or column mark the rows or columns of a period.
  const marks = bands.flatMap(([axis, low, high, period]) => {
    const [pixels, length] = axis === "row" ? [side / rows, side * down] : [side / columns, side * across];
    const bar = 5;
    if ((high - low + 1) * pixels < 2) return [];
    return d3.range(low * pixels, length, period * pixels).map((start) => {
      const extent = Math.min((high - low + 1) * pixels, length - start);
      const box = axis === "row" ? { x: -bar - 2, y: start, width: bar, height: extent } : { x: start, y: -bar - 2, width: extent, height: bar };
      return shape("rect", { class: "band", ...box });
    });
  });
  const margin = marks.length ? 9 : 0;
  const box = [-margin, -margin, side * across + margin, side * down + margin];
  const map = shape("svg", { class: "heat", viewBox: box.join(" "), width: box[2], height: box[3], role: "img" }, ...marks);
  map.append(shape("rect", { class: "level0", width: side * across, height: side * down }));
  const levelOf = (count) => Math.ceil((5 * count) / most);
  let worst = "";
  counts.forEach((line, row) =>
    line.forEach((count, column) => {
      if (!count) return;
      const words = `rows ${span(row, rows)}, columns ${span(column, columns)}: ${figure(count)} wrong`;
      if (count === most && !worst) worst = words;
      map.append(titled("rect", { class: `level${levelOf(count)}`, x: side * column, y: side * row, width: side, height: side }, words));
    }),
  );
  map.setAttribute("aria-label", `heat map of wrong elements; the most in ${worst}`);
  const periods = marks.length ? ` Bars at the edge: ${bands.map(([axis, low, high, period]) => `${axis}s ${low} to ${high} of every ${period}`).join("; ")}.` : "";
  const square = rows * columns === 1 ? "one element" : `${plural(rows, "row")} × ${plural(columns, "column")}`;
  const words = `wrong elements, rows down, columns across; a square is ${square}. Most: ${worst}.${periods}`;
  return captioned(words, map, heatLegend(counts.flat(), levelOf));
}

/** A swatch for each level that occurs, with its counts of wrong elements in a square. */
function heatLegend(counts, levelOf) {
  const levels = d3.rollup(counts, (some) => d3.extent(some), (count) => (count ? levelOf(count) : 0));
  const items = [...levels].sort(([a], [b]) => a - b).map(([level, [low, high]]) => {
    const swatch = shape("svg", { width: 12, height: 12, "aria-hidden": "true" }, shape("rect", { width: 12, height: 12, class: `level${level}` }));
    return make("span", {}, swatch, ` ${low === high ? figure(low) : `${figure(low)} to ${figure(high)}`}`);
  });
  return make("p", { className: "legend" }, make("span", {}, "wrong in a square:"), ...items);
}

/** Uneven counts modulo 16, 32 and 128 of rows or columns, with the residues in words. */
function axisView(axis, by) {
  const divisors = Object.keys(by).sort((a, b) => a - b);
  return make("div", { className: "axis" }, ...divisors.map((divisor) => residues(axis, divisor, by[divisor])));
}

function residues(axis, divisor, counts) {
  const hit = counts.flatMap((count, residue) => (count ? [residue] : []));
  let which = `${hit.length} of ${counts.length} residues`;
  if (hit.length === counts.length) which = "every residue";
  else if (hit.length <= 8) which = hit.length ? `only ${hit.join(", ")}` : "none";
  const width = Math.max(2, Math.min(12, Math.floor(256 / divisor)));
  const most = Math.max(1, ...counts);
  const words = `${axis} modulo ${divisor}: ${which}`;
  const chart = shape("svg", { width: width * counts.length, height: 44, role: "img", "aria-label": words });
  chart.append(shape("rect", { class: "ground", y: 43, width: width * counts.length, height: 1 }));
  for (const residue of hit) {
    const height = Math.ceil((40 * counts[residue]) / most);
    const place = { x: width * residue, y: 43 - height, width: width - (width > 3 ? 1 : 0), height };
    chart.append(titled("rect", { class: "bar", ...place }, `${axis} % ${divisor} = ${residue}: ${figure(counts[residue])} wrong`));
  }
  return captioned(words, chart);
}

function steps(histogram) {
  return bars("elements by actual minus expected, in steps", histogram.map(([order, words, count]) => [words.replaceAll("-", "−"), count, "bar", order === 0]));
}

function census(found) {
  if (!found.expected) return captioned("special values", make("p", {}, "no NaN, Inf, −0, saturated or subnormal number on either side"));
  const names = Object.keys(SPECIAL).filter((name) => name !== "no_code" || name in found.expected);
  const sides = ["expected", "actual"].map((side) =>
    make("tr", {}, make("th", { scope: "row" }, side), ...names.map((name) => {
      const differs = (found.expected[name] ?? 0) !== (found.actual[name] ?? 0);
      return make("td", { className: differs ? "number differs" : "number" }, figure(found[side][name] ?? 0));
    })),
  );
  const head = make("tr", {}, make("td"), ...names.map((name) => make("th", { scope: "col" }, SPECIAL[name])));
  return captioned("special values; bold where the sides differ", make("table", { className: "census" }, make("thead", {}, head), make("tbody", {}, ...sides)));
}

function budgets(counts) {
  if (!counts.length) return null;
  const label = (n) => (n === counts.length - 1 ? "above 1" : `${figure(n / 10)} to ${figure((n + 1) / 10)}`);
  const rows = counts.map((count, n) => [label(n), count, n === counts.length - 1 ? "bar over" : "bar inside-bound", false]);
  return bars("outputs by share of the proved budget that they use", rows.filter(([, count], n) => count || n === counts.length - 1));
}

function sweep(shares) {
  if (!shares.length) return null;
  const row = (tag, place) => make("tr", {}, ...shares.map((pair) => make(tag, tag === "th" ? { scope: "col" } : {}, pair[place])));
  return captioned(
    "values within a relative distance of the reference's (for information)",
    make("table", { className: "sweep" }, make("thead", {}, row("th", 0)), make("tbody", {}, row("td", 1))),
  );
}
