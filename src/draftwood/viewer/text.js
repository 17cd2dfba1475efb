// The generated text: one span per cycle, and search across them.

const HUES = 5;

class TextPane {
  constructor(root, choose) {
    this.root = root;
    root.addEventListener("click", (event) => {
      const span = event.target.closest("[data-cycle]");
      if (span) choose(Number(span.dataset.cycle));
    });
    this.clear();
  }

  show(cycles) {
    this.clear();
    this.parts = [];
    let start = 0;
    this.spans = cycles.pieces.map((pieces, at) => {
      const text = pieces.join(""), node = document.createTextNode(text);
      this.parts.push({ node, start, cycle: at });
      start += text.length;
      return html("span", { id: `cycle-${at}`, role: "option", class: `c${at % HUES}`, "data-cycle": at, "aria-selected": "false",
        title: `cycle ${at + 1}: ${cycles.committed[at]} committed, budget ${cycles.budget[at]}` }, node);
    });
    this.text = cycles.pieces.map((pieces) => pieces.join("")).join("");
    this.root.replaceChildren(...this.spans);
    this.selected = null;
  }

  select(at) {
    if (this.selected) this.selected.setAttribute("aria-selected", "false");
    this.selected = this.spans[at];
    this.selected.setAttribute("aria-selected", "true");
    this.root.setAttribute("aria-activedescendant", this.selected.id);
    const span = this.selected.getBoundingClientRect(), box = this.root.getBoundingClientRect();
    if (span.top < box.top || span.bottom > box.bottom) {
      this.root.scrollTop += span.top - box.top - box.height / 2;
    }
  }

  /** Find `query` anywhere, case ignored; returns the number of matches. */
  search(query) {
    this.clear();
    if (!query) return 0;
    const pattern = new RegExp(query.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu");
    for (const match of this.text.matchAll(pattern)) this.matches.push([match.index, match.index + match[0].length]);
    this.mark("found", this.matches);
    return this.matches.length;
  }

  /** Make match `at` the current one; returns its cycle. */
  current(at) {
    const [start] = this.matches[at];
    this.mark("current", [this.matches[at]]);
    return this.partAt(start).cycle;
  }

  clear() {
    this.matches = [];
    for (const name of ["found", "current"]) {
      if (window.CSS?.highlights) CSS.highlights.delete(name);
    }
    for (const span of this.root.querySelectorAll(".found")) span.classList.remove("found");
  }

  mark(name, matches) {
    if (!window.CSS?.highlights) {  // older browsers: underline the cycles instead
      if (name === "found") for (const [start] of matches) this.spans[this.partAt(start).cycle].classList.add("found");
      return;
    }
    const ranges = matches.map(([start, end]) => {
      const range = new Range(), first = this.partAt(start), last = this.partAt(end - 1);
      range.setStart(first.node, start - first.start);
      range.setEnd(last.node, end - last.start);
      return range;
    });
    const highlight = new Highlight(...ranges);
    highlight.priority = name === "current" ? 1 : 0;
    CSS.highlights.set(name, highlight);
  }

  partAt(position) {
    let low = 0, high = this.parts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.parts[middle].start <= position) low = middle;
      else high = middle - 1;
    }
    return this.parts[low];
  }
}
