// The page: choose a model and a task, write, and see what the model says.
import {HEADS, headsOf, titleOf} from "./heads.js";
import {ask, hasKey, keep, Problem} from "./requests.js";
import {Refused} from "./results.js";
import {make} from "./view.js";
import {language, say, SHOWN_MASK, speak, translate} from "./words.js";

const $ = id => document.getElementById(id);
const LONGEST_JSON = 20000, LONGEST_EXAMPLE = 60;
const written = {};  // what the person has written, by field; it stays when the model or the task changes
let models = [], model = null, task = null, running = null, last = null;

// ---- the controls ----

function listModels() {
  $("model").replaceChildren(...models.map(each => new Option(each.name, each.name)));
  const [name, head] = location.hash.slice(1).split("/").map(part => { try { return decodeURIComponent(part); }
    catch { return ""; } });
  const found = models.find(each => each.name === name);
  chooseModel(found || models[0], found && head);
}

function chooseModel(chosen, head) {
  model = chosen;
  $("model").value = model.name;
  const heads = headsOf(model);
  chooseTask(heads.includes(head) ? head : heads.includes(task) ? task : heads[0]);
}

function listTasks() {
  $("facts").textContent = say("size", {layers: model.num_layers, length: model.max_length});
  $("tasks").replaceChildren(...headsOf(model).map(name => {
    const label = make("label"), box = make("input");
    box.type = "radio"; box.name = "task"; box.value = name; box.checked = name === task;
    box.onchange = () => chooseTask(name);
    label.append(box, make("span", "", say(titleOf(name, model))));
    return label;
  }));
}

function chooseTask(name) {
  const hadFocus = $("tasks").contains(document.activeElement);
  task = name;
  clear();
  history.replaceState(null, "", `#${encodeURIComponent(model.name)}/${task}`);
  listTasks();
  if (hadFocus) $("tasks").querySelector(":checked").focus();
  $("about").textContent = task ? say("about_" + titleOf(task, model), model) : "";
  $("fields").replaceChildren(...(HEADS[task]?.fields || []).map(drawField));
  $("run").disabled = !task;
  $("extra").replaceChildren(...(task === "fill-mask" ? [maskButton()] : []));
  $("examples").replaceChildren(...(HEADS[task]?.examples[language] || []).map(exampleButton));
}

function drawField({name, kind, label, optional}) {
  const box = make("div", "field"), title = make("label", "", say(label));
  const input = make(kind === "line" ? "input" : "textarea");
  input.id = title.htmlFor = "field-" + name;
  if (kind === "line") input.type = "text";
  else input.rows = kind === "lines" || name === "passage" ? 5 : optional ? 1 : 3;
  input.value = written[name] || "";
  input.autocomplete = "off";
  input.oninput = () => { written[name] = input.value; };
  box.append(title, input);
  return box;
}

function fill(name, value) {
  written[name] = $("field-" + name).value = value;
}

function maskButton() {
  const button = make("button", "quiet", say("insert_mask", model));
  button.type = "button";
  button.onclick = () => {
    const input = $("field-masked");
    input.setRangeText(model.mask, input.selectionStart, input.selectionEnd, "end");
    input.focus();
    input.oninput();
  };
  return button;
}

function exampleButton(example) {
  const values = Object.entries(example).map(([name, value]) => [name, value.replaceAll(SHOWN_MASK, model.mask)]);
  const first = values[0][1].replaceAll("\n", " · ");
  const shown = first.length > LONGEST_EXAMPLE ? first.slice(0, LONGEST_EXAMPLE).replace(/[ ·]+$/, "") + "…" : first;
  const button = make("button", "example", shown);
  button.type = "button";
  button.setAttribute("aria-label", `${say("example")}: ${shown}`);
  button.onclick = () => {
    for (const [name, value] of values) fill(name, value);
    run();
  };
  return button;
}

// ---- running a request ----

function clear() {
  if (running) { running.abort(); running = null; working(false); }
  last = null;
  $("result").replaceChildren();
  $("problem").hidden = true;
  $("status").textContent = "";
}

function checked() {
  const head = HEADS[task], values = {};
  for (const {name, label, optional} of head.fields) {
    values[name] = written[name] || "";
    if (!optional && !values[name].trim()) throw new Refused(say("empty", {field: say(label)}), name);
  }
  head.check?.(values, model);
  return values;
}

async function run() {
  clear();
  const mine = running = new AbortController();
  try {
    const values = checked(), body = {model: model.name, ...HEADS[task].body(values)};
    working(true);
    const begin = performance.now(), found = await ask(task, body, mine.signal);
    last = {task, values, body, found, time: performance.now() - begin};
    if (mine === running) drawResult();
  } catch (error) {
    if (mine !== running) return;
    if (mine.signal.aborted) $("status").textContent = say("stopped_by_you");
    else showProblem(error, run);
  } finally {
    if (mine === running) { running = null; working(false); }
  }
}

function working(is) {
  $("run-words").dataset.say = is ? "stop" : "run";
  $("run-words").textContent = say(is ? "stop" : "run");
  $("run").classList.toggle("working", is);
  $("result").setAttribute("aria-busy", is);
  if (is) $("status").textContent = say("working");
}

function drawResult() {
  const card = make("div", "card shown");
  $("result").replaceChildren(card);
  const summary = HEADS[last.task].draw(card, last.found, last.values, model);
  card.append(requestPart());
  $("status").textContent = `${say("result")}: ${summary}`;
  const quick = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (card.getBoundingClientRect().top > innerHeight - 120)
    card.scrollIntoView({block: "start", behavior: quick ? "auto" : "smooth"});
}

// What was asked and answered, for a person who writes a program next.
function requestPart() {
  const part = make("details", "request"), text = JSON.stringify(last.found, null, 1);
  const secret = hasKey() ? ` -H "Authorization: Bearer $KEY"` : "";
  const data = JSON.stringify(last.body).replaceAll("'", "'\\''");
  const command = `curl ${new URL(last.task, location.href.split("#")[0])} -H 'Content-Type: application/json'${secret} ` +
    `-d '${data}'`;
  const summary = make("summary", "", say("request"));
  summary.append(make("small", "", say("milliseconds", {time: Math.max(1, Math.round(last.time))})));
  const cut = text.length > LONGEST_JSON ? say("shortened", {count: text.length - LONGEST_JSON}) : "";
  const line = make("div", "line");
  line.append(make("pre", "", command), ...(navigator.clipboard ? [copyButton(command)] : []));
  part.append(summary, line, make("pre", "", text.slice(0, LONGEST_JSON) + cut));
  for (const block of part.querySelectorAll("pre")) block.tabIndex = 0;
  return part;
}

function copyButton(text) {
  const button = make("button", "quiet", say("copy"));
  button.type = "button";
  button.onclick = async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = $("status").textContent = say("copied");
  };
  return button;
}

function showProblem(error, again) {
  const box = $("problem");
  box.replaceChildren();
  $("status").textContent = "";
  for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  if (error instanceof Refused) {
    box.append(make("span", "", error.message));
    $("field-" + error.field)?.setAttribute("aria-invalid", "true");
    $("field-" + error.field)?.focus();
  } else if (error instanceof Problem) {
    if (error.kind === "key") { unlock(hasKey()); return; }
    box.append(make("span", "", say("problem_" + error.kind, {seconds: error.seconds})));
    if (error.detail && ["long", "input", "missing"].includes(error.kind)) {
      const detail = make("small", "", error.detail);
      detail.lang = "en";
      box.append(detail);
    }
    if (["stopped", "busy", "closing", "slow", "failed"].includes(error.kind)) {
      const button = make("button", "quiet", say("again"));
      button.type = "button";
      button.onclick = again;
      box.append(button);
    }
  } else throw error;
  box.hidden = false;
  box.scrollIntoView({block: "nearest"});
}

// ---- the key, the language, the start ----

function unlock(wasWrong) {
  keep("");
  clear();
  $("ask").hidden = true;
  $("unlock").hidden = false;
  $("key").value = "";
  if (wasWrong) {
    $("problem").replaceChildren(make("span", "", say("problem_key")));
    $("problem").hidden = false;
  }
  $("key").focus();
}

async function start() {
  $("problem").hidden = true;
  if ("key" in document.body.dataset && !hasKey()) { unlock(false); return; }
  try {
    models = await ask("models");
  } catch (error) {
    showProblem(error, start);
    return;
  }
  const hadFocus = $("unlock").contains(document.activeElement);
  $("unlock").hidden = true;
  $("forget").hidden = !hasKey();
  $("ask").hidden = false;
  listModels();
  if (hadFocus) $("model").focus();
}

function setLanguage(chosen) {
  speak(chosen);
  const kept = last;
  document.documentElement.lang = chosen;
  document.title = `bertsmith – ${say("lead")}`;
  for (const button of document.querySelectorAll("[data-language]"))
    button.setAttribute("aria-pressed", button.dataset.language === chosen);
  translate(document);
  if (!model) return;
  chooseTask(task);
  if (kept) { last = kept; drawResult(); }
}

for (const button of document.querySelectorAll("[data-language]"))
  button.onclick = () => setLanguage(button.dataset.language);
$("model").onchange = () => chooseModel(models.find(each => each.name === $("model").value));
$("ask").onsubmit = event => {
  event.preventDefault();
  const stops = running && event.submitter === $("run");
  stops ? running.abort() : run();
};
document.onkeydown = event => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || $("ask").hidden || !task) return;
  event.preventDefault();
  run();
};
$("unlock").onsubmit = event => {
  event.preventDefault();
  keep($("key").value.trim());
  start();
};
$("forget").onclick = () => unlock(false);
setLanguage(language);
start();
