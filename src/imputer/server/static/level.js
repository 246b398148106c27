// The level meter of the microphone.

const QUIET = -50; // decibels; below it for QUIET_SECONDS nothing is coming in
const QUIET_SECONDS = 3;
const FLOOR = -60; // decibels at the left end of the meter
const PEAK_FALL = 1.5; // decibels that the peak mark falls in a tenth of a second

const $ = (id) => document.getElementById(id);

export class Level {
  constructor({ onQuiet }) {
    this.onQuiet = onQuiet; // no sound for a while from the start on
  }

  // Show it, from the start, or hide it.
  enter(open) {
    this.loudest = this.peak = FLOOR;
    this.count = 0;
    $("level").hidden = !open;
  }

  // The peak of the last tenth of a second, 0 to 1.
  show(peak) {
    const decibels = Math.max(FLOOR, 20 * Math.log10(peak + 1e-9));
    this.peak = Math.max(decibels, this.peak - PEAK_FALL);
    $("level").setAttribute("aria-valuenow", Math.round(decibels));
    $("level").setAttribute("aria-valuetext", `${Math.round(decibels)} dB`);
    $("level-bar").style.transform = `scaleX(${1 - decibels / FLOOR})`;
    $("level-peak").style.left = `${100 * (1 - this.peak / FLOOR)}%`;
    this.loudest = Math.max(this.loudest, decibels);
    if (++this.count === 10 * QUIET_SECONDS && this.loudest < QUIET) this.onQuiet();
  }
}
