// The page: from a recording to a transcript that fills in while the server writes it.

import * as api from "./api.js";
import { clock } from "./clock.js";
import { acceptDrops } from "./drop.js";
import { showGreedy } from "./greedy.js";
import { Imputation, NOW } from "./imputation.js";
import { Level } from "./level.js";
import { Live } from "./live.js";
import { Microphone } from "./microphone.js";
import { Overview } from "./overview.js";
import { Player } from "./player.js";
import { Recording } from "./recording.js";
import { Settings, searchOf } from "./settings.js";
import { copy, download } from "./take.js";
import { Timeline } from "./timeline.js";
import { Transcript } from "./transcript.js";
import { Passes, Sound } from "./transport.js";

const $ = (id) => document.getElementById(id);

const player = new Player({});
const settings = new Settings({ onChange: offerAgain });
const transcript = new Transcript({ host: $("transcript"), tip: $("word-tip"), onWord: playWord });
const overview = new Overview({ canvas: $("overview"), onSeek: goToShare });
const timeline = new Timeline({
  scroller: $("timeline"),
  space: $("timeline-space"),
  canvas: $("timeline-canvas"),
  tip: $("frame-tip"),
  onWord: playWord,
  onSeek: (seconds) => playable && player.seek(seconds),
  onView: showView,
});
const sound = new Sound({ player, onTime: showTime, onPlay: () => (timeline.following = true) });
const passes = new Passes({ onPass: showPass });
const microphone = new Microphone();
const level = new Level({ onQuiet: () => say("No sound from the microphone so far.") });
const recording = new Recording({
  microphone,
  level,
  onOpen: () => player.pause(), // or it would be recorded
  onRecorded: (blob) => take("recording.wav", () => blob),
  onProblem: (problem) => complain(problem),
  onStatus: say,
});

const live = new Live({
  microphone,
  level,
  getModel: () => settings.model,
  onOpen: beginLive,
  onChange: showWriting,
  onEnd: endLive,
  onProblem: complain,
  onStatus: say,
});

let source = null; // {name, get, blob}
let imputation = null;
let request = null; // the AbortController of what is running
let sent = null; // the settings that the result was made with
let playable = false;

// The server.

async function start() {
  $("error").hidden = true;
  try {
    settings.setModels(await api.models());
  } catch (problem) {
    complain(problem);
    return;
  }
  $("key-form").hidden = true;
  say("");
  recording.setLimits(settings.model);
  if (source && !imputation?.done) await run();
}

function complain(problem) {
  say("");
  if (problem instanceof api.NeedsKey) {
    $("key-form").hidden = false;
    say(problem.message);
    $("key").focus();
    return;
  }
  $("error-text").textContent = problem.message.charAt(0).toUpperCase() + problem.message.slice(1);
  $("retry").hidden = !(problem instanceof api.Lost);
  $("error").hidden = false;
}

function say(text) {
  $("status").textContent = text;
}

// From a recording to an imputation.

// Stop whatever is running, so that nothing of it shows up later.
function abandon() {
  request?.abort();
  request = null;
  microphone.discard();
  live.discard();
}

// A recording by its name; get(signal) brings its bytes.
function take(name, get) {
  abandon();
  player.unload();
  sound.enable((playable = false));
  source = { name, get, blob: null };
  return run();
}

const takeFile = (file) => take(file.name, () => file);

async function run() {
  if (!source) return;
  request?.abort();
  clearResult(source.name);
  if (!settings.model) {
    await start();
    return;
  }
  const [mine, from] = [(request = new AbortController()), source];
  sent = settings.options();
  busy(true);
  progress("Sending the recording", null);
  say(`Transcribing ${from.name}.`);
  try {
    from.blob ??= await open(from, mine.signal);
    await api.impute(from.blob, from.name, sent, {
      signal: mine.signal,
      onUpload: (share) => request === mine && progress(share < 1 ? "Sending the recording" : "Waiting for the server", share < 1 ? share : null),
      onEvent: (kind, told) => request === mine && EVENTS[kind]?.(told),
    });
    if (request === mine) ended();
  } catch (problem) {
    if (request !== mine) return;
    ended();
    if (problem.name === "AbortError") cancelled();
    else complain(problem);
    if (imputation) showFacts();
  }
}

async function open(from, signal) {
  const blob = await from.get(signal);
  const limit = settings.model.max_upload_bytes;
  if (blob.size > limit) throw new Error(`${from.name} is larger than the ${limit / 2 ** 20} MB that this server takes.`);
  player.load(blob).then((can) => source === from && sound.enable((playable = can)));
  return blob;
}

function ended() {
  request = null;
  busy(false);
}

function cancelled() {
  $("busy").hidden = false;
  $("cancel").hidden = true;
  $("resume").hidden = false;
  progress("Cancelled", imputation ? Math.min(1, imputation.filledNow / imputation.frames) : 0);
  say(`Cancelled ${source.name}.`);
  $("resume").focus();
}

const EVENTS = {
  "imputation.start": (outline) => {
    imputation = new Imputation(outline);
    sound.setLength(outline.seconds);
    $("alignment").hidden = false;
    timeline.show(imputation, NOW);
    overview.show(timeline.overflows);
    showFacts();
  },
  "imputation.pictures": (pictures) => {
    imputation.addPictures(pictures);
    overview.changed();
    timeline.invalidate();
  },
  "imputation.pass": (pass) => {
    imputation.addPass(pass);
    showWriting();
  },
  "imputation.done": (told) => {
    cancelAnimationFrame(writing);
    writing = null;
    imputation.finish(told);
    showDone();
  },
};

function busy(is) {
  $("busy").hidden = !is;
  $("cancel").hidden = false;
  $("resume").hidden = true;
  $("transport").hidden = is || !imputation?.done;
  $("result").setAttribute("aria-busy", String(is));
  offerAgain();
}

function progress(text, share) {
  $("progress-text").textContent = text;
  if (share === null) $("progress").removeAttribute("value");
  else $("progress").value = share;
}

// Settings that were not used for what is shown are one button away, never an upload per change.
function offerAgain() {
  const changed = source !== null && JSON.stringify(sent) !== JSON.stringify(settings.model ? settings.options() : null);
  $("again").disabled = !source || request !== null;
  $("again-hint").textContent = !source ? "Settings apply to the next recording." : changed ? "The transcript below was made with other settings." : "";
}

// What is shown.

function clearResult(name) {
  imputation = null;
  passes.show(null);
  transcript.clear();
  timeline.clear();
  overview.show(false);
  player.pause();
  $("busy").hidden = $("error").hidden = $("empty").hidden = true;
  $("result").hidden = false;
  for (const id of ["take", "transport", "alignment", "greedy", "as-text"]) $(id).hidden = true;
  $("downloads").hidden = $("compare-option").hidden = false;
  $("as-text").open = false;
  $("result-title").textContent = name;
  $("facts").textContent = "";
}

let writing = null;

// At most once a picture, however fast passes come.
function showWriting() {
  writing ??= requestAnimationFrame(() => {
    writing = null;
    if (!imputation || imputation.done) return;
    if (!imputation.live) showProgress();
    overview.show(timeline.overflows);
    overview.changed();
    timeline.grew();
    transcript.show(imputation, NOW);
  });
}

function showProgress() {
  const { place, windows, frames } = imputation;
  const passCount = imputation.passCount + (searchOf(sent) ? 1 : 0);
  const part = windows.length > 1 ? `Part ${place.window + 1} of ${windows.length}, pass` : "Pass";
  progress(`${part} ${place.pass} of ${Math.max(place.pass, passCount)}`, Math.min(1, imputation.filledNow / frames));
}

// Live.

function beginLive(fresh) {
  request?.abort();
  request = null;
  player.unload();
  sound.enable((playable = false));
  source = null;
  clearResult("Live");
  $("downloads").hidden = $("compare-option").hidden = true;
  imputation = fresh;
  $("alignment").hidden = false;
  timeline.show(imputation, NOW);
  transcript.show(imputation, NOW);
  offerAgain();
}

// A live transcript stays as it is; its sound, if it was kept, can be played and transcribed again.
function endLive(blob) {
  cancelAnimationFrame(writing);
  writing = null;
  sound.setLength(imputation.seconds);
  timeline.show(imputation, imputation.passCount);
  timeline.reveal(imputation.frames, 1);
  overview.show(timeline.overflows);
  transcript.show(imputation, imputation.passCount);
  $("take").hidden = false;
  $("facts").textContent = [clock(imputation.seconds), count(imputation.finalWords.length, "word"), imputation.model].join(" · ");
  if (blob) {
    source = { name: "live.wav", get: () => blob, blob };
    player.load(blob).then((can) => source?.blob === blob && sound.enable((playable = can)));
  }
  offerAgain();
  say(`Done: ${count(imputation.finalWords.length, "word")}.`);
}

function showDone() {
  busy(false);
  timeline.show(imputation, imputation.passCount);
  overview.show(timeline.overflows);
  passes.show(imputation);
  sound.setLength(imputation.seconds);
  $("take").hidden = $("as-text").hidden = false;
  showFacts();
  showComparison();
  const done = `Done: ${count(imputation.finalWords.length, "word")} in ${count(imputation.passCount, "pass", "passes")}`;
  say(`${[done, ...(imputation.warnings ?? [])].join("; ")}.`);
}

function showFacts() {
  const { done, seconds, finalWords, filledNow, frames } = imputation;
  const parts = [clock(seconds), settings.label(sent)];
  if (done) parts.splice(1, 0, count(finalWords.length, "word"), count(imputation.passCount, "pass", "passes"));
  else if (!request) parts.push(`incomplete: ${filledNow} of ${frames} frames filled`);
  parts.push(...(imputation.warnings ?? []));
  $("facts").textContent = parts.join(" · ");
}

function count(number, one, several = `${one}s`) {
  return `${number} ${number === 1 ? one : several}`;
}

function showPass(pass, animate) {
  overview.changed();
  timeline.go(pass, animate);
  transcript.show(imputation, pass);
}

function showView(view) {
  overview.draw(imputation, view, timeline.pass, timeline.cursor);
}

function showComparison() {
  const shown = $("compare").checked;
  timeline.setGreedy(shown);
  if (!imputation?.done || imputation.live) return;
  $("greedy").hidden = !shown;
  transcript.mark(shown ? showGreedy(imputation) : null);
}

function listPasses() {
  if (!$("as-text").open || !imputation?.done) return;
  const items = Array.from({ length: imputation.passCount }, (_, n) => {
    const item = document.createElement("p");
    item.textContent = `${n + 1}. ${imputation.symbols(n + 1).join(" ")}`;
    return item;
  });
  $("passes-text").replaceChildren(...items);
}

// Sound.

function playWord({ start, end }) {
  if (playable) player.play(start - 0.06, start + Math.max(0.25, end - start) + 0.06);
}

function showTime(seconds) {
  if (!imputation) return;
  timeline.setCursor(seconds > 0 || player.playing ? seconds : null);
  transcript.setTime(player.playing ? seconds : null);
}

function goToShare(share) {
  timeline.following = false;
  timeline.reveal(share * imputation.frames, 0.5);
}

// Controls.

$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  $("file").value = ""; // so that the same file can be chosen again
  if (file) takeFile(file);
});
acceptDrops($("drop"), takeFile);
$("sample").addEventListener("click", () => take("sample.wav", (signal) => api.sample(settings.model.id, signal)));
$("again").addEventListener("click", run);
$("resume").addEventListener("click", run);
$("retry").addEventListener("click", start);
$("cancel").addEventListener("click", () => request?.abort());
$("copy").addEventListener("click", async () => {
  await copy(imputation.text);
  say(`Copied ${count(imputation.finalWords.length, "word")}.`);
});
for (const button of document.querySelectorAll("[data-download]")) {
  const kind = button.dataset.download;
  button.addEventListener("click", () => download(imputation.name, kind, imputation.formats[kind]));
}
$("compare").addEventListener("change", showComparison);
$("as-text").addEventListener("toggle", listPasses);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.useKey($("key").value.trim());
  start();
});

start();
