// Formulas as MathML, which browsers draw themselves: the part of LaTeX that these pages use, and no more.
// A formula with anything else is left as its source, marked with the class "unread".

const IDENTIFIERS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", theta: "θ", phi: "φ", infty: "∞", partial: "∂", varnothing: "∅",
};
const OPERATORS = {
  in: "∈", le: "≤", ge: "≥", ne: "≠", mid: "∣", cdot: "⋅", times: "×", lvert: "|", rvert: "|", sim: "∼", to: "→",
  lbrace: "{", rbrace: "}", "{": "{", "}": "}", ldots: "…",
};
const LARGE = { sum: "∑", prod: "∏" };
const FUNCTIONS = ["log", "exp", "max", "min", "arg"];
const ACCENTS = { tilde: "~", hat: "^", bar: "¯" };
const SPACES = { ",": "0.17em", ";": "0.28em", " ": "0.33em", quad: "1em", qquad: "2em" };

function element(name, children = [], attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[children].flat());
  return made;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : element("mrow", nodes));

class Reader {
  constructor(source, display) {
    this.words = source.match(/\\[a-zA-Z]+|\\[\s\S]|[0-9]+(\.[0-9]+)?|\s+|[\s\S]/g) ?? [];
    this.place = 0;
    this.display = display;
  }

  next() {
    if (this.place >= this.words.length) throw new Error("the formula breaks off");
    return this.words[this.place++];
  }

  skipSpace() {
    while (/^\s/.test(this.words[this.place] ?? "")) this.place++;
  }

  // Everything up to the end, or to the brace that closes a group.
  nodes(closing) {
    const found = [];
    for (;;) {
      this.skipSpace();
      if (this.place >= this.words.length && !closing) return found;
      if (closing && this.words[this.place] === "}") {
        this.place++;
        return found;
      }
      found.push(this.scripted(this.atom()));
    }
  }

  argument() {
    this.skipSpace();
    if (this.words[this.place] !== "{") return this.atom();
    this.place++;
    return row(this.nodes(true));
  }

  // What stands between braces, letter by letter.
  plain() {
    this.skipSpace();
    if (this.next() !== "{") throw new Error("a brace is missing");
    let text = "";
    for (let word = this.next(); word !== "}"; word = this.next()) text += word.replace(/^\\(?=[^a-zA-Z])/, "");
    return text;
  }

  atom() {
    const word = this.next();
    if (word === "{") return row(this.nodes(true));
    if (/^[0-9]/.test(word)) return element("mn", word);
    if (/^[a-zA-Z]$/.test(word)) return element("mi", word);
    if (!word.startsWith("\\")) return element("mo", word === "-" ? "−" : word, { stretchy: "false" });
    const name = word.slice(1);
    if (name in IDENTIFIERS) return element("mi", IDENTIFIERS[name]);
    if (name in OPERATORS) return element("mo", OPERATORS[name], { stretchy: "false" });
    if (name in LARGE) return element("mo", LARGE[name], { largeop: "true", movablelimits: String(!this.display) });
    if (FUNCTIONS.includes(name)) return this.applied(element("mi", name));
    if (/^\s$/.test(name)) return element("mspace", [], { width: SPACES[" "] });
    if (name in SPACES) return element("mspace", [], { width: SPACES[name] });
    if (name === "_") return element("mi", "_");
    if (name === "text") return element("mtext", this.plain().replaceAll(" ", " "));
    if (name in ACCENTS) {
      const accent = element("mo", ACCENTS[name], { stretchy: "false" });
      return element("mover", [this.argument(), accent], { accent: "true" });
    }
    if (name === "frac") return element("mfrac", [this.argument(), this.argument()]);
    if (name === "binom") {
      const inside = element("mfrac", [this.argument(), this.argument()], { linethickness: "0" });
      return element("mrow", [element("mo", "("), inside, element("mo", ")")]);
    }
    throw new Error(`\\${name} is not known`);
  }

  // A function stands a little apart from what it is taken of.
  applied(name) {
    const named = this.scripted(name);
    this.skipSpace();
    const thin = /^[([,.]?$/.test(this.words[this.place] ?? "") ? "0" : "0.17em";
    return element("mrow", [named, element("mspace", [], { width: thin })]);
  }

  // An atom with what hangs on it: primes, an index, an exponent.
  scripted(base) {
    let below = null;
    let above = null;
    for (;;) {
      const word = this.words[this.place];
      if (word === "_" || word === "^") {
        this.place++;
        const script = this.argument();
        if (word === "_") below = script;
        else above = above ? element("mrow", [above, script]) : script;
      } else if (word === "'") {
        this.place++; // the sign is raised already
        base = element("mrow", [base, element("mo", "′", { lspace: "0", rspace: "0" })]);
      } else break;
    }
    if (!below && !above) return base;
    const limits = base.getAttribute("largeop") === "true";
    const kind = (below ? (limits ? "under" : "sub") : "") + (above ? (limits ? "over" : "sup") : "");
    return element(`m${kind}`, [base, below, above].filter(Boolean));
  }
}

function formula(source, display) {
  const nodes = new Reader(source, display).nodes(false);
  return element("math", row(nodes), { display: display ? "block" : "inline" });
}

document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const [, opening, source] = place.textContent.match(/^\s*(\\[(\[])([\s\S]*)\\[)\]]\s*$/) ?? [];
    try {
      if (source === undefined) throw new Error("no formula");
      place.replaceChildren(formula(source.trim(), opening === "\\["));
    } catch (error) {
      place.classList.add("unread");
      console.warn(`${place.textContent}: ${error.message}`);
    }
  }
});
