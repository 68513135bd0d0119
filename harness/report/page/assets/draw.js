// Elements and figures. Text goes in as text, never as HTML: it may come from a case file or a backend.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties (or attributes, where it has no such property) and children. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function titled(tag, attributes, words) {
  return shape(tag, attributes, shape("title", {}, words));
}

/** A figure for people: thousands apart, four digits of a fraction, nothing of what was not measured. */
function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value).replace("Infinity", "∞").replace("-", "−");
  if (!Number.isInteger(value)) return Number(value.toPrecision(4)).toString();
  return value.toString().replace("-", "−").replace(/\B(?=(\d{3})+$)/g, "\u00a0");
}

/** A distance in steps: from 100 on, no count of steps says anything. */
function ulps(value) {
  return typeof value === "number" && value >= 100 ? "> 99" : figure(value);
}

/** A figure of any size in few characters: 0.2048, 2.56e22. */
function compact(value) {
  if (typeof value !== "number" || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e5)) return figure(value);
  return value ? value.toExponential(2).replace("+", "") : "0";
}

function plural(count, noun) {
  return `${figure(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function seconds(value) {
  if (typeof value !== "number") return "";
  if (value < 1e-3) return `${figure(value * 1e6)} µs`;
  return value < 1 ? `${figure(value * 1e3)} ms` : `${figure(value)} s`;
}

/** A case id whose lines break after its slashes. */
function breakable(id) {
  return id.split(/(?<=\/)/).flatMap((part, n) => (n ? [make("wbr"), part] : [part]));
}

/** A line "label: command" as a label and a command. */
function labelled(line) {
  const [, label, rest] = line.match(/^(.*?): ((?:narrowgauge|safetensors\.).*)$/s) ?? [];
  return rest ? make("div", {}, `${label}:`, command(rest)) : make("p", {}, line);
}

/** A command line with a button that copies it. */
function command(line) {
  const button = make("button", { type: "button", className: "copy", ariaLabel: `copy: ${line}` }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(line);
    button.textContent = copied ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return make("div", { className: "command" }, make("pre", { className: "line" }, make("code", {}, line)), button);
}

/** Whether the text is in the clipboard. Pages opened from a file may lack `navigator.clipboard`. */
async function copy(line) {
  try {
    await navigator.clipboard.writeText(line);
    return true;
  } catch {
    const field = make("textarea", { value: line, readOnly: true });
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

/** Let the keyboard reach what scrolls sideways and has no button or link inside. */
function reachScrollers() {
  const boxes = [...document.querySelectorAll(".scroll, figure, pre")];
  const scrolls = boxes.map((box) => box.scrollWidth > box.clientWidth && !box.querySelector("button, a"));
  boxes.forEach((box, n) => (scrolls[n] ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex")));
}

function captioned(words, ...children) {
  return make("figure", {}, make("figcaption", {}, words), ...children);
}

/** Rows of label, bar and count; `[label, count, class, outside]`: a row that is `outside` is on no scale. */
function bars(words, rows) {
  const most = Math.max(1, ...rows.filter((row) => !row[3]).map((row) => row[1]));
  const body = rows.map(([label, count, kind, outside]) => {
    const length = outside ? 0 : Math.max(count ? 1 : 0, Math.round((160 * count) / most));
    const bar = shape("svg", { width: 160, height: 11, "aria-hidden": "true" });
    bar.append(shape("rect", { class: kind, width: length, height: 11 }));
    const drawn = outside ? make("span", { className: "aside" }, "not drawn") : bar;
    return make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, drawn), make("td", { className: "number" }, figure(count)));
  });
  return captioned(words, make("table", { className: "bars" }, make("tbody", {}, ...body)));
}

/** Arrow keys, Home and End go from one item to another; only one of them is on the way of Tab. */
function roving(container, selector, step) {
  container.addEventListener("keydown", (event) => {
    let items = [...container.querySelectorAll(selector)];
    const at = items.indexOf(document.activeElement);
    const to = at < 0 ? -1 : event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : step(event.key, at, items);
    items = [...container.querySelectorAll(selector)]; // a step may have made more
    if (to < 0 || to >= items.length || to === at) return;
    event.preventDefault();
    items[at].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
  });
}
