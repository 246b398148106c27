// The bar of controls: sound and passes.

import { clock } from "./clock.js";

const PASS_MILLISECONDS = 620;
const PLAY_ICON = "M7 4v16l13-8z";
const PAUSE_ICON = "M6 4h4v16H6zM14 4h4v16h-4z";

const $ = (id) => document.getElementById(id);

function setButton(id, on, texts) {
  $(`${id}-icon`).setAttribute("d", on ? PAUSE_ICON : PLAY_ICON);
  $(`${id}-text`).textContent = texts[Number(on)];
}

export class Passes {
  constructor({ onPass }) {
    this.onPass = onPass; // (pass, animate)
    this.imputation = null;
    this.pass = 0;
    this.timer = null;
    $("play").addEventListener("click", () => this.toggle());
    $("back").addEventListener("click", () => this.step(this.pass - 1));
    $("step").addEventListener("click", () => this.step(this.pass + 1));
    $("pass").addEventListener("input", () => this.step(Number($("pass").value)));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  // Passes of a finished imputation, or null.
  show(imputation) {
    this.pause();
    this.imputation = imputation;
    if (!imputation) return;
    $("pass").max = imputation.passCount;
    this.set(imputation.passCount, false);
  }

  set(pass, animate) {
    const { passCount, frames } = this.imputation;
    this.pass = Math.max(0, Math.min(passCount, pass));
    const text = `Pass ${this.pass} of ${passCount} · ${this.imputation.filled(this.pass)} of ${frames} filled`;
    $("pass").value = this.pass;
    $("pass").setAttribute("aria-valuetext", text);
    $("pass-text").textContent = text;
    // Not disabled: a button that is loses the focus of whoever just pressed it.
    $("back").setAttribute("aria-disabled", String(this.pass === 0));
    $("step").setAttribute("aria-disabled", String(this.pass === passCount));
    this.onPass(this.pass, animate);
  }

  step(pass) {
    this.pause();
    this.set(pass, pass === this.pass + 1);
  }

  toggle() {
    if (this.timer !== null) return this.pause();
    if (this.pass === this.imputation.passCount) this.set(0, false);
    setButton("play", true, ["Play passes", "Pause passes"]);
    this.timer = setInterval(() => {
      this.set(this.pass + 1, true);
      if (this.pass === this.imputation.passCount) this.pause();
    }, PASS_MILLISECONDS);
    return undefined;
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    setButton("play", false, ["Play passes", "Pause passes"]);
  }

  // Keys that nothing in focus has a use of its own for.
  key(event) {
    if (!this.imputation || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, select, textarea, summary, [tabindex='0']")) return;
    const actions = {
      ArrowRight: () => this.step(this.pass + 1),
      ArrowLeft: () => this.step(this.pass - 1),
      Home: () => this.step(0),
      End: () => this.step(this.imputation.passCount),
    };
    if (!event.target.closest("button")) actions[" "] = () => this.toggle();
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}

export class Sound {
  constructor({ player, onTime, onPlay }) {
    Object.assign(this, { player, onTime });
    this.seconds = 0;
    player.onChange = (playing) => {
      setButton("listen", playing, ["Play sound", "Pause sound"]);
      if (playing) onPlay();
    };
    player.onTime = (time) => this.show(time);
    $("listen").addEventListener("click", () => (player.playing ? player.pause() : player.play()));
    $("seek").addEventListener("input", () => player.seek(Number($("seek").value)));
  }

  setLength(seconds) {
    this.seconds = seconds;
    $("seek").max = seconds;
    this.show(0);
  }

  enable(playable) {
    $("listen").disabled = $("seek").disabled = !playable;
  }

  show(time) {
    $("seek").value = time;
    const text = `${clock(time)} / ${clock(this.seconds)}`;
    if ($("clock").textContent !== text) {
      $("clock").textContent = text;
      $("seek").setAttribute("aria-valuetext", `${clock(time)} of ${clock(this.seconds)}`);
    }
    this.onTime(time);
  }
}
