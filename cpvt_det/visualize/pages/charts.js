// SPDX-License-Identifier: Apache-2.0
// Line charts of values from 0 to 1.
"use strict";

const CHART = { width: 460, height: 320, left: 44, right: 12, top: 26, bottom: 38 };
const toX = (value) => CHART.left + value * (CHART.width - CHART.left - CHART.right);
const toY = (value) => CHART.height - CHART.bottom - value * (CHART.height - CHART.top - CHART.bottom);

/** A chart of lines: [{points: [[x, y], ...], color, dash, name}]; names are written into a legend. */
function chart(title, xLabel, yLabel, lines) {
  const svg = drawn("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": title });
  for (const tick of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
    svg.append(drawn("line", { x1: toX(tick), x2: toX(tick), y1: toY(0), y2: toY(1), stroke: "#e3e8ed" }));
    svg.append(drawn("line", { x1: toX(0), x2: toX(1), y1: toY(tick), y2: toY(tick), stroke: "#e3e8ed" }));
    svg.append(drawn("text", { x: toX(tick), y: toY(0) + 15, "text-anchor": "middle" }, tick));
    svg.append(drawn("text", { x: toX(0) - 6, y: toY(tick) + 4, "text-anchor": "end" }, tick));
  }
  svg.append(drawn("text", { x: toX(0.5), y: CHART.height - 6, "text-anchor": "middle" }, xLabel));
  svg.append(drawn("text", { x: 12, y: toY(0.5), "text-anchor": "middle", transform: `rotate(-90 12 ${toY(0.5)})` }, yLabel));
  for (const { points, color, dash } of lines) {
    const path = points.map(([x, y]) => `${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join(" ");
    const stroke = { stroke: color, "stroke-width": 2, "stroke-dasharray": dash || "none" };
    svg.append(drawn("polyline", { points: path, fill: "none", ...stroke }));
  }
  const named = lines.filter(({ name }) => name);
  named.forEach(({ name, color, dash }, i) => {
    const [x, y] = [toX(0) + 12 + 105 * i, 12];
    const stroke = { stroke: color, "stroke-width": 2, "stroke-dasharray": dash || "none" };
    svg.append(drawn("line", { x1: x, x2: x + 24, y1: y, y2: y, ...stroke }));
    svg.append(drawn("text", { x: x + 30, y: y + 4 }, name));
  });
  return svg;
}

/** Put the mark of a chart elsewhere: a dot at x and y, or an upright line at x; none where a value is not a number. */
function mark(svg, x, y = null) {
  svg.querySelector(".mark")?.remove();
  if (Number.isNaN(x) || Number.isNaN(y)) return;
  const upright = { x1: toX(x), x2: toX(x), y1: toY(0), y2: toY(1), stroke: "#111", "stroke-dasharray": "2 3" };
  svg.append(y === null ? drawn("line", { class: "mark", ...upright })
    : drawn("circle", { class: "mark", cx: toX(x), cy: toY(y), r: 5, fill: "#111" }));
}
