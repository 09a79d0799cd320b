"use strict";

// Values of all lines at the step under the pointer.
for (const plot of document.querySelectorAll(".plot[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const tip = document.createElement("div"), cursor = document.createElement("div");
  tip.className = "tip";
  cursor.className = "cursor";
  const hide = () => { tip.remove(); cursor.remove(); };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    let nearest = 0;
    chart.at.forEach((at, index) => {
      if (Math.abs(at - share) < Math.abs(chart.at[nearest] - share)) nearest = index;
    });
    tip.replaceChildren(document.createTextNode(chart.x[nearest]));
    for (const line of chart.series) {
      const row = document.createElement("div"), colour = document.createElement("i");
      colour.className = line.colour;
      row.append(colour, `${line.name} ${line.y[nearest]}`);
      tip.append(row);
    }
    plot.append(cursor, tip);
    const left = chart.at[nearest] * box.width;
    cursor.style.left = `${left}px`;
    tip.style.left = `${Math.max(0, Math.min(left + 12, box.width - tip.offsetWidth))}px`;
    tip.style.top = "8px";
  });
}

// The timeline: zoom and move by changing the part of the drawing that is shown.
for (const lanes of document.querySelectorAll(".lanes")) {
  const plot = lanes.querySelector(".plot"), svg = plot.querySelector("svg"), marks = lanes.querySelector(".x");
  const seconds = Number(lanes.dataset.seconds), height = svg.viewBox.baseVal.height, whole = svg.viewBox.baseVal.width;
  let start = 0, width = whole;
  const shown = value => value >= 1 ? `${+value.toFixed(3)} s` : value >= 1e-3 ? `${+(value * 1e3).toFixed(2)} ms` : `${+(value * 1e6).toFixed(1)} µs`;
  const show = () => {
    width = Math.min(whole, Math.max(whole / 2000, width));
    start = Math.min(whole - width, Math.max(0, start));
    svg.setAttribute("viewBox", `${start} 0 ${width} ${height}`);
    const span = width / whole * seconds, rough = span / 5, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(factor => factor * size).find(each => each >= rough);
    marks.replaceChildren();
    for (let at = Math.ceil(start / whole * seconds / step) * step; at <= (start + width) / whole * seconds; at += step) {
      const mark = document.createElement("span");
      mark.textContent = at ? shown(at) : "0 s";
      mark.style.left = `${(at / seconds * whole - start) / width * 100}%`;
      marks.append(mark);
    }
  };
  const zoom = (factor, share) => {
    start += share * width * (1 - factor);
    width *= factor;
    show();
  };
  const share = event => (event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth;
  plot.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, share(event)); }, { passive: false });
  plot.addEventListener("dblclick", () => { start = 0; width = whole; show(); });
  plot.addEventListener("keydown", event => {
    const moves = { ArrowLeft: -0.2, ArrowRight: 0.2 }, factors = { "+": 0.8, "-": 1.25 };
    if (event.key in moves) { start += moves[event.key] * width; show(); event.preventDefault(); }
    if (event.key in factors) zoom(factors[event.key], 0.5);
  });
  const pointers = new Map();
  plot.addEventListener("pointerdown", event => { pointers.set(event.pointerId, event.clientX); plot.setPointerCapture(event.pointerId); });
  plot.addEventListener("pointermove", event => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()], moved = event.clientX - pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 1) { start -= moved / plot.clientWidth * width; show(); return; }
    const after = [...pointers.values()], wide = Math.abs(after[0] - after[1]);
    if (wide > 10) zoom(Math.abs(before[0] - before[1]) / wide, 0.5);
  });
  for (const end of ["pointerup", "pointercancel"]) plot.addEventListener(end, event => pointers.delete(event.pointerId));
}
