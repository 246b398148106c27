// Playback of a recording, whole or a part of it.

export class Player {
  constructor({ onChange, onTime }) {
    this.onChange = onChange; // (playing)
    this.onTime = onTime; // (seconds)
    this.audio = new Audio();
    this.audio.preload = "auto";
    this.until = Infinity;
    for (const kind of ["play", "pause", "ended"]) this.audio.addEventListener(kind, () => this.changed());
  }

  // Whether the browser can play the recording; the server may read formats that it cannot.
  load(blob) {
    this.unload();
    return new Promise((resolve) => {
      const { audio } = this;
      audio.onloadedmetadata = () => resolve(true);
      audio.onerror = () => resolve(false);
      audio.src = URL.createObjectURL(blob);
    });
  }

  unload() {
    this.pause();
    if (!this.audio.src) return;
    URL.revokeObjectURL(this.audio.src);
    this.audio.onerror?.();
    this.audio.onerror = null;
    this.audio.removeAttribute("src");
    this.audio.load();
  }

  // A word clicked while another is played interrupts it, which rejects the other's promise.
  play(start = this.time, until = Infinity) {
    this.until = until;
    this.audio.currentTime = Math.max(0, start);
    this.audio.play().catch((problem) => {
      if (problem.name !== "AbortError") this.changed();
    });
  }

  pause() {
    this.audio.pause();
  }

  seek(seconds) {
    this.until = Infinity;
    this.audio.currentTime = seconds;
    this.onTime(seconds);
  }

  get playing() {
    return !this.audio.paused && !this.audio.ended;
  }

  get time() {
    return this.audio.ended ? 0 : this.audio.currentTime;
  }

  changed() {
    this.onChange(this.playing);
    this.onTime(this.time);
    cancelAnimationFrame(this.frame);
    if (this.playing) this.follow();
  }

  follow() {
    this.onTime(this.audio.currentTime);
    if (this.audio.currentTime >= this.until) this.pause();
    else this.frame = requestAnimationFrame(() => this.playing && this.follow());
  }
}
