// Two texts word by word: what the first alone has, what the second alone has, what both have.

const WORDS = 1500; // of a text, at most, are compared one by one

function words(text) { return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? []; }

// [[sign, text]]: "-" of a alone, "+" of b alone, "=" of both; by the longest common subsequence
function difference(a, b) {
  let [x, y] = [words(a), words(b)], from = 0, back = 0;
  while (from < x.length && from < y.length && x[from] === y[from]) from++;
  while (back < x.length - from && back < y.length - from && x.at(-1 - back) === y.at(-1 - back)) back++;
  const head = x.slice(0, from), tail = back ? x.slice(-back) : [];
  [x, y] = [x.slice(from, x.length - back), y.slice(from, y.length - back)];
  const found = [["=", head.join("")]];
  if (x.length > WORDS || y.length > WORDS) found.push(["-", x.join("")], ["+", y.join("")]);
  else found.push(...common(x, y));
  return joined([...found, ["=", tail.join("")]]);
}

function common(x, y) {
  const wide = y.length + 1, best = new Uint16Array((x.length + 1) * wide); // length of what follows and is common
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      best[i * wide + j] = x[i] === y[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
  const found = [];
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) { found.push(["=", x[i++]]); j++; }
    else if (i < x.length && (j === y.length || best[(i + 1) * wide + j] >= best[i * wide + j + 1])) found.push(["-", x[i++]]);
    else found.push(["+", y[j++]]);
  }
  return found;
}

// Neighbours of one sign as one, nothing empty.
function joined(pieces) {
  const found = [];
  for (const [sign, text] of pieces) {
    if (!text) continue;
    if (found.length && found.at(-1)[0] === sign) found.at(-1)[1] += text;
    else found.push([sign, text]);
  }
  return found;
}
