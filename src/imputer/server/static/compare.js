// Which words of two transcripts of one recording differ.

// Two sets of places whose words agree. Compared section by section, so that an hour of speech costs little.
export function agreeing(ours, theirs, sections) {
  const same = [new Set(), new Set()];
  sections.forEach((start, n) => {
    const inside = ({ start: time }) => (n === 0 || time >= start) && time < (sections[n + 1] ?? Infinity);
    const [left, right] = [ours, theirs].map((words) => words.flatMap((word, place) => (inside(word) ? [{ place, text: word.text }] : [])));
    for (const [i, j] of common(left.map(({ text }) => text), right.map(({ text }) => text))) {
      same[0].add(left[i].place);
      same[1].add(right[j].place);
    }
  });
  return same;
}

// Longest common subsequence, as pairs of places.
function common(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (table[i + 1][j] >= table[i][j + 1]) i++;
    else j++;
  }
  return pairs;
}
