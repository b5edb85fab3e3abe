"""The page of `view`: its looks and its script. Whatever comes from a text or a vocabulary goes in as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bertsmith.pages.page import paragraph, section, table

MOST_LABELS = 10

LOOKS = """<style>
.strip { position: sticky; top: 0; background: var(--page); padding: .6rem 0 .7rem; z-index: 2;
  border-bottom: 1px solid var(--line); max-height: 45vh; overflow: auto; }
.strip div { display: flex; flex-wrap: wrap; gap: .35rem .4rem; margin-bottom: .35rem; }
.token { font: inherit; line-height: 1.3; color: inherit; border: 1px solid var(--line); border-radius: .35rem;
  padding: .1rem .4rem; cursor: pointer; background: rgb(59 130 246 / var(--w, 0)); margin: 0; }
.token.piece { margin-left: -.4rem; border-left-style: dotted; border-radius: 0 .35rem .35rem 0; }
.token.special { color: var(--soft); font-size: .8rem; } .token.chosen { outline: 2px solid var(--accent);
  outline-offset: 1px; } .token.pinned { font-weight: 600; }
.controls { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; font-size: .92rem; }
.controls select { font: inherit; color: inherit; background: var(--box); border: 1px solid var(--line);
  border-radius: .35rem; padding: .1rem .3rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 2.4rem; }
.bars { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr 3.8rem; gap: .2rem .7rem;
  align-items: center; font-size: .92rem; margin: .5rem 0; }
.bars i { height: .8rem; background: #3b82f6; border-radius: .2rem; min-width: 1px; }
.bars b { font-weight: 400; text-align: right; font-variant-numeric: tabular-nums; color: var(--soft); }
.bars .own { color: var(--good); font-weight: 600; }
.heads { display: grid; gap: 3px; align-items: center; font-size: .75rem; color: var(--soft); }
.heads span { text-align: center; white-space: nowrap; }
.heads button { padding: 0; border: 1px solid var(--line); background: var(--box);
  border-radius: .2rem; cursor: pointer; line-height: 0; aspect-ratio: 1; min-width: 0; overflow: hidden; }
.heads button.chosen { outline: 2px solid var(--accent); }
.heads canvas { width: 100%; height: 100%; image-rendering: pixelated; }
.near { display: inline-block; margin-right: .9rem; white-space: nowrap; } .near small { margin-left: .25rem; }
#nearest td:first-child { min-width: 6.5rem; white-space: nowrap; } #nearest table { width: 100%; }
</style>"""

MARKUP = """<noscript><p class=banner>This page draws with JavaScript, which is switched off.</p></noscript>
<div class=strip id=strip></div>
<h2>Attention</h2>
<p class=controls>
  <label>Layer <select id=layer></select></label> <label>Head <select id=head></select></label>
  <label>Show <select id=way><option value=to>where it looks</option>
    <option value=from>who looks at it</option></select></label>
  <label><input type=checkbox id=bare> without [CLS] and [SEP]</label>
</p>
<div class=columns>
  <section><h3 id=strongest></h3><div class=bars id=weights></div></section>
  <section><h3 id=masked></h3><div class=bars id=words></div><p class=note id=said></p></section>
</div>
<h3>All heads</h3>
<p class=note>A row of a picture is a token that looks, a column one that is looked at. A click chooses the head.</p>
<div class=heads id=heads></div>
<h2>Nearest words, layer by layer</h2>
<p class=note>The words of the vocabulary whose embeddings point most nearly the same way as the token's state
(cosine).</p>
<div class=wide id=nearest></div>"""

SCRIPT = r"""<script>
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
  $("strongest").textContent = (back ? "Who looks at " : "Where it looks: ") + data.tokens[i];
  const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 8);
  bars($("weights"), order.map(j => [data.tokens[j] + (data.tokens.indexOf(data.tokens[j]) !==
    data.tokens.lastIndexOf(data.tokens[j]) ? " (" + (j + 1) + ")" : ""), row[j], ""]));
  const mask = data.masked[i];
  $("masked").textContent = "If it were masked: " + data.tokens[i];
  bars($("words"), mask ? mask.words.map(([word, p]) => [word, p, word === data.tokens[i] ? "own" : ""]) : []);
  $("said").textContent = data.why_not || (mask ? data.tokens[i] + " itself: " + percent(mask.own) + ", place " +
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
data.tokens.forEach((token, i) => {
  if (data.segments[i] !== segment) { line = make("div"); $("strip").append(line); segment = data.segments[i]; }
  const piece = token.startsWith("##") && token.length > 2;
  const chip = make("button", "token" + (piece ? " piece" : "") + (data.special[i] ? " special" : ""),
    piece ? token.slice(2) : token);
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
</script>"""


def answer_parts(answer: Mapping[str, Any] | None) -> Iterator[str]:
    """What the model answers, at the top of the page; nothing for a model without a task."""
    if answer is None:
        return
    yield section("What the model answers")
    if "words" in answer:
        rows = zip(answer["words"], answer["tags"], answer["scores"], strict=True)
        yield table(["word", "tag", "probability"], [(word, tag, _percent(score)) for word, tag, score in rows])
    elif "scores" in answer:
        said = answer.get("label") or ", ".join(answer.get("labels", ())) or "none of its labels"
        yield paragraph(said, "number")
        order = sorted(answer["scores"].items(), key=lambda pair: -pair[1])
        yield table(["label", "probability"], [(name, _percent(score)) for name, score in order[:MOST_LABELS]])
    elif "value" in answer:
        yield paragraph(f"{answer['value']:.3f}", "number")
    else:
        yield paragraph(answer["text"] or "The text has no answer.", "number")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def body(found: Mapping[str, Any]) -> Iterator[str]:
    """The parts of the page. A `<` inside the data could end its element, so it is written as an escape."""
    yield LOOKS
    yield section("The text")
    yield paragraph("Point at a token to see what the model does with it; a click keeps it.", "note")
    yield MARKUP
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    yield f"<script type=application/json id=data>{text}</script>"
    yield SCRIPT
