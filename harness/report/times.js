// Time per case: how the times lie, and the slowest.

const SLOWEST = 25;

function drawTimes() {
  const rows = Array.from({ length: data.rows }, (_, row) => row).filter((row) => typeof cell("seconds", row) === "number");
  const place = document.getElementById("times-body");
  if (!rows.length) {
    place.replaceChildren(make("p", {}, "No time was measured."));
    return;
  }
  const sum = (name) => rows.reduce((total, row) => total + (cell(name, row) ?? 0), 0);
  const spent = make("p", {}, `Kernels took ${seconds(sum("seconds"))} in ${plural(rows.length, "case")}, the reference ${seconds(sum("seconds_reference"))}.`);
  place.replaceChildren(spent, make("div", { className: "finding" }, octaves(rows), slowest(rows)));
}

/** Cases by time: a bar for each doubling. */
function octaves(rows) {
  const counts = new Map();
  for (const row of rows) {
    const octave = Math.max(-20, Math.floor(Math.log2(Math.max(cell("seconds", row), 1e-9))));
    counts.set(octave, (counts.get(octave) ?? 0) + 1);
  }
  const [low, high] = [Math.min(...counts.keys()), Math.max(...counts.keys())];
  const lines = [];
  const edge = (octave) => seconds(Number((2 ** octave).toPrecision(2)));
  for (let octave = low; octave <= high; octave++) {
    lines.push([`${edge(octave)} to ${edge(octave + 1)}`, counts.get(octave) ?? 0, "time", false]);
  }
  return bars("cases by the time of the kernel", lines);
}

function slowest(rows) {
  const total = (row) => cell("seconds", row) + (cell("seconds_reference", row) ?? 0);
  const shown = [...rows].sort((a, b) => total(b) - total(a)).slice(0, SLOWEST);
  const most = total(shown[0]) || 1;
  const lines = shown.map((row) => {
    const [kernel, reference] = [cell("seconds", row), cell("seconds_reference", row) ?? 0];
    const widths = [kernel, reference].map((time) => (200 * time) / most);
    const bar = shape("svg", { width: 200, height: 11, "aria-hidden": "true" });
    bar.append(shape("rect", { class: "time", width: widths[0], height: 11 }));
    bar.append(shape("rect", { class: "time-reference", x: widths[0], width: widths[1], height: 11 }));
    const link = make("a", { href: `#${new URLSearchParams({ case: cell("case", row) })}` }, cell("case", row));
    const figures = [kernel, reference].map((time) => make("td", { className: "number" }, seconds(time)));
    return make("tr", {}, make("td", { className: "case" }, link), ...figures, make("td", {}, bar));
  });
  const head = ["slowest cases", "kernel", "reference", ""].map((label) => make("th", { scope: "col" }, label));
  return make("div", { className: "scroll" }, make("table", { className: "slow" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
}
