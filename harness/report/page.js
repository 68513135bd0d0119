"use strict";
(() => {
  const CHUNK = 200;
  const { columns, rows, glyphs, severity } = JSON.parse(document.getElementById("records").textContent);
  const rank = Object.fromEntries(severity.map((verdict, place) => [verdict, place]));
  const words = document.getElementById("words");
  const boxes = [...document.querySelectorAll("input[name=verdict]")];
  const body = document.querySelector("#table tbody");
  const more = document.getElementById("more");
  const haystack = rows.map((row) => row.filter((_, i) => !columns[i].numeric).join(" ").toLowerCase());
  let chosen = [];
  let rendered = 0;
  let sorted = { column: -1, descending: false };

  // What was not measured sorts last, whichever the direction.
  function compare(a, b) {
    const { column, descending } = sorted;
    let x = rows[a][column];
    let y = rows[b][column];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    if (column === 0) [x, y] = [rank[x], rank[y]];
    else if (columns[column].numeric) [x, y] = [Number(x), Number(y)];
    const order = x < y ? -1 : x > y ? 1 : 0;
    return (descending ? -order : order) || a - b;
  }

  function select() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    chosen = [];
    for (let i = 0; i < rows.length; i++) {
      if (verdicts.has(rows[i][0]) && wanted.every((word) => haystack[i].includes(word))) chosen.push(i);
    }
    if (sorted.column >= 0) chosen.sort(compare);
    body.replaceChildren();
    rendered = 0;
    extend();
    document.getElementById("shown").textContent = `${figure(chosen.length)} of ${figure(rows.length)} cases`;
  }

  // Rows are added as one scrolls: a page of 20 000 cases opens at once.
  function extend() {
    const fragment = document.createDocumentFragment();
    for (const i of chosen.slice(rendered, rendered + CHUNK)) fragment.append(line(rows[i]));
    body.append(fragment);
    rendered = Math.min(rendered + CHUNK, chosen.length);
    more.hidden = rendered === chosen.length;
  }

  function line(row) {
    const tr = document.createElement("tr");
    row.forEach((value, i) => {
      const td = document.createElement("td");
      if (i === 0) {
        const badge = document.createElement("span");
        badge.className = `badge ${value}`;
        badge.textContent = `${glyphs[value]} ${value}`;
        td.append(badge);
      } else if (columns[i].numeric) {
        td.className = "number";
        td.textContent = figure(value);
      } else {
        td.className = columns[i].label;
        td.textContent = value;
      }
      tr.append(td);
    });
    return tr;
  }

  function figure(value) {
    if (typeof value !== "number") return value === null ? "" : value.replace("Infinity", "∞");
    if (!Number.isInteger(value)) return Number(value.toPrecision(4)).toString();
    return value.toString().replace(/\B(?=(\d{3})+$)/g, "\u00a0");
  }

  const heads = columns.map(({ label, numeric }, column) => {
    const th = document.createElement("th");
    th.scope = "col";
    if (numeric) th.className = "number";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", () => {
      // Figures are looked at from the largest down.
      const descending = sorted.column === column ? !sorted.descending : numeric;
      sorted = { column, descending };
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", descending ? "descending" : "ascending");
      select();
    });
    th.append(button);
    return th;
  });
  document.querySelector("#table thead tr").append(...heads);

  words.addEventListener("input", select);
  words.form.addEventListener("submit", (event) => event.preventDefault());
  boxes.forEach((box) => box.addEventListener("change", select));
  more.addEventListener("click", extend);
  new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && extend()).observe(more);
  document.querySelectorAll("[data-filter]").forEach((link) =>
    link.addEventListener("click", () => {
      words.value = link.dataset.filter;
      boxes.forEach((box) => (box.checked = !link.dataset.verdict || box.value === link.dataset.verdict));
      select();
    }),
  );
  select();
})();
