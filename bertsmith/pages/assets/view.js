// What a model computes for one text: attention, masked words, nearest words. A module for the page of one text, and
// for the page of the server, which brings its own language.
export const ENGLISH = {
  attends_to: "What it attends to: {token}", attends_from: "What attends to {token}",
  if_masked: "If it were masked: {token}", itself: "{token} itself: {share}, rank {rank}",
  never_masked: "{token} is never masked.", mean: "mean", mean_of_all: "mean of all", all_layers: "all layers",
  layer_number: "layer {number}", head_number: "head {number}", embeddings: "embeddings",
  why_not: "{reason}",
};
const inEnglish = (name, values = {}) => filled(ENGLISH[name], values);

// A sentence with its values in the place of {names}.
export const filled = (sentence, values) => sentence.replace(/\{(\w+)\}/g, (_, name) => values[name]);

export function make(kind, css, text) {
  const element = document.createElement(kind);
  if (css) element.className = css;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function percent(x) {
  if (x && x < .0005) return "< 0.1 %";
  return (x >= .0995 ? Math.round(100 * x) : (100 * x).toFixed(1)) + " %";
}

// Rows of [word, value, class] as bars; the longest one has the value `top`.
export function bars(box, rows, top = Math.max(...rows.map(row => row[1]), 1e-9)) {
  box.replaceChildren();
  for (const [word, value, css] of rows) {
    const bar = make("i"); bar.style.width = 100 * value / top + "%";
    box.append(make("span", css, word), bar, make("b", "", percent(value)));
  }
}

export function showView(root, data, say = inEnglish) {
  const bytes = Uint8Array.from(atob(data.attention), c => c.charCodeAt(0));
  const n = data.tokens.length, L = data.layers, A = data.heads;
  const $ = id => root.querySelector("#" + id);
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

  function show(i) {
    shown = i;
    const w = weights(+$("layer").value, +$("head").value), back = $("way").value === "from", bare = $("bare").checked;
    let row = data.tokens.map((_, j) => bare && data.special[j] ? 0 : back ? w[j * n + i] : w[i * n + j]);
    const sum = row.reduce((a, b) => a + b, 0), token = data.tokens[i];
    if (bare && !back && sum > 0) row = row.map(x => x / sum);
    const top = Math.max(...row, 1e-9);
    root.querySelectorAll(".token").forEach((e, j) => {
      e.style.setProperty("--w", (.65 * row[j] / top).toFixed(3));
      e.title = data.tokens[j] + ": " + percent(row[j]);
      e.classList.toggle("chosen", j === i); e.classList.toggle("pinned", j === pinned);
      e.setAttribute("aria-pressed", j === pinned);
    });
    $("strongest").textContent = say(back ? "attends_from" : "attends_to", {token});
    const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 8);
    bars($("weights"), order.map(j => [data.tokens[j] + (data.tokens.indexOf(data.tokens[j]) !==
      data.tokens.lastIndexOf(data.tokens[j]) ? " (" + (j + 1) + ")" : ""), row[j], ""]));
    const mask = data.masked[i];
    $("masked").textContent = say("if_masked", {token});
    bars($("words"), mask ? mask.words.map(([word, p]) => [word, p, word === token ? "own" : ""]) : []);
    $("note").textContent = data.why_not ? say("why_not", {reason: data.why_not}) : mask ? say("itself",
      {token, share: percent(mask.own), rank: mask.rank.toLocaleString("en")}) : say("never_masked", {token});
    const table = make("table");
    data.nearest.forEach((layer, l) => {
      const line = make("tr"), cell = make("td");
      for (const [word, cosine] of layer[i]) {
        const near = make("span", word === token ? "near right" : "near", word);
        near.append(make("small", "", cosine.toFixed(2)));
        cell.append(near);
      }
      line.append(make("td", "", l ? say("layer_number", {number: l}) : say("embeddings")), cell);
      table.append(line);
    });
    $("nearest").replaceChildren(table);
  }

  function choose(layer, head) {
    $("layer").value = layer; $("head").value = head;
    root.querySelectorAll(".heads button").forEach(b => {
      const is = +b.dataset.layer === +layer && +b.dataset.head === +head;
      b.classList.toggle("chosen", is); b.setAttribute("aria-pressed", is);
    });
    show(shown);
  }

  function picture(layer, head) {
    const canvas = make("canvas"), w = weights(layer, head), button = make("button");
    canvas.width = canvas.height = n;
    const context = canvas.getContext("2d"), image = context.createImageData(n, n);
    w.forEach((x, k) => image.data.set([59, 130, 246, Math.min(255, 255 * Math.sqrt(x))], 4 * k));
    context.putImageData(image, 0, 0);
    button.type = "button";
    button.dataset.layer = layer; button.dataset.head = head;
    button.title = (layer < 0 ? say("all_layers") : say("layer_number", {number: layer + 1})) + ", " +
      (head < 0 ? say("mean") : say("head_number", {number: head + 1}));
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
    chip.type = "button";
    chip.onmouseenter = chip.onfocus = () => show(i);
    chip.onclick = () => { pinned = i; show(i); };
    line.append(chip);
  });
  $("strip").onmouseleave = () => show(pinned);
  for (const [id, count, all] of [["layer", L, say("mean_of_all")], ["head", A, say("mean")]]) {
    $(id).append(new Option(all, -1));
    for (let k = 0; k < count; k++) $(id).append(new Option(k + 1, k));
    $(id).onchange = () => choose($("layer").value, $("head").value);
  }
  $("way").onchange = $("bare").onchange = () => show(shown);
  const grid = $("heads");
  grid.style.gridTemplateColumns = "3.4rem repeat(" + (A + 1) + ", minmax(0, 4.4rem))";
  grid.append(make("span"), make("span", "", say("mean")), ...[...Array(A).keys()].map(h => make("span", "", h + 1)));
  for (let l = 0; l < L; l++) {
    grid.append(make("span", "", say("layer_number", {number: l + 1})));
    for (let h = -1; h < A; h++) grid.append(picture(l, h));
  }
  choose(-1, -1);
}
