// Draws `page`, what report_page.py says of a run or of several. Text of a run is never HTML.
const page = JSON.parse(document.getElementById("page").textContent);
const several = page.runs.length > 1, main = document.querySelector("main"), charts = [];
let axis = Object.keys(page.axes)[0];

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "title", "clipPath", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// an element in the colour of its run; the second seven runs are dashed
function mine(run, element) {
  if (several) element.style.setProperty("--mine", `var(--c${run % 7})`);
  element.classList.toggle("dashed", run > 6);
  return element;
}

const whole = value => value.toLocaleString("en");
const short = value => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });

function shown(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("e+", "e");
  return size >= 1e3 ? whole(Math.round(value)) : value.toPrecision(4);
}

// what the page remembers when it reloads itself; some viewers give a page no storage
function recall(key) {
  try { return sessionStorage.getItem(key); } catch { return null; }
}
function remember(key, value) {
  try { sessionStorage.setItem(key, value); } catch { /* the reloaded page forgets it then */ }
}

function state({ now, said, done, planned }) {
  main.append(make("p", { id: "state" }, make("b", {}, now), ` · ${said}`));
  if (done < planned) main.append(make("progress", { max: planned, value: done }));
}

// round numbers from low to high, at most about `count`
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, n) => +((first + n) * step).toPrecision(12));
}

// Empties an svg and draws a grid with its numbers. px and py place a value; what is in `inner` is cut at the edges.
function frame(svg, height, [low, high], lastX, id) {
  const width = svg.clientWidth || 600, left = 54, right = Math.max(left, width - 12), top = 8, bottom = height - 22;
  const px = x => left + (right - left) * x / lastX;
  const py = y => y === null ? null : top + (bottom - top) * (high - y) / (high - low);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const inner = make("g", { "clip-path": `url(#${id})` });
  const box = { x: left - 5, y: top - 4, width: right - left + 10, height: bottom - top + 10 };
  svg.replaceChildren(make("clipPath", { id }, make("rect", box)));
  for (const y of ticks(low, high, height / 45)) {
    const small = y !== 0 && Math.abs(y) < 1e-3;
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) }),
      make("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, small ? y.toExponential() : short(y)));
  }
  svg.append(make("text", { x: left, y: height - 6 }, `${page.axes[axis]} 0`));
  const free = left + 6 * page.axes[axis].length + 14; // beyond the name of the axis
  for (const x of ticks(0, lastX, width / 90).filter(x => px(x) > free && px(x) < width - 20)) {
    svg.append(make("text", { x: px(x), y: height - 6, "text-anchor": "middle" }, x < 1e4 ? whole(x) : short(x)));
  }
  svg.append(inner);
  return { inner, px, py };
}

// a line through points of the svg; null draws a gap, and a value between two gaps is a dot
function path(xs, ys) {
  const parts = ys.map((y, n) => {
    const begins = n === 0 || ys[n - 1] === null;
    return y === null ? "" : `${begins ? "M" : "L"}${xs[n].toFixed(1)} ${y.toFixed(1)}${begins ? "h0" : ""}`;
  });
  return parts.join("");
}

function chart({ title, range, above, lines }, number) {
  const wide = number === 0, svg = make("svg", { role: "img", "aria-label": title });
  const losses = lines.some(line => line.name === "validation");
  const isPale = line => losses && line.name === "training";
  const ends = lines.filter(line => line.y.length && !(several && isPale(line))).flatMap(line => {
    const name = !several && losses ? `${line.name} ` : "", look = isPale(line) ? { class: "pale" } : {};
    return [mine(line.run, make("i", look)), name, make("b", {}, shown(line.y.at(-1)))];
  });
  const cut = above === null ? "" : make("small", {}, `▲ up to ${shown(above)} above`);
  const head = [make("span", {}, make("b", {}, title), cut), make("span", { class: "ends" }, ...ends)];

  charts.push(() => {
    const last = page.charts.flatMap(each => each.lines.map(line => line.x[axis].at(-1) ?? 0));
    const { inner, px, py } = frame(svg, wide ? 300 : 170, range, Math.max(...last) || 1, `clip${number}`);
    for (const line of lines) {
      const look = `line${isPale(line) ? " pale" : ""}${line.y.length > 200 ? " dense" : ""}`;
      const xs = line.x[axis].map(px), ys = line.y.map(py);
      inner.append(mine(line.run, make("path", { class: look, d: path(xs, ys) })));
      if (line.name !== "validation" && line.y.length > 3) continue;
      line.y.forEach((y, n) => {
        if (y === null) return;
        const said = make("title", {}, `${page.axes[axis]} ${short(line.x[axis][n])}: ${shown(y)}`);
        inner.append(mine(line.run, make("circle", { class: "dot", cx: xs[n], cy: ys[n], r: 3 }, said)));
      });
    }
  });
  return make("figure", { class: wide ? "wide" : "" }, make("figcaption", {}, ...head), svg);
}

function curves() {
  const legend = page.runs.map((name, run) => make("span", {}, mine(run, make("i")), name));
  const buttons = Object.entries(page.axes).map(([name, unit]) => {
    const text = name === "time" ? `training time (${unit})` : name;
    const button = make("button", { type: "button", "data-axis": name, "aria-pressed": name === axis }, text);
    button.addEventListener("click", () => {
      axis = name;
      buttons.forEach(each => each.setAttribute("aria-pressed", each === button));
      charts.forEach(draw => draw());
    });
    return button;
  });
  const all = make("section", { class: several ? "charts several" : "charts" }, ...page.charts.map(chart));
  main.append(make("p", { class: "bar" }, make("span", {}, ...several ? legend : []), make("span", {}, ...buttons)), all);
  new ResizeObserver(() => charts.forEach(draw => draw())).observe(all);
  charts.forEach(draw => draw());
}

// Each iteration with its samples. A run that has none there shows its last one from the same prompt.
function samples() {
  const same = (a, b) => a.iter === b.iter && a.prompt === b.prompt;
  const stops = page.samples.filter((sample, n) => page.samples.findIndex(each => same(each, sample)) === n);
  if (!stops.length) return;
  const last = stops.length - 1, when = make("label", { for: "slider", id: "when" });
  const slider = make("input", { type: "range", id: "slider", min: 0, max: last });
  const texts = make("div", { class: "samples" });
  function show() {
    const { iter, prompt } = stops[slider.value];
    when.textContent = `After ${whole(iter)} iterations`;
    texts.replaceChildren(...page.runs.map((name, run) => {
      const of = page.samples.findLast(each => each.run === run && each.prompt === prompt && each.iter <= iter);
      const text = of ? [make("b", {}, prompt), of.text] : ["no sample from this prompt"];
      const head = several ? [mine(run, make("i")), of ? `${name}, after ${whole(of.iter)}` : name] : [];
      return make("div", {}, ...head, make("pre", { tabindex: 0 }, ...text));
    }));
  }
  const at = stops.findLastIndex(each => each.iter <= (recall("sample") || Infinity)); // a reloaded page stays there
  slider.value = at < 0 ? last : at;
  slider.addEventListener("input", () => {
    remember("sample", Number(slider.value) === last ? "" : stops[slider.value].iter); // "": follow the latest
    show();
  });
  show();
  main.append(make("section", { id: "samples" }, make("h2", {}, "What it writes"),
    make("div", { class: "card" }, when, slider, texts)));
}

function table({ title, open, head, rows }) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((text, n) => make(n ? tag : "th", {}, text)));
  const body = make("tbody", {}, ...rows.map(cells => row(cells, "td")));
  const content = make("table", {}, ...head.length ? [make("thead", {}, row(head, "th"))] : [], body);
  const details = make("details", {}, make("summary", {}, title), make("div", { class: "scroll" }, content));
  const kept = recall(title); // a reloaded page leaves open what was opened
  details.open = kept === null ? open : kept === "open";
  details.addEventListener("toggle", () => remember(title, details.open ? "open" : "folded"));
  return details;
}

const tables = all => all.filter(each => each.rows.length).map(table);
if (page.state) state(page.state);
if (page.headline) main.append(make("p", { class: "lead" }, page.headline));
main.append(make("section", { class: several ? "" : "summary" }, ...tables(page.summary)));
curves();
samples();
main.append(make("section", { id: "tables" }, make("h2", {}, "How it runs"), ...tables(page.tables)));
