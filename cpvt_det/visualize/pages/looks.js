// SPDX-License-Identifier: Apache-2.0
// Where the decoder looked for a box: sampling points or a heat map, drawn over the image.
"use strict";

const levelColor = (level) => data.levels[level % data.levels.length];
const MARK = "#00b8d4";
const LARGEST = 0.03; // radius, in parts of the image's longer side, of a point that has all the weight

/** Sampling points: a dot each, coloured by level, its area the weight; a cross at the reference, dotted where it is a box. */
function drawPoints(layer, [width, height]) {
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "look" });
  const long = Math.max(width, height);
  for (const [x, y, weight, level] of layer.points) {
    const r = LARGEST * long * Math.sqrt(weight);
    const paint = { fill: levelColor(level), stroke: "#fff", "stroke-width": long / 1200 };
    svg.append(drawn("circle", { cx: x, cy: y, r, ...paint }));
  }
  const [x, y, w, h] = layer.reference;
  const line = { stroke: MARK, "stroke-width": long / 250, fill: "none" };
  const arm = long / 60;
  svg.append(drawn("path", { d: `M${x - arm} ${y}H${x + arm}M${x} ${y - arm}V${y + arm}`, ...line }));
  if (w !== undefined) {
    const place = { x: x - w / 2, y: y - h / 2, width: w, height: h };
    svg.append(drawn("rect", { ...place, ...line, "stroke-dasharray": `${long / 120} ${long / 120}` }));
  }
  return svg;
}

/** Attention by cell: what a cell gets beyond an even share, up to the strongest. */
function drawHeat(layer, [width, height]) {
  const [rows, columns] = [layer.rows.length, layer.rows[0].length];
  const peak = Math.max(...layer.rows.flat());
  const canvas = element("canvas", { width: columns, height: rows, class: "look" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  layer.rows.flat().forEach((value, i) => {
    const share = Math.min(Math.max((value - 1) / Math.max(peak - 1, 1e-6), 0), 1);
    pixels.data.set([255, 60 + 190 * share, 40 * (1 - share), 215 * share], 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  // The last cells reach beyond the image.
  Object.assign(canvas.style, { width: `${(100 * layer.corner[0]) / width}%`, height: `${(100 * layer.corner[1]) / height}%` });
  return canvas;
}

/** A layer of a look in words, or as the share of each level: [{color, stride, share}]. */
function describeLook(look, layer) {
  if (look.kind === "heat") return `Strongest cell: ${Math.max(...layer.rows.flat()).toFixed(1)} times an even share.`;
  const shares = look.strides.map((_, level) => layer.points.reduce((sum, point) => sum + (point[3] === level ? point[2] : 0), 0));
  return look.strides.map((stride, level) => ({ color: levelColor(level), stride, share: shares[level] }));
}
