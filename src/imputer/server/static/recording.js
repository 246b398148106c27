// The Record button and its limit.

import { clock } from "./clock.js";

const LONGEST = 300; // seconds
const USUAL_RATE = 48_000; // samples per second, to state the limit before the microphone is open

const $ = (id) => document.getElementById(id);

export class Recording {
  constructor({ microphone, level, onOpen, onRecorded, onProblem, onStatus }) {
    Object.assign(this, { microphone, level, onOpen, onRecorded, onProblem, onStatus });
    this.recording = false;
    this.setLimits({});
    $("record").addEventListener("click", () => this.toggle());
  }

  // What the server takes.
  setLimits({ max_seconds: seconds = LONGEST, max_upload_bytes: bytes = Infinity }) {
    this.bytes = bytes - 1024;
    const most = Math.min(LONGEST, seconds, this.bytes / 2 / USUAL_RATE);
    this.seconds = most > 60 ? most - (most % 30) : Math.floor(most);
    $("record-limit").textContent = `Recording stops after ${clock(this.seconds)}.`;
  }

  async toggle() {
    if (this.recording && this.microphone.state === "open") this.microphone.stop();
    if (this.microphone.state !== "closed") return;
    this.onOpen();
    this.recording = true;
    try {
      const blob = await this.microphone.record({
        seconds: this.seconds,
        bytes: this.bytes,
        onState: (state) => this.show(state),
        onLevel: (peak) => this.level.show(peak),
        onTime: (seconds) => ($("record-text").textContent = `Stop · ${clock(seconds)} of ${clock(this.seconds)}`),
      });
      if (blob) this.onRecorded(blob);
    } catch (problem) {
      this.onProblem(problem);
    } finally {
      this.recording = false;
    }
  }

  show(state) {
    this.level.enter(state === "open");
    $("live").disabled = state !== "closed";
    $("record").classList.toggle("recording", state === "open");
    $("record").setAttribute("aria-disabled", String(state === "opening"));
    $("record-text").textContent = { closed: "Record", opening: "Opening the microphone", open: "Stop" }[state];
    if (state !== "closed") this.onStatus(state === "open" ? `Recording, at most ${clock(this.seconds)}.` : "Waiting for the microphone.");
  }
}
