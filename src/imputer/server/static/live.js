// Live: the microphone to the server, words back while they are spoken. OpenAI's realtime transcription events.

import * as api from "./api.js";
import { clock } from "./clock.js";
import { evenSections } from "./imputation.js";
import { peak } from "./microphone.js";
import { pcm, wav } from "./wav.js";

const KEPT_SECONDS = 300; // of sound, to be played and transcribed again
const BEHIND_SECONDS = 20; // of sound that is not sent yet: the connection is too slow
const COLUMN_SECONDS = 0.02; // of the waveform
const INCLUDE = ["imputer.partial", "imputer.alignment"];
const TRANSCRIPTION = "conversation.item.input_audio_transcription";

const $ = (id) => document.getElementById(id);

export class Live {
  constructor({ microphone, level, getModel, onOpen, onChange, onEnd, onProblem, onStatus }) {
    Object.assign(this, { microphone, level, getModel, onOpen, onChange, onEnd, onProblem, onStatus });
    this.session = null;
    $("live").addEventListener("click", () => this.toggle());
  }

  async toggle() {
    if (this.session) {
      this.microphone.stop();
      return;
    }
    if (this.microphone.state !== "closed" || !this.getModel()) return;
    const session = (this.session = new Session(this.getModel(), () => this.onChange()));
    this.show("opening");
    try {
      await session.connect();
      const used = await this.microphone.use({
        onState: (state) => state !== "closed" && this.show(state),
        onOpen: (rate) => {
          session.begin(rate);
          this.onOpen(session.imputation);
        },
        onSamples: (samples) => this.take(session, samples),
      });
      if (this.session !== session) return; // discarded
      this.show("ending");
      if (used?.end === "unplugged") this.onProblem(new Error("The microphone was disconnected."));
      if (used?.end !== "discarded") await session.finish();
    } catch (problem) {
      if (this.session === session) this.onProblem(problem);
    } finally {
      session.close();
      if (this.session === session) {
        this.session = null;
        this.show("closed");
        if (session.imputation) {
          session.imputation.finish();
          this.onEnd(session.recording());
        }
      }
    }
  }

  take(session, samples) {
    try {
      session.send(samples);
      this.level.show(peak(samples));
      $("live-text").textContent = `Stop · ${clock(session.imputation.seconds)}`;
    } catch (problem) {
      this.onProblem(problem);
      this.microphone.stop();
    }
  }

  // Forget the session, whatever state it is in.
  discard() {
    if (!this.session) return;
    this.session.close();
    this.session = null;
    this.microphone.discard();
    this.show("closed");
  }

  show(state) {
    const open = state === "open";
    this.level.enter(open);
    $("live").classList.toggle("recording", open);
    $("live").setAttribute("aria-pressed", String(state !== "closed"));
    $("live").setAttribute("aria-disabled", String(state === "opening" || state === "ending"));
    $("record").disabled = state !== "closed";
    $("live-text").textContent = { closed: "Live", opening: "Opening the microphone", open: "Stop", ending: "Finishing" }[state];
    if (state === "opening") this.onStatus("Waiting for the microphone.");
    if (open) this.onStatus("Listening. Words appear as you speak.");
  }
}

// One connection. A problem with it is thrown by the next call, whichever that is.
class Session {
  constructor(model, onChange) {
    Object.assign(this, { model, onChange });
    this.problem = null;
    this.imputation = null;
    this.pieces = [];
    this.socket = api.realtime();
    this.created = new Promise((resolve) => (this.onCreated = resolve));
    this.ended = new Promise((resolve) => (this.onEnded = resolve));
    this.socket.addEventListener("message", ({ data }) => this.receive(JSON.parse(data)));
    this.socket.addEventListener("close", ({ reason }) => this.fail(new api.Lost(reason ? `The server ended the session: ${reason}.` : "The connection to the server is lost.")));
  }

  async connect() {
    await Promise.race([this.created, this.ended]);
    if (this.problem) throw this.problem;
  }

  // The microphone is open, at this rate.
  begin(rate) {
    this.rate = rate;
    this.imputation = new LiveImputation(this.model);
    this.tell("session.update", {
      session: {
        type: "transcription",
        audio: { input: { format: { type: "audio/pcm", rate }, transcription: { model: this.model.id }, turn_detection: { type: "server_vad" } } },
        include: INCLUDE,
      },
    });
  }

  send(samples) {
    if (this.problem) throw this.problem;
    if (this.socket.bufferedAmount > 2.7 * BEHIND_SECONDS * this.rate) throw new api.Lost("The connection is too slow for live audio.");
    const piece = pcm(samples);
    this.imputation.addSound(samples, this.rate);
    if (this.imputation.seconds < KEPT_SECONDS) this.pieces.push(piece);
    else this.pieces = null;
    this.tell("input_audio_buffer.append", { audio: base64(new Uint8Array(piece.buffer)) });
  }

  // All that was sent is transcribed: the answer to an update comes after it.
  async finish() {
    this.tell("input_audio_buffer.commit", { event_id: "last" });
    this.finishing = true;
    this.tell("session.update", { session: { type: "transcription" } });
    await this.ended;
    if (this.problem) throw this.problem;
  }

  recording() {
    return this.pieces?.length ? wav(this.pieces, this.rate) : null;
  }

  close() {
    this.onCreated();
    this.onEnded();
    this.closed = true;
    this.socket.close(1000);
  }

  fail(problem) {
    if (this.closed) return;
    this.problem ??= problem;
    this.onEnded();
  }

  tell(type, fields) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }

  receive(event) {
    if (this.closed) return;
    if (event.type === "session.created") this.onCreated();
    else if (event.type === "session.updated") this.updates();
    else if (event.type === "error" && event.error.event_id !== "last") this.fail(new Error(event.error.message));
    else if (this.imputation?.add(event)) this.onChange();
  }

  // The first answers begin(), the one after finish() is the last.
  updates() {
    this.updated = (this.updated ?? 0) + 1;
    if (this.finishing && this.updated === 2) this.onEnded();
  }
}

// The imputation of a live session: it grows at its right edge.
class LiveImputation {
  constructor({ id, frame_seconds: frameSeconds }) {
    Object.assign(this, { model: id, frame_seconds: frameSeconds, blank: "_", strategy: "live", live: true });
    this.done = false;
    this.passCount = 1;
    this.frames = 1;
    this.seconds = 0;
    this.entries = []; // frame -> {symbol, confidence, pass}
    this.settledFrames = 0;
    this.settledWords = [];
    this.partialWords = [];
    this.starts = new Set();
    this.windows = [];
    this.sections = [0];
    this.peaks = { data: [], column_seconds: COLUMN_SECONDS };
    this.mel = { data: [], columns: 0, bins: 1, column_seconds: 1 };
    this.loudest = 24;
  }

  addSound(samples, rate) {
    const size = Math.round(COLUMN_SECONDS * rate);
    for (let at = 0; at < samples.length; at += size) {
      const height = Math.round(255 * Math.min(1, peak(samples.subarray(at, at + size))));
      this.peaks.data.push(height);
      this.loudest = Math.max(this.loudest, height);
    }
    this.seconds += samples.length / rate;
    this.frames = Math.max(this.frames, Math.ceil(this.seconds / this.frame_seconds));
  }

  // Whether the event changed anything.
  add(event) {
    if (event.type === `${TRANSCRIPTION}.delta`) {
      this.settledWords.push(...event.words.map((word) => this.word(word, false)));
      this.partialWords = [];
    } else if (event.type === "imputer.partial") {
      this.partialWords = event.words.map((word) => this.word(word, true));
    } else if (event.type === "imputer.alignment") {
      this.entries.length = event.first;
      event.symbols.forEach((symbol, n) => (this.entries[event.first + n] = { symbol, confidence: event.confidence[n], pass: 1 }));
      this.settledFrames = event.settled;
    } else return false;
    this.sections = evenSections(this.seconds);
    return true;
  }

  word({ word: text, start, end, confidence }, open) {
    return { text, start, end, confidence, open, frame: Math.floor(start / this.frame_seconds + 1e-6) };
  }

  finish() {
    this.partialWords = [];
    this.done = true;
  }

  at(frame) {
    return this.entries[frame] ?? null;
  }

  // Frames that may still change are marked as those of the latest pass.
  isFresh(frame) {
    return !this.done && frame >= this.settledFrames;
  }

  filled() {
    return this.entries.length;
  }

  words() {
    return [...this.settledWords, ...this.partialWords];
  }

  get finalWords() {
    return this.settledWords;
  }

  get text() {
    return this.settledWords.map(({ text }) => text).join(" ");
  }
}

function base64(bytes) {
  let text = "";
  for (let n = 0; n < bytes.length; n += 8192) text += String.fromCharCode(...bytes.subarray(n, n + 8192));
  return btoa(text);
}
