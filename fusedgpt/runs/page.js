// What the pages of runs and of studies share. `page` is what Python says of the run or study.
const page = JSON.parse(document.getElementById("page").textContent);
const byId = id => document.getElementById(id);

// an element with attributes and children; text is never HTML
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "clipPath", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function shown(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", size >= 1e3 ? { maximumFractionDigits: 0 }
    : { minimumSignificantDigits: 4, maximumSignificantDigits: 4 });
}

const onAxis = value => Math.abs(value) >= 1e4 ? value.toLocaleString("en", { notation: "compact" })
  : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : value.toLocaleString("en");

// round numbers from low to high, at most about `count`
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, n) => +((first + n) * step).toPrecision(12));
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

// Empties an svg and draws a grid with its numbers. px and py place a value; what is in `inner` is cut at the edges.
// x runs from 0 to lastX, in whole numbers or not, and its first number is named.
let frames = 0;
function frame(svg, height, [low, high], lastX, name, whole = true) {
  const width = svg.clientWidth || 600, left = 54, right = Math.max(left, width - 12), top = 8, bottom = height - 22;
  const px = x => left + (right - left) * x / lastX;
  const py = y => y === null ? null : top + (bottom - top) * (high - y) / (high - low);
  const at = clientX => { // the x below the pointer
    const inside = clientX - svg.getBoundingClientRect().left - left;
    return Math.min(lastX, Math.max(0, inside / (right - left) * lastX));
  };
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const id = `clip${frames++}`, inner = make("g", { "clip-path": `url(#${id})` });
  const box = { x: left - 5, y: top - 4, width: right - left + 10, height: bottom - top + 10 };
  svg.replaceChildren(make("clipPath", { id }, make("rect", box)));
  for (const y of ticks(low, high, height / 45)) {
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) }),
      make("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, onAxis(y)));
  }
  for (const x of ticks(0, lastX, width / 90)) {
    if ((whole && !Number.isInteger(x)) || (x && px(x) < left + 6 * name.length + 14)) continue; // the first has a name
    const atEnd = px(x) > width - 25, anchor = atEnd ? "end" : x ? "middle" : "start";
    const place = { x: atEnd ? width - 1 : px(x), y: height - 6, "text-anchor": anchor };
    svg.append(make("text", place, x ? (whole ? x.toLocaleString("en") : onAxis(x)) : `${name} 0`));
  }
  svg.append(inner);
  return { inner, px, py, at, left, right, top, bottom };
}

// a line through points of the svg; null draws a gap
function path(xs, ys) {
  let pen = "M";
  return xs.map((x, n) => {
    if (ys[n] === null) { pen = "M"; return ""; }
    const part = `${pen}${x.toFixed(1)} ${ys[n].toFixed(1)}`, alone = pen === "M" ? "h0" : "";
    pen = "L";
    return part + alone; // a value between two gaps is a dot
  }).join("");
}

// what the page remembers when it reloads itself; some viewers give a page no storage
function recall(key) {
  try { return sessionStorage.getItem(key); } catch { return null; }
}
function remember(key, value) {
  try { sessionStorage.setItem(key, value); } catch { /* the reloaded page forgets it then */ }
}

// text that may break after , = and + in the long names of runs and variants
function soft(text) {
  const parts = text.split(/(?<=[,=+])(?=\S)/);
  return make("span", {}, ...parts.flatMap((part, n) => n ? [make("wbr"), part] : [part]));
}

function table({ title, open, head, rows }) {
  const cells = (tag, row) => row.map((text, n) => make(n ? tag : "th", { scope: n ? "" : "row" }, text));
  const body = make("table", {}, make("tbody", {}, ...rows.map(row => make("tr", {}, ...cells("td", row)))));
  const heads = head.map(text => make("th", { scope: "col" }, text));
  if (heads.length) body.prepend(make("thead", {}, make("tr", {}, ...heads)));
  const details = make("details", {}, make("summary", {}, title), make("div", { class: "scroll" }, body));
  const kept = recall(title); // a reloaded page leaves open what was opened
  details.open = kept === null ? open : kept === "open";
  details.addEventListener("toggle", () => remember(title, details.open ? "open" : "folded"));
  byId("tables").append(details);
}

function tile([what, value, remark]) {
  const [name, note] = [what, remark].map(text => make("small", {}, text));
  byId("tiles").append(make("div", { class: "tile" }, name, make("b", {}, value), note));
}
