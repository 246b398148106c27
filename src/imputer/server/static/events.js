// Server-sent events out of a text that grows.

export class EventReader {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.at = 0;
  }

  // All of the text so far; events that are complete and new are passed on.
  read(text) {
    for (let end = text.indexOf("\n\n", this.at); end >= 0; end = text.indexOf("\n\n", this.at)) {
      const lines = text.slice(this.at, end).split("\n");
      this.at = end + 2;
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      const data = field("data");
      if (data) this.onEvent(field("event") ?? "message", JSON.parse(data));
    }
  }
}
