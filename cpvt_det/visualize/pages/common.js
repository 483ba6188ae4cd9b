// SPDX-License-Identifier: Apache-2.0
// What the pages share: elements, the slider's score, and boxes over an image. Names come from data, so text is never HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** An element with attributes, properties (a function is a listener, "on..."), and children, which are elements or text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made[name] = value;
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** An element of SVG. */
function drawn(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

const plural = (count, noun, several = `${noun}s`) => `${count.toLocaleString("en")} ${count === 1 ? noun : several}`;
const baseName = (path) => path.split(/[\\/]/).pop();

/** Black or white, whichever is read on a colour #rrggbb; as in visualize/pictures.py. */
function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128 ? "#000" : "#fff";
}

/**
 * A box over an image, placed in percent, so that it follows the image's size.
 * box: [x, y, w, h] in pixels of an image of size [width, height].
 */
function placeBox(tag, box, size, attributes, label) {
  const percent = box.map((value, i) => (100 * value) / size[i % 2]);
  const [left, top] = [Math.max(0, percent[0]), Math.max(0, percent[1])];
  const made = element(tag, attributes);
  Object.assign(made.style, {
    left: `${left}%`, top: `${top}%`,
    width: `${Math.min(100, percent[0] + percent[2]) - left}%`, height: `${Math.min(100, percent[1] + percent[3]) - top}%`,
  });
  if (label) made.append(element("span", { class: top > 7 ? "above" : null }, label));
  return made;
}
