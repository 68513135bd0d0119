// Time per case: how the times of kernels lie.

function drawTimes() {
  const rows = Array.from({ length: data.rows }, (_, row) => row).filter((row) => typeof cell("seconds", row) === "number");
  const place = document.getElementById("times-body");
  if (!rows.length) {
    place.replaceChildren(make("p", {}, "No time was measured."));
    return;
  }
  place.replaceChildren(octaves(rows));
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
