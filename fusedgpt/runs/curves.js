// Charts of one run, or of page.runs, over one of page.axes. The pointer shows the values at one place in all of them.
const several = "runs" in page, charts = [];
let axis = Object.keys(page.axes)[0];
const hover = x => charts.forEach(chart => chart.show(x));
const mine = (run, element) => { // an element in the colour of a run; the second seven runs are dashed
  if (several) element.style.setProperty("--mine", `var(--c${run % 7})`);
  element.classList.toggle("dashed", run > 6);
  return element;
};

function chart(spec, number) {
  const svg = make("svg", { role: "img", tabindex: 0 }), readout = make("span", { class: "readout" });
  const compared = spec.lines.some(line => line.name === "validation"), wide = number === 0;
  const isPale = line => compared && line.name === "training";
  const isRead = line => line.x[axis].length && !(several && isPale(line));
  const most = spec.above === null ? "" : `up to ${shown(spec.above)}`, sentence = `values ${most} lie above`;
  const cut = most && make("small", { title: sentence }, `▲ ${wide ? sentence : most}`);
  const caption = make("figcaption", {}, make("span", {}, make("b", {}, spec.title), cut), readout);
  byId("charts").append(make("figure", { class: wide ? "wide" : "" }, caption, svg));
  const said = (line, n) => `${shown(line.y.at(n))} at iteration ${line.x.iterations.at(n)}`;
  const nameOf = line => several ? `${page.runs[line.run]}, ${line.name}` : line.name;
  const summary = spec.lines.filter(line => line.y.length)
    .map(line => `${nameOf(line)} from ${said(line, 0)} to ${said(line, -1)}`).join("; ") || "nothing yet";
  svg.setAttribute("aria-label", `${spec.title}: ${summary}. Arrow keys move along the curve.`);

  let axes, marks, at = null;

  function draw() {
    const ends = page.charts.flatMap(each => each.lines.map(line => line.x[axis].at(-1) ?? 0));
    const lastX = Math.max(...ends) || 1;
    axes = frame(svg, wide ? 300 : 170, spec.range, lastX, page.axes[axis], axis === "iterations");
    const { inner, px, py } = axes;
    for (const line of spec.lines) {
      const look = `line${isPale(line) ? " pale" : ""}${line.y.length > 200 ? " dense" : ""}`;
      const xs = line.x[axis].map(px);
      inner.append(mine(line.run, make("path", { class: look, d: path(xs, line.y.map(py)) })));
      if (line.name === "validation" || line.y.length < 4) {
        const r = line.y.length > 60 ? 1.5 : 3;
        line.y.forEach((y, n) => y !== null && inner.append(
          mine(line.run, make("circle", { class: "dot", cx: xs[n], cy: py(y), r }))));
      }
    }
    marks = make("g");
    svg.append(marks);
    self.show(at);
  }

  const self = {
    draw,
    show(x) { // the values at x, or the last ones
      const { px, py, left, right, top, bottom } = axes;
      at = x;
      marks.replaceChildren();
      readout.replaceChildren();
      let place = null;
      for (const line of spec.lines.filter(isRead)) {
        const n = nearest(line.x[axis], x ?? Infinity), value = line.y[n];
        place ??= line.x[axis][n];
        const name = !several && compared ? `${line.name} ` : "";
        readout.append(mine(line.run, make("i", isPale(line) ? { class: "pale" } : {})), name,
          make("b", {}, shown(value)));
        if (x === null || value === null) continue;
        const y = Math.max(top, py(value)); // mark a value above the view at its edge
        marks.append(mine(line.run, make("circle", { class: "here", cx: px(line.x[axis][n]), cy: y, r: 4 })));
      }
      if (x === null || place === null) return;
      const label = Math.min(Math.max(px(place), left + 35), right - 23); // keep the label inside the figure
      const here = { x1: px(place), x2: px(place), y1: top, y2: bottom };
      marks.prepend(make("line", { class: "cross", ...here }));
      const unit = page.axes[axis], short = { notation: "compact", maximumSignificantDigits: 3 };
      const name = axis === "iterations" ? `${unit} ${place.toLocaleString("en")}`
        : `${place.toLocaleString("en", short)} ${unit}`;
      marks.append(make("text", { class: "at", x: label, y: bottom + 16 }, name));
    },
  };
  svg.addEventListener("pointermove", event => hover(axes.at(event.clientX)));
  svg.addEventListener("pointerleave", () => hover(null));
  svg.addEventListener("blur", () => hover(null));
  svg.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], xs = spec.lines.find(isRead)?.x[axis];
    if (!step || !xs) return;
    event.preventDefault();
    const n = at === null ? xs.length - 1 : nearest(xs, at) + step * Math.max(1, Math.round(xs.length / 200));
    hover(xs[Math.min(xs.length - 1, Math.max(0, n))]);
  });
  charts.push(self);
  draw();
}

new ResizeObserver(() => charts.forEach(each => each.draw())).observe(byId("charts"));
