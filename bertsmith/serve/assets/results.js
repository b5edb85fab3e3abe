// How results are drawn. Texts of people and models become text nodes only, so they are never read as HTML.
import {bars, make, percent, showView} from "./view.js";
import {say, SHOWN_MASK, translate} from "./words.js";

const MOST_LABELS = 10, MOST_SENTENCES = 40, COLOURS = 8;

// An input that the page itself refuses, and the field to correct.
export class Refused extends Error {
  constructor(message, field) { super(message); this.field = field; }
}

export const lines = text => text.split("\n").map(line => line.trim()).filter(Boolean);

// Offsets of the server count characters, those of JavaScript count UTF-16 units.
const slice = (characters, begin, end) => characters.slice(begin, end).join("");

const fixed = (value, decimals) => value.toFixed(decimals).replace("-", "−").replace(/^−(0\.?0*)$/, "$1");

function barsOf(rows, top) {
  const box = make("div", "bars");
  bars(box, rows, top);
  return box;
}

function table(header, rows) {
  const found = make("table"), head = make("tr");
  head.append(...header.map(name => { const cell = make("th", "", name); cell.scope = "col"; return cell; }));
  found.append(head);
  for (const row of rows) {
    const line = make("tr");
    line.append(...row.map(value => make("td", "", value)));
    found.append(line);
  }
  const box = make("div", "wide");
  box.append(found);
  return box;
}

function folded(title, content) {
  const box = make("details");
  box.append(make("summary", "", title), content);
  return box;
}

export function drawMasks(box, found, values, model) {
  const text = values.masked, mask = text.includes(model.mask) ? model.mask : SHOWN_MASK, parts = text.split(mask);
  if (parts.length === found.length + 1) {
    const sentence = make("p", "passage", parts[0]);
    found.forEach((words, i) => sentence.append(make("mark", "filled", words[0].token), parts[i + 1]));
    box.append(sentence);
  }
  const columns = make("div", "columns");
  found.forEach((words, i) => {
    const part = make("section");
    if (found.length > 1) part.append(make("h3", "", say("mask_number", {number: i + 1})));
    part.append(barsOf(words.map(each => [each.token, each.probability, ""])));
    columns.append(part);
  });
  box.append(columns);
  return found.map(words => `${words[0].token} ${percent(words[0].probability)}`).join(", ");
}

export function drawLabels(box, found) {
  if (found.value !== undefined) {
    const shown = fixed(found.value, 3);
    box.append(make("p", "number", shown));
    return shown;
  }
  const order = Object.entries(found.scores).sort((a, b) => b[1] - a[1]);
  const chosen = found.label !== undefined ? [found.label] : found.labels;
  const names = make("p", "number", chosen.length ? chosen.join(", ") : say("no_label"));
  const rows = order.map(([label, share]) => [label, share, chosen.includes(label) ? "own" : ""]);
  box.append(names, barsOf(rows.slice(0, MOST_LABELS), 1));
  if (rows.length > MOST_LABELS) box.append(folded(say("other_labels", {count: rows.length}), barsOf(rows, 1)));
  return found.label !== undefined ? `${found.label}, ${percent(found.score)}` : names.textContent;
}

export function drawRanks(box, found, values) {
  const texts = lines(values.texts);
  const list = make("ol", "ranks");
  for (const {index, score} of found) {
    const entry = make("li");
    entry.append(make("span", "", texts[index]), make("b", "", fixed(score, 2)));
    list.append(entry);
  }
  box.append(list);
  return texts[found[0].index];
}

// The words of a text with their places, found one after another.
function places(characters, words) {
  let begin = 0;
  return words.map(word => {
    const size = [...word].length;
    while (begin < characters.length && slice(characters, begin, begin + size) !== word) begin++;
    begin += size;
    return [begin - size, begin];
  });
}

function colours(model) {
  const kinds = [...new Set((model.labels || []).map(label => label.replace(/^[BIESLU]-/, "")))].filter(k => k !== "O");
  return kind => "c" + Math.max(0, kinds.indexOf(kind)) % COLOURS;
}

export const hasEntities = model => model.labels.some(label => /^[BIESLU]-/.test(label));

export function drawTags(box, found, values, model) {
  const characters = [...values.text], colour = colours(model);
  const marksEntities = hasEntities(model);
  const at = marksEntities ? [] : places(characters, found.words);
  const marks = marksEntities ? found.entities : found.words.map((word, i) => ({type: found.tags[i], text: word,
    start: at[i][0], end: at[i][1], score: found.scores[i]})).filter(mark => mark.type !== "O");
  const text = make("p", "passage");
  let done = 0;
  for (const {type, start, end} of marks) {
    const mark = make("mark", "entity " + colour(type), slice(characters, start, end));
    mark.append(make("small", "", type));
    text.append(slice(characters, done, start), mark);
    done = end;
  }
  text.append(slice(characters, done));
  box.append(text);
  if (!marks.length) box.append(make("p", "note", say("no_entities")));
  else if (marksEntities) box.append(table([say("entity"), say("kind"), say("share")],
    marks.map(mark => [mark.text, mark.type, percent(mark.score)])));
  box.append(folded(say("every_word"), table([say("word"), say("tags"), say("share")],
    found.words.map((word, i) => [word, found.tags[i], percent(found.scores[i])]))));
  return marks.length ? marks.map(mark => `${mark.text}: ${mark.type}`).join(", ") : say("no_entities");
}

export function drawAnswer(box, found, values) {
  const characters = [...values.passage], passage = make("p", "passage"), answer = found.text || say("no_answer");
  const mark = (begin, end) => passage.replaceChildren(slice(characters, 0, begin),
    make("mark", "filled", slice(characters, begin, end)), slice(characters, end));
  const rows = make("div", "bars candidates"), buttons = [];
  for (const each of found.nbest) {
    const button = make("button", "", each.text), bar = make("i");
    button.type = "button";
    button.onclick = () => {
      mark(each.start, each.end);
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    };
    bar.style.width = 100 * each.score + "%";
    buttons.push(button);
    rows.append(button, bar, make("b", "", percent(each.score)));
  }
  box.append(make("p", "number", answer), passage);
  if (found.text) buttons[0].click();
  else passage.textContent = values.passage;
  if (buttons.length) box.append(make("h3", "", say("candidates")), rows);
  if (found.null_odds < 1e5)
    box.append(make("p", "note", say("no_answer_odds", {odds: fixed(found.null_odds, 2)})));
  return found.text ? `${answer}, ${percent(found.score)}` : answer;
}

export function drawChoice(box, found, values) {
  const endings = lines(values.endings);
  const sentence = make("p", "passage", values.context.trim() + " ");
  sentence.append(make("mark", "filled", found.text));
  box.append(sentence, barsOf(endings.map((text, i) => [text, found.scores[i], i === found.choice ? "own" : ""]), 1));
  return `${found.text}, ${percent(found.score)}`;
}

function cosine(a, b) {
  let dot = 0, first = 0, second = 0;
  for (let k = 0; k < a.length; k++) { dot += a[k] * b[k]; first += a[k] ** 2; second += b[k] ** 2; }
  return dot / Math.sqrt(first * second || 1);
}

export function drawSimilarity(box, vectors, values) {
  const all = lines(values.sentences);
  const texts = all.slice(0, MOST_SENTENCES), grid = make("table", "similarity"), head = make("tr");
  let best = null;
  head.append(make("td"), make("td"), ...texts.map((text, i) => {
    const cell = make("th", "", i + 1);
    cell.scope = "col"; cell.title = text;
    return cell;
  }));
  grid.append(head);
  texts.forEach((text, i) => {
    const line = make("tr"), number = make("td", "count", i + 1), name = make("th", "", text);
    name.scope = "row";
    line.append(number, name);
    texts.forEach((other, j) => {
      const value = cosine(vectors[i], vectors[j]), cell = make("td", i === j ? "same" : "", fixed(value, 2));
      cell.style.setProperty("--w", (.7 * Math.max(0, value) ** 1.5).toFixed(3));
      cell.title = `${text} · ${other}`;
      line.append(cell);
      if (i < j && (!best || value > best.value)) best = {first: i + 1, second: j + 1, value, cell};
    });
    grid.append(line);
  });
  const facts = say("vectors", {count: vectors.length, size: vectors[0].length}), wide = make("div", "wide");
  let summary = say("one_more");
  if (best) {
    best.cell.classList.add("best");
    summary = say("most_similar", {...best, cosine: fixed(best.value, 2)});
  }
  wide.append(grid);
  wide.tabIndex = 0; wide.role = "region"; wide.ariaLabel = say("embed");  // wide ones are scrolled with the arrow keys
  box.append(make("p", "lead", summary), wide, make("p", "note", facts));
  if (all.length > texts.length)
    box.append(make("p", "note", say("too_many", {count: texts.length, all: all.length})));
  return summary;
}

export function drawView(box, data) {
  const root = make("div", "look");
  root.append(document.getElementById("view").content.cloneNode(true));
  translate(root);
  box.append(root);
  showView(root, data, say);
  return say("view_done", {count: data.tokens.length, layers: data.layers, heads: data.heads});
}
