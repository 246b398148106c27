// What greedy CTC makes of the same recording, with the words that differ marked.

import { agreeing } from "./compare.js";

const $ = (id) => document.getElementById(id);

// Write greedy CTC's text; returns the places of our words that differ.
export function showGreedy({ finalWords: ours, greedy: { words: theirs }, sections }) {
  const [sameOurs, sameTheirs] = agreeing(ours, theirs, sections);
  const parts = theirs.flatMap(({ text }, n) => {
    if (sameTheirs.has(n)) return [text, " "];
    const mark = document.createElement("mark");
    mark.textContent = text;
    return [mark, " "];
  });
  $("greedy-text").replaceChildren(...(parts.length ? parts : ["No words."]));
  const differing = Math.max(ours.length - sameOurs.size, theirs.length - sameTheirs.size);
  $("difference").textContent = differing === 0 ? "Both wrote the same words." : `${differing} ${differing === 1 ? "word differs" : "words differ"}, marked in both texts.`;
  return new Set([...ours.keys()].filter((n) => !sameOurs.has(n)));
}
