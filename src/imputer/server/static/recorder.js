// In the audio thread: passes on what the microphone hears, a tenth of a second at a time.

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.buffer = new Float32Array(Math.round(sampleRate / 10));
    this.filled = 0;
  }

  process([input]) {
    const heard = input[0];
    if (!heard) return true;
    let at = 0;
    while (at < heard.length) {
      const part = heard.subarray(at, at + this.buffer.length - this.filled);
      this.buffer.set(part, this.filled);
      this.filled += part.length;
      at += part.length;
      if (this.filled === this.buffer.length) {
        this.port.postMessage(this.buffer.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
