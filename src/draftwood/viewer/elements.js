// Small builders and formats. Whatever the model printed enters the document through text nodes.

const byId = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const html = (tag, attributes = {}, ...children) =>
  build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Characters that have no width, or that would reorder what stands around them.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const SHOWN = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** A token's text with blanks and invisible characters made visible. */
function visible(text) {
  if (text === "") return "∅";
  return text.replace(/ /g, "·").replace(UNSEEN, (char) => {
    if (SHOWN[char]) return SHOWN[char];
    const code = char.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16)}⟩`;
  });
}

/** At most `length` characters, the middle left out. */
function shortened(text, length) {
  const characters = Array.from(text);
  if (characters.length <= length) return text;
  const head = Math.ceil((length - 1) * 0.6);
  return [...characters.slice(0, head), "…", ...characters.slice(characters.length - (length - 1 - head))].join("");
}

const number = (value, digits = 2) => (value === null || !isFinite(value) ? "–" : value.toFixed(digits));
const whole = (value) => value.toLocaleString("en");
const plural = (count, one, many) => `${whole(count)} ${count === 1 ? one : many}`;

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 0.1 ? `${(seconds * 1e3).toFixed(0)} ms` : `${(seconds * 1e3).toFixed(2)} ms`;
}

function probability(value) {
  if (value >= 0.001) return value.toFixed(3);
  return value > 0 ? value.toExponential(1) : "0";
}

function fillStats(list, facts) {
  list.replaceChildren(...facts.map(([name, value, title]) =>
    html("div", { title: title ?? null }, html("dt", {}, name), html("dd", {}, value))));
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
