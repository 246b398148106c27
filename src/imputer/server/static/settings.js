// The settings under "Advanced": they change nothing until a recording is sent with them.

const STRATEGIES = {
  block: ["Block", "In each block, the place it is surest of. The paper's own."],
  alternate_sub_block: ["Alternate sub-blocks", "Left halves of the blocks in one pass, right halves in the next."],
  right_most_last: ["Right-most last", "The last place of every block is left for the last pass."],
  top_k: ["Top k", "The surest places anywhere, never two neighbours in one pass."],
  annealing: ["Annealing", "Fills in everything, then masks again what it was least sure of."],
  annealing_random: ["Random annealing", "Fills in everything, then masks random places again."],
  adaptive: ["Adaptive", "All places it is sure of, at least one per block: often fewer passes."],
};

const $ = (id) => document.getElementById(id);

export class Settings {
  constructor({ onChange }) {
    this.models = [];
    this.model = null;
    $("model").addEventListener("change", () => this.choose(this.models.find(({ id }) => id === $("model").value)));
    for (const id of ["model", "block-size", "strategy", "lm", "hotwords"]) {
      $(id).addEventListener("input", () => {
        this.explain();
        onChange();
      });
    }
  }

  // The models of the server; the one chosen stays, if it is still there.
  setModels(models) {
    this.models = models;
    $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
    $("model-option").hidden = models.length < 2;
    this.choose(models.find(({ id }) => id === this.model?.id) ?? models.find((model) => model.default) ?? models[0]);
  }

  choose(model) {
    if (model.id !== this.model?.id) $("block-size").value = model.block_size;
    this.model = model;
    $("model").value = model.id;
    $("sample").hidden = !model.sample;
    const kept = $("strategy").value;
    $("strategy").replaceChildren(...model.strategies.map((name) => new Option(strategyName(name), name)));
    if (model.strategies.includes(kept)) $("strategy").value = kept;
    $("lm-option").hidden = !model.lm;
    $("hotwords-option").hidden = !model.hotwords;
    this.explain();
  }

  explain() {
    const size = Number($("block-size").value);
    const span = size * (this.model?.frame_seconds ?? 0);
    const strategy = $("strategy").value;
    const passes = size === 1 ? "1 pass" : `${strategy === "adaptive" ? "at most " : ""}${size} passes`;
    const search = this.model ? searchOf(this.options()) : "";
    $("block-size-value").textContent = size;
    $("block-size-hint").textContent = `Blocks of ${span < 1 ? `${Math.round(1000 * span)} ms` : `${span.toFixed(1)} s`}, ${passes}${search && ` and one with the ${search}`}.`;
    $("strategy-hint").textContent = STRATEGIES[strategy]?.[1] ?? "";
    $("settings-summary").textContent = this.model ? this.label(this.options()) : "";
  }

  // The fields to send; those of a language model only to a model that has one.
  options() {
    const { model } = this;
    const options = { model: model.id, block_size: $("block-size").value, strategy: $("strategy").value };
    if (model.lm) options.lm = $("lm").checked ? "default" : "none";
    if (model.hotwords && $("hotwords").value.trim()) options.hotwords = $("hotwords").value.trim();
    return options;
  }

  label({ model, block_size: size, strategy, lm, hotwords }) {
    const parts = [model, `block size ${size}`, strategyName(strategy)];
    if (lm === "none") parts.push("no language model");
    if (hotwords) parts.push("hotwords");
    return parts.join(" · ");
  }
}

// What decides the places that imputation was not sure of, in one more pass; empty if nothing does.
export function searchOf({ lm, hotwords }) {
  return lm === "default" ? "language model" : hotwords ? "hotwords" : "";
}

function strategyName(name) {
  return STRATEGIES[name]?.[0] ?? name;
}
