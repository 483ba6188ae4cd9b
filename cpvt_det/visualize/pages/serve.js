// SPDX-License-Identifier: Apache-2.0
// The page of cpvt-det serve: takes photographs, folders and films, asks the server for detections once, and shows one image at a time.
"use strict";

const MOST_IMAGES = 500; // their previews are kept in memory
const images = []; // {name, file, size, src, results: one of each model}
const queue = [];
let [current, busy, stopped, left] = [null, false, false, 0];

/** Ask the server about an image. Whatever happens, the answer is an object; {error} says what went wrong. */
async function ask(path, image) {
  try {
    const address = `${path}&name=${encodeURIComponent(baseName(image.name))}`;
    const headers = { "Content-Type": "application/octet-stream" };
    const answer = await fetch(address, { method: "POST", body: image.file, headers });
    return await answer.json();
  } catch (error) {
    return { error: `no answer (${error.message}); does cpvt-det serve still run?` };
  }
}

const panels = data.models.map((model, index) => new Panel(model, index, ask, () => images));
const film = new Film(askOfFrame, show, say);

function say(name, text) {
  byId("messages").append(element("li", {}, element("b", {}, baseName(name)), `: ${text}`));
}

/** Why a file is not even sent; null if it is. */
function refusal(file) {
  if (!file.size) return "it is empty (0 bytes)";
  if (file.size <= data.maxUpload) return null;
  return `${(file.size / 1e6).toFixed(1)} MB are too much: at most ${data.maxUpload / 1e6} MB are accepted (--max-upload)`;
}

/** Take files: [{file, name}]. */
function take(files) {
  byId("messages").replaceChildren();
  for (const { file, name } of files) {
    if (file.type.startsWith("video/")) {
      film.openFile(file, baseName(name));
      continue;
    }
    const isFull = images.length + queue.length >= MOST_IMAGES;
    const why = refusal(file) || (isFull ? `left out: ${MOST_IMAGES} images are on the page` : null);
    if (why) say(name, why);
    else queue.push({ file, name, results: [] });
  }
  if (!files.length) say("nothing taken", `no image is in it (suffixes: ${data.suffixes.join(", ")})`);
  if (!busy) work();
}

async function work() {
  busy = true;
  stopped = false;
  byId("stop").hidden = false;
  const total = queue.length;
  for (let done = 0; queue.length && !stopped; done++) {
    const image = queue.shift();
    byId("progress").textContent = `${baseName(image.name)}: ${done + 1} of ${Math.max(total, done + 1 + queue.length)}`;
    await detect(image);
  }
  left = queue.length;
  queue.length = 0;
  byId("progress").textContent = `${plural(images.length, "image")}${left ? `, ${left} left out` : ""}`;
  byId("stop").hidden = true;
  busy = false;
}

/** Ask every model; an image that the first one cannot read is a message and no more. */
async function detect(image) {
  for (const index of data.models.keys()) {
    const answer = await ask(`/detect?model=${index}${index ? "" : "&pixels=1"}`, image);
    if (answer.error !== undefined && !index) return say(image.name, answer.error);
    if (!index) {
      Object.assign(image, { size: answer.size, src: answer.image });
      add(image);
    }
    if (answer.error !== undefined) say(image.name, `${data.models[index].name}: ${answer.error}`);
    image.results[index] = answer;
    if (image === current) panels[index].show(image);
  }
}

/** Ask every model about a frame of a film, which is not kept; what went wrong, or null. */
async function askOfFrame(frame) {
  for (const index of data.models.keys()) {
    const answer = await ask(`/detect?model=${index}${index ? "" : "&pixels=1"}`, frame);
    if (answer.error !== undefined) return answer.error;
    if (!index) Object.assign(frame, { size: answer.size, src: answer.image });
    frame.results[index] = answer;
  }
  return null;
}

function add(image) {
  images.push(image);
  const open = () => {
    film.close();
    show(image);
  };
  image.button = element("button", { type: "button", onclick: open, "aria-label": image.name, "aria-pressed": "false" });
  image.button.append(element("img", { src: image.src, alt: "" }));
  byId("strip").append(image.button);
  byId("strip").hidden = images.length < 2;
  if (current === null) show(image);
}

function show(image) {
  current = image;
  for (const one of images) one.button.setAttribute("aria-pressed", String(one === image));
  byId("name").hidden = false;
  byId("name").textContent = `${image.name}, ${image.size[0]} x ${image.size[1]} pixels`;
  for (const panel of panels) panel.show(image);
}

const isImage = (name) => data.suffixes.some((suffix) => name.toLowerCase().endsWith(suffix)) && !baseName(name).startsWith(".");
const byName = (a, b) => (a.name < b.name ? -1 : 1);

/** The files of a dropped entry: a file itself, or all images below a folder. */
async function filesOf(entry, isBelow) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return isBelow && !isImage(file.name) ? [] : [{ file, name: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) { // a reader gives a hundred at a time
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) return found;
    for (const one of entries) found.push(...(await filesOf(one, true)));
  }
}

async function takeDropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const plain = [...transfer.files].map((file) => ({ file, name: file.name }));
  try {
    const found = (await Promise.all(entries.map((entry) => filesOf(entry, false)))).flat();
    take((entries.length ? found : plain).sort(byName));
  } catch (error) {
    say("not read", error.message);
  }
}

function start() {
  byId("panels").append(...panels.map(({ parts }) => parts.panel));
  byId("strip").hidden = true;
  document.title = data.models.map(({ name }) => name).join(" and ");
  byId("files").onchange = ({ target }) => {
    take([...target.files].map((file) => ({ file, name: file.name })));
    target.value = ""; // so that the same file can be chosen again
  };
  byId("folder").onchange = ({ target }) => {
    const inside = [...target.files].map((file) => ({ file, name: file.webkitRelativePath || file.name }));
    take(inside.filter(({ name }) => isImage(name)).sort(byName));
    target.value = "";
  };
  byId("camera").onclick = () => film.openCamera();
  byId("stop").onclick = () => (stopped = true);
  // The whole page takes what is dropped: a browser would open it instead.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    byId("drop").classList.add("over");
  });
  document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    byId("drop").classList.remove("over");
    takeDropped(event.dataTransfer);
  });
}
start();
