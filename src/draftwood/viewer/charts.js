// Φ with the chosen budget, seconds by stage, and all cycles at a glance.

const STAGES = ["draft", "verify", "walk", "commit", "other"];

function drawPhi(target, phi, budget, accepted, width) {
  const height = 190, left = 34, right = 12, top = 14, bottom = 24;
  const most = Math.max(phi.length - 1, 1);
  const highest = Math.max(phi[phi.length - 1], accepted, 0.5) * 1.08;
  const x = (n) => left + (n / most) * (width - left - right);
  const y = (value) => height - bottom - (value / highest) * (height - top - bottom);
  const line = (from, to) => phi.slice(from, to + 1).map((value, at) => `${at ? "L" : "M"}${x(from + at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const children = [];
  for (const value of ticks(highest, 4)) {
    children.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const n of ticks(most, 5).filter(Number.isInteger)) {
    children.push(svg("text", { x: x(n), y: height - 6, "text-anchor": "middle" }, whole(n)));
  }
  const chosen = Math.min(budget, phi.length - 1), nearEnd = x(chosen) > width * 0.6;
  children.push(
    svg("line", { class: "accepted", x1: left, x2: width - right, y1: y(accepted), y2: y(accepted) }),
    svg("line", { class: "budget", x1: x(chosen), x2: x(chosen), y1: top, y2: height - bottom }),
    svg("path", { class: "curve beyond", d: line(chosen, phi.length - 1) }),
    svg("path", { class: "curve", d: line(0, chosen) }),
    svg("circle", { class: "dot", cx: x(chosen), cy: y(phi[chosen]), r: 4 }),
    svg("text", { class: "strong", x: x(chosen) + (nearEnd ? -8 : 8), y: Math.min(y(phi[chosen]) + 18, height - bottom - 4), "text-anchor": nearEnd ? "end" : "start" },
      `budget ${whole(budget)}, Φ ${number(phi[chosen])}`),
    svg("text", { class: "accepted", x: width - right, y: y(accepted) - 4, "text-anchor": "end" }, `${accepted} accepted`));
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.setAttribute("aria-label", `Φ over the number of nodes; budget ${budget} with Φ ${number(phi[chosen])}, ${accepted} accepted`);
  target.replaceChildren(...children);
}

function ticks(highest, wanted) {
  const rough = highest / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor(highest / step) + 1 }, (_, at) => Number((at * step).toPrecision(12)));
}

/** Bars and a table; `predicted` may be null. Predictions cover verify + walk, commit + other. */
function drawSeconds(target, seconds, predicted, share) {
  const total = seconds.reduce((sum, value) => sum + value, 0);
  const guess = predicted && [predicted.draft_s ?? 0, predicted.verify_s, 0, predicted.other_s, 0];
  const guessed = guess ? guess.reduce((sum, value) => sum + value, 0) : 0;
  const scale = Math.max(total, guessed) || 1;
  const stack = (values, label) => html("div", { class: "stack", role: "img", "aria-label": label },
    ...values.map((value, at) => {
      const part = html("i", { class: `s${at}`, title: `${STAGES[at]} ${duration(value)}` });
      part.style.width = `${(100 * value) / scale}%`;
      return part;
    }));
  const cells = (values) => values.map((value) => html("td", {}, value));
  const rows = STAGES.map((stage, at) => {
    const told = guess && { 0: predicted.draft_s, 1: predicted.verify_s, 3: predicted.other_s }[at];
    const row = html("tr", {}, html("th", { scope: "row" }, html("i", { class: `s${at}` }), stage),
      ...cells([duration(seconds[at]), `${Math.round(100 * share[at])} %`]));
    if (guess && (at === 0 || at === 1 || at === 3)) {
      row.append(html("td", at ? { rowspan: 2, title: `${STAGES[at]} and ${STAGES[at + 1]} together` } : {}, duration(told)));
    }
    return row;
  });
  target.replaceChildren(
    html("div", { class: "bar-label" }, `this cycle ${duration(total)}`), stack(seconds, `this cycle ${duration(total)}`),
    ...(guess ? [html("div", { class: "bar-label" }, `predicted ${duration(guessed)}`), stack(guess, `predicted ${duration(guessed)}`)] : []),
    html("table", {},
      html("thead", {}, html("tr", {}, ...["stage", "this cycle", "whole run", ...(guess ? ["predicted"] : [])].map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows)));
}

/** All cycles: committed tokens upwards, budget downwards; the selected one is marked. */
class Overview {
  constructor(canvas, choose) {
    this.canvas = canvas;
    const pick = (event) => {
      const box = canvas.getBoundingClientRect();
      const at = Math.floor(((event.clientX - box.left) / box.width) * this.cycles.committed.length);
      choose(Math.max(0, Math.min(at, this.cycles.committed.length - 1)));
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pick(event); });
    canvas.addEventListener("pointermove", (event) => { if (canvas.hasPointerCapture(event.pointerId)) pick(event); });
  }

  show(cycles) {
    this.cycles = cycles;
    this.most = { committed: Math.max(...cycles.committed, 1), budget: Math.max(...cycles.budget, 1) };
    this.canvas.setAttribute("aria-valuemax", cycles.committed.length);
    byId("most-committed").textContent = `committed tokens per cycle, at most ${this.most.committed}`;
    byId("most-budget").textContent = `budget, at most ${Math.max(...cycles.budget)}`;
    this.measure();
  }

  /** Take in the size and colours of the page. */
  measure() {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.ink = style("--ink");
    this.picture = null;
  }

  select(at) {
    this.selected = at;
    this.canvas.setAttribute("aria-valuenow", at + 1);
    this.canvas.setAttribute("aria-valuetext",
      `cycle ${at + 1}: budget ${this.cycles.budget[at]}, ${this.cycles.committed[at]} committed`);
    this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, canvas = this.canvas;
    const width = Math.round(this.width * ratio), height = Math.round(this.height * ratio);
    if (!width || !height) return;
    if (!this.picture) {
      canvas.width = width;
      canvas.height = height;
      this.picture = this.paint(width, height);
    }
    const context = canvas.getContext("2d"), count = this.cycles.committed.length;
    context.putImageData(this.picture, 0, 0);
    const wide = Math.max(width / count, 2 * ratio), left = Math.min((this.selected / count) * width, width - wide);
    context.fillStyle = this.ink;
    context.globalAlpha = 0.16;
    context.fillRect(left - 3 * ratio, 0, wide + 6 * ratio, height);
    context.globalAlpha = 1;
    context.fillRect(left, height - 2 * ratio, wide, 2 * ratio);
    context.fillRect(left, 0, wide, 2 * ratio);
  }

  paint(width, height) {
    const context = this.canvas.getContext("2d", { willReadFrequently: true });
    const { committed, budget } = this.cycles, count = committed.length;
    const middle = Math.round(height * 0.52), room = height * 0.46, columns = Math.min(count, width);
    context.clearRect(0, 0, width, height);
    const bars = [[committed, this.most.committed, -1, style("--accent")], [budget, this.most.budget, 1, style("--stage4")]];
    for (const [values, most, direction, color] of bars) {
      context.fillStyle = color;
      for (let column = 0; column < columns; column++) {
        const from = Math.floor((column * count) / columns), to = Math.max(from + 1, Math.floor(((column + 1) * count) / columns));
        let value = 0;
        for (let at = from; at < to; at++) value = Math.max(value, values[at]);
        const left = (column / columns) * width, wide = width / columns, size = (value / most) * room;
        context.fillRect(left, direction < 0 ? middle - 1 - size : middle + 1, wide > 4 ? wide - 1 : wide, size);
      }
    }
    return context.getImageData(0, 0, width, height);
  }
}
