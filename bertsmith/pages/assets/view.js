"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.attention), c => c.charCodeAt(0));
const n = data.tokens.length, L = data.layers, A = data.heads;
const $ = id => document.getElementById(id);
const make = (kind, css, text) => { const e = document.createElement(kind); if (css) e.className = css;
  if (text !== undefined) e.textContent = text; return e; };
const percent = x => x && x < .0005 ? "< 0.1 %" : x >= .0995 ? Math.round(100 * x) + " %" : (100 * x).toFixed(1) + " %";
let pinned = Math.max(0, data.special.indexOf(false)), shown = pinned;

// The weights (n × n) of a head; -1 is the mean over all layers or heads.
const means = {};
function weights(layer, head) {
  const key = layer + " " + head;
  if (means[key]) return means[key];
  const found = new Float32Array(n * n);
  const ls = layer < 0 ? [...Array(L).keys()] : [layer], hs = head < 0 ? [...Array(A).keys()] : [head];
  for (const l of ls) for (const h of hs) {
    const begin = (l * A + h) * n * n;
    for (let k = 0; k < n * n; k++) found[k] += bytes[begin + k] / 255 / (ls.length * hs.length);
  }
  return means[key] = found;
}

function bars(box, rows) {
  const top = Math.max(...rows.map(r => r[1]), 1e-9);
  box.replaceChildren();
  for (const [word, value, css] of rows) {
    const bar = make("i"); bar.style.width = 100 * value / top + "%";
    box.append(make("span", css, word), bar, make("b", "", percent(value)));
  }
}

function show(i) {
  shown = i;
  const w = weights(+$("layer").value, +$("head").value), back = $("way").value === "from", bare = $("bare").checked;
  let row = data.tokens.map((_, j) => bare && data.special[j] ? 0 : back ? w[j * n + i] : w[i * n + j]);
  const sum = row.reduce((a, b) => a + b, 0);
  if (bare && !back && sum > 0) row = row.map(x => x / sum);
  const top = Math.max(...row, 1e-9);
  document.querySelectorAll(".token").forEach((e, j) => {
    e.style.setProperty("--w", (.75 * row[j] / top).toFixed(3));
    e.title = data.tokens[j] + ": " + percent(row[j]);
    e.classList.toggle("chosen", j === i); e.classList.toggle("pinned", j === pinned);
  });
  $("strongest").textContent = (back ? "What attends to " : "What it attends to: ") + data.tokens[i];
  const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 8);
  bars($("weights"), order.map(j => [data.tokens[j] + (data.tokens.indexOf(data.tokens[j]) !==
    data.tokens.lastIndexOf(data.tokens[j]) ? " (" + (j + 1) + ")" : ""), row[j], ""]));
  const mask = data.masked[i];
  $("masked").textContent = "If it were masked: " + data.tokens[i];
  bars($("words"), mask ? mask.words.map(([word, p]) => [word, p, word === data.tokens[i] ? "own" : ""]) : []);
  $("note").textContent = data.why_not || (mask ? data.tokens[i] + " itself: " + percent(mask.own) + ", rank " +
    mask.rank.toLocaleString("en") : data.tokens[i] + " is never masked.");
  const table = make("table");
  data.nearest.forEach((layer, l) => {
    const line = make("tr"), cell = make("td");
    for (const [word, cosine] of layer[i]) {
      const near = make("span", word === data.tokens[i] ? "near right" : "near", word);
      near.append(make("small", "", cosine.toFixed(2)));
      cell.append(near);
    }
    line.append(make("td", "", l ? "layer " + l : "embeddings"), cell);
    table.append(line);
  });
  $("nearest").replaceChildren(table);
}

function choose(layer, head) {
  $("layer").value = layer; $("head").value = head;
  document.querySelectorAll(".heads button").forEach(b => b.classList.toggle("chosen",
    +b.dataset.layer === +layer && +b.dataset.head === +head));
  show(shown);
}

function picture(layer, head) {
  const canvas = make("canvas"), w = weights(layer, head), button = make("button");
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d"), image = context.createImageData(n, n);
  w.forEach((x, k) => image.data.set([59, 130, 246, Math.min(255, 255 * Math.sqrt(x))], 4 * k));
  context.putImageData(image, 0, 0);
  button.dataset.layer = layer; button.dataset.head = head;
  button.title = (layer < 0 ? "all layers" : "layer " + (layer + 1)) + (head < 0 ? ", mean" : ", head " + (head + 1));
  button.setAttribute("aria-label", button.title);
  button.onclick = () => choose(layer, head);
  button.append(canvas);
  return button;
}

let line = null, segment = null;
data.tokens.forEach((_, i) => {
  if (data.segments[i] !== segment) { line = make("div"); $("strip").append(line); segment = data.segments[i]; }
  const chip = make("button", "token" + (data.continues[i] ? " piece" : "") + (data.special[i] ? " special" : ""),
    data.shown[i]);
  chip.onmouseenter = chip.onfocus = () => show(i);
  chip.onclick = () => { pinned = i; show(i); };
  line.append(chip);
});
$("strip").onmouseleave = () => show(pinned);
for (const [id, count, all] of [["layer", L, "mean of all"], ["head", A, "mean"]]) {
  $(id).append(new Option(all, -1));
  for (let k = 0; k < count; k++) $(id).append(new Option(k + 1, k));
  $(id).onchange = () => choose($("layer").value, $("head").value);
}
$("way").onchange = $("bare").onchange = () => show(shown);
const grid = $("heads");
grid.style.gridTemplateColumns = "3.4rem repeat(" + (A + 1) + ", minmax(0, 4.4rem))";
grid.append(make("span"), make("span", "", "mean"), ...[...Array(A).keys()].map(h => make("span", "", h + 1)));
for (let l = 0; l < L; l++) {
  grid.append(make("span", "", "layer " + (l + 1)));
  for (let h = -1; h < A; h++) grid.append(picture(l, h));
}
choose(-1, -1);
