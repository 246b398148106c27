// The page: from a recording to a picture that can be played, pass by pass.

import * as api from "./api.js";
import { Grid } from "./grid.js";
import { Imputation, compare } from "./imputation.js";
import { Player, record } from "./sound.js";

const PASS_MILLISECONDS = 620;
const LONGEST_RECORDING = 120; // seconds, from the microphone
const PLAY_ICON = "M7 4v16l13-8z";
const PAUSE_ICON = "M6 4h4v16H6zM14 4h4v16h-4z";

const STRATEGIES = {
  block: ["Block", "In each block, the place it is surest of. The paper's own."],
  alternate_sub_block: ["Alternate sub-blocks", "Left halves of the blocks in one pass, right halves in the next."],
  right_most_last: ["Right-most last", "The last place of every block waits for the last pass."],
  top_k: ["Top k", "The surest places anywhere, never two neighbours at once."],
  annealing: ["Annealing", "Fills in everything, then takes back what it was least sure of."],
  annealing_random: ["Annealing at random", "Fills in everything, then takes back places at random."],
  adaptive: ["Adaptive", "Whatever it is sure of at once, at least one place a block: often fewer passes."],
};

const $ = (id) => document.getElementById(id);
const player = new Player();
const grid = new Grid($("rows"), { onWord: hear });

const state = { models: [], blob: null, name: "", imputation: null, pass: 0, timer: null, request: null, recording: null };

// Starting up.

async function start() {
  try {
    state.models = await api.models();
  } catch (problem) {
    if (problem instanceof api.NeedsKey) return askForKey(problem);
    return complain(problem);
  }
  $("key-form").hidden = true;
  $("error").hidden = true;
  $("model").replaceChildren(...state.models.map(({ id }) => new Option(id, id)));
  $("model-option").hidden = state.models.length < 2;
  chooseModel(state.models.find((model) => model.default) ?? state.models[0]);
  if (state.blob) run();
}

function askForKey(problem) {
  $("key-form").hidden = false;
  say(problem.message);
  $("key").focus();
}

function chooseModel(model) {
  state.model = model;
  $("model").value = model.id;
  $("sample").hidden = !model.sample;
  const kept = $("strategy").value;
  $("strategy").replaceChildren(...model.strategies.map((name) => new Option(STRATEGIES[name]?.[0] ?? name, name)));
  if (model.strategies.includes(kept)) $("strategy").value = kept;
  $("block-size").value = model.block_size;
  explain();
}

function explain() {
  const size = Number($("block-size").value);
  $("block-size-value").textContent = size;
  const seconds = size * (state.model?.frame_seconds ?? 0);
  const span = seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
  $("block-size-hint").textContent = size === 1 ? "One pass: every place at once." : `Blocks of ${span}, so ${size} passes.`;
  $("strategy-hint").textContent = STRATEGIES[$("strategy").value]?.[1] ?? "";
}

// From a recording to an imputation.

async function take(blob, name) {
  state.blob = blob;
  state.name = name;
  player.stop();
  $("listen").disabled = !(await player.load(blob));
  await run();
}

async function run() {
  if (!state.blob || !state.model) return;
  state.request?.abort();
  const request = (state.request = new AbortController());
  pause();
  $("error").hidden = true;
  $("result").setAttribute("aria-busy", "true");
  say(`Listening to ${state.name} …`);
  const options = { model: state.model.id, block_size: $("block-size").value, strategy: $("strategy").value };
  try {
    const told = await api.impute(state.blob, state.name, options, request.signal);
    if (request !== state.request) return;
    show(new Imputation(told));
  } catch (problem) {
    if (problem.name === "AbortError" || request !== state.request) return;
    if (problem instanceof api.NeedsKey) askForKey(problem);
    else complain(problem);
  } finally {
    $("result").setAttribute("aria-busy", "false");
  }
}

function show(imputation) {
  state.imputation = imputation;
  $("result").hidden = false;
  $("empty").hidden = true;
  $("pass").max = imputation.passCount;
  grid.show(imputation, imputation.passCount);
  setPass(imputation.passCount, false);
  compareSides();
  listPasses();
  if ($("transcript").getBoundingClientRect().top > 0.7 * innerHeight) $("status").scrollIntoView();
  const passes = imputation.passCount === 1 ? "1 pass" : `${imputation.passCount} passes`;
  const unheard = $("listen").disabled ? " This browser cannot play that format, so words cannot be heard." : "";
  say(`${imputation.name}: ${imputation.seconds.toFixed(1)} s, written in ${passes}.${unheard}`);
}

function say(text) {
  $("status").textContent = text;
}

function complain(problem) {
  const message = problem instanceof TypeError ? "The server cannot be reached." : problem.message;
  $("error").textContent = message.charAt(0).toUpperCase() + message.slice(1);
  $("error").hidden = false;
  say("");
}

// Passes.

function setPass(pass, animate) {
  const { imputation } = state;
  if (!imputation) return;
  state.pass = Math.max(0, Math.min(imputation.passCount, pass));
  $("pass").value = state.pass;
  const filled = imputation.filled(state.pass);
  const text = `Pass ${state.pass} of ${imputation.passCount} · ${filled} of ${imputation.frames} filled`;
  $("pass-text").textContent = text;
  $("pass").setAttribute("aria-valuetext", text);
  $("back").disabled = state.pass === 0;
  $("step").disabled = state.pass === imputation.passCount;
  grid.go(state.pass, animate);
  writeTranscript();
}

function writeTranscript() {
  const words = state.imputation.words(state.pass);
  const parts = words.map((word) => {
    const element = document.createElement(word.open ? "span" : "button");
    element.textContent = word.text;
    if (word.open) {
      element.className = "open";
      return [element, " "];
    }
    element.type = "button";
    element.style.borderBottomColor = grid.sure(word.confidence);
    const percent = Math.round(100 * word.confidence);
    element.title = `${word.start.toFixed(2)} s, ${percent} % sure`;
    element.setAttribute("aria-label", `Hear ${word.text}, at ${word.start.toFixed(2)} seconds, ${percent} percent sure`);
    element.addEventListener("click", () => hear(word));
    return [element, " "];
  });
  if (!parts.length) {
    const nothing = document.createElement("span");
    nothing.className = "nothing";
    nothing.textContent = state.pass === state.imputation.passCount ? "No words in this recording." : "…";
    parts.push([nothing]);
  }
  $("transcript").replaceChildren(...parts.flat());
}

function play() {
  if (!state.imputation) return;
  if (state.pass === state.imputation.passCount) setPass(0, false);
  $("play").setAttribute("aria-label", "Pause");
  $("play-icon").setAttribute("d", PAUSE_ICON);
  state.timer = setInterval(() => {
    setPass(state.pass + 1, true);
    if (state.pass === state.imputation.passCount) pause();
  }, PASS_MILLISECONDS);
}

function pause() {
  clearInterval(state.timer);
  state.timer = null;
  $("play").setAttribute("aria-label", "Play the passes");
  $("play-icon").setAttribute("d", PLAY_ICON);
}

function togglePlay() {
  if (state.timer === null) play();
  else pause();
}

function stepTo(pass) {
  pause();
  setPass(pass, pass === state.pass + 1);
}

// Sound.

function hear(word) {
  const length = (word.end ?? word.start + 0.4) - word.start;
  listen(word.start - 0.06, word.start + Math.max(0.25, length) + 0.06);
}

function listen(start, end) {
  $("listen").textContent = "Listen";
  player.play(start, end, () => {
    if (player.time === null) {
      grid.setCursor(null);
      $("listen").textContent = "Listen";
    }
  });
  const follow = () => {
    if (player.time === null) return;
    grid.setCursor(player.time);
    requestAnimationFrame(follow);
  };
  follow();
}

async function toggleRecording() {
  if (state.recording) {
    state.recording.stop();
    return;
  }
  $("error").hidden = true;
  try {
    state.recording = await record({
      limit: Math.min(LONGEST_RECORDING, state.model?.max_seconds ?? LONGEST_RECORDING),
      level: (value) => ($("level").value = value),
      tick: (seconds) => ($("record-text").textContent = `Stop ${seconds.toFixed(0)} s`),
    });
  } catch (problem) {
    complain(problem);
    return;
  }
  $("record").setAttribute("aria-pressed", "true");
  $("record").setAttribute("aria-label", "Stop recording");
  $("record-text").textContent = "Stop";
  $("level").hidden = false;
  say("Recording: speak, then press stop.");
  const blob = await state.recording.finished;
  state.recording = null;
  $("record").setAttribute("aria-pressed", "false");
  $("record").setAttribute("aria-label", "Record from the microphone");
  $("record-text").textContent = "Record";
  $("level").hidden = true;
  await take(blob, "recording.wav");
}

// Beside each other, and to take along.

function compareSides() {
  const { imputation } = state;
  const ours = imputation.finalWords.map((word) => word.text);
  const theirs = imputation.greedy.words.map((word) => word.text);
  const [sameOurs, sameTheirs] = compare(ours, theirs);
  writeSide($("ours-text"), ours, sameOurs);
  writeSide($("greedy-text"), theirs, sameTheirs);
  const passes = document.createElement("small");
  passes.textContent = imputation.passCount === 1 ? "1 pass" : `${imputation.passCount} passes`;
  $("ours-title").replaceChildren("Imputer ", passes);
  const differing = Math.max(ours.length - sameOurs.size, theirs.length - sameTheirs.size);
  $("difference").textContent = differing === 0 ? "Here both write the same words." : `They differ in ${differing} ${differing === 1 ? "word" : "words"}, marked above.`;
}

function writeSide(element, words, same) {
  const parts = words.flatMap((word, n) => {
    if (same.has(n)) return [word, " "];
    const mark = document.createElement("mark");
    mark.textContent = word;
    return [mark, " "];
  });
  element.replaceChildren(...(parts.length ? parts : ["–"]));
}

function listPasses() {
  const { imputation } = state;
  const items = imputation.states.slice(1).map(({ symbols }) => {
    const item = document.createElement("li");
    item.textContent = symbols.join(" ");
    return item;
  });
  $("passes-text").replaceChildren(...items);
}

function download(kind) {
  const { imputation } = state;
  const told = { name: imputation.name, model: imputation.model, text: imputation.text, seconds: imputation.seconds, block_size: imputation.block_size, strategy: imputation.strategy, passes: imputation.passCount, words: imputation.finalWords.map(({ text, start, end, confidence }) => ({ text, start, end, confidence })) };
  const content = kind === "json" ? `${JSON.stringify(told, null, 2)}\n` : imputation.formats[kind];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind === "json" ? "application/json" : "text/plain" }));
  link.download = `${imputation.name.replace(/\.[^.]*$/, "") || "transcript"}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Controls.

$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (file) take(file, file.name);
});
$("record").addEventListener("click", toggleRecording);
$("sample").addEventListener("click", async () => {
  try {
    await take(await api.sample(state.model.id), "sample.wav");
  } catch (problem) {
    complain(problem);
  }
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.useKey($("key").value.trim());
  start();
});
$("model").addEventListener("change", () => {
  chooseModel(state.models.find(({ id }) => id === $("model").value));
  run();
});
$("block-size").addEventListener("input", explain);
$("block-size").addEventListener("change", run);
$("strategy").addEventListener("change", () => {
  explain();
  run();
});
$("play").addEventListener("click", togglePlay);
$("back").addEventListener("click", () => stepTo(state.pass - 1));
$("step").addEventListener("click", () => stepTo(state.pass + 1));
$("pass").addEventListener("input", () => stepTo(Number($("pass").value)));
$("listen").addEventListener("click", () => {
  if ($("listen").textContent === "Stop") {
    player.stop();
    return;
  }
  listen(0, Infinity);
  $("listen").textContent = "Stop";
});
$("show-greedy").addEventListener("change", () => grid.setGreedy($("show-greedy").checked));
for (const kind of ["txt", "srt", "json"]) $(`download-${kind}`).addEventListener("click", () => download(kind));

document.addEventListener("keydown", (event) => {
  if (!state.imputation || event.ctrlKey || event.metaKey || event.altKey) return;
  const control = event.target.closest("input, select, textarea, summary");
  if (control) return; // they have uses of their own for these keys
  const onButton = event.target.closest("button");
  const actions = { ArrowRight: () => stepTo(state.pass + 1), ArrowLeft: () => stepTo(state.pass - 1), Home: () => stepTo(0), End: () => stepTo(state.imputation.passCount) };
  if (!onButton) actions[" "] = togglePlay;
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

let dragging = 0;
const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragenter", (event) => {
  if (carriesFile(event)) $("drop").hidden = ++dragging === 0;
});
document.addEventListener("dragleave", (event) => {
  if (carriesFile(event)) $("drop").hidden = --dragging <= 0;
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  dragging = 0;
  $("drop").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) take(file, file.name);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.imputation && writeTranscript());

start();
