// The Record button, its limit and its level meter.

import { clock } from "./clock.js";
import { Microphone } from "./microphone.js";

const LONGEST = 300; // seconds
const USUAL_RATE = 48_000; // samples a second, to state the limit before the microphone is open
const QUIET = -50; // decibels; below it for QUIET_SECONDS nothing is coming in
const QUIET_SECONDS = 3;
const FLOOR = -60; // decibels at the left end of the meter
const PEAK_FALL = 1.5; // decibels that the peak mark falls in a tenth of a second

const $ = (id) => document.getElementById(id);

export class Recording {
  constructor({ onOpen, onRecorded, onProblem, onStatus }) {
    Object.assign(this, { onOpen, onRecorded, onProblem, onStatus });
    this.microphone = new Microphone({
      onState: (state) => this.show(state),
      onLevel: (peak) => this.level(peak),
      onTime: (seconds) => ($("record-text").textContent = `Stop · ${clock(seconds)} of ${clock(this.seconds)}`),
    });
    this.setLimits({});
    $("record").addEventListener("click", () => this.toggle());
  }

  // What the server takes.
  setLimits({ max_seconds: seconds = LONGEST, max_upload_bytes: bytes = Infinity }) {
    this.bytes = bytes - 1024;
    const most = Math.min(LONGEST, seconds, this.bytes / 2 / USUAL_RATE);
    this.seconds = most > 60 ? most - (most % 30) : Math.floor(most);
    $("record-limit").textContent = `or drop audio on this page. Recording stops after ${clock(this.seconds)}.`;
  }

  async toggle() {
    if (this.microphone.state === "open") return this.microphone.stop();
    if (this.microphone.state === "opening") return undefined;
    this.onOpen();
    this.loudest = FLOOR;
    this.peak = FLOOR;
    this.levels = 0;
    try {
      const blob = await this.microphone.record({ seconds: this.seconds, bytes: this.bytes });
      if (blob) this.onRecorded(blob);
    } catch (problem) {
      this.onProblem(problem);
    }
    return undefined;
  }

  discard() {
    this.microphone.discard();
  }

  show(state) {
    $("record").classList.toggle("recording", state === "open");
    $("record").setAttribute("aria-disabled", String(state === "opening"));
    $("level").hidden = state !== "open";
    $("record-text").textContent = { closed: "Record", opening: "Opening the microphone", open: "Stop" }[state];
    if (state !== "closed") this.onStatus(state === "open" ? `Recording, at most ${clock(this.seconds)}.` : "Waiting for the microphone.");
  }

  level(peak) {
    const decibels = Math.max(FLOOR, 20 * Math.log10(peak + 1e-9));
    this.peak = Math.max(decibels, this.peak - PEAK_FALL);
    $("level").setAttribute("aria-valuenow", Math.round(decibels));
    $("level").setAttribute("aria-valuetext", `${Math.round(decibels)} dB`);
    $("level-bar").style.transform = `scaleX(${1 - decibels / FLOOR})`;
    $("level-peak").style.left = `${100 * (1 - this.peak / FLOOR)}%`;
    this.loudest = Math.max(this.loudest, decibels);
    if (++this.levels === 10 * QUIET_SECONDS && this.loudest < QUIET) this.onStatus("No sound from the microphone so far.");
  }
}
